"""The operators in fp64, written from the formulas and not from the references."""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.double() + offset)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        normed = normed * weight.double()
    return normed if bias is None else normed + bias.double()


def gated_activation(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = gate.double(), up.double()
    activated = {
        "silu": lambda: gate * torch.sigmoid(gate),
        "gelu": lambda: gate * 0.5 * torch.erfc(-gate / math.sqrt(2.0)),
        "gelu_tanh": lambda: gate * torch.sigmoid(math.sqrt(8.0 / math.pi) * (gate + 0.044715 * gate**3)),
        "relu": lambda: gate.clamp_min(0.0),
        "relu2": lambda: gate.clamp_min(0.0).square(),
    }[kind]()
    return activated * up


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, half_table: bool, deinterleave: bool
) -> torch.Tensor:
    """Rotate `[B, H, S, D]` pair by pair, as complex numbers where cos and sin of a pair agree."""
    x, cos, sin = x.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    rotated = cos.shape[-1] * (2 if half_table else 1)
    half = rotated // 2
    out = x.clone()
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        table_a, table_b = (pair, pair) if half_table else (a, b)
        to_a, to_b = (pair, pair + half) if deinterleave else (a, b)
        out[..., to_a] = x[..., a] * cos[..., table_a] - x[..., b] * sin[..., table_a]
        out[..., to_b] = x[..., b] * cos[..., table_b] + x[..., a] * sin[..., table_b]
    return out


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    *,
    scores: str,
    normalize: bool,
    eps: float = 0.0,
    scaling: float = 1.0,
    bias: torch.Tensor | None = None,
    least_sum: float = 0.0,
) -> torch.Tensor:
    """The weights `[N, K]` of experts that were chosen, token by token."""
    logits = x.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    exp = (logits - logits.amax(-1, keepdim=True)).exp()
    values = 1.0 / (1.0 + (-logits).exp()) if scores == "sigmoid" else exp / exp.sum(-1, keepdim=True)
    chosen = values.gather(-1, index)
    if normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps).clamp_min(least_sum)
    return chosen * scaling


def in_groups(keys: torch.Tensor, groups: int, wanted: int, best: int, left_out: float) -> torch.Tensor:
    """What experts are chosen by, `[N, E]`: as given in the `wanted` groups with the largest sums of `best` keys."""
    keys = keys.clone()
    size = keys.shape[-1] // groups
    for row in keys:
        sums = [sum(sorted(row[g * size : (g + 1) * size].tolist())[-best:]) for g in range(groups)]
        for g in sorted(range(groups), key=lambda g: -sums[g])[wanted:]:
            row[g * size : (g + 1) * size] = left_out
    return keys


def experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, kind: str
) -> torch.Tensor:
    """The weighted sum of each token's experts, one expert at a time."""
    x, gate_up, down, weights = x.double(), gate_up.double(), down.double(), weights.double()
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weights[token, slot] * (down[expert] @ gated_activation(gate, up, kind))
    return out
