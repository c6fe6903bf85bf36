"""Which experts are chosen, with ties, by groups and corrected, against a choice one expert after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from torch import Tensor

from hf_rewrite_runtime.moe.selection import RoutingRule, launch_selection, select_experts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

E, K = 12, 3
SIGMOID = {"scores": "sigmoid", "corrected": True, "eps": 1e-20, "scaling": 2.5, "num_group": 4, "topk_group": 2}
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not normalised": {"normalize": False},
    "softmax, corrected, a least sum": {"corrected": True, "least_sum": 0.9},
    "sigmoid, corrected": {"scores": "sigmoid", "corrected": True},
    "groups by two": SIGMOID,
    "groups by two, or zero": {**SIGMOID, "left_out": 0.0},
    "groups by their best": {
        "normalize": False, "num_group": 4, "topk_group": 2, "group_best": 1, "left_out": 0.0,
    },
    "three groups of four": {**SIGMOID, "num_group": 3, "topk_group": 1},
}  # fmt: skip


def rule_of(corrected: bool = False, **fields: Any) -> RoutingRule:
    correction = torch.tensor([0.0, 0.5, 0.0, 0.25] * (E // 4)) if corrected else None
    return RoutingRule(torch.empty(E, 1), K, correction_bias=correction, weights_in_fp32=True, **fields)


def one_by_one(logits: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """Choose the experts of a token; of equal ones the lower number."""
    exponents = [math.exp(logit - max(logits)) for logit in logits]
    scores = [e / sum(exponents) for e in exponents]
    if rule.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    correction = [0.0] * E if rule.correction_bias is None else rule.correction_bias.tolist()
    keys = [score + more for score, more in zip(scores, correction, strict=True)]
    if rule.num_group > 1:
        size = E // rule.num_group
        sums = [sum(sorted(keys[g * size : (g + 1) * size])[-rule.group_best :]) for g in range(rule.num_group)]
        kept = sorted(range(rule.num_group), key=lambda g: (-sums[g], g))[: rule.topk_group]
        keys = [key if expert // size in kept else rule.left_out for expert, key in enumerate(keys)]
    index = sorted(range(E), key=lambda expert: (-keys[expert], expert))[:K]
    divisor = max(sum(scores[i] for i in index) + rule.eps, rule.least_sum) if rule.normalize else 1.0
    return index, [scores[i] / divisor * rule.scaling for i in index]


def kernel(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    moved = None if rule.correction_bias is None else rule.correction_bias.to(logits.device)
    weights = torch.full((logits.shape[0], K), torch.nan, device=logits.device)
    index = torch.full((logits.shape[0], K), -1, device=logits.device)
    launch_selection(logits, rule._replace(correction_bias=moved), weights, index)
    return weights, index


def check(logits: Tensor, rule: RoutingRule, wrong: RoutingRule | None = None) -> None:
    weights, index = kernel(logits, wrong or rule)
    for row, got, numbers in zip(logits.tolist(), weights.tolist(), index.tolist(), strict=True):
        wanted, shares = one_by_one(row, rule)
        assert numbers == wanted
        assert got == pytest.approx(shares, rel=1e-5)


def many(device: torch.device) -> Tensor:
    """Return logits without equal ones, then some of few values, whose scores are equal in every arithmetic."""
    torch.manual_seed(3)
    ties = torch.randint(0, 3, (6, E)).float()
    return torch.cat([2.0 * torch.randn(6, E), ties, torch.zeros(1, E)]).to(device)


@pytest.mark.parametrize("name", RULES)
def test_experts_are_chosen_one_by_one(device: torch.device, name: str) -> None:
    check(many(device), rule_of(**RULES[name]))


@pytest.mark.parametrize("name", RULES)
def test_torch_chooses_the_same(name: str) -> None:
    logits, rule = 2.0 * torch.randn(8, E), rule_of(**RULES[name])
    weights, index = select_experts(logits, rule, torch.float32)
    for row, got, numbers in zip(logits.tolist(), weights.tolist(), index.tolist(), strict=True):
        wanted, shares = one_by_one(row, rule)
        assert dict(zip(numbers, got, strict=True)) == pytest.approx(dict(zip(wanted, shares, strict=True)), rel=1e-5)


WRONG: dict[str, dict[str, Any]] = {
    "not divided": {"normalize": False},
    "a group too many": {"topk_group": 3},
    "the best of a group alone": {"group_best": 1},
    "no groups": {"num_group": 1},
    "not scaled": {"scaling": 1.0},
    "corrections of other experts": {"correction_bias": torch.tensor([0.5, 0.0, 0.25, 0.0] * (E // 4))},
    "not corrected": {"correction_bias": None},
    "a least sum": {"least_sum": 50.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_is_seen(device: torch.device, name: str) -> None:
    rule = rule_of(**SIGMOID)
    with pytest.raises(AssertionError):
        check(many(device), rule, rule._replace(**WRONG[name]))


def test_what_is_not_a_number_is_chosen(device: torch.device) -> None:
    weights, index = kernel(torch.full((1, E), torch.nan, device=device), rule_of(**SIGMOID))
    assert weights.isnan().all()
    assert ((index >= 0) & (index < E)).all()


@pytest.mark.parametrize("fields", [{}, {"scores": "sigmoid", "corrected": True}], ids=["softmax", "sigmoid"])
def test_what_is_no_number_is_chosen_first(fields: dict[str, Any], device: torch.device) -> None:
    """As by torch; and every place has an expert's number, whatever the logits are."""
    logits = torch.randn(2, E, device=device)
    logits[0], logits[1, 7] = torch.nan, torch.nan
    _, index = kernel(logits, rule_of(**fields))
    assert index[0].tolist() == list(range(K))
    if "scores" in fields:  # a softmax has no number in the whole row
        assert index[1, 0] == 7
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in index.tolist())


@pytest.mark.parametrize("experts", [256, 300, 512])
@pytest.mark.parametrize("top_k", [1, 10])
def test_of_many_experts(device: torch.device, experts: int, top_k: int) -> None:
    """More than 256 are chosen one after the other: of equal ones the lower number first, then what is no number."""
    torch.manual_seed(5)
    logits = torch.randn(4, experts, device=device)
    logits[1] = torch.randint(0, 3, (experts,), device=device).float()
    logits[2, 7:] = -torch.inf
    rule = RoutingRule(torch.empty(experts, 1), top_k, weights_in_fp32=True)
    weights = torch.full((4, top_k), torch.nan, device=device)
    index = torch.full((4, top_k), -1, device=device)
    launch_selection(logits, rule, weights, index)
    wanted, numbers = select_experts(logits[:1], rule, torch.float32)
    assert torch.equal(index[:1], numbers)
    torch.testing.assert_close(weights[:1], wanted)
    for row, chosen in zip(logits.tolist(), index.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda expert: (-row[expert], expert))[:top_k]
