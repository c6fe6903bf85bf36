"""Strict bodies of aiter's functions for mixtures of experts, for `fake_aiter`."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ActivationType(Enum):
    Silu, Gelu = range(2)


class QuantType(Enum):
    No, Other = range(2)


GateMode = SimpleNamespace(SEPARATED=SimpleNamespace(value="separated"))
DTYPES = SimpleNamespace(bf16=torch.bfloat16, i8=torch.int8, fp32=torch.float32)
DEFAULTS = {"ActivationType": ActivationType, "QuantType": QuantType, "GateMode": GateMode, "dtypes": DTYPES}
"""What the defaults of recorded signatures name."""


def shuffle_weight(release: Any, x: Tensor, layout: tuple[int, int], **others: Any) -> Tensor:
    """Blocks of 16 rows and 64 bytes (32, of one a number), one behind the other, stored by columns of 16 bytes."""
    assert layout == (16, 16)
    assert not any(others.values())
    assert x.is_contiguous()
    rows, cols = x.shape[-2:]
    assert not rows % 16
    assert not cols % 32
    many = 16 // x.element_size()
    bits = x.view(torch.uint8) if x.element_size() == 1 else x  # as the CPU has no such copies of 8-bit floats
    parts = bits.view(-1, rows // 16, 16, cols // 32, 32 // many, many).permute(0, 1, 3, 4, 2, 5).contiguous()
    shuffled = parts.view(x.shape).view(x.dtype)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


def unshuffled(x: Tensor) -> Tensor:
    rows, cols = x.shape[-2:]
    return x.view(-1, rows // 16, cols // 32, 4, 16, 8).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def fused_moe(
    release: Any,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    activation: ActivationType,
    quant_type: QuantType,
    doweight_stage1: bool,
    gate_mode: str = "separated",
    **others: Any,
) -> Tensor:
    assert (activation, quant_type, doweight_stage1) == (ActivationType.Silu, QuantType.No, False)
    assert gate_mode == "separated"
    assert all(value is None or value in (0, -1) for value in others.values())
    assert hidden_states.dtype in (torch.float16, torch.bfloat16)
    assert topk_weight.dtype == torch.float32
    assert topk_ids.dtype == torch.int32
    experts, size, inner = w2.shape
    assert w1.shape == (experts, 2 * inner, size)
    assert int(topk_ids.max()) < experts, "memory fault"
    for tensor in (hidden_states, w1, w2, topk_weight, topk_ids):
        assert tensor.is_contiguous(), "raw addresses"
    for weight in (w1, w2):
        assert getattr(weight, "is_shuffled", False), "garbage"
        assert weight.dtype == hidden_states.dtype
    first, second = unshuffled(w1).float(), unshuffled(w2).float()
    out = torch.zeros(hidden_states.shape)
    for token, (numbers, shares) in enumerate(zip(topk_ids.tolist(), topk_weight.tolist(), strict=True)):
        for expert, share in zip(numbers, shares, strict=True):
            gate, up = (first[expert] @ hidden_states[token].float()).chunk(2)
            out[token] += share * (second[expert] @ (F.silu(gate) * up))
    return out.to(hidden_states.dtype)


def topk_softmax(
    release: Any,
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    need_renorm: bool,
    num_shared_experts: int = 0,
    shared_expert_scoring_func: str = "",
) -> None:
    assert not num_shared_experts
    assert not shared_expert_scoring_func
    assert topk_weights.dtype == torch.float32, "raw addresses"
    assert topk_indices.dtype == token_expert_indices.dtype == torch.int32, "raw addresses"
    assert topk_weights.shape == topk_indices.shape == token_expert_indices.shape
    assert topk_weights.shape[0] == gating_output.shape[0]
    assert gating_output.is_contiguous(), "raw addresses"
    weights, index = gating_output.float().softmax(-1).topk(topk_weights.shape[1], -1)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if need_renorm else weights)
    topk_indices.copy_(index)


def biased_grouped_topk(
    release: Any,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """In ascending order, to show that none is promised; experts of other groups are never chosen."""
    assert num_expert_group in (1, 2, 4, 8)
    assert correction_bias.dtype == gating_output.dtype, "raw addresses"
    assert topk_weights.dtype == torch.float32, "raw addresses"
    assert topk_ids.dtype == torch.int32, "raw addresses"
    for tensor in (gating_output, correction_bias, topk_weights, topk_ids):
        assert tensor.is_contiguous(), "raw addresses"
    assert routed_scaling_factor == 1.0
    scores = gating_output.float().sigmoid()
    keys = (scores + correction_bias.float()).unflatten(-1, (num_expert_group, -1))
    best = keys.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
    left = torch.ones(keys.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
    index = keys.masked_fill(left[..., None], -torch.inf).flatten(-2).topk(topk_ids.shape[1], -1).indices.flip(-1)
    weights = scores.gather(-1, index)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if need_renorm else weights)
    topk_ids.copy_(index)


FUNCTIONS = (shuffle_weight, fused_moe, topk_softmax, biased_grouped_topk)
