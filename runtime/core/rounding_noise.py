"""What rounding in another order may cost, measured on the model itself, and whether something is off by more.

R rows, W numbers of a row.

How far two right ways to compute a model may be apart depends on its weights, its dtype and what it is asked. So the
model's own code is run again with every result moved by up to one unit in its last place, at random: in another order,
or with roundings left out in between, a kernel is off by less. What is to be proved has to be as near to one of these
runs as they are to each other. To the nearest one, since a router near a tie takes another expert: runs that agree
about the expert agree about its numbers, and half of attention left out is near none of them.

All of it is compared row by row and layer by layer, where a layer leaves something: the first layers tell a wrong step
from a right one even where what comes behind them makes of one rounding another text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FACTOR = 2.0
"""By how much further than runs with noise from each other something may be from the nearest of them."""
LEAST = 16.0
"""Units in the last place of fp32 that a row may always be off by, relative to its size: exponentials and roots of a
GPU are right to two, and some functions have several of them."""
MOST = 1e-3
"""Largest relative distance of fp32 numbers, however far noise takes them."""
MOST_IN_16_BITS = 2.0
"""The same in 16 bits, where the bound is `VAGUE`; numbers that have nothing to do with each other are at 1.4."""
RUNS, MOST_RUNS = 2, 16
"""Runs with noise that are made at first, and that are made before something is refused: of routers near a tie, one
of so many takes what another order of rounding did."""
FEW = 16
"""Of so many rows one may be off by more, if rows of the runs themselves are: of many tokens, with a choice of experts
in every layer, some go another way than in any of the runs."""
VAGUE = 0.5
"""Relative distance from which a bound tells little."""
_TOO_LARGE = 1e18
"""Numbers that stand for infinity, whose squares are: both sides have to have them."""
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_TF32 = 2**13
"""Units in the last place of fp32 in one of TF32."""


class RoundingNoise(TorchFunctionMode):
    """Moves what functions of torch compute from weights by up to one unit in its last place.

    What no weight is in, as masks, positions and choices, stays, and so does what is written in place. It draws from
    generators of its own.

    Args:
        seed: another one gives other noise.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.unit = 0.0
        """The coarsest unit in the last place, relative to a number's size, of what was computed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **given)
        found = func(*args, **given)
        read = [*_tensors_in((args, given))]
        if not any(isinstance(tensor, nn.Parameter) or hasattr(tensor, _MARK) for tensor in read):
            return found
        if type(found) is Tensor and found.is_floating_point():
            coarser = _TF32 if _rounds_to_tf32(found) else 1
            eps = torch.finfo(found.dtype).eps if found.dtype in _BITS else 1.0
            self.unit = max(self.unit, coarser * eps)
            if _is_new(found, read):
                found = self._moved(found, coarser * _roundings(found, read))
        for tensor in _tensors_in(found):
            if tensor.is_floating_point() and not any(tensor is one for one in read):  # choices are no numbers
                setattr(tensor, _MARK, True)
        return found

    def _moved(self, tensor: Tensor, most: int) -> Tensor:
        bits = tensor.view(_BITS[tensor.dtype])
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        moved = torch.empty_like(bits).random_(-1, 2, generator=generator)
        least = torch.finfo(tensor.dtype).tiny if most > 1 else 0  # a number of fewer units would change its sign
        size = tensor.abs()
        moved.masked_fill_(~((size > least) & (size < _TOO_LARGE)), 0)
        return moved.mul_(most).add_(bits).view(tensor.dtype)


_MARK = "_has_rounding_noise"
"""Attribute of tensors that are computed from weights."""


def _rounds_to_tf32(tensor: Tensor) -> bool:
    """Return whether products that give such a tensor may."""
    return tensor.dtype is torch.float32 and tensor.is_cuda and torch.get_float32_matmul_precision() != "highest"


def _roundings(found: Tensor, read: Sequence[Tensor]) -> int:
    """Return how many units a sum may be off by: in fp32 each of its terms was rounded with what came before it.

    A sum of K numbers, one by one, is off by 0.15 sqrt(K) units; 16 bits are summed in fp32.
    """
    if found.itemsize < 4:
        return 1
    longest = max(
        (tensor.shape[-1] for tensor in read if isinstance(tensor, nn.Parameter) and tensor.dim() > 1), default=1
    )
    return max(1, math.isqrt(longest) // 8)


def _is_new(found: Tensor, read: Sequence[Tensor]) -> bool:
    """Return whether a result is of numbers that nobody else reads or writes."""
    if found.dtype not in _BITS or found.layout is not torch.strided:
        return False
    memory = found.untyped_storage()._cdata
    plain = (tensor for tensor in read if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided)
    return all(tensor.untyped_storage()._cdata != memory for tensor in plain)


class Verdict(NamedTuple):
    """How far something is from the nearest run, and how far it may be, where that is most out of proportion."""

    distance: float
    bound: float
    where: str
    vague: bool
    """Whether there is something of which the bound tells little."""

    @property
    def excess(self) -> float:
        """The one by the other."""
        return self.distance / self.bound

    @property
    def holds(self) -> bool:
        """Whether it may be so far."""
        return self.distance <= self.bound

    def __str__(self) -> str:
        return f"{self.where} by {self.distance:.3g}, where rounding explains {self.bound:.3g}"


Trace = dict[str, Tensor]
"""What a run leaves, by its place in the model, each `[R, W]`."""


class Yardstick:
    """Runs of a model's own code, one as it is and others with noise.

    Args:
        plain: what the first left.
        again: runs it once more, everything else being as it was.
    """

    def __init__(self, plain: Trace, again: Callable[[], Trace]):
        self._again = again
        self._runs = [plain]
        self._most = MOST

    def judge(self, found: Trace) -> Verdict:
        """Return how far something is off; runs are added until it is near enough, or there are `MOST_RUNS`."""
        count = RUNS
        while True:
            while len(self._runs) <= count:
                with RoundingNoise(seed=len(self._runs)) as noise:
                    self._runs.append(self._again())
                if noise.unit > torch.finfo(torch.float32).eps:
                    self._most = MOST_IN_16_BITS
            verdict = self._verdict(found)
            if verdict.holds or count == MOST_RUNS:
                return verdict
            count = min(2 * count, MOST_RUNS)

    def bound(self, name: str) -> float:
        """Return the largest relative distance of something from the nearest run, of all rows."""
        return float(_bounds([run[name] for run in self._runs], self._most)[0].max().item())

    def _verdict(self, found: Trace) -> Verdict:
        plain = self._runs[0]
        if found.keys() != plain.keys():
            return Verdict(math.inf, 0.0, f"{sorted(found.keys() ^ plain.keys())[0]}, of one alone,", vague=False)
        verdicts = [_verdict(name, found[name], [run[name] for run in self._runs], self._most) for name in plain]
        return max(verdicts, key=lambda verdict: verdict.excess)._replace(vague=any(each.vague for each in verdicts))


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return how far the numbers in the last dimension are from others, relative to those, where it is most."""
    return float((_apart(found, wanted) / _sizes(wanted)).max().item())


def _verdict(name: str, found: Tensor, runs: Sequence[Tensor], most: float) -> Verdict:
    """Return how far rows are from the nearest ones, where that is most out of proportion."""
    bounds, astray = _bounds(runs, most)
    apart = torch.stack([_apart(found, run) for run in runs]).amin(0) / _sizes(runs[0])
    row = int((apart / bounds).argsort(descending=True)[min(astray, len(bounds) // FEW)])
    return Verdict(apart[row].item(), bounds[row].item(), name, vague=bool((bounds > VAGUE).any()))


def _bounds(runs: Sequence[Tensor], most: float) -> tuple[Tensor, int]:
    """Return how far each row may be from the nearest one, relative to its size, as those are from each other.

    And how many rows of a run are further from all others: tokens that went to experts of their own.
    """
    between = torch.stack([torch.stack([_apart(one, other) for other in runs]) for one in runs])  # [N, N, R]
    between.diagonal(dim1=0, dim2=1).fill_(math.inf)
    nearest = between.amin(1) / _sizes(runs[0])
    bounds = (FACTOR * nearest.median(0).values).clamp(LEAST * torch.finfo(torch.float32).eps, most)
    return bounds, int((nearest > bounds).sum(1).amax())


def _sizes(rows: Tensor) -> Tensor:
    rows = rows.float()
    rows = torch.where(rows.abs() < _TOO_LARGE, rows, 0)
    return rows.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return how far each row is from the other's; infinite where they differ in what is no number to count with."""
    one, other = one.float(), other.float()
    apart = torch.where(one == other, 0, one - other)
    beyond = ~(apart.abs() < _TOO_LARGE).all(-1)
    return apart.norm(dim=-1).masked_fill(beyond, math.inf)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in([*value.values()])
