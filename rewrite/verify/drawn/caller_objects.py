"""What a caller gives `generate()` of its own: objects that write down what they are given, and may raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .drawn_calls import DrawnCall

if TYPE_CHECKING:
    from torch import Tensor

LATE = 2
"""How many times a caller's object is asked until it raises."""


class Raised(Exception):
    """What a caller's own object raises."""


@dataclass
class Seen:
    """What the caller's objects were given, in order."""

    words: list[Any] = field(default_factory=list)

    def note(self, what: str, *values: Any) -> None:
        """Write something down, tensors as lists."""
        self.words.append((what, *(value.tolist() if hasattr(value, "tolist") else value for value in values)))

    def raise_late(self, what: str) -> None:
        """Raise where the same was written down a few times."""
        if [word[0] for word in self.words].count(what) > LATE:
            raise Raised(what)


def objects_of(call: DrawnCall, seen: Seen) -> dict[str, Any]:
    """The caller's own processors, criteria, streamers and functions."""
    given, made = call.given, dict[str, Any]()
    if "logits_processor" in given:
        made["logits_processor"] = [_processor(call, seen)]
    if "stopping_criteria" in given:
        made["stopping_criteria"] = [functools.partial(CRITERIA[given["stopping_criteria"]], seen)]
    if "prefix_allowed_tokens_fn" in given:
        made["prefix_allowed_tokens_fn"] = functools.partial(ALLOWED[given["prefix_allowed_tokens_fn"]], seen)
    if "streamer" in given:
        made["streamer"] = Streamer(seen, given["streamer"] == "raises")
    return made


def _processor(call: DrawnCall, seen: Seen) -> Callable[..., Tensor]:
    """A processor of the caller's, or one of transformers' that the caller made: 6 tokens before an end."""
    from transformers import MinNewTokensLengthLogitsProcessor

    kind, ends = call.given["logits_processor"], call.settings.get("eos_token_id", 5)
    if kind == "new tokens":
        return MinNewTokensLengthLogitsProcessor(call.prompt.length, 6, ends)
    return functools.partial(PROCESSORS[kind], seen)


class Streamer:
    """Writes down what it is given, and may raise at the third time."""

    def __init__(self, seen: Seen, raises: bool) -> None:
        self._seen, self._raises = seen, raises

    def put(self, value: Tensor) -> None:
        """Take tokens."""
        self._seen.note("put", value)
        if self._raises:
            self._seen.raise_late("put")

    def end(self) -> None:
        """Take note of the end."""
        self._seen.note("end")


def _adds(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    """Prefer every third token, counted from the last one."""
    import torch

    seen.note("processor", ids, tuple(scores.shape), str(scores.dtype))
    order = torch.arange(scores.shape[1])[None] - ids[:, -1:]
    return scores + 2.0 * (order % 3 == 0)


def _in_place(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    """Make the last token of each row unlikely, in the tensor that was given."""
    seen.note("processor", ids, tuple(scores.shape))
    return scores.scatter_add_(1, ids[:, -1:], scores.new_full((len(ids), 1), -5.0))


def _counts(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    seen.note("processor", tuple(ids.shape), scores.argmax(1))
    return scores


def _raises(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    seen.note("processor", ids)
    seen.raise_late("processor")
    return scores


PROCESSORS: Mapping[str, Callable[..., Tensor]] = {
    "adds": _adds, "in place": _in_place, "counts": _counts, "raises": _raises,
}  # fmt: skip


def _at_a_token(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids, None if scores is None else len(scores))
    return ids[:, -1] % 4 == 1


def _at_a_length(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    import torch

    seen.note("criterion", ids)
    return torch.full((len(ids),), ids.shape[1] > 9)


def _never(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids)
    return ids[:, 0] < 0


def _raises_late(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids)
    seen.raise_late("criterion")
    return ids[:, 0] < 0


CRITERIA: Mapping[str, Callable[..., Tensor]] = {
    "at a token": _at_a_token, "at a length": _at_a_length, "never": _never, "raises": _raises_late,
}  # fmt: skip


def _even(seen: Seen, row: int, ids: Tensor) -> list[int]:
    seen.note("allowed", row, ids)
    return list(range(4, 60, 2))


def _by_row(seen: Seen, row: int, ids: Tensor) -> list[int]:
    seen.note("allowed", row, ids)
    return list(range(4 + row, 60, 3))


ALLOWED: Mapping[str, Callable[..., list[int]]] = {"even": _even, "by row": _by_row}
