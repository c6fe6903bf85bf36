"""The parts of a sparse mixture of experts, as a rewritten modeling file has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_rewrite_runtime.moe.form import ExpertsForm
from hf_rewrite_runtime.moe.router import RoutingRule, select_experts
from hf_rewrite_runtime.norms.rms_norm import rms_norm

EPS = 1e-6


class Norm(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, EPS)


class Gate(nn.Module):
    def __init__(self, weight: Tensor, top_k: int, bias: bool = False, correction_bias: bool = False, **rule: Any):
        super().__init__()
        count = weight.shape[0]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = torch.randn(count).to(weight) if bias else None
        self.correction_bias = 0.3 * torch.randn(count, device=weight.device) if correction_bias else None
        self.described = {"top_k": top_k, **rule}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, self.weight, self.bias)
        return logits, *select_experts(logits, self.rule(), hidden_states.dtype)

    def rule(self) -> RoutingRule:
        biases = {"bias": self.bias, "correction_bias": self.correction_bias}
        return RoutingRule(weight=self.weight, **biases, **self.described)


class Every(nn.Module):
    """Experts that are all computed: `[E N, H]`, N tokens for each, of weights `[E, H, 2 M]` and `[E, M, H]`."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        self.act_fn = nn.SiLU()

    def forward(self, inputs: Tensor) -> Tensor:
        gate, up = torch.bmm(inputs.unflatten(0, (self.down_proj.shape[0], -1)), self.gate_up_proj).chunk(2, -1)
        return torch.bmm(self.act_fn(gate) * up, self.down_proj).flatten(0, 1)

    def form(self) -> ExpertsForm:
        return ExpertsForm(self.act_fn, transposed=True, every_expert=True)
