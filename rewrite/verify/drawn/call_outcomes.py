"""What came of a drawn call on each side, and where the two differ."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..calls.observed import everything
from ..judging.compare import Mismatch, near_exact
from ..models.inputs import seed_all
from .call_arguments import Arguments
from .caller_objects import Raised

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    `error` is the type and the message of what it raised; `values` every tensor of what it returned, its cache
    included, and of what the caller gave it; `seen` what the caller's objects were given; `random` where the generator
    stands afterwards, and `model` the mode and the settings that the model is left with.
    """

    error: tuple[str, str] | None
    kind: str
    values: Mapping[str, Tensor]
    seen: list[Any]
    random: Tensor
    model: str


def outcome(model: Any, arguments: Arguments, mode: str | None, seed: int) -> Outcome:
    """Ask a model, and keep what it does: foreign code raises what it likes."""
    import torch

    seed_all(seed)
    error, found = None, None
    model.train(mode == "training")
    entered = torch.inference_mode() if mode == "inference" else contextlib.nullcontext()
    try:
        with warnings.catch_warnings(), entered:
            warnings.simplefilter("ignore")
            found = model.generate(*arguments.positional, **arguments.keywords)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    left = f"{sum(module.training for module in model.modules())} modules in training mode, {model.generation_config}"
    model.eval()
    random = torch.cuda.get_rng_state() if model.device.type == "cuda" else torch.get_rng_state()
    kind = type(found).__name__ + (f" of {', '.join(found)}" if isinstance(found, Mapping) else "")
    values = everything(found, "output") | everything(arguments.tensors, "given")
    kept = {name: value.clone() for name, value in values.items()}
    return Outcome(error, kind, kept, arguments.seen.words, random, left)


def streamed_singly(outcome: Outcome) -> Outcome:
    """The same with every token that a streamer got by itself: with drafts transformers' gets several at a time."""
    words: list[Any] = []
    for word in outcome.seen:
        if word[0] == "put" and len(words):
            words += [("put", [token]) for token in _flat(word[1])]
        else:
            words.append(word)
    return replace(outcome, seen=words)


def _flat(value: Any) -> list[Any]:
    return [token for part in value for token in _flat(part)] if isinstance(value, list) else [value]


def difference(original: Outcome, rewritten: Outcome, maximum: str) -> str | None:
    """In words what differs first; None where nothing does.

    Args:
        original: what the original did.
        rewritten: what the other side did.
        maximum: the name of the bound of what is computed.
    """
    import torch

    if original.error != rewritten.error:
        return f"raised: {rewritten.error} instead of {original.error}"
    if original.kind != rewritten.kind:
        return f"{rewritten.kind} instead of {original.kind}"
    wanted, values = original.values, rewritten.values
    if original.error is not None and original.error[0] != Raised.__name__:  # a forward may have begun to write
        wanted, values = {}, {}
    for name, expected in wanted.items():
        found = values.get(name)
        if found is None:
            return f"{name} is missing"
        if not expected.is_floating_point() and not torch.equal(expected, found):
            return f"{name}: {found.tolist()} instead of {expected.tolist()}"
    for number, (said, told) in enumerate(zip(rewritten.seen, original.seen, strict=False)):
        if said != told:
            return f"a caller's object, time {number}: {said} instead of {told}"
    if len(rewritten.seen) != len(original.seen):
        return f"a caller's objects were asked {len(rewritten.seen)} times instead of {len(original.seen)}"
    if not torch.equal(original.random, rewritten.random):
        return "the random generator stands elsewhere"
    if original.model != rewritten.model:
        return f"the model is left with {rewritten.model}, not with {original.model}"
    try:
        if wanted:
            near_exact(wanted, values, maximum)
    except Mismatch as mismatch:
        return str(mismatch)
    return None
