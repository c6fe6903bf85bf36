"""Sparse blocks of the installed transformers: `block(x, norm=n, residual=r)` is `r + block(n(x))`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from tolerances import BLOCK_IN_FP64, SOFTMAX_IN_FP32

from rewrite.measure.runtime_part import runtime_part

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
GROUPS = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": 8, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", {"num_experts": 8, "shared_expert_intermediate_size": 40}),
    "mixtral": ("MixtralSparseMoeBlock", {"num_local_experts": 8}),
    "olmoe": ("OlmoeSparseMoeBlock", {"num_experts": 8}),
    "glm4_moe": ("Glm4MoeMoE", GROUPS),
    "deepseek_v3": ("DeepseekV3MoE", GROUPS),
    "deepseek_v2": ("DeepseekV2Moe", {**GROUPS, "topk_method": "greedy"}),
    "ernie4_5_moe": ("Ernie4_5_MoeSparseMoeBlock", {"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2}),
    "minimax_m2": ("MiniMaxM2SparseMoeBlock", {"num_local_experts": 8}),
    "gpt_oss": ("GptOssMLP", {"num_local_experts": 8}),
}
OWN_SCORES = {"gpt_oss"}
"""Models whose softmax is in the hidden states' dtype."""


class Norm(torch.nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + 1e-6)


@pytest.fixture(scope="module")
def modeling(rewritten: Callable[[str], Any]) -> Callable[[str], Any]:
    """Import the modeling file of a model's package."""
    return lambda model: importlib.import_module(f"{rewritten(model).__name__}.modeling_{model}")


def blocks(module: Any, model: str, **extra: Any) -> tuple[Any, Any]:
    """Return the original's block and ours with the same weights, in fp64."""
    name, sizes = BLOCKS[model]
    config = transformers.AutoConfig.for_model(model, **{**SMALL, **sizes, **extra})
    config._experts_implementation = "eager"
    original = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    theirs, ours = (getattr(m, name)(config).double().eval().requires_grad_(False) for m in (original, module))
    torch.manual_seed(0)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.copy_(0.5 * torch.randn(tensor.shape))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def only(returned: Any) -> Any:
    """Return the hidden states of what a block returns."""
    return returned[0] if isinstance(returned, tuple) else returned


def inputs() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(2, 5, 1, SMALL["hidden_size"], dtype=torch.float64).unbind(0)


@pytest.mark.parametrize("model", BLOCKS)
def test_a_block_takes_the_norm_before_it_and_the_residual_behind_it(
    modeling: Callable[[str], Any], model: str
) -> None:
    module = modeling(model)
    backend = runtime_part(f"sparse_{model}", "core/backend")
    theirs, ours = blocks(module, model)
    x, residual = inputs()
    norm = Norm()
    backend.reset_fallbacks()
    got = only(ours(x, norm=norm, residual=residual))
    assert norm.calls == 1
    assert not {operator for operator, _ in backend.fallbacks()} & {"router", "fused_experts"}
    wanted, lost = residual + only(theirs(norm(x))), SOFTMAX_IN_FP32 if model in OWN_SCORES else BLOCK_IN_FP64
    torch.testing.assert_close(got, wanted, rtol=lost, atol=lost)
    wrong = only(ours(x, norm=norm, residual=torch.zeros_like(residual)))
    assert not torch.allclose(wrong, wanted)


@pytest.mark.parametrize("model", ["glm4_moe", "deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("kept", [1, 2])
def test_experts_are_chosen_from_the_best_groups(modeling: Callable[[str], Any], model: str, kept: int) -> None:
    module = modeling(model)
    backend = runtime_part(f"sparse_{model}", "core/backend")
    theirs, ours = blocks(module, model, n_group=4, topk_group=kept, topk_method="group_limited_greedy")
    x, residual = inputs()
    backend.reset_fallbacks()
    got = only(ours(x, norm=Norm(), residual=residual))
    too_few = {("router", "grouped_choice"): 1} if kept == 1 else {}  # 2 experts, of which 3 are to be chosen
    assert {key: count for key, count in backend.fallbacks().items() if key[0] == "router"} == too_few
    torch.testing.assert_close(got, residual + theirs(Norm()(x)), rtol=1e-10, atol=1e-10)


def test_hooks_on_the_router_and_the_experts_are_called(modeling: Callable[[str], Any]) -> None:
    module = modeling("qwen3_moe")
    backend = runtime_part("sparse_qwen3_moe", "core/backend")
    theirs, ours = blocks(module, "qwen3_moe")
    x, residual = inputs()
    seen: list[str] = []
    ours.gate.register_forward_hook(lambda *_: seen.append("router"))
    ours.experts.register_forward_hook(lambda *_: seen.append("experts"))
    backend.reset_fallbacks()
    got = only(ours(x, norm=Norm(), residual=residual))
    assert seen == ["router", "experts"]
    assert {("router", "observed"), ("fused_experts", "observed")} <= set(backend.fallbacks())
    torch.testing.assert_close(got, residual + theirs(Norm()(x)), rtol=1e-10, atol=1e-10)
