"""`torch.fx.symbolic_trace` of MLPs and norms: it works for the originals, so it does for what they became."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.linear.packing import packed_linear
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm


class Calls(nn.Module):
    """A module of a weight and three projections whose forward is one function."""

    def __init__(self, function: Callable[[Calls, Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mlp(module: Calls, x: Tensor) -> Tensor:
    gate, up = packed_linear(x, module.gate_proj, module.up_proj)
    return module.down_proj(gated_activation(gate, up, module.act_fn))


FORMS: dict[str, Callable[[Calls, Tensor], Tensor]] = {
    "mlp": mlp,
    "rms_norm": lambda module, x: rms_norm(x, module.weight, 1e-6),
    "rms_norm of gemma": lambda module, x: rms_norm(x, module.weight, 1e-6, offset=1.0, weight_in_fp32=True),
    "layer_norm": lambda module, x: layer_norm(x, module.weight, module.bias, 1e-6),
    "add_rms_norm": lambda module, x: add_rms_norm(x, x, module.weight, 1e-6)[0],
    "add_layer_norm": lambda module, x: add_layer_norm(x, x, module.weight, module.bias, 1e-6)[0],
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_traced_module_computes_the_same(form: str, warm: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    module, x = Calls(FORMS[form]).eval(), torch.randn(2, 3, 16)
    with torch.set_grad_enabled(gradients):
        if warm:
            module(x)  # packs
        traced = torch.fx.symbolic_trace(module)
        torch.testing.assert_close(traced(x), module(x))
