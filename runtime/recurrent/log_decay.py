"""How much of a state stays, as a logarithm, from what is projected of a token: `-exp(rates) * softplus(x + bias)`.

N is any leading shape, H heads. Torch runs it as seven kernels on H numbers each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES, collapse
from ..launching.launch import WAVE, Kernel, overlaps

CASES = """
case("Qwen3.5 2B", log_decay, tensor(1, 1, 32)[..., 16:], tensor(16), tensor(16))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit
    def _log_decay_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        rates_ptr,
        bias_ptr,
        out_ptr,
        inner,
        outer_stride,
        inner_stride,
        H: tl.constexpr,
        BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Compute one row a program."""
        follow(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        col = tl.arange(0, BLOCK)
        place = (row // inner) * outer_stride + (row % inner) * inner_stride + col
        x = tl.load(x_ptr + place, mask=col < H, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + col, mask=col < H, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(rates_ptr + col, mask=col < H, other=0.0).to(tl.float32))
        positive = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        tl.store(out_ptr + row * H + col, -rate * positive, mask=col < H)

    log_decay_kernel = Kernel(_log_decay_kernel)


def log_decay(x: Tensor, rates: Tensor, bias: Tensor) -> Tensor:
    """Return `-exp(rates) * softplus(x + bias)`.

    Args:
        x: `[N, H]`.
        rates: `[H]`, logarithms.
        bias: `[H]`.

    Returns:
        `[N, H]` in fp32. Differentiable: where gradients are wanted the torch form runs.
    """
    if not _fits(x, rates, bias):
        return reference(x, rates, bias)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    x, inner, outer_stride, inner_stride = collapse(x)
    heads = x.shape[-1]
    block = max(32, 1 << (heads - 1).bit_length())
    overlap = overlaps(out)
    with backend.device_guard(out):
        log_decay_kernel.launch(
            (x.numel() // heads, 1, 1),
            max(1, min(block, 256) // WAVE),
            (x, rates, bias, out),
            (),
            (inner, outer_stride, inner_stride),
            (),
            (heads, block, overlap),
            overlap=overlap,
        )
    return out


def reference(x: Tensor, rates: Tensor, bias: Tensor) -> Tensor:
    """Compute `log_decay` in plain torch, rounding where the modeling files round."""
    return -rates.float().exp() * F.softplus(x.float() + bias)


def _fits(x: Tensor, rates: Tensor, bias: Tensor) -> bool:
    given = (x, rates, bias)
    return (
        x.dim() > 0
        and x.numel() > 0
        and x.shape[-1] <= 1024
        and rates.shape == bias.shape == x.shape[-1:]
        and rates.is_contiguous()
        and bias.is_contiguous()
        and all(t.dtype in KERNEL_DTYPES and t.device == x.device for t in given)
        and backend.nothing_watches(x)
        and not backend.wants_gradient(*given)
        and backend.uses_triton(x)
    )
