"""Which experts a router chooses by its logits, and their weights; the letters are those of `router`.

Of G groups of experts the best are chosen first, by the sum of a group's best scores; the experts of others are chosen
last, or by zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit
    def _keys(  # type: ignore[no-untyped-def]
        logits_row,
        correction_ptr,
        expert,
        there,
        largest,
        total,
        SIGMOID: tl.constexpr,
        CORRECTED: tl.constexpr,
        GROUPED: tl.constexpr,
    ):
        """Return what experts are chosen by; softmax keeps the order of its logits where nothing is added."""
        keys = tl.load(logits_row + expert, mask=there, other=float("-inf"))
        if SIGMOID:
            keys = 1.0 / (1.0 + tl.exp(-keys))
        elif CORRECTED or GROUPED:
            keys = tl.exp(keys - largest) / total
        if CORRECTED:
            keys += tl.load(correction_ptr + expert, mask=there, other=0.0).to(tl.float32)
        keys = tl.where(keys == keys, keys, float("inf"))  # what is not a number is chosen, as by torch
        return tl.where(there, keys, float("-inf"))

    @triton.jit
    def _best_groups(keys, group, G: tl.constexpr, CHOSEN: tl.constexpr, BEST: tl.constexpr, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return which groups, rows of `keys`, are chosen by the sum of their BEST best."""
        score, place = tl.max(keys, axis=1, return_indices=True)
        if BEST == 2:
            others = tl.where(tl.arange(0, BLOCK_S)[None, :] == place[:, None], float("-inf"), keys)
            score += tl.max(others, axis=1)
        score = tl.where(group < G, score, float("-inf"))
        left, taken = score, group < 0
        for _ in tl.static_range(CHOSEN):
            _, best = tl.max(left, axis=0, return_indices=True)
            taken = taken | (group == best)
            left = tl.where(taken, float("-inf"), score)
        return taken

    @triton.jit
    def _in_turn(left, place, there, K: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return in which turn each of SIZE is the largest of what is left, K for those that never are."""
        rank = tl.full((SIZE,), K, tl.int32)
        for turn in tl.static_range(K):
            highest = tl.max(tl.where(rank == K, left, float("-inf")), axis=0)
            open_ = there & (rank == K) & (left == highest)
            first = tl.min(tl.where(open_, place, SIZE), axis=0)
            rank = tl.where(place == first, turn, rank)
        return rank

    @triton.jit
    def _ahead(others, rival, expert, keys):  # type: ignore[no-untyped-def]
        """Return which rivals go before which experts: 0 or 1, `[experts, rivals]`."""
        better = others[None, :] > keys[:, None]
        equal = (others[None, :] == keys[:, None]) & (rival[None, :] < expert[:, None])
        return (better | equal).to(tl.int32)

    @triton.jit
    def _select_experts_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        correction_ptr,
        weights_ptr,
        index_ptr,
        eps,
        scaling,
        least_limit,
        left_offset,
        E: tl.constexpr,
        K: tl.constexpr,
        SIGMOID: tl.constexpr,
        CORRECTED: tl.constexpr,
        NORMALIZE: tl.constexpr,
        GROUPS: tl.constexpr,
        CHOSEN_GROUPS: tl.constexpr,
        GROUP_BEST: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_G: tl.constexpr,
        BLOCK_S: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        """Choose a token's experts: an expert's rank is the number of experts ahead of it, all counted at once.

        Of groups, and of more than 256, they are chosen one after the other: of 512, all counted took 36 µs (H100).
        """
        follow(OVERLAP)
        token = tl.program_id(0).to(tl.int64)
        logits_row = logits_ptr + token * E
        GROUPED: tl.constexpr = GROUPS > 1
        SIZE: tl.constexpr = E // GROUPS
        if GROUPED:
            group, inner = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
            in_groups = group[:, None] * SIZE + inner[None, :]
            expert = tl.reshape(in_groups, (BLOCK_G * BLOCK_S,))
            in_group = (group < GROUPS)[:, None] & (inner < SIZE)[None, :]
            there = tl.reshape(in_group, (BLOCK_G * BLOCK_S,))
        else:
            expert = tl.arange(0, BLOCK_E)
            there = expert < E
        logits = tl.load(logits_row + expert, mask=there, other=float("-inf"))
        largest = tl.max(logits, axis=0)
        exponents = tl.exp(logits - largest)
        total = tl.sum(exponents, axis=0)
        if GROUPED:
            keys = _keys(logits_row, correction_ptr, in_groups, in_group, largest, total, SIGMOID, CORRECTED, True)
            best = _best_groups(keys, group, GROUPS, CHOSEN_GROUPS, GROUP_BEST, BLOCK_S)
            keys = tl.where(best[:, None], keys, left_offset)
            left = tl.reshape(tl.where(in_group, keys, float("-inf")), (BLOCK_G * BLOCK_S,))
            rank = _in_turn(left, tl.arange(0, BLOCK_G * BLOCK_S), there, K, BLOCK_G * BLOCK_S)
        elif BLOCK_E > 256:
            keys = _keys(logits_row, correction_ptr, expert, there, largest, total, SIGMOID, CORRECTED, False)
            rank = _in_turn(keys, expert, there, K, BLOCK_E)
        else:
            keys = _keys(logits_row, correction_ptr, expert, there, largest, total, SIGMOID, CORRECTED, False)
            ahead = tl.zeros((BLOCK_E, CHUNK), tl.int32)
            for start in tl.static_range(0, BLOCK_E, CHUNK):  # all rivals are loaded at once
                rival = start + tl.arange(0, CHUNK)
                others = _keys(logits_row, correction_ptr, rival, rival < E, largest, total, SIGMOID, CORRECTED, False)
                ahead += _ahead(others, rival, expert, keys)
            rank = tl.sum(ahead, axis=1)
        chosen = (rank < K) & there
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            scores = exponents
            if not NORMALIZE:
                scores = scores / total
        if NORMALIZE:
            divisor = tl.sum(tl.where(chosen, scores, 0.0), axis=0)
            # A softmax that is not divided by its own sum: the least and eps are multiplied by it.
            by = 1.0 if SIGMOID else total
            divisor = divisor + eps * by
            scores = scores / tl.where(divisor < least_limit * by, least_limit * by, divisor)
        weights = (scores * scaling).to(weights_ptr.dtype.element_ty)
        tl.store(weights_ptr + token * K + rank, weights, mask=chosen)
        tl.store(index_ptr + token * K + rank, expert.to(tl.int64), mask=chosen)

    select_experts_kernel = Kernel(_select_experts_kernel)


class RoutingRule(NamedTuple):
    """What a router computes; its class returns one from a method `rule()`."""

    weight: Tensor
    """`[E, H]`"""
    top_k: int
    """K"""
    scores: str = "softmax"
    """`"softmax"` or `"sigmoid"`."""
    normalize: bool = True
    """Whether the chosen scores are divided by their sum."""
    eps: float = 0.0
    """Added to that sum."""
    scaling: float = 1.0
    """Factor of the weights."""
    bias: Tensor | None = None
    """`[E]`, added to the logits."""
    correction_bias: Tensor | None = None
    """`[E]`, added to the scores for the choice alone; with `"sigmoid"` only."""
    num_group: int = 1
    """Groups of experts, of which some are chosen first."""
    logits_in_fp32: bool = False
    """Whether the product is taken in fp32 and not rounded to the input's dtype."""
    weights_in_fp32: bool = False
    """Whether the weights stay in fp32 and are not rounded to the input's dtype."""
    topk_group: int = 1
    """Groups that are chosen, where there are several."""
    group_best: int = 2
    """1 or 2: how many of its best scores, corrected, make the score of a group."""
    left_out: float = float("-inf")
    """What the experts of other groups are chosen by."""
    least_sum: float = 0.0
    """The least that the chosen scores are divided by."""


def select_experts(logits: Tensor, rule: RoutingRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights and numbers, each `[N, K]`, of the experts that `rule` chooses by `logits` `[N, E]`."""
    sigmoid = rule.scores == "sigmoid"
    scores = logits.float().sigmoid() if sigmoid else F.softmax(logits, dim=-1, dtype=torch.float32)
    keys = scores if rule.correction_bias is None else scores + rule.correction_bias
    if rule.num_group > 1:
        keys = keys.masked_fill(_left_out(keys, rule), rule.left_out)
    index = torch.topk(keys, rule.top_k, dim=-1).indices
    weights = scores.gather(-1, index)
    if rule.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.eps).clamp(min=rule.least_sum)
    weights = weights * rule.scaling
    return weights if rule.weights_in_fp32 else weights.to(dtype), index


def _left_out(keys: Tensor, rule: RoutingRule) -> Tensor:
    """Return whether an expert is in none of the best groups, `[N, E]`."""
    groups = keys.unflatten(-1, (rule.num_group, -1))
    best = groups.topk(rule.group_best, dim=-1).values.sum(dim=-1).topk(rule.topk_group, dim=-1).indices
    left = torch.ones(groups.shape[:-1], dtype=torch.bool, device=keys.device).scatter(-1, best, False)
    return left.unsqueeze(-1).expand_as(groups).flatten(-2)


def groups_fit(rule: RoutingRule) -> bool:
    """Return whether groups are equal, and the chosen ones have as many experts as are chosen."""
    size, rest = divmod(rule.weight.shape[0], rule.num_group)
    return rest == 0 and rule.group_best <= size and rule.top_k <= rule.topk_group * size


def launch_selection(logits: Tensor, rule: RoutingRule, weights: Tensor, index: Tensor) -> None:
    """Write what `rule` chooses by `logits` `[N, E]`, in fp32, into `weights` and `index`, each `[N, K]`."""
    tokens, experts = logits.shape
    overlap = overlaps(logits)
    correction = logits if rule.correction_bias is None else rule.correction_bias.contiguous()
    groups = rule.num_group
    with backend.device_guard(logits):
        select_experts_kernel.launch(
            (tokens, 1, 1),
            128 // WAVE,
            (logits, correction, weights, index),
            (),
            (),
            (float(rule.eps), float(rule.scaling), float(rule.least_sum), float(rule.left_out)),
            (
                experts, rule.top_k, rule.scores == "sigmoid", rule.correction_bias is not None, rule.normalize,
                groups, rule.topk_group if groups > 1 else 1, rule.group_best, overlap,
                max(1 << (experts - 1).bit_length(), 16), 1 << (groups - 1).bit_length(),
                1 << (experts // groups - 1).bit_length(), 16,
            ),
            overlap=overlap,
        )  # fmt: skip
