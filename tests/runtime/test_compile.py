"""Operators pass through `torch.compile(fullgraph=True)`, and their fakes have the strides of the real results."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from mixture import Gate, Norm
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.linear.packing import packed_linear
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.add_norm import add_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.rotary import rotary, rotary_single

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
router = importlib.import_module("hf_rewrite_runtime.moe.router")


class FileNorm(torch.nn.Module):
    """As a rewritten file has it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, None, 1e-5)

    def add_forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(hidden_states, residual, None, 1e-5)


FILE_NORM = FileNorm()
PROJECTIONS = [torch.nn.Linear(16, size).requires_grad_(False) for size in (16, 8)]
NORM = torch.nn.LayerNorm(16).requires_grad_(False)
GATE, RMS_NORM = Gate(torch.randn(8, 16).bfloat16(), 2), Norm(torch.ones(16).bfloat16())
EXPERTS = torch.randn(8, 12, 16).bfloat16(), torch.randn(8, 16, 6).bfloat16()
OPERATORS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w: rms_norm(x, w[0, 0, 0], 1e-5),
    "rms_norm in fp32": lambda x, w: rms_norm(x, w[0, 0, 0].float(), 1e-5, weight_in_fp32=True),
    "rms_norm promoted": lambda x, w: rms_norm(x, w[0, 0, 0].float(), 1e-5),
    "add_rms_norm": lambda x, y: add_rms_norm(x, y, None, 1e-5),
    "layer_norm": lambda x, w: layer_norm(x, w[0, 0], None, 1e-5),
    "add_layer_norm": lambda x, y: add_layer_norm(x, y, None, None, 1e-5),
    "add_norm": lambda x, y: add_norm(x.float(), y, NORM),
    "add_norm of a class": lambda x, y: add_norm(x, y, FILE_NORM),
    "gated_activation": lambda x, y: gated_activation(x, y, torch.nn.functional.silu),
    "gated_activation of a module": lambda x, y: gated_activation(x, y, torch.nn.GELU(approximate="tanh")),
    "router": lambda x, y: router.router(x, GATE)[1],
    "router after a norm": lambda x, y: router.router(x + y, GATE, norm=RMS_NORM)[:2],
    "rotary": lambda x, y: rotary(x, y, x[:, 0], y[:, 0]),
    "rotary of some columns": lambda x, y: rotary(
        x, y[:, :1], x[:, 0, :, :8].float(), y[:, 0, :, :8].float(), 1, partial=True
    ),
    "rotary heads last": lambda x, y: rotary(x, y, x[:, :, 0], y[:, :, 0], 2, interleaved=True, in_fp32=True),
    "rotary by tables as they come": lambda x, y: rotary(x, y, x[:, :1], y[:, :1], None),
    "rotary_single by rows": lambda x, y: rotary_single(x, x[0, 0], -y[0, 0], None, interleaved=True),
    "rotary_single": lambda x, y: rotary_single(x, y[:1, 0, :, :4], y[:1, 0, :, :4], half_table=True, partial=True),
}
operators = pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS.keys())


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


FORWARD_ONLY: dict[str, Callable[..., Any]] = {
    "fused_experts": lambda x, y: experts._op(
        x[0, 0], torch.arange(10).view(5, 2) % 8, y[0, 0, :, :2], *EXPERTS, y[0, 0], "silu"
    ),
}


@pytest.mark.parametrize("function", (OPERATORS | FORWARD_ONLY).values(), ids=(OPERATORS | FORWARD_ONLY).keys())
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fake_has_the_strides_of_the_result(
    function: Callable[..., Any], layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, y = (layout(torch.randn(2, 3, 5, 16).bfloat16()) for _ in range(2))
    with torch.no_grad():
        real = outputs(function(x, y))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = outputs(function(mode.from_tensor(x), mode.from_tensor(y)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


FUSED = {name: function for name, function in OPERATORS.items() if "router" not in name} | {
    "packed_linear": lambda x, y: packed_linear(x.float(), *PROJECTIONS)
}


@pytest.mark.parametrize("function", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("named", ["auto", "triton"])
def test_a_compiler_sees_torchs_own_operators(function: Callable[..., Any], named: str) -> None:
    """Which it fuses with what is around; only who names a backend gets that one's operators."""
    seen: set[str] = set()

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.update(str(node.target).split(".")[0] for node in module.graph.nodes if node.op == "call_function")
        return module

    torch.compiler.reset()
    x, y = torch.randn(2, 3, 5, 16).bfloat16(), torch.randn(2, 3, 5, 16).bfloat16()
    with torch.no_grad(), backend.use_backend(named), contextlib.suppress(backend.BackendUnavailable):
        torch.compile(function, fullgraph=True, backend=note)(x, y)
    assert (backend.NAMESPACE in seen) == (named == "triton")


@operators
@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "gradients"])
def test_compiles_in_one_graph(function: Callable[..., Any], recorded: bool) -> None:
    torch.compiler.reset()
    x, y = (torch.randn(2, 3, 5, 16).bfloat16().requires_grad_(recorded) for _ in range(2))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(outputs(compiled(x, y)), outputs(function(x, y)), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad == recorded


FORWARD_MODE = {
    **{name: OPERATORS[name] for name in ("rms_norm", "gated_activation", "rotary_single")},
    "packed_linear": lambda x, y: packed_linear(x * y, *PROJECTIONS),
}


@pytest.mark.parametrize("function", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_compile_in_one_graph(function: Callable[..., Any]) -> None:
    x, y = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16)
    transforms: tuple[Callable[..., Any], ...] = (
        lambda x, y: torch.func.jvp(function, (x, y), (y, x))[1],
        lambda x, y: torch.func.vmap(function)(x[None], y[None]),
    )
    for transform in transforms:
        torch.compiler.reset()
        with torch.no_grad():
            ours = outputs(torch.compile(transform, fullgraph=True, backend="aot_eager")(x, y))
            eager = outputs(transform(x, y))
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b)
            assert b.any(), "no tangent"
