"""Experts as transformers packs them, and what they are, one matrix a pair of a token and an expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Mixture(torch.nn.Module):
    """Experts as transformers packs them, with their weights given or made."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Any = None):
        super().__init__()
        self._parameters.update(gate_up_proj=gate_up, down_proj=down)  # also what was computed
        self.act_fn = activation or torch.nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return every_pair(x, weights, self.gate_up_proj, self.down_proj, index, self.act_fn)


def every_pair(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, activation: Any) -> Tensor:
    """What the experts are, one matrix a pair."""
    gate, up = torch.einsum("nkmh,nh->nkm", gate_up[index], x).chunk(2, -1)
    return torch.einsum("nkhm,nkm,nk->nh", down[index], activation(gate) * up, weights).to(x.dtype)
