"""aiter's choice of experts (`topk_softmax`, `biased_grouped_topk`) in place of the bundled selection.

N tokens, E experts, K experts a token. aiter reads logits and biases by raw addresses and as one dtype, and writes
weights in fp32 and numbers in 32 bits: both are made here, and converted to what the router returns. The form with
biases chooses by `sigmoid(logit) + bias`, of groups by the sum of their two best, and takes the bias off again to get
the weight, which rounds it where the bias is large.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import aiter_calls

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
MOST_EXPERTS = 1024
MOST_CHOSEN = 32
"""Of K with biases, where each thread of half a wave writes one."""
GROUPS = frozenset({1, 2, 4, 8})
MOST_TOKENS = 16384
"""More than 212 for each compute unit, of which chips have 80 and more, go to another kernel of aiter's."""
_ROWS = 37
_NEAR = 1e-5
"""How far weights, which are at most 1, may be from the reference's: exponentials and sums in fp32."""

Chosen = tuple[Tensor, Tensor]
Reference = Callable[[Tensor], Chosen]


def topk_softmax(logits: Tensor, top_k: int, normalize: bool, reference: Reference) -> Chosen | None:
    """Return weights, in fp32, and numbers, in 64 bits, each `[N, K]`; None where the bundled form is to run.

    Args:
        logits: `[N, E]`.
        top_k: K.
        normalize: whether the chosen weights are divided by their sum.
        reference: returns both of other logits, for the comparison.
    """
    if not aiter_calls.chosen("topk_softmax", logits):
        return None
    reason = _refusal(logits, top_k)
    if reason is not None:
        aiter_calls.refuse("topk_softmax", reason)
        return None
    tensors = ("topk_weights", "topk_indices", "token_expert_indices", "gating_output")
    function = aiter_calls.function("topk_softmax", "topk_softmax", tensors, ("need_renorm",))
    if function is None:
        return None

    def call(given: Tensor) -> Chosen:
        weights, index = _empty(given, top_k)
        function(weights, index, torch.empty_like(index), given, need_renorm=normalize)
        return weights, index.long()

    return _run("topk_softmax", logits, (top_k, normalize), call, reference)


def biased_grouped_topk(
    logits: Tensor, bias: Tensor, top_k: int, groups: tuple[int, int], normalize: bool, reference: Reference
) -> Chosen | None:
    """Return what `topk_softmax` does, of `sigmoid(logits)`, chosen by these plus `bias` `[E]`, in any order.

    Args:
        logits: `[N, E]`.
        bias: `[E]`.
        top_k: K.
        groups: how many there are, and how many are chosen; the experts of others are not.
        normalize: whether the chosen weights are divided by their sum.
        reference: returns both of other logits, for the comparison.
    """
    if not aiter_calls.chosen("biased_grouped_topk", logits):
        return None
    reason = _refusal(logits, top_k) or _biased_refusal(logits, bias, top_k, groups)
    if reason is not None:
        aiter_calls.refuse("biased_grouped_topk", reason)
        return None
    tensors = ("gating_output", "correction_bias", "topk_weights", "topk_ids")
    keywords = ("num_expert_group", "topk_group", "need_renorm")
    function = aiter_calls.function("biased_grouped_topk", "biased_grouped_topk", tensors, keywords)
    if function is None:
        return None

    def call(given: Tensor) -> Chosen:
        weights, index = _empty(given, top_k)
        numbers = {"num_expert_group": groups[0], "topk_group": groups[1]}
        function(given, bias, weights, index, **numbers, need_renorm=normalize)
        return weights, index.long()

    return _run("biased_grouped_topk", logits, (top_k, *groups, normalize), call, reference)


def _empty(logits: Tensor, top_k: int) -> Chosen:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _run(
    operator: str, logits: Tensor, variant: tuple[object, ...], call: Callable[[Tensor], Chosen], reference: Reference
) -> Chosen | None:
    def proof() -> bool:
        given = _sample(logits)
        weights, index = call(given)
        if bool(((index < 0) | (index >= logits.shape[1])).any()):
            return False
        wanted, chosen = reference(given)
        if operator == "topk_softmax" and not torch.equal(index, chosen):
            return False
        zeros = torch.zeros(given.shape, dtype=torch.float32, device=given.device)
        apart = zeros.scatter(1, index, weights) - zeros.scatter(1, chosen, wanted.float())
        return bool(apart.abs().max() <= _NEAR)  # an expert that is chosen twice leaves another's weight out

    whole = (logits.dtype, logits.device, logits.shape[1], *variant)
    return aiter_calls.run(operator, logits, whole, lambda: call(logits.contiguous()), proof)


def _sample(like: Tensor) -> Tensor:
    """Return logits of which no two in a row are alike, multiples of 1/16 around 0: of equal ones any is right."""
    experts = like.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.rand(_ROWS, experts, generator=generator, device="cpu").argsort(-1)
    return ((order - experts // 2) / 16).to(like.device, like.dtype)


def _refusal(logits: Tensor, top_k: int) -> str | None:
    if logits.dtype not in DTYPES or (logits.dtype == torch.bfloat16 and logits.shape[-1] > 256):
        return "dtype"  # a bf16 has no 257 numbers that the comparison could tell apart
    if not logits.numel():
        return "empty"
    return None if logits.ndim == 2 and 0 < top_k <= logits.shape[1] <= MOST_EXPERTS else "layout"


def _biased_refusal(logits: Tensor, bias: Tensor, top_k: int, groups: tuple[int, int]) -> str | None:
    experts = logits.shape[1]
    if bias.dtype != logits.dtype:
        return "dtype"
    lies = bias.shape == (experts,) and bias.is_contiguous() and not bias.data_ptr() % 16
    if not lies or bias.device != logits.device or logits.data_ptr() % 16 or logits.shape[0] > MOST_TOKENS:
        return "layout"
    count, chosen = groups
    divided = count in GROUPS and not experts % count and experts // count >= 2 and 0 < chosen <= count
    return None if divided and top_k <= min(MOST_CHOSEN, experts // count * chosen) else "groups"
