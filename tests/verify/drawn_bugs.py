"""Bugs planted into the loop of `generate()` that show in calls of some kind alone."""

from __future__ import annotations

from collections.abc import Callable

from rewrite.verify.drawn.call_sides import drafts
from rewrite.verify.drawn.drawn_calls import DrawnCall

from .bugs import Bug

Of = Callable[[DrawnCall], bool]


def bug(name: str, old: str, new: str) -> Bug:
    return Bug("llama", name, old, new, gate="generation", file="_runtime")


def sets(*names: str) -> Of:
    """Calls that set all of these names."""
    return lambda call: {*names} <= {*call.settings, *call.given}


DRAWN: tuple[tuple[Bug, Of], ...] = (
    (bug("stop strings that begin in the prompt", "if reads_prompt:", "if False:"), sets("stop_strings")),
    (
        bug(
            "new tokens counted from the beginning",
            "least = processor.prompt_length_to_skip + processor.min_new_tokens",
            "least = processor.min_new_tokens",
        ),
        lambda call: call.given.get("logits_processor") == "new tokens" and "eos_token_id" in call.settings,
    ),
    (
        bug(
            "the last of the n-grams is not seen",
            "complete = torch.arange(size - 1, ids.shape[1], device=ids.device) < length",
            "complete = torch.arange(size - 1, ids.shape[1], device=ids.device) < length - 1",
        ),
        sets("no_repeat_ngram_size"),
    ),
    (
        bug(
            "holes in a mask taken for tokens",
            "return not bool(visible[:, -1].all()",
            "return False and not bool(visible[:, -1].all()",
        ),
        lambda call: call.prompt.padding == "holes" and call.prompt.length > 2,
    ),
    (
        bug("positions that a caller gives left aside", "return given[:, -1:] + 1", "return graph.cache.length"),
        sets("position_ids"),
    ),
    (
        bug("training mode ended", "module.training = on", "module.training = False"),
        lambda call: call.given.get("mode") == "training",
    ),
    (
        bug(
            "of a cache that grows the first token forgotten",
            "mine.take(theirs, other.length)",
            "mine.take(theirs, other.length)\n            mine.keys[:, :, 0] = 0",
        ),
        lambda call: "room" in call.given and call.settings.get("max_new_tokens", 0) > 8,
    ),
    (
        bug("a wrong draft taken", "cumprod(1).sum(dim=1) + 1", "cumprod(1).sum(dim=1) + 2"),
        lambda call: drafts(call) and call.settings.get("max_new_tokens", 0) > 4,
    ),
    (
        bug(
            "scores of the first draft for all",
            "self._keep(window.logits[:, number], window.scores[:, number])",
            "self._keep(window.logits[:, 0], window.scores[:, 0])",
        ),
        lambda call: drafts(call) and "weights" in call.given and "output_scores" in call.settings,
    ),
    (
        bug(
            "the generator left behind what was thrown away",
            "self._random.restore(self._marks[self.reader.count - 1])",
            "pass",
        ),
        sets("do_sample", "eos_token_id"),
    ),
    (
        bug(
            "a criterion of the caller's taken for one of transformers'",
            "if any(type(criterion) not in _KNOWN_CRITERIA for criterion in call.criteria):",
            "if False:",
        ),
        sets("stopping_criteria"),
    ),
)
"""A bug, and the calls that can show it."""
