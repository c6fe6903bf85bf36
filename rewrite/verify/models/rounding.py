"""What a package of weights in 8 bits rounds, repeated on an original: the yardstick for what else differs."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .loaded_sides import Source

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
