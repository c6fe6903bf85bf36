"""Compares a step against the buffers with the model's ordinary step, before anything relies on it.

B rows, n tokens of a step of several, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ..core import backend
from ..core.rounding_noise import Trace, Verdict, Yardstick
from ..launching.launch import rehearsing
from ..sampling.sampling import Sampling
from .kernels_ahead import KernelsAhead
from .side_effects import Before, Kept
from .step_call import StepCall
from .validation import LOGITS, StepChanges, StepDiffers, StepReads, compared, trace


class Validator:
    """Knows which kinds of steps are the model's ordinary ones, and which of them need a mask for that.

    Args:
        call: of the steps.
        kernels: compiles what they launch.
    """

    def __init__(self, call: StepCall, kernels: KernelsAhead):
        self._call, self._kernels = call, kernels
        self._kept: dict[Hashable, Any] = {}
        """What was on the model when a kind of step was proved."""
        self._proved: set[tuple[Hashable, int]] = set()
        """Kinds of steps, and how many tokens they read."""
        self.rounding = 0.0
        """Largest relative distance of a step's logits that rounding explains, of the steps that were proved."""
        self.aligns: bool | None = None
        """Whether a step computes the same where its rows lie in other slots; None where that was not tried."""

    @property
    def has_proved(self) -> bool:
        """Whether a step has been compared with the model's ordinary one."""
        return bool(self._proved)

    def knows_step(self, width: int = 1) -> bool:
        """Return whether a step of `width` tokens, called as now, has been compared."""
        return (self._call.kind, width) in self._proved

    def prove(self, tokens: Tensor, sampling: Sampling | None = None) -> bool:
        """Compare one step with the model's ordinary one, once; it leaves the cache as it was.

        Before that the kernels of the step, and of a sampling, are compiled side by side.

        The model's own code decides which slots it attends to. Code that takes the mask as it comes for a single
        token, or is given none, would see the slots that nothing has written: a mask hides them then. Code that
        ignores masks would silently see them.

        Args:
            tokens: `[B]`, or `[B, n]` for a step of several tokens a row.
            sampling: what follows the step.

        Returns:
            Whether it was compared: not where that was done before, or no slot is left for it.

        Raises:
            StepDiffers: if they differ by more than another order of summation explains.
            StepFails: if the model's code needs the length as a Python int, say.
            StepChanges: if it leaves something on the model besides the states that its class is marked for.
            StepReads: if it was captured behind another prompt, and reads what that one left on the model.
        """
        call, cache = self._call, self._call.buffers.cache
        tokens = tokens.view(cache.batch_size, -1)
        width = tokens.shape[1]
        if cache.length + width > cache.capacity:
            return False
        several = tokens if width > 1 else None
        if self.knows_step(width):
            kept = self._kept.get(call.kind) if several is None else None
            if kept is not None and kept.is_read(self._once_more):
                raise StepReads(call.model)
            return False
        call.buffers.state.input_ids.copy_(tokens[:, :1])
        yardstick = self._examined(cache.length, several, sampling)
        self._proved.add((call.kind, width))
        self.rounding = max(self.rounding, yardstick.bound(LOGITS))
        return True

    def _examined(self, length: int, several: Tensor | None, sampling: Sampling | None) -> Yardstick:
        """Compare a step behind `length` tokens, and return by what."""
        call = self._call
        with call.as_for_decoding():
            ordinary = self._ordinary(length, several)
            yardstick = Yardstick(ordinary, lambda: self._ordinary(length, several))
            with call.held():
                self._kernels.compile_step(sampling, several)
            verdict, holds = self._hidden_if_need_be(yardstick, length, several)
            if several is None:
                self._look_for_changes()  # by which it may differ
        if not holds:
            raise StepDiffers(verdict)
        return yardstick

    def _hidden_if_need_be(self, yardstick: Yardstick, length: int, several: Tensor | None) -> tuple[Verdict, bool]:
        """Return as `_compared` does, of a step with a mask over the slots that are written if it needs one."""
        call = self._call
        verdict, holds = self._compared(yardstick, length, several)
        if not holds and several is None and "attention_mask" in call.accepted:
            call.hiding.add(call.kind)
            verdict, holds = self._compared(yardstick, length, several)
            if not holds:
                call.hiding.discard(call.kind)
        return verdict, holds

    def _compared(self, yardstick: Yardstick, length: int, several: Tensor | None) -> tuple[Verdict, bool]:
        """Return how far a step is from the ordinary one, and whether it is the same."""
        call, buffers = self._call, self._call.buffers

        def step() -> Trace:
            buffers.state.position.fill_(length)
            with rehearsing(), call.held():
                return self._trace(call.forward() if several is None else call.forward_several(several), length)

        return compared(buffers.cache, length + (1 if several is None else several.shape[1]), yardstick, step)

    def _ordinary(self, length: int, several: Tensor | None) -> Trace:
        """Return what the ordinary step leaves."""
        with backend.plainly(), self._call.held():
            found = self._trace(self._call.first_ordinary_step(length, several), length)
        self._call.buffers.cache.rewind(length)
        return found

    def _trace(self, logits: Tensor, length: int) -> Trace:
        """Return what a step of logits `[B, V]` or `[B, n, V]`, behind `length` tokens, has left."""
        width = logits.shape[1] if logits.dim() > 2 else 1
        buffers = self._call.buffers
        slots = buffers.slots[length : length + width]
        return trace(buffers.cache, slots, logits.float(), buffers.carried.buffers)

    def _look_for_changes(self) -> None:
        """Run a step once more: what it makes at its first run is there."""
        model, buffers = self._call.model, self._call.buffers
        before, kept = Before(model, buffers.carried.buffers, layers=buffers.cache.layers), Kept(model)
        kept.watch(self._once_more)
        if (changes := before.changes()) is not None:
            raise StepChanges(changes, changes.named(model))
        self._kept[self._call.kind] = kept

    def _once_more(self) -> None:
        """Run a step and leave everything as it is."""
        with rehearsing(), self._call.held(), self._call.as_for_decoding():
            self._call.forward()

    def take_over(self, other: Validator) -> None:
        """Know what is known of the same step against buffers with less capacity."""
        kind = self._call.kind
        self._proved |= {key for key in other._proved if key[0] == kind}
        self._call.hiding |= other._call.hiding & {kind}
        self._kept |= other._kept
        self.rounding = max(self.rounding, other.rounding)

    def forget(self) -> None:
        """Let the next step be compared."""
        self._proved.clear()
        self._kept.clear()
        self._call.hiding.clear()
