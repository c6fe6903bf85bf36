"""Where the kernels of a sparse block do not fit, its modules are called, with a reason that can be read.

The loop over experts sees every token with each of its experts once, in the order in which results are added.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixture import Gate, Norm
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.moe.routed import routed, select

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
router = importlib.import_module("hf_rewrite_runtime.moe.router")


def mixture(tokens: int = 3) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Return hidden states, experts, index and weights, in fp32."""
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.3)
    index = torch.rand(tokens, 6).topk(2, dim=-1).indices
    return torch.randn(tokens, 1, 32), module, index, torch.rand(tokens, 2)


def check_experts(reason: str | None, x: Tensor, module: Any, index: Tensor, weights: Tensor) -> Tensor:
    wanted = module(x.view(-1, x.shape[-1]), index, weights).view(x.shape)
    backend.reset_fallbacks()
    got = experts.fused_experts(x, module, index, weights)
    assert backend.fallbacks() == ({} if reason is None else {("fused_experts", reason): 1})
    assert reason is None or reason in experts.REASONS
    torch.testing.assert_close(got, wanted)
    residual = torch.randn_like(x)
    torch.testing.assert_close(experts.fused_experts(x, module, index, weights, residual=residual), residual + wanted)
    return got


def test_experts_of_transformers_need_no_fallback() -> None:
    check_experts(None, *mixture())


def test_many_tokens_are_sorted_by_expert() -> None:
    check_experts("many_tokens", *mixture(experts.MAX_TOKENS + 1))


@pytest.mark.parametrize(
    ("shape", "top_k", "few", "many"), [((128, 2048, 768), 8, 16, 32), ((8, 4096, 14336), 2, 2, 4)], ids=str
)
def test_sorting_starts_where_it_was_measured_to_pay(shape: tuple[int, ...], top_k: int, few: int, many: int) -> None:
    down = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    assert not any(experts.sorting_is_faster(tokens, top_k, down) for tokens in range(1, few + 1))
    assert all(experts.sorting_is_faster(tokens, top_k, down) for tokens in range(many, 513))


def test_a_hook_on_the_experts_is_called() -> None:
    x, module, index, weights = mixture()
    module.register_forward_hook(lambda _module, _args, output: 2.0 * output)
    check_experts("observed", x, module, index, weights)


def test_gradients_flow_through_the_experts() -> None:
    x, module, index, weights = mixture()
    module.requires_grad_(True)
    check_experts("gradient", x, module, index, weights).sum().backward()
    assert module.gate_up_proj.grad is not None
    assert module.down_proj.grad is not None


def test_autocast_decides_the_dtype_of_the_experts() -> None:
    inputs = mixture()
    with torch.autocast("cpu", torch.bfloat16):
        check_experts("autocast", *inputs)


def test_an_activation_that_the_kernel_does_not_have_is_called() -> None:
    x, module, index, weights = mixture()
    module.act_fn = nn.Tanh()
    check_experts("unknown_activation", x, module, index, weights)


class Sharded(nn.Parameter):
    """Stands for a distributed parameter, which is a subclass too."""


def test_special_parameters_are_the_modules_own_business() -> None:
    x, module, index, weights = mixture()
    module.down_proj = Sharded(module.down_proj.data, requires_grad=False)
    check_experts("not_a_plain_parameter", x, module, index, weights)


@pytest.mark.parametrize("name", ["is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"])
def test_another_layout_is_left_to_the_module(name: str) -> None:
    x, module, index, weights = mixture()
    setattr(module, name, True)
    check_experts("layout", x, module, index, weights)


def test_kernels_asked_for_by_name_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, module, index, weights = mixture()
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "sonicmoe", batched_mm_experts_forward)
    module.config._experts_implementation = "sonicmoe"
    check_experts("other_implementation", x, module, index, weights)


def check_router(reason: str, gate: Any, x: Tensor) -> None:
    norm = Norm(torch.ones(x.shape[-1]))
    normed = norm(x)
    _, *wanted = gate(normed.view(-1, x.shape[-1]))
    backend.reset_fallbacks()
    got = router.router(x, gate, norm=norm)
    assert backend.fallbacks() == {("router", reason): 1}
    assert reason in router.REASONS
    for ours, theirs in zip(got, (normed, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


class Watched(Gate):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_forward_hook(lambda _module, _args, output: (output[0], 2.0 * output[1], output[2]))


class Unruled(nn.Module):
    def __init__(self, weight: Tensor, top_k: int):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(weight, requires_grad=False), top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        return logits, *logits.tanh().topk(self.top_k)


def special(weight: Tensor, top_k: int) -> Gate:
    gate = Gate(weight, top_k)
    gate.weight = Sharded(gate.weight.data, requires_grad=False)
    return gate


GATES: dict[str, Callable[[Tensor], Any]] = {
    "observed": lambda weight: Watched(weight, 2),
    "router_without_rule": lambda weight: Unruled(weight, 2),
    "grouped_choice": lambda weight: Gate(weight, 2, num_group=6, group_best=1),  # one expert in the best group
    "gradient": lambda weight: Gate(weight, 2).requires_grad_(True),
    "not_a_plain_parameter": lambda weight: special(weight, 2),
}


@pytest.mark.parametrize("reason", GATES)
def test_a_router_that_does_not_fit_is_called(reason: str) -> None:
    check_router(reason, GATES[reason](torch.randn(6, 32)), torch.randn(3, 1, 32))


def test_autocast_decides_the_dtype_of_the_router() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_router("autocast", Gate(torch.randn(6, 32), 2), torch.randn(3, 1, 32))


def test_a_norm_without_a_prologue_is_called_once() -> None:
    norm, calls = nn.LayerNorm(32).requires_grad_(False), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 1, 32)
    normed, _, _ = router.router(x, Gate(torch.randn(6, 32), 2), norm=norm)
    assert calls == [1]
    torch.testing.assert_close(normed, nn.functional.layer_norm(x, (32,)))
    assert not backend.fallbacks()


CASES = [torch.tensor([[5, 1, 7]]), torch.tensor([[5, 1], [7, 5]]), torch.rand(40, 8).topk(3).indices]


def pairs(top_k_index: torch.Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """Every (token, expert, position), in the order of the loop's turns."""
    found = []
    for expert_idx, top_k_pos, token_idx in routed(top_k_index, num_experts):
        for position, token in zip(top_k_pos.tolist(), token_idx.tolist(), strict=True):
            found.append((token, int(expert_idx), position))
    return found


@pytest.mark.parametrize("top_k_index", CASES, ids=["one token", "two tokens", "many tokens"])
@pytest.mark.parametrize("gradients", [False, True])
def test_every_token_meets_its_experts_in_ascending_order(top_k_index: torch.Tensor, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        found = pairs(top_k_index, 8)
    expected = [
        (token, int(experts[place]), place)
        for token, experts in enumerate(top_k_index)
        for place in experts.argsort().tolist()
    ]
    assert sorted(found) == sorted(expected)
    for token in range(len(top_k_index)):
        assert [pair for pair in found if pair[0] == token] == [pair for pair in expected if pair[0] == token]


def test_experts_of_other_processes_are_left_out() -> None:
    assert pairs(torch.tensor([[8, 1], [8, 8], [0, 8]] * 4), 8) == [
        (2, 0, 0), (5, 0, 0), (8, 0, 0), (11, 0, 0), (0, 1, 1), (3, 1, 1), (6, 1, 1), (9, 1, 1)
    ]  # fmt: skip


def test_few_tokens_take_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    with torch.no_grad():
        turns = list(routed(torch.tensor([[5, 1], [7, 5]]), 8))
        assert len(turns) == 4
        assert all(isinstance(expert, torch.Tensor) for expert, _, _ in turns)
        with pytest.raises(TypeError):
            list(routed(CASES[-1], 8))


def test_the_loop_leaves_the_gradient_mode_alone() -> None:
    for _ in routed(CASES[0], 8):
        assert torch.is_grad_enabled()


def test_select_takes_numbers_and_tensors() -> None:
    weight = torch.randn(8, 3, 2)
    assert torch.equal(select(weight, 5), weight[5])
    assert torch.equal(select(weight, torch.tensor([5])), weight[5])
