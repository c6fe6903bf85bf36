"""One forward pass of any class, whatever it is fed: the short parity check, and the only one without text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..judging.compare import Mismatch, NotRun, Observations, finite, join, near_exact
from ..judging.low_precision_bound import Runs, compare_draws
from ..judging.verdict import Figure
from ..models.inputs import Padding, seed_all
from ..models.model_inputs import TEXT, make, tensors
from ..models.model_pair import Workbench, on_original, unrounded_original

if TYPE_CHECKING:
    import torch


TURNS, ENOUGH = 16, 512
"""Inputs are drawn until there are enough numbers for the RMS of their errors to mean something."""


def forward_parity(bench: Workbench) -> dict[str, Figure]:
    """Compare all outputs of both sides in fp64, or in fp32 where the original has no finite fp64 run.

    Raises:
        Mismatch: an output differs by more than its bound.
        NotRun: the original does not run, or not twice alike.
    """
    figures: dict[str, Figure] = {"inputs": " + ".join(bench.base.inputs)}
    for implementation in bench.implementations():
        try:
            found = _in_dtype(bench, implementation, "float64")
        except NotRun:
            found = _in_dtype(bench, implementation, "float32") | {"in": "fp32, the original has no finite fp64 run"}
        figures |= {f"{implementation} {name}": value for name, value in found.items()}
    return figures


def _in_dtype(bench: Workbench, implementation: str, dtype: str) -> dict[str, Figure]:
    pair = bench.fresh(bench.base, implementation, dtype)
    original = on_original(observe, pair.original, bench, dtype)
    if not finite(original):
        raise NotRun(f"the original's output is not finite in {dtype}")
    again = on_original(observe, pair.original, bench, dtype)
    if any(not bool((again[name] == tensor).all()) for name, tensor in original.items()):
        raise NotRun("the original computes something else each time")
    rewritten = observe(pair.rewritten, bench, dtype)
    if dtype != "float64":
        return near_exact(original, rewritten, "fp32 max")
    return near_exact(original, rewritten, unrounded=unrounded_original(observe, pair.original, bench, dtype))


def low_precision_alone(bench: Workbench) -> dict[str, Figure]:
    """The same in 16 bits, which is what kernels compute in, as a part of another check."""
    try:
        return low_precision_forward(bench, bench.options.dtype)
    except NotRun as reason:
        return {bench.options.dtype: f"not run: {reason}"}


def low_precision_forward(bench: Workbench, dtype: str) -> dict[str, Figure]:
    """Compare the outputs in a precision by the original's own error against fp64.

    Only floating-point outputs: what a model chose (codes, indices) is another with any rounding.

    Raises:
        Mismatch: an output is further off than the yardstick allows.
        NotRun: the original has no finite outputs, or other ones than in fp64.
    """
    import torch

    variant = bench.base.without_choice
    pairs = [bench.fresh(variant, bench.implementations()[0], name) for name in ("float64", dtype)]

    def draw(number: int) -> Runs:
        truth: dict[str, torch.Tensor] = {}
        own, new = dict(truth), dict(truth)
        for turn in range(TURNS * number, TURNS * (number + 1)):
            exact = _floating(on_original(observe, pairs[0].original, bench, "float64", turn), turn)
            rounded = _floating(on_original(observe, pairs[1].original, bench, dtype, turn), turn)
            if {name: value.shape for name, value in exact.items()} != {name: v.shape for name, v in rounded.items()}:
                raise NotRun("the original's outputs have other shapes than in fp64")
            if not (exact and finite(exact) and finite(rounded)):
                raise NotRun("the original has no finite outputs")
            truth, own = truth | exact, own | rounded
            new |= _floating(observe(pairs[1].rewritten, bench, dtype, turn), turn)
            if sum(value.numel() for value in truth.values()) >= ENOUGH:
                break
        return Runs(truth, own, new)

    figures = compare_draws(draw, torch.finfo(getattr(torch, dtype)).eps, variant.routed)
    return {f"{dtype} {name}": value for name, value in figures.items()}


def _floating(outputs: Observations, turn: int) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in outputs.items() if tensor.is_floating_point() and tensor.numel()}
    return {f"{name}, inputs {turn}": tensor for name, tensor in found.items()}


def observe(model: Any, bench: Workbench, dtype: str, turn: int = 0) -> Observations:
    """The outputs of a plain pass, and where the class reads text alone, of a padded one; padding itself left out."""
    import torch

    kind = bench.base.inputs
    paddings: tuple[Padding, ...] = (
        ("none", "right") if kind == TEXT and bench.subject.accepts("attention_mask") else ("none",)
    )
    runs = []
    for padding in paddings:
        seed = bench.seed_for(bench.subject.name, padding, *([turn] if turn else []))
        arguments = make(kind, model.config, 2, seed, getattr(torch, dtype), padding)
        arguments = {name: value.to(bench.options.device) for name, value in arguments.items()}
        keep = {name: value.clone() for name, value in arguments.items()}
        seed_all(seed)
        with torch.no_grad():
            found = tensors(model(**arguments))
        if changed := next((name for name, value in keep.items() if not torch.equal(value, arguments[name])), None):
            raise Mismatch(f"{changed} was changed in place")
        mask = arguments.get("attention_mask")
        runs.append({name: value if mask is None else real_rows(value, mask) for name, value in found.items()})
    return join(runs)


def real_rows(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows [tokens, …] of an output with a token axis that are not padding; of caches and others, nothing."""
    if output.shape[:2] == mask.shape:
        return output[mask.bool()]
    return output if output.dim() <= 2 else output[:0]
