"""The loop over experts sees every token with each of its experts once, in the order in which results are added."""

from __future__ import annotations

import pytest
import torch

from hf_rewrite_runtime.moe.routed import routed, select

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
