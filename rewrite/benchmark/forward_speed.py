"""How long a call of a model takes: the original as it is and compiled, the rewritten one as it is and compiled.

All sides share their weights and are timed in turn, each call with the wait for its end. The rewritten side is what a
user gets: from the third call on its forward replays a graph where that is faster. Parity is taken in the same run:
the error of every side's outputs against the original in fp32, as a multiple of the original's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.errors import VerificationError
from rewrite.measure import timing
from rewrite.verify.models import model_inputs

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL, COMPILED, OURS, OURS_COMPILED = "original", "compiled", "ours", "ours_compiled"
PLAIN = "ours_plain"
TITLES = {
    ORIGINAL: "original, eager",
    COMPILED: "original, compiled",
    PLAIN: "rewritten, not captured",
    OURS: "rewritten",
    OURS_COMPILED: "rewritten, compiled",
}
SIDES = (ORIGINAL, COMPILED, OURS, OURS_COMPILED)
WARM = 4
"""Calls before the first that counts: the second captures, and compiled code settles."""
LARGEST_ERROR = 1.5
"""Of the original's own error in that precision, which another order of rounding may reach."""
SMALLEST_ERROR = 1e-5
"""Relative error up to which outputs are equal, whatever the original's own is."""
SAMPLES = 160_000
"""Of sound: 10 s."""

Call = Callable[[], Any]


@dataclass
class Forward:
    """Both models, what they are given, and the sides that are timed.

    Args:
        original: the original, in eval mode.
        rewritten: the rewritten model, with the same weights.
        graphs: `forward/forward_settings` of the package's runtime.
        inputs: the arguments of a call, on the device.
        device: of both.
        names: of the sides.
    """

    original: Any
    rewritten: Any
    graphs: Any
    inputs: Mapping[str, Tensor]
    device: str
    names: Sequence[str] = SIDES
    sides: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Why a side is not measured."""

    def prepare(self) -> None:
        """Compile, capture and warm up; a side that fails is noted and left out."""
        for name in self.names:
            try:
                call = self._side(name)
                for _ in range(WARM):
                    self._called(call)
            except Exception as error:  # compilers and models under test raise what they like
                lines = str(error).strip().splitlines() or [""]
                self.errors[name] = f"{type(error).__name__}: {lines[0][:300]}"
            else:
                self.sides[name] = call

    def _side(self, name: str) -> Call:
        import torch

        if name in (COMPILED, OURS_COMPILED):
            model = self.original if name == COMPILED else self.rewritten
            compiled = torch.compile(model, dynamic=False)
            return lambda: compiled(**self.inputs)
        if name == PLAIN:
            return self._plain
        return lambda: (self.original if name == ORIGINAL else self.rewritten)(**self.inputs)

    def _plain(self) -> Any:
        with self.graphs.use_forward_graphs("never"):
            return self.rewritten(**self.inputs)

    def _called(self, call: Call) -> Any:
        import torch

        with torch.no_grad():
            return call()

    def times(self, rounds: tuple[int, int], seconds: float) -> dict[str, dict[str, Any]]:
        """Return ms of each side by name: median, interval, and the ratio to the rewritten side."""
        calls = {name: self._timed(call) for name, call in self.sides.items()}
        samples = timing.interleaved(calls, rounds, seconds)
        found: dict[str, dict[str, Any]] = {}
        for name, values in samples.items():
            low, high = timing.interval(values)
            found[name] = {"ms": median(values), "low_ms": low, "high_ms": high, "rounds": len(values)}
            if name != OURS and OURS in samples:
                found[name]["ours"] = timing.ratio(values, samples[OURS])
        return found

    def _timed(self, call: Call) -> Callable[[int], float]:
        return lambda _: timing.wall_ms(self.device, call)

    def parity(self) -> dict[str, float]:
        """Return the RMS error of each side against the original in fp32, relative to that output's own RMS."""
        exact = copy.deepcopy(self.original).float()
        inputs = {name: value.float() if _is_float(value) else value for name, value in self.inputs.items()}
        truth = model_inputs.tensors(self._called(partial(exact, **inputs)))
        if not truth:
            raise VerificationError("the forward returns no floating-point output to compare.")
        found = {name: model_inputs.tensors(self._called(call)) for name, call in self.sides.items()}
        return {name: max(_error(truth[key], outputs.get(key)) for key in truth) for name, outputs in found.items()}


def _error(truth: Tensor, found: Tensor | None) -> float:
    if found is None or found.shape != truth.shape:
        return float("inf")
    apart = (found.float() - truth).pow(2).mean().sqrt().item()
    size: float = truth.pow(2).mean().sqrt().item()
    return apart / size if size else apart


def agrees(parity: Mapping[str, float]) -> bool:
    """Return whether no rewritten side is further from fp32 than another order of rounding takes the original."""
    allowed = max(LARGEST_ERROR * parity.get(ORIGINAL, 0.0), SMALLEST_ERROR)
    return all(parity[name] <= allowed for name in (OURS, PLAIN, OURS_COMPILED) if name in parity)


def arguments(model: Any, batch: int, length: int, device: str, seed: int = 0) -> dict[str, Tensor]:
    """The arguments of one call: `batch` texts of `length` tokens, images of the configuration's size, 10 s of sound.

    Raises:
        VerificationError: no set of arguments that the class takes is known.
    """
    for kind in model_inputs.kinds_of(type(model)):
        if _runs(model, kind, device):
            break
    else:
        raise VerificationError(f"nothing is known that {type(model).__name__} could be given.")
    sizes = model_inputs.Sizes(length, SAMPLES)
    found = model_inputs.make(kind, model.config, batch, seed, model.dtype, sizes=sizes)
    given = {name: value.to(device) for name, value in found.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False  # type: ignore[assignment]
    return given


def _runs(model: Any, kind: tuple[str, ...], device: str) -> bool:
    """Return whether a model runs on a set of arguments."""
    import torch

    given = model_inputs.make(kind, model.config, 1, 0, model.dtype)
    try:
        with torch.no_grad():
            model(**{name: value.to(device) for name, value in given.items()})
    except Exception:  # foreign model code raises what it likes; what none of the sets suits is an error of the caller
        return False
    return True


def _is_float(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()
