"""Bugs planted into the decode loop of what the tool generates; none shows outside of the loop."""

from __future__ import annotations

from functools import partial

from .bugs import Bug

ADVANCE = "state.position_ids.add_(1)\n    state.input_ids.copy_(tokens[:, None])"


def bug(name: str, old: str, new: str, file: str) -> Bug:
    return Bug("llama", name, old, new, gate="generation", file=file)


decode = partial(bug, file="_runtime")

LOOP = (
    decode("stale position", ADVANCE, ADVANCE.replace("add_(1)", "add_(0)")),
    decode("position one ahead", "position_ids.copy_(position_ids)", "position_ids.copy_(position_ids + 1)"),
    decode("token not fed back", ADVANCE, ADVANCE.replace("input_ids.copy_(tokens[:, None])", "input_ids")),
    decode("padding not masked", "self.cache.pad((attention_mask != 0).int().argmax(dim=1))", "pass"),
    bug(
        "cache slot off by one",
        "write_token(self.keys, self.values, key_states, value_states, self.cache.slots)",
        "write_token(self.keys, self.values, key_states, value_states, (self.cache.slots - 1).clamp(min=0))",
        "_runtime",
    ),
    bug(
        "a slot ahead is read",
        "(slots <= position)",
        "(slots <= position + 1)",
        "_runtime/attention/decode_attention.py",
    ),
    decode("the scaling left out", "scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,", "scaling=1.0,"),
    decode("processors left out", "for form in sampling.forms:\n", "for form in ():\n"),
    decode(
        "other random numbers",
        "torch.empty_like(probabilities).exponential_(1)",
        "torch.empty_like(probabilities).exponential_(1).exponential_(1)",
    ),
    decode("a draft is taken unseen", "cumprod(1).sum(dim=1) + 1", "cumprod(1).sum(dim=1) + 2"),
    decode(
        "all rows end with one",
        "(first[:, None] == sampling.eos).any(dim=-1)",
        "(first[:, None] == sampling.eos).any()",
    ),
    decode("cache not emptied", "self.state.position.fill_(self.cache.length)", "pass"),
)

CAPTURED = (
    decode(
        "graph of the old weights",
        "changed = known is None or now != self._settings or not known.is_mapped()",
        "changed = known is None",
    ),
    decode(
        "a replay too few",
        "for _ in range(count):\n            program.replay()",
        "for _ in range(count):\n            _ = None if progress.made % 7 == 0 else program.replay()",
    ),
)
"""Bugs that show only where steps are captured."""

TURNS = {
    "other settings in turn": decode(
        "a number of a setting left out", "plain.append((name, type(value), value))", "pass"
    ),
    "what comes back on request": decode("a reason to step aside ignored", "if plan.reason is not None:", "if False:"),
    "a class of the user's own": decode(
        "a method of the user's own unseen",
        'getattr(found, "_recomputes_at_switch", False)',
        'getattr(found, "_recomputes_at_switch", True)',
    ),
    "a step for each token": decode(
        "the graphs of the first call thrown away", "self._store.settle(self._model, graph)", "pass"
    ),
    "tokens looked up in the text": decode(
        "of the drafts that are right one is taken", "state.taken.copy_(taken)", "state.taken.fill_(1)"
    ),
    "rows looked up in the text": decode(
        "of each row as many tokens are read as of the first",
        "ahead.extend(tokens[row, :count].tolist())",
        "ahead.extend(tokens[row, : counts[0]].tolist())",
    ),
    "begun without kernels": decode(
        "the token of a plain step not written down",
        "self.logits, self.scores = choose(logits, self._graph.state, self._sampling)",
        "self.logits, self.scores = logits, logits",
    ),
}
"""Bugs that show in the loop's check of this name alone."""

ENDLESS = decode("a draft's tokens are never counted", "state.taken.copy_(taken)", "pass")
"""Looked up in the text, no step gets on."""
