"""Finds the call in which a package's step parts from its own forward: a method and its second form, or an operator.

Both are watched as the package tries a step, one token on the same cache. What the modeling file's functions take and
give, and what the functions give that they call, is in both, under whatever name: the first tensor that the step alone
has is where they part.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ..judging.compare import Mismatch, measure
from ..judging.tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Call:
    """A call of a function of the modeling file, or of one that it calls."""

    code: CodeType
    own: bool
    """Whether the function is the file's own."""
    line: int
    """Where the file calls it; 0 where something else does."""
    caller: Call | None
    """The function of the file in which it is called."""
    owner: object
    """What the method is of; None of a function."""
    given: list[Tensor]
    residual: list[Tensor]
    """What is added at its end, if that is among its arguments."""
    gave: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`Qwen3Attention.forward`; of what is not the file's own, what the file calls."""
        if not self.own:
            return type(self.owner).__name__ if "_call_impl" in self.code.co_name else self.code.co_name
        return self.code.co_name if self.owner is None else f"{type(self.owner).__name__}.{self.code.co_name}"

    def __str__(self) -> str:
        if self.own or self.caller is None:
            return f"{self.name} ({Path(self.code.co_filename).name}:{self.code.co_firstlineno})"
        place = f"{Path(self.caller.code.co_filename).name}:{self.line}"
        return f"the operator {self.name}, called in {self.caller.name} ({place}),"


@dataclass
class Steps:
    """The calls of an ordinary step and of the package's own, in the order in which they returned."""

    ordinary: list[Call] = field(default_factory=list)
    own: list[Call] = field(default_factory=list)

    def parted(self) -> str:
        """Return where the second parts from the first, as a sentence; empty where that is not seen."""
        known: dict[int, list[Tensor]] = {}
        for call in self.ordinary:
            for tensor in (*call.given, *call.gave):
                known.setdefault(tensor.numel(), []).append(tensor)
        sites = {(call.code, call.line) for call in self.ordinary}
        for call in self.own:
            if (call.own or (call.code, call.line) in sites) and (error := self._error(call, known)):
                given = call.given[:1] if call.caller is not None else []
                differed = any(_error(one, known.get(one.numel(), ())) for one in given)
                place = call.caller if differed and call.caller is not None else call
                return f"{self._said(place)}, {error:.2g} of its size off"
        return ""

    def _error(self, call: Call, known: Mapping[int, Sequence[Tensor]]) -> float:
        """How far what a call gives is from what the ordinary step has of it.

        Of a module's methods that is what they give, less the residual that one form of two may add: the other may
        compute on the way what is given here, and go on.
        """
        found = [one for one in (call.gave[:1] if call.own else call.gave) if one.numel() in known]
        error = max((self._least(one, call, known[one.numel()]) for one in found), default=0.0)
        if found and (of_methods := self._of(call)):
            same = [one for other in of_methods for one in other.gave if one.numel() == found[0].numel()]
            error = self._least(found[0], call, same)
        return error

    def _least(self, found: Tensor, call: Call, known: Sequence[Tensor]) -> float:
        """How far a result is from others, with or without the residual that the call adds at its end."""
        added = [one for one in call.residual if one.shape == found.shape]
        return min(_error(one, known) for one in (found, *(found - one for one in added)))

    def _of(self, call: Call) -> list[Call]:
        """The ordinary step's calls of methods of the module that a call is of."""
        return [one for one in self.ordinary if one.own and call.own and one.owner is call.owner is not None]

    def _said(self, call: Call) -> str:
        if not call.own:
            return f"{call} gives something else in a step"
        codes = {one.code for one in self.ordinary}
        alone = dict.fromkeys(one.name for one in self.own if one.caller is call and one.code not in codes)
        by = f" (by {', '.join(alone)})" if alone else ""
        same = self._of(call)
        if not same or same[-1].code is call.code:
            return f"{call} gives something else{by} in a step"
        return f"a step takes {call}{by} in place of {same[-1]}, which computes something else"


@contextlib.contextmanager
def watched(step_call: Any, file: str) -> Iterator[Steps]:
    """Watch the first ordinary step that a package tries in a block, and its own of the same token, on a CPU.

    Args:
        step_call: the class `StepCall` of the package's runtime.
        file: the modeling file.
    """
    found, at = Steps(), list[int]()
    ordinary, own = step_call.first_ordinary_step, step_call.forward

    def as_ordinary(self: Any, length: int, *more: Any) -> Any:
        if at:
            return ordinary(self, length, *more)
        at.append(length)
        with _noted(file) as found.ordinary:
            return ordinary(self, length, *more)

    def as_own(self: Any) -> Any:
        if at[:1] != [int(self.buffers.cache.position)]:
            return own(self)
        with _noted(file) as found.own:
            return own(self)

    step_call.first_ordinary_step, step_call.forward = as_ordinary, as_own
    try:
        yield found
    finally:
        step_call.first_ordinary_step, step_call.forward = ordinary, own


@contextlib.contextmanager
def _noted(file: str) -> Iterator[list[Call]]:
    """Note the calls of a block; tensors are kept and not copied, since what is put off is computed by its end."""
    found: list[Call] = []
    running: dict[FrameType, Call] = {}

    def seen(frame: FrameType, event: str, value: Any) -> None:
        back, code = frame.f_back, frame.f_code
        if event == "call":
            line = back.f_lineno if back is not None and back.f_code.co_filename == file else 0
            own = code.co_filename == file
            if own or (line and not code.co_name.startswith("__")):
                caller = next((one for one in reversed(running.values()) if one.own), None)
                names = frame.f_locals
                given, residual = [*_floats(names.values())], [*_floats([names.get("residual")])]
                running[frame] = Call(code, own, line, caller, names.get("self"), given, residual)
        elif event == "return" and (call := running.pop(frame, None)) is not None:
            call.gave = [*_floats([value])]
            found.append(call)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _floats(values: Iterable[Any]) -> Iterator[Tensor]:
    """The numbers among arguments or results, those of states of a cache aside."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield from [value] if value.is_floating_point() else []
        elif isinstance(value, (list, tuple)):
            yield from _floats(value)
        elif isinstance(value, dict):
            yield from _floats(value.values())


def _error(found: Tensor, known: Sequence[Tensor]) -> float:
    """How far a tensor is from the nearest of others of as many numbers; 0 where that is rounding."""
    import torch

    least, maximum = math.inf, bound("fp64 max" if found.dtype is torch.float64 else "fp32 max")
    for one in known:
        with contextlib.suppress(Mismatch):  # infinite where the other is not
            least = min(least, measure("", one.reshape(found.shape), found).relative_max)
        if least <= maximum:
            return 0.0
    return least
