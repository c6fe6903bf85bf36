"""Bugs planted into the decode loop of what the tool generates; none shows outside of the loop."""

from __future__ import annotations

from .bugs import Bug

ADVANCE = "state.position_ids.add_(1)\n    state.input_ids.copy_(tokens[:, None])"
DOWN = "linear(hidden_states, self.down_proj, residual=residual)"
KEPT = 'self.__dict__.setdefault("_kept", self.down_proj.weight.detach().clone())'


def bug(name: str, file: str, old: str, new: str) -> Bug:
    return Bug("llama", name, old, new, gate="generation", file=file)


LOOP = (
    bug("stale position", "_runtime/decode", ADVANCE, ADVANCE.replace("add_(1)", "add_(0)")),
    bug(
        "position one ahead",
        "_runtime/decode",
        "position_ids.copy_(position_ids)",
        "position_ids.copy_(position_ids + 1)",
    ),
    bug(
        "token not fed back",
        "_runtime/decode",
        ADVANCE,
        ADVANCE.replace("input_ids.copy_(tokens[:, None])", "input_ids"),
    ),
    bug(
        "padding not masked",
        "_runtime/decode",
        "self.cache.pad((attention_mask != 0).int().argmax(dim=1))",
        "pass",
    ),
    bug(
        "cache slot off by one",
        "_runtime/cache",
        "write_token(self.keys, self.values, key_states, value_states, self.cache.slots)",
        "write_token(self.keys, self.values, key_states, value_states, (self.cache.slots - 1).clamp(min=0))",
    ),
    bug(
        "a slot ahead is read",
        "_runtime/attention",
        "(slots <= position)",
        "(slots <= position + 1)",
    ),
    bug("old weight", "modeling_llama.py", DOWN, f"residual + nn.functional.linear(hidden_states, {KEPT})"),
    bug("residual dropped", "modeling_llama.py", DOWN, DOWN.replace("residual=residual", "residual=None")),
    bug(
        "norm of the wrong place",
        "modeling_llama.py",
        "self.mlp.decode_residual(hidden_states, self.post_attention_layernorm, hidden_states)",
        "self.mlp.decode_residual(hidden_states, self.input_layernorm, hidden_states)",
    ),
    bug("processors left out", "_runtime/decode", "for form in sampling.forms:\n", "for form in ():\n"),
    bug(
        "other random numbers",
        "_runtime/decode",
        "torch.empty_like(probabilities).exponential_(1)",
        "torch.empty_like(probabilities).exponential_(1).exponential_(1)",
    ),
    bug("a draft is taken unseen", "_runtime/decode", "cumprod(1).sum(dim=1) + 1", "cumprod(1).sum(dim=1) + 2"),
    bug(
        "all rows end with one",
        "_runtime/decode",
        "(first[:, None] == sampling.eos).any(dim=-1)",
        "(first[:, None] == sampling.eos).any()",
    ),
    bug("cache not emptied", "_runtime/decode", "self.state.position.fill_(self.cache.length)", "pass"),
)

CAPTURED = (
    bug(
        "graph of the old weights",
        "_runtime/decode",
        "if known is None or now != self._settings or not (known.is_mapped() and known.is_current()):",
        "if known is None:",
    ),
    bug(
        "a replay too few",
        "_runtime/decode",
        "for _ in range(count):\n            program.replay()",
        "for _ in range(count):\n            _ = None if progress.made % 7 == 0 else program.replay()",
    ),
)
"""Bugs that show only where steps are captured."""

TURNS = {
    "other settings in turn": bug(
        "a number of a setting left out",
        "_runtime/decode",
        "plain.append((name, type(value), value))",
        "pass",
    ),
    "what comes back on request": bug(
        "a reason to step aside ignored", "_runtime/decode", "if plan.reason is not None:", "if False:"
    ),
    "a class of the user's own": bug(
        "a method of the user's own unseen",
        "_runtime/decode",
        'getattr(found, "_recomputes_at_switch", False)',
        'getattr(found, "_recomputes_at_switch", True)',
    ),
    "a step for each token": bug(
        "the graphs of the first call thrown away", "_runtime/decode", "self._store.settle(self._model, graph)", "pass"
    ),
    "tokens looked up in the text": bug(
        "of the drafts that are right one is taken",
        "_runtime/decode",
        "state.taken.copy_(taken)",
        "state.taken.fill_(1)",
    ),
    "rows looked up in the text": bug(
        "of each row as many tokens are read as of the first",
        "_runtime/decode",
        "ahead.extend(tokens[row, :count].tolist())",
        "ahead.extend(tokens[row, : counts[0]].tolist())",
    ),
    "begun without kernels": bug(
        "the token of a plain step not written down",
        "_runtime/decode",
        "self.logits, self.scores = choose(logits, self._graph.state, self._sampling)",
        "self.logits, self.scores = logits, logits",
    ),
}
"""Bugs that show in the loop's check of this name alone."""

ENDLESS = bug("a draft's tokens are never counted", "_runtime/decode", "state.taken.copy_(taken)", "pass")
"""Looked up in the text, no step gets on."""
