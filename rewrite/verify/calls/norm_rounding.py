"""Gate 2, norms by themselves in 16 bits: they round where the original's do, neither more often nor less.

A cast that is left out makes a norm more exact, which no bound on errors finds; yet a model was trained with it. Where
weights and hidden states have different dtypes, it also decides on the dtype that comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rewrite.measure.runtime_part import has_runtime, runtime_part

from ..judging.compare import Mismatch, NotRun
from ..judging.fp32_free_reference import unrounded
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.model_pair import Pair, Workbench, on_original

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 256
DTYPES = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"), ("bfloat16", "float32"),
)  # fmt: skip
"""Of the weights, and of the hidden states."""


@dataclass(frozen=True)
class Norm:
    """A norm of both sides, by the name of its module."""

    name: str
    original: Any
    rewritten: Any

    @property
    def width(self) -> int:
        """How many columns it takes."""
        return int(next(self.original.parameters()).numel())


def norms_round(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Every kind of norm of the file, also behind a sum: its error against fp64 is that of the original.

    Raises:
        Mismatch: a norm rounds more or less, or gives another dtype.
        NotRun: the file has no norm.
    """
    worst, count = 1.0, 0
    for weights, states in DTYPES:
        pair, exact = (bench.fresh(variant, "eager", dtype) for dtype in (weights, "float64"))
        for norm in _norms(pair):
            wide = exact.original.get_submodule(norm.name)
            for said, sides in _asked(bench, norm, wide, states):
                ratio = _ratio(*sides, f"{norm.name}{said}, weights in {weights}, hidden states in {states}")
                worst, count = max(worst, ratio, 1 / ratio), count + 1
    if not count:
        raise NotRun("the file has no norm that runs by itself")
    return {"calls": count, "rms ratio": worst}


def _norms(pair: Pair) -> Iterator[Norm]:
    """A norm of each class of the original's file that has one vector of weights and nothing else."""
    own, seen = type(pair.original).__module__, set()
    for name, module in pair.original.named_modules():
        kind, parameters = type(module), list(module.parameters())
        if kind.__module__ != own or kind in seen or len(parameters) != 1 or parameters[0].dim() != 1:
            continue
        if "norm" in kind.__name__.lower():
            seen.add(kind)
            yield Norm(name, module, pair.rewritten.get_submodule(name))


def _asked(
    bench: Workbench, norm: Norm, exact: Any, dtype: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    """What a norm gives in fp64, of the original and of the rewritten file; then behind a sum, where it has that."""
    import torch

    kind, device = getattr(torch, dtype), bench.options.device
    generator = torch.Generator().manual_seed(bench.seed_for("norms", norm.name))
    one, other = (torch.randn(ROWS, norm.width, generator=generator).to(device, kind) for _ in range(2))
    with torch.no_grad():
        try:
            with unrounded():
                truth = on_original(exact, one.double())
            own = on_original(norm.original, one)
        except NotRun:
            return  # a norm that takes a gate, say
        yield "", (truth, own, norm.rewritten(one))
        module = str(bench.subject.rewritten.__module__)
        part = partial(runtime_part, module.rpartition(".")[0])
        if has_runtime(module) and part("norms/norm_form").norm_form(norm.rewritten) is not None:
            total = other + one
            with unrounded():
                truth = on_original(exact, total.double())
            own = on_original(norm.original, total)
            yield " behind a sum", (truth, own, part("norms/add_norm").add_norm(one, other, norm.rewritten)[0])


def _ratio(truth: Tensor, own: Tensor, new: Tensor, said: str) -> float:
    """The RMS error of the rewritten file's norm over that of the original's.

    Raises:
        Mismatch: it is not near one.
    """
    import torch

    if own.dtype != new.dtype or own.shape != new.shape:
        raise Mismatch(f"{said}: {new.dtype} {tuple(new.shape)} comes out, not {own.dtype} {tuple(own.shape)}")
    if torch.equal(own, new) or own.dtype not in (torch.float16, torch.bfloat16):
        return 1.0
    errors = [float((side.double() - truth).square().mean().sqrt()) for side in (own, new)]
    ratio = errors[1] / errors[0] if errors[0] else float("inf")
    limit = bound("roundings of a norm")
    if not 1 / limit <= ratio <= limit:
        raise Mismatch(f"{said}: its error against fp64 is {ratio:.3g} times the original's", {"rms ratio": ratio})
    return ratio
