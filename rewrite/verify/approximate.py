"""Packages that round on request: they are compared with the original, rounded in the same way by plain torch.

The transform `fp8` reads weights, and for more than one token a sequence activations, in 8 bits. What it writes is
held to the ordinary bounds against the original with those tensors rounded where it stands, so a wrong kernel shows as
it does in any package; how far the rounding itself moves the model is a figure of its own, in KL.

The rounding is written here from its definition, and not taken from the package: a row is divided by the smallest
power of two that brings its largest magnitude into the format's range, and rounded to e4m3.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checks import CheckRun
from .compare import Mismatch
from .configs import WINDOW, Variant
from .tolerances import bound
from .verdict import Figure

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import Batch
    from .sides import Source
    from .workbench import Workbench

TRANSFORM = "fp8"
FEW_SEQUENCES = 16
"""Up to so many sequences of one token keep their activations as they are."""


@dataclass(frozen=True)
class Rounding:
    """Which projections a package reads in 8 bits: by the class that has them, those that are read together."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, source: Source) -> Rounding | None:
        """Read the lock beside a modeling file; None for a package that rounds nothing, or no package."""
        lock = source.path.parent / "rewrite.lock"
        if not lock.is_file():
            return None
        found = json.loads(lock.read_text("utf-8")).get("transforms", {}).get(TRANSFORM, {}).get("rewritten", ())
        groups = dict.fromkeys(_group(site) for site in found)
        return cls(tuple(groups)) if groups else None

    def apply(self, model: Any, rewritten: Any) -> Any:
        """Round in the projections of an original, which the verifier built for itself. Returns the model.

        Where transformers builds a part of the rewritten model from the original's classes, nothing is rounded.
        """
        import torch

        file = type(rewritten).__module__
        own = {name for name, module in rewritten.named_modules() if type(module).__module__ == file}
        for path, parent in model.named_modules():
            names = {base.__name__ for base in type(parent).__mro__} if path in own else set()
            for owner, attributes in self.groups:
                modules = [getattr(parent, attribute, None) for attribute in attributes]
                if owner not in names or not all(type(module) is torch.nn.Linear for module in modules):
                    continue
                for module in modules:
                    module.forward = functools.partial(_forward, parent, attributes, module)  # type: ignore[union-attr]
        return model


def _group(site: str) -> tuple[str, tuple[str, ...]]:
    """Return class and attributes of `LlamaAttention.forward: packed_linear: q_proj, k_proj, v_proj`."""
    where, *_, attributes = site.split(": ")
    return where.split(".")[0], tuple(attributes.split(", "))


def _forward(parent: Any, attributes: tuple[str, ...], module: Any, x: Tensor) -> Tensor:
    """The projection of `x`, rounded unless something keeps the package from it; then its weights stay as they are."""
    import torch
    import torch.nn.functional as F

    modules = [getattr(parent, attribute) for attribute in attributes]
    weights = [other.weight for other in modules]
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
    plain = any(type(m) is not torch.nn.Linear or m._forward_hooks or m._forward_pre_hooks for m in modules)
    if gradient or plain or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, module.weight, module.bias)
    if not (x.dim() > 1 and x.shape[-2] == 1 and x.numel() <= FEW_SEQUENCES * x.shape[-1]):
        x = rounded(x)
    return F.linear(x, rounded(module.weight), module.bias)


def rounded(rows: Tensor) -> Tensor:
    """Rows `[…, I]` rounded to 8 bits and back, in their own dtype."""
    import torch

    dtype = _format(rows)
    wide = rows.detach().to(torch.float32)
    if not wide.numel():
        return rows
    fraction, exponent = torch.frexp(wide.abs().amax(-1, keepdim=True))
    limit, power = torch.frexp(torch.tensor(torch.finfo(dtype).max))
    shift = (exponent - power.to(exponent)).to(torch.int32) + (fraction > limit.to(fraction)).to(torch.int32)
    values = torch.ldexp(wide, -shift).to(dtype).to(torch.float64)
    return torch.ldexp(values, shift).to(rows.dtype)


def _format(tensor: Tensor) -> Any:
    """The 8-bit format of a device: MI300's has another range."""
    import torch

    if tensor.is_cuda and torch.version.hip is not None:
        if str(torch.cuda.get_device_properties(tensor.device).gcnArchName).startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def approximation_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """How far the package is from the original, beside how far the rounding alone is; none for an exact package."""
    if bench.rounding is not None:
        for dtype in dict.fromkeys(("float32", bench.options.dtype)):
            name = f"approximate, {dtype}: KL of a prompt and of steps from the original"
            yield CheckRun(name, functools.partial(_approximation, bench, variant, dtype), essential=True)


def _approximation(bench: Workbench, variant: Variant, dtype: str) -> Mapping[str, Figure]:
    from .inputs import prompt

    batch = prompt(bench.seed_for("approximate"), variant.vocab_size, 8, 3 * WINDOW, "none", bench.options.device)
    implementation = bench.implementations()[0]
    pair = bench.pair(variant, implementation, dtype)
    exact = bench.unrounded(variant, implementation, "float64")
    original, own, new = (observed(bench, model, batch) for model in (exact, pair.original, pair.rewritten))
    return judged(divergence(original, own), divergence(original, new), divergence(own, new))


def observed(bench: Workbench, model: Any, batch: Batch) -> Tensor:
    """Log-probabilities `[tokens, V]` of prompts, and of the same tokens with the second half fed one at a time."""
    import torch

    if not bench.subject.causal:
        with torch.no_grad():
            states: Tensor = model(input_ids=batch.input_ids)[0]
        return states.flatten(0, 1).double().log_softmax(-1)
    half = batch.input_ids.shape[1] // 2
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits
    steps = step_by_step(bench, model, batch.input_ids, None, half)
    return torch.cat([logits, steps.to(logits)], 1).flatten(0, 1).double().log_softmax(-1)


def step_by_step(bench: Workbench, model: Any, ids: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """Logits after the first `start` tokens of a text, and after each of the others, which are fed one at a time."""
    import torch

    from .caches import new_cache

    cache, found = new_cache(model, "dynamic"), []
    mask = torch.ones_like(ids) if mask is None else mask
    spans = [(0, start), *((column, column + 1) for column in range(start, ids.shape[1]))]
    with torch.no_grad():
        for first, last in spans:
            arguments: dict[str, Any] = {"attention_mask": mask[:, :last]}
            if bench.subject.accepts("position_ids"):
                arguments["position_ids"] = (mask[:, :last].cumsum(1) - 1).clamp(min=0)[:, first:]
            out = model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True, **arguments)
            found.append(out.logits[:, -1])
    return torch.stack(found, 1)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of log-probabilities, per token."""
    return (first.exp() * (first - second.to(first))).sum(-1).clamp(min=0)


def judged(rounding: Tensor, package: Tensor, between: Tensor) -> dict[str, Figure]:
    """The figures of an approximation, per token: KL to the original of the rounding alone and of the package.

    Raises:
        Mismatch: the package moves the model further than the rounding does.
    """
    figures: dict[str, Figure] = {
        "KL mean": float(package.mean()),
        "KL mean, of the rounding alone": float(rounding.mean()),
        "KL 99%": float(package.quantile(0.99)),
        "KL to the rounding": float(between.mean()),
        "tokens": int(package.numel()),
    }
    limit = bound("approximate kl") * float(rounding.mean()) + bound("approximate kl floor")
    if not float(package.mean()) <= limit:
        raise Mismatch(f"mean KL {float(package.mean()):.3g} > {limit:.3g}", figures)
    return figures
