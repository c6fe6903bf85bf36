"""Whether a step against the preallocated buffers is the model's ordinary step, and what is wrong where it is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.preallocated import PreallocatedCache
from ..core.capture import NOT_FOR_A_STEP

TOLERANCE = 0.5
"""Largest relative distance of a row's logits in both forms of a step. It tells a wrong mask, for which the slots that
must not be seen are filled with `POISON`, from another order of rounding; a wrong mask gives 1 and more."""
POISON = 64.0
UNSTEADY = TOLERANCE / 4
"""Relative distance by which one rounding of the embeddings moves the logits of a model of which they tell nothing. In
bf16 a model with sensible weights moves by 0.01, Gemma 3n with random ones by 0.4."""


class StepDiffers(RuntimeError):
    """The step against the preallocated buffers computes something else than the model's ordinary step."""

    def __init__(self, distance: float):
        super().__init__(f"the logits of a step differ by {distance:.3g} from those of an ordinary one")


class StepFails(RuntimeError):
    """The step cannot run where the host does not know the length."""

    def __init__(self, cause: Exception):
        super().__init__(f"the step cannot run against fixed-size buffers: {cause}")


class StepChanges(RuntimeError):
    """The step changes the model in a way that a replay would not."""

    def __init__(self, changes: Any, named: str):
        super().__init__(f"a step changes the model: {named}")
        self.changes = changes


class StepReads(RuntimeError):
    """The step reads something that each prompt leaves on the model anew."""

    def __init__(self, model: nn.Module):
        super().__init__(f"a step of {type(model).__name__} reads what a prompt left on the model")


def compared(
    cache: PreallocatedCache,
    written: int,
    ordinary: Tensor,
    step: Callable[[], Tensor],
    nudged: Callable[[], Tensor],
) -> tuple[float, bool]:
    """Return how far a step is from the ordinary one, and whether it is the same.

    Where logits tell nothing, since one rounding moves them as far, it is the same if no slot that it must not see
    moves one bit.

    Args:
        cache: what the step runs against.
        written: slots that it may see.
        ordinary: logits of the ordinary step.
        step: returns those of the step, and leaves everything as it is.
        nudged: returns those of the ordinary step with other roundings.

    Raises:
        StepFails: if the step cannot run.
    """
    ours = _poisoned(cache, POISON, written, step)
    far = distance(ours, ordinary)
    if far < TOLERANCE:
        return far, True
    unsteady = bool(ours.isfinite().all()) and distance(nudged(), ordinary) > UNSTEADY
    return far, unsteady and torch.equal(ours, _poisoned(cache, -POISON, written, step))


def distance(logits: Tensor, of: Tensor) -> float:
    """Return how far logits are from others, relative to those, in the row where it is farthest."""
    return ((logits - of).norm(dim=-1) / of.norm(dim=-1)).max().item()


def _poisoned(cache: PreallocatedCache, poison: float, written: int, step: Callable[[], Tensor]) -> Tensor:
    """Return the logits of a step where the slots from `written` on hold `poison`."""
    for layer in cache.attention_layers:
        layer.spoil(written, poison)
    try:
        return step()
    except torch.OutOfMemoryError:
        raise
    except NOT_FOR_A_STEP as error:
        raise StepFails(error) from error
    finally:
        for layer in cache.attention_layers:
            layer.spoil(written, 0)
