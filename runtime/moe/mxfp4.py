"""Experts as gpt-oss publishes them: MXFP4, loaded, computed with and saved in the checkpoint's own bytes.

A checkpoint has `gate_up_proj_blocks` `[E, 2 M, H / 32, 16]` and `gate_up_proj_scales` `[E, 2 M, H / 32]`, and the
same of `down_proj`: rows of the transposed weights that the model's class holds. transformers reads them with kernels
from the Hub, and without those dequantises them when they are loaded. Here they are parameters under their own names:
`state_dict()` and `save_pretrained` give what was loaded.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.quantizers.quantizers_utils import should_convert_module

from ..core import backend
from ..linear.blocks import Blocks, dequantized
from ..loading.original_checkpoint import Loader
from .block_experts import BlockExperts, block_experts
from .form import ExpertsForm, form_of

BLOCK = 32
"""Elements of a row that have one scale."""
_NAMES = ("gate_up_proj", "down_proj")


class MxExperts(Loader, nn.Module):
    """Experts in MXFP4; the first base of what takes the place of a class whose weights are `[E, H, 2 M]`."""

    method: ClassVar[str] = "mxfp4"

    @classmethod
    def wanted(cls, quantization: dict[str, Any]) -> bool:
        """Return whether there is a GPU and Triton; elsewhere 16 bits are as fast, and transformers dequantises."""
        return torch.cuda.is_available() and backend.triton_installed()

    @classmethod
    def prepare(cls, model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> bool:
        """Give the experts of a model without weights the parameters of a checkpoint; return whether it has any."""
        left_out = quantization.get("modules_to_not_convert") or []
        found = False
        for name, module in model.named_modules():
            if _takes_mx(module) and should_convert_module(name, left_out):
                _prepare(module)
                found = True
        return found

    @property
    def gate_up_proj(self) -> Tensor:
        """The weight as the class without blocks has it, `[E, H, 2 M]`, dequantised at every access."""
        return _dense(self, "gate_up_proj")

    @property
    def down_proj(self) -> Tensor:
        """The weight as the class without blocks has it, `[E, M, H]`, dequantised at every access."""
        return _dense(self, "down_proj")

    def packed_parts(self) -> BlockExperts:
        """Return the parts for kernels."""
        form = form_of(self, some=True)
        assert form is not None
        biases = (self._parameters.get("gate_up_proj_bias"), self._parameters.get("down_proj_bias"))
        return BlockExperts(_blocks(self, "gate_up_proj"), _blocks(self, "down_proj"), biases, form)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, `[N, H]`."""
        return block_experts(hidden_states, self.packed_parts(), top_k_index, top_k_weights, None, 1.0, many=True)


_classes: dict[type, type] = {}
"""What takes the place of a class."""


def _takes_mx(module: nn.Module) -> bool:
    if not hasattr(type(module), "form") or any(module._parameters.get(name) is None for name in _NAMES):
        return False
    form: ExpertsForm | None = form_of(module)
    if form is None or not form.transposed or form.every_expert:
        return False
    return all(module.get_parameter(name).shape[1] % BLOCK == 0 for name in _NAMES)


def _prepare(module: nn.Module) -> None:
    kind = type(module)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (MxExperts, kind), {"__module__": __name__})
    for name in _NAMES:
        weight = module.get_parameter(name)
        experts, cols, rows = weight.shape
        shape = (experts, rows, cols // BLOCK)
        del module._parameters[name]
        for suffix, size in (("blocks", (*shape, BLOCK // 2)), ("scales", shape)):
            empty = torch.zeros(size, dtype=torch.uint8, device=weight.device)
            module.register_parameter(f"{name}_{suffix}", nn.Parameter(empty, requires_grad=False))
    module.__class__ = _classes[kind]
    module._is_hf_initialized = True  # type: ignore[assignment]


def _blocks(module: nn.Module, name: str) -> Blocks:
    blocks, scales = module._parameters[f"{name}_blocks"], module._parameters[f"{name}_scales"]
    assert blocks is not None
    assert scales is not None
    return Blocks(blocks.detach().flatten(-2), scales.detach(), 1, BLOCK)


def _dense(module: nn.Module, name: str) -> Tensor:
    bias = module._parameters.get(f"{name}_bias")
    return dequantized(_blocks(module, name), torch.bfloat16 if bias is None else bias.dtype).transpose(1, 2)
