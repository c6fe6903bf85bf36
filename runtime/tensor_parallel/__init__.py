"""Models whose tensors are dealt to several processes."""
