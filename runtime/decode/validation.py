"""Whether a step against the preallocated buffers is the model's ordinary step, and what is wrong where it is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..cache import states
from ..cache.layers import PreallocatedLayer
from ..cache.preallocated import PreallocatedCache
from ..core.rounding_noise import Trace, Verdict, Yardstick
from ..device.graph_capture import NOT_FOR_A_STEP

POISON = 64.0
"""What slots hold that a step must not see."""
LOGITS = "the logits"
"""Their name in a trace."""


class StepRefused(RuntimeError):
    """A step that no graph may take."""

    reason: ClassVar[str]
    """A key of `loop_reasons.REASONS`."""
    changes: Any = None
    """`Changes` of the model that the step has made."""


class StepDiffers(StepRefused):
    """The step against the preallocated buffers computes something else than the model's ordinary step."""

    reason = "step_differs"

    def __init__(self, verdict: Verdict):
        super().__init__(f"a step differs from an ordinary one in {verdict}")


class StepFails(StepRefused):
    """The step cannot run where the host does not know the length."""

    reason = "step_fails"

    def __init__(self, cause: Exception):
        super().__init__(f"the step cannot run against fixed-size buffers: {cause}")


class StepChanges(StepRefused):
    """The step changes the model in a way that a replay would not."""

    reason = "step_changes"

    def __init__(self, changes: Any, named: str):
        super().__init__(f"a step changes the model: {named}")
        self.changes = changes


class StepReads(StepRefused):
    """The step reads something that each prompt leaves on the model anew."""

    reason = "step_reads"

    def __init__(self, model: nn.Module):
        super().__init__(f"a step of {type(model).__name__} reads what a prompt left on the model")


def compared(
    cache: PreallocatedCache, written: int, yardstick: Yardstick, step: Callable[[], Trace]
) -> tuple[Verdict, bool]:
    """Return how far a step is from the ordinary one, and whether it is the same.

    Where a bound tells little it is the same only if no slot that it must not see moves one bit, too.

    Args:
        cache: what the step runs against.
        written: slots that it may see.
        yardstick: of the ordinary step.
        step: returns what the step leaves, everything being as it was.

    Raises:
        StepFails: if the step cannot run.
    """
    found = _poisoned(cache, POISON, written, step)
    verdict = yardstick.judge(found)
    if not (verdict.holds and verdict.vague):
        return verdict, verdict.holds
    again = _poisoned(cache, -POISON, written, step)
    return verdict, all(torch.equal(value, again[name]) for name, value in found.items())


def trace(cache: PreallocatedCache, slots: Tensor, logits: Tensor, beside: Sequence[Tensor] = ()) -> Trace:
    """Return what a step leaves: logits, and in each layer what it wrote of the tokens that it read, or its states.

    What a layer writes is made of all that the layers before it have computed.

    Args:
        cache: that it ran against.
        slots: `[n]`, those of the tokens.
        logits: `[B, V]` or `[B, n, V]`.
        beside: states outside of the cache.
    """
    left = {}
    for number, layer in enumerate(cache.layers):
        written = layer.of_slots(slots) if isinstance(layer, PreallocatedLayer) else []
        for name, tensor in zip(("keys", "values", "an indexer's keys"), written, strict=False):
            left[f"layer {number}, {name}"] = tensor.transpose(-2, 1).flatten(0, 1).flatten(1)
        for kind, state in enumerate(states.tensors([layer])):
            left[f"layer {number}, state {kind}"] = _rows(state, cache.batch_size)
    for number, state in enumerate(beside):
        left[f"state {number} beside the cache"] = _rows(state, cache.batch_size)
    left[LOGITS] = logits.flatten(0, -2)
    return left


def _rows(state: Tensor, count: int) -> Tensor:
    """Return a copy of a state as `[R, W]`; it has rows only if its first dimension is of the batch."""
    rows = count if state.dim() and len(state) == count else 1
    return state.clone().reshape(rows, state.numel() // rows)


def _poisoned(cache: PreallocatedCache, poison: float, written: int, step: Callable[[], Trace]) -> Trace:
    """Return what a step leaves where the slots from `written` on hold `poison`."""
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
