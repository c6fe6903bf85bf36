"""One forward pass of any class, whatever it is fed: the short parity check, and the only one without text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compare import Mismatch, NotRun, Observations, finite, join, near_exact
from .inputs import Padding
from .model_inputs import TEXT, make, tensors
from .unrounded import unrounded
from .verdict import Figure
from .workbench import Workbench, on_original

if TYPE_CHECKING:
    import torch


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

    def truth() -> Observations:
        with unrounded():
            return on_original(observe, pair.original, bench, dtype)

    return near_exact(original, rewritten, unrounded=truth)


def observe(model: Any, bench: Workbench, dtype: str) -> Observations:
    """The outputs of a plain pass, and where the class reads text alone, of a padded one; padding itself left out."""
    import torch

    kind = bench.base.inputs
    paddings: tuple[Padding, ...] = (
        ("none", "right") if kind == TEXT and bench.subject.accepts("attention_mask") else ("none",)
    )
    runs = []
    for padding in paddings:
        seed = bench.seed_for(bench.subject.name, padding)
        arguments = make(kind, model.config, 2, seed, getattr(torch, dtype), padding)
        arguments = {name: value.to(bench.options.device) for name, value in arguments.items()}
        keep = {name: value.clone() for name, value in arguments.items()}
        torch.manual_seed(seed)
        with torch.no_grad():
            found = tensors(model(**arguments))
        if changed := next((name for name, value in keep.items() if not torch.equal(value, arguments[name])), None):
            raise Mismatch(f"{changed} was changed in place")
        mask = arguments.get("attention_mask")
        runs.append({name: value if mask is None else _real(value, mask) for name, value in found.items()})
    return join(runs)


def _real(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows [tokens, …] of an output with a token axis that are not padding; of caches and others, nothing."""
    if output.shape[:2] == mask.shape:
        return output[mask.bool()]
    return output if output.dim() <= 2 else output[:0]
