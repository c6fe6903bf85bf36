"""What the cases of the operators' files are made of: sizes, caches, weights, and modules of a real layer's form.

Import this after `launch.pretend`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_rewrite_runtime.cache.fp8_layer import Fp8Slots
from hf_rewrite_runtime.device.e4m3 import Quantized, as_read, dtype_for
from hf_rewrite_runtime.linear.prologue import LayerNormPrologue
from hf_rewrite_runtime.moe.form import ExpertsForm
from hf_rewrite_runtime.moe.selection import RoutingRule
from hf_rewrite_runtime.norms.norm_form import Prologue
from hf_rewrite_runtime.norms.rms_norm import rms_norm

from .kernel_cases import tensor
from .model_sizes import Mixture, Model

CONTEXT = 1024
LONG_CONTEXT = 32768
PROMPT = 4096
"""Tokens."""
EPS = 1e-5


def many(count: int) -> int:
    """Return how many rows of a weight, tokens or heads there are: a catalogue for an interpreter has fewer."""
    return count


def parameter(*shape: int) -> nn.Parameter:
    """Return a parameter, which kernels of a graph may load before they wait."""
    return nn.Parameter(tensor(*shape), requires_grad=False)


def layer_norm(size: int) -> LayerNormPrologue:
    """Return a LayerNorm, for a kernel that computes it itself."""
    return LayerNormPrologue(parameter(size), parameter(size), EPS)


def prologue(size: int) -> Prologue:
    """Return the RMSNorm of rows of a size."""
    return Prologue(parameter(size), EPS)


def cache(model: Model, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer."""
    shape = (rows, model.kv_heads, capacity, model.head_dim)
    return tensor(*shape), tensor(*shape)


def fp8_cache(model: Model, rows: int, capacity: int) -> Fp8Slots:
    """Return the keys and values of a layer in 8 bits."""
    shape, kind = (rows, model.kv_heads, capacity), dtype_for(tensor(1))
    keys, values = (as_read(tensor(*shape, model.head_dim, dtype=kind)) for _ in range(2))
    return Fp8Slots(keys, values, tensor(*shape, 2), kind == torch.float8_e4m3fnuz)


def quantized(rows: int, cols: int) -> Quantized:
    """Return a weight in 8 bits."""
    kind = dtype_for(tensor(1))
    return Quantized(tensor(rows, cols, dtype=kind), tensor(rows, dtype=torch.float32))


class Gate(nn.Module):
    """A router that chooses as DeepSeek V3's does, or by softmax."""

    def __init__(self, sizes: Mixture, corrected: bool, groups: int = 1):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(tensor(sizes.experts, sizes.hidden_size), requires_grad=False)
        self.top_k = sizes.top_k
        self.correction = tensor(sizes.experts, dtype=torch.float32) if corrected else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Be no way around the kernels."""
        raise NotImplementedError

    def rule(self) -> RoutingRule:
        """Return what the operator computes of it."""
        scores = "softmax" if self.correction is None else "sigmoid"
        rule = RoutingRule(self.weight, self.top_k, scores, correction_bias=self.correction)
        return rule._replace(num_group=self.groups, topk_group=max(self.groups // 2, 1))


class Norm(nn.Module):
    """An RMSNorm that a kernel may compute itself."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = tensor(size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm, whose arguments a kernel is told."""
        return rms_norm(hidden_states, self.weight, EPS)


class Experts(nn.Module):
    """The weights of the experts of a layer."""

    def __init__(self, sizes: Mixture, form: ExpertsForm | None = None):
        super().__init__()
        count, size, inner = sizes.experts, sizes.hidden_size, sizes.intermediate_size
        shapes = [(count, 2 * inner, size), (count, size, inner)]
        if form is not None and form.transposed:
            shapes = [(count, size, 2 * inner), (count, inner, size)]
        self.gate_up_proj, self.down_proj = (nn.Parameter(tensor(*shape), requires_grad=False) for shape in shapes)
        if form is not None and form.biased:
            self.gate_up_proj_bias = nn.Parameter(tensor(count, 2 * inner), requires_grad=False)
            self.down_proj_bias = nn.Parameter(tensor(count, size), requires_grad=False)
            self.has_bias = True
        self.is_transposed = form is not None and form.transposed
        self.act_fn = nn.SiLU()
        self.described = ExpertsForm(self.act_fn) if form is None else form

    def form(self) -> ExpertsForm:
        """Return what they compute."""
        return self.described
