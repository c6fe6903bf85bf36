"""Strict bodies of aiter's products in 8 bits, for `fake_aiter`: those of an MI300X, whose format is e4m3fnuz."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fnuz


def unshuffled(x: Tensor) -> Tensor:
    """A weight of one byte an element, out of the order that `shuffle_weight` gives."""
    rows, cols = x.shape
    return (
        x.view(torch.uint8)
        .view(rows // 16, cols // 32, 2, 16, 16)
        .permute(0, 3, 1, 2, 4)
        .reshape(rows, cols)
        .view(x.dtype)
    )


def gemm_a8w8_bpreshuffle(
    release: Any, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, **others: Any
) -> Tensor:
    assert not any(others.values())
    assert XQ.dtype == WQ.dtype == FORMAT
    assert dtype == torch.bfloat16
    assert getattr(WQ, "is_shuffled", False), "garbage"
    for tensor in (XQ, WQ, x_scale, w_scale):
        assert tensor.is_contiguous(), "raw addresses"
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert x_scale.shape == (XQ.shape[0], 1)
    assert w_scale.shape == (WQ.shape[0], 1)
    if WQ.shape[0] % 64 or WQ.shape[1] % 128:
        raise RuntimeError("This GEMM is not supported!")
    product = XQ.float() @ unshuffled(WQ).float().t()
    return (product * x_scale * w_scale.t()).to(dtype)


def per_group_quant_hip(release: Any, x: Tensor, quant_dtype: torch.dtype, group_size: int, **others: Any) -> Any:
    """The scale is not rounded to a power of two."""
    assert all(value in (None, False, 1) or value == torch.float32 for value in others.values())
    assert x.is_contiguous(), "raw addresses"
    assert x.ndim == 2
    assert group_size == 128
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True) / torch.finfo(quant_dtype).max
    values = torch.where(scale > 0, groups / scale, 0.0).to(quant_dtype).flatten(-2)
    return values, scale.flatten(-2)


def gemm_a8w8_blockscale(
    release: Any, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, **others: Any
) -> Tensor:
    assert not any(others.values())
    assert XQ.dtype == WQ.dtype == FORMAT
    assert dtype in (torch.bfloat16, torch.float16)
    assert x_scale.dtype == w_scale.dtype == torch.float32
    for tensor in (XQ, WQ, x_scale, w_scale):
        assert tensor.is_contiguous(), "raw addresses"
    size, columns = WQ.shape
    assert x_scale.shape == (XQ.shape[0], columns // 128)
    assert w_scale.shape == (size // 128, columns // 128)
    x = XQ.float() * x_scale.repeat_interleave(128, 1)
    weight = WQ.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x @ weight.t()).to(dtype)


def rmsnorm2d_fwd_with_add_smoothquant(
    release: Any,
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    xscale: Tensor,
    yscale: Tensor,
    weight: Tensor,
    epsilon: float,
    out_before_quant: Tensor,
    use_model_sensitive_rmsnorm: int,
) -> None:
    """Mode 1, with the row before it is quantised."""
    for tensor in (out, input, residual_in, residual_out, xscale, yscale, weight, out_before_quant):
        assert tensor.is_contiguous(), "raw addresses"
    assert input.ndim == 2
    assert input.shape[1] % 8 == 0, "neighbouring rows are written to"
    assert input.dtype == residual_in.dtype == residual_out.dtype == weight.dtype == out_before_quant.dtype
    assert out.dtype == FORMAT
    assert xscale.dtype == yscale.dtype == torch.float32
    assert xscale.shape == (input.shape[1],)
    assert yscale.shape == (input.shape[0], 1)
    assert use_model_sensitive_rmsnorm == 1
    residual_out.copy_(input + residual_in)
    x = residual_out.float()
    normed = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon)).to(input.dtype) * weight
    out_before_quant.copy_(normed)
    smooth = normed.float() * xscale
    yscale.copy_(smooth.abs().amax(-1, keepdim=True) / 240)
    out.copy_((smooth / yscale).to(FORMAT))


FUNCTIONS = (rmsnorm2d_fwd_with_add_smoothquant, gemm_a8w8_bpreshuffle, per_group_quant_hip, gemm_a8w8_blockscale)
