"""The loss of a language model, without its logits."""
