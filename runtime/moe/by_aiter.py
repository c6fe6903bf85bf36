"""What the experts and the router of a mixture ask of aiter, and what it cannot know of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..aiter import aiter_calls, aiter_experts, aiter_preshuffle, aiter_selection
from ..linear import preshuffle
from .form import Gating
from .selection import RoutingRule, select_experts


def experts_by_aiter(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    both: tuple[Tensor, Tensor],
    residual: Tensor | None,
    how: Gating,
    *,
    biased: bool,
) -> Tensor | None:
    """Return what `fused_experts` does by aiter, shaped as `hidden_states`; None where another form is to run."""
    if not aiter_calls.chosen("fused_moe", hidden_states):
        return None
    if how.activation != "silu" or how.bounded or how.interleaved or how.transposed or biased:
        aiter_calls.refuse("fused_moe", "form")
        return None
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    output = aiter_experts.fused_experts(tokens, index, weights, both, _copy_of)
    if output is None:
        return None
    output = output.view(hidden_states.shape)
    output = output if how.scaling == 1.0 else output * how.scaling
    return output if residual is None else residual + output


_copy_of = functools.partial(
    preshuffle.copy_of, shuffle=functools.partial(aiter_preshuffle.shuffle, operator="fused_moe")
)


def selection_by_aiter(logits: Tensor, rule: RoutingRule, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return what `select_experts` does by aiter; None where another form is to run."""
    operator = "topk_softmax" if rule.correction_bias is None else "biased_grouped_topk"
    if not aiter_calls.chosen(operator, logits):
        return None
    if not (_is_softmax(rule) if rule.correction_bias is None else _is_biased(rule)):
        aiter_calls.refuse(operator, "rule")
        return None
    unscaled = rule._replace(scaling=1.0, weights_in_fp32=True)

    def reference(given: Tensor) -> tuple[Tensor, Tensor]:
        return select_experts(given, unscaled, torch.float32)

    if rule.correction_bias is None:
        found = aiter_selection.topk_softmax(logits, rule.top_k, rule.normalize, reference)
    else:
        groups = (rule.num_group, rule.topk_group)
        bias = rule.correction_bias.detach()
        found = aiter_selection.biased_grouped_topk(logits, bias, rule.top_k, groups, rule.normalize, reference)
    if found is None:
        return None
    weights = found[0] * rule.scaling
    return weights if rule.weights_in_fp32 else weights.to(dtype), found[1]


def _is_softmax(rule: RoutingRule) -> bool:
    return rule.scores == "softmax" and rule.num_group == 1 and not rule.eps and not rule.least_sum


def _is_biased(rule: RoutingRule) -> bool:
    """Return whether a rule is that of `biased_grouped_topk`: experts of other groups are never chosen.

    Some models choose them by 0, which comes before the negative keys of the best groups.
    """
    grouped = rule.num_group == 1 or (rule.group_best == 2 and rule.left_out == float("-inf"))
    return rule.scores == "sigmoid" and grouped and rule.eps <= LEAST_EPS and not rule.least_sum


LEAST_EPS = 1e-12
"""Less than this beside a sum of sigmoids is not seen in fp32."""
