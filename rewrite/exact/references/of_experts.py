"""References of mixtures of experts: routers, experts, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .of_norms import slope
from .reference_stages import Outputs, activated, rms, scaled_codes


def _index(a: Arguments) -> Tensor:
    """Choose experts of which each token takes others; some are not here where only a share of them is."""
    tokens, top_k = a.values["index_ptr"].shape
    experts = a.E + 2 * max(a.values.get("FIRST", -1), 0)
    return (torch.arange(tokens)[:, None] * 3 + torch.arange(top_k)) % experts


_CHOSEN = {"index_ptr": _index}


def _here(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return the experts of each pair as rows of the weights, and whether they are here."""
    expert = a.index_ptr - max(a.values.get("FIRST", -1), 0)
    return expert.clamp(0, a.E - 1), ((expert >= 0) & (expert < a.E))[..., None]


def _gate(a: Arguments, gate: Tensor, up: Tensor) -> Tensor:
    """Return gated states; bounded ones as gpt-oss and MiniMax have them."""
    if a.BOUNDED:
        gate, up = torch.minimum(gate, a.limit), torch.minimum(torch.maximum(up, -a.limit), a.limit) + a.offset
    return activated(a.ACTIVATION, gate, a.scaling) * up


def _halves(a: Arguments, both: Tensor, *, interleaved: bool) -> Tensor:
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    return _gate(a, gate, up)


def _gate_up(a: Arguments, weight: Tensor, *, interleaved: bool = False, biased: bool = False) -> Outputs:
    """Gated states `[T, K, M]`, by weights `[E, 2 M, H]`; of experts that are not here nothing is written."""
    expert, here = _here(a)
    x = a.x_ptr.reshape(expert.shape[0], 1, -1, 1)
    both = (weight[expert] @ x)[..., 0]
    both = both + a.bias_ptr[expert] if biased else both
    y = _halves(a, both, interleaved=interleaved)
    return {"out_ptr": torch.where(here, y, a.out_ptr.view(y.shape))}


def _down(a: Arguments, weight: Tensor, shares: Tensor, *, biased: bool = False) -> Outputs:
    """The sum over a token's experts, by weights `[E, H, M]`."""
    expert, here = _here(a)
    y = (weight[expert] @ a.gated_ptr.view(*expert.shape, -1, 1))[..., 0]
    y = y + a.bias_ptr[expert] if biased else y
    y = (y * shares[..., None] * a.scaling * here.float()).sum(1)
    return {"out_ptr": y + a.residual_ptr.reshape(y.shape) if a.RESIDUAL else y}


def _experts_gate_up(a: Arguments) -> Outputs:
    return _gate_up(a, a.weight_ptr)


def _experts_down(a: Arguments) -> Outputs:
    return _down(a, a.weight_ptr, a.weights_ptr)


def _transposed_gate_up(a: Arguments) -> Outputs:
    return _gate_up(a, a.weight_ptr.mT, interleaved=a.INTERLEAVED, biased=a.BIASED)


def _transposed_down(a: Arguments) -> Outputs:
    return _down(a, a.weight_ptr.mT, a.weights_ptr, biased=a.BIASED)


def _block_gate_up(a: Arguments) -> Outputs:
    columns = a.BYTES * (2 if a.FOUR else 1)
    return _gate_up(a, scaled_codes(a, a.values_ptr, columns), interleaved=a.INTERLEAVED, biased=a.BIASED)


def _block_down(a: Arguments) -> Outputs:
    return _down(a, scaled_codes(a, a.values_ptr, a.M), a.shares_ptr, biased=a.BIASED)


def _matrices(a: Arguments) -> Tensor:
    """Return weights of experts `[E, rows, I]`, however they lie."""
    if a.KIND in ("plain", "transposed"):
        return a.weight_ptr.mT if a.KIND == "transposed" else a.weight_ptr
    return scaled_codes(a, a.weight_ptr, a.I)


def _grouped(a: Arguments) -> Outputs:
    out, weights = a.out_ptr, _matrices(a)
    for expert in range(a.E):
        place = torch.arange(int(a.starts_ptr[expert]), int(a.starts_ptr[expert + 1]))
        pair = a.order_ptr[place]
        y = a.x_ptr[pair // a.K if a.GATED else place] @ weights[expert].T
        y = y + a.bias_ptr[expert] if a.BIASED else y
        if a.GATED:
            out[place] = _halves(a, y, interleaved=a.INTERLEAVED)
        else:
            out[pair] = y * a.shares_ptr[pair][:, None] * a.scaling
    return {"out_ptr": out}


def _order(a: Arguments) -> Tensor:
    return torch.arange(a.pairs) * 7 % a.pairs if a.pairs % 7 else torch.arange(a.pairs).flip(0)


def _bounds(a: Arguments) -> Tensor:
    """Return where each expert's pairs begin: one expert has none, and the last pairs have no expert."""
    bounds = torch.arange(a.E + 1) * (a.pairs - 2) // a.E
    bounds[1] = bounds[2]
    return bounds


def _experts_gradient(a: Arguments) -> Outputs:
    gate, up = a.both_ptr.chunk(2, -1)
    opened, share = activated(a.ACTIVATION, gate), a.weights_ptr.flatten()[a.order_ptr][:, None]
    of_gate = a.of_gated_ptr * share * up * slope(a.ACTIVATION, gate)
    of_both = torch.cat((of_gate, a.of_gated_ptr * share * opened), -1)
    of_weights = a.of_weights_ptr.flatten()
    of_weights[a.order_ptr] = (a.of_gated_ptr * opened * up).sum(-1)
    return {"of_both_ptr": of_both, "shared_ptr": opened * up * share, "of_weights_ptr": of_weights}


def _permuted(name: str) -> Any:
    def order(a: Arguments) -> Tensor:
        count = a.values[name].numel()
        return (torch.arange(count) * 7 + 3) % count if count % 7 else torch.arange(count).flip(0)

    return order


def _sum_of_experts(a: Arguments) -> Outputs:
    parts = a.parts_ptr[a.places_ptr].view(-1, a.K, a.H)
    return {"out_ptr": (parts * a.weights_ptr.view(-1, a.K, 1) if a.WEIGHTED else parts).sum(1)}


def _router_logits(a: Arguments) -> Outputs:
    x = a.x_ptr.reshape(-1, a.H)
    y = rms(x, a.eps) if a.NORM else x
    y = y * (a.norm_weight_ptr + a.offset) if a.WEIGHTED else y
    logits = y @ a.weight_ptr.T
    logits = logits + a.bias_ptr if a.BIASED else logits
    return {"logits_ptr": logits} | ({"normed_ptr": y} if a.NORM else {})


def _select_experts(a: Arguments) -> Outputs:
    logits = a.logits_ptr.view(-1, a.E)
    top = logits.amax(-1, keepdim=True)
    scores = torch.sigmoid(logits) if a.SIGMOID else torch.exp(logits - top)
    whole = torch.ones_like(top) if a.SIGMOID else scores.sum(-1, keepdim=True)
    keys = scores / whole if a.SIGMOID or a.CORRECTED or a.GROUPS > 1 else logits
    keys = keys + a.correction_ptr.flatten() if a.CORRECTED else keys
    if a.GROUPS > 1:
        grouped = keys.view(-1, a.GROUPS, a.E // a.GROUPS)
        groups = grouped.topk(a.GROUP_BEST, -1)[0].sum(-1).topk(a.CHOSEN_GROUPS, -1)[1]
        away = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, groups, value=False)
        keys = torch.where(away[..., None], a.left_offset, grouped).view(-1, a.E)
    index = keys.topk(a.K, -1)[1]
    weights = scores.gather(-1, index)
    if a.NORMALIZE:
        whole = torch.maximum(weights.sum(-1, keepdim=True) + a.eps * whole, a.least_limit * whole)
    return {"weights_ptr": weights / whole * a.scaling, "index_ptr": index}


EXPERTS = (
    Reference("experts_gate_up", _experts_gate_up, _CHOSEN),
    Reference("experts_down", _experts_down, _CHOSEN),
    Reference("joined_gate_up", _experts_gate_up, _CHOSEN),
    Reference("joined_down", _experts_down, _CHOSEN, ("part_ptr",)),
    Reference("transposed_gate_up", _transposed_gate_up, _CHOSEN),
    Reference("transposed_down", _transposed_down, _CHOSEN, ("part_ptr",)),
    Reference("block_gate_up", _block_gate_up, _CHOSEN),
    Reference("block_down", _block_down, _CHOSEN),
    Reference("grouped", _grouped, {"order_ptr": _order, "starts_ptr": _bounds}),
    Reference("experts_gradient", _experts_gradient, {"order_ptr": _permuted("order_ptr")}),
    Reference("sum_of_experts", _sum_of_experts, {"places_ptr": _permuted("places_ptr")}),
    Reference("router_logits", _router_logits),
    Reference("select_experts", _select_experts, {"index_ptr": lambda a: torch.tensor(-1)}),
)
