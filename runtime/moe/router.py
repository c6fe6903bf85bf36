"""The router of a sparse mixture of experts: which experts a token takes, and with what weights.

N tokens, H hidden_size, E experts, K experts a token:

    logits_e = x' · W_e (+ b_e)                     x' = norm(x), or x; rounded to x's dtype, or in fp32
    score_e  = softmax(logits)_e, or sigmoid(logits_e)
    chosen   = the K largest of score_e (+ correction_e)
    weight_e = score_e (/ (Σ of chosen scores + eps)) * scaling

The largest of a softmax are those of its logits, and a softmax over the chosen logits is the normalised softmax, so
`topk(softmax(x))` and `softmax(topk(x))` are one form. Of equal scores the expert with the lower number goes first, as
`torch.topk` has it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from ..device import row_tiles
from ..guards.provenance import owner_of
from ..launching.launch import WAVE, Kernel, overlaps
from ..linear.prologue import prologue_of
from ..norms.norm_form import Prologue
from ..norms.rms_norm import reference as norm_reference
from ..norms.rms_norm import refusal as norm_refusal
from ..norms.rms_norm import result_dtype
from ..norms.sum_norm import normed as normed_input
from .by_aiter import selection_by_aiter
from .selection import RoutingRule, groups_fit, launch_selection, select_experts

CASES = """
def route(sizes, corrected, groups=1):
    return router(tensor(1, 1, sizes.hidden_size), Gate(sizes, corrected, groups), norm=Norm(sizes.hidden_size))

for sizes in (QWEN3_MOE, MIXTRAL):
    case(sizes.name, route, sizes, corrected=False)
case(DEEPSEEK_V3.name, route, DEEPSEEK_V3, corrected=True)
case(f"{DEEPSEEK_V3.name}, 8 groups", route, DEEPSEEK_V3, corrected=True, groups=8)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..norms.rms_norm import _scale

    @triton.jit
    def _router_logits_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_weight_ptr,
        weight_ptr,
        bias_ptr,
        normed_ptr,
        logits_ptr,
        x_stride,
        eps,
        offset,
        E: tl.constexpr,
        H: tl.constexpr,
        NORM: tl.constexpr,
        WEIGHTED: tl.constexpr,
        WEIGHT_IN_FP32: tl.constexpr,
        BIASED: tl.constexpr,
        ROUND: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        """Normalise a token and multiply it by BLOCK_E experts' rows; the first program of a token stores the norm."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(1).to(tl.int64)
        expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
        col = tl.arange(0, BLOCK_H)
        live = col < H
        there = (expert < E)[:, None] & live[None, :]
        weight = tl.load(weight_ptr + expert[:, None] * H + col[None, :], mask=there, other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + token * x_stride + col, mask=live, other=0.0)
        if NORM:
            x32 = x.to(tl.float32)
            normed = x32 * tl.rsqrt(tl.sum(x32 * x32, axis=0) / H + eps)
            if WEIGHTED:
                norm_weight = tl.load(norm_weight_ptr + col, mask=live, other=0.0)
                normed = _scale(normed, norm_weight, offset, x_ptr.dtype.element_ty, WEIGHT_IN_FP32)
            x = normed.to(x_ptr.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(normed_ptr + token * H + col, x, mask=live)
        logits = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        if BIASED:
            logits += tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
        if ROUND:
            logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(logits_ptr + token * E + expert, logits, mask=expert < E)

    router_logits_kernel = Kernel(_router_logits_kernel)

MAX_TOKENS = 64
"""More tokens than this take a plain product for the logits."""
MAX_HIDDEN_SIZE = 8192
MAX_EXPERTS = 1024

REASONS = {
    "router_without_rule": "the router's class does not say what it computes",
    "observed": "a hook, a wrapped forward or a parametrisation watches the router",
    "gradient": "gradients are wanted",
    "autocast": "autocast chooses the dtype of each product",
    "not_a_plain_parameter": "a weight is a distributed or otherwise special tensor",
    "grouped_choice": "experts are chosen group by group, of groups that are not equal or have too few",
    "dtype": "the tensors differ in dtype, or have one that the kernel does not take",
    "device": "the tensors are on different devices",
    "size": "more experts or a larger hidden size than the kernel takes, or more tokens than it is for",
}


def router(
    hidden_states: Tensor, gate: nn.Module, *given: Tensor, norm: nn.Module | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise tokens and choose their experts, in two kernels where the router's class has a method `rule`.

    Args:
        hidden_states: `[..., H]`, N tokens.
        gate: the router, which returns `(logits, weights, index)` when it is called.
        given: what the router and its `rule` are called with besides.
        norm: of the hidden states; None for none.

    Returns:
        The normed hidden states, shaped as given; the weights `[N, K]`; the experts' numbers `[N, K]`, int64.
    """
    prologue = None if norm is None else prologue_of(norm)
    if norm is not None and prologue is None:
        hidden_states = normed_input(hidden_states, norm)
    rule = _rule(gate, given)
    reason = rule if isinstance(rule, str) else _unsafe(hidden_states, rule, prologue)
    if reason is None and not takes_few_tokens(hidden_states):
        reason = "size"
    if reason is not None:
        backend.count_fallback("router", reason, gate)
        if norm is not None and prologue is not None:
            hidden_states = normed_input(hidden_states, norm)
        _, weights, index = gate(hidden_states.reshape(-1, hidden_states.shape[-1]), *given)
        return hidden_states, weights, index
    assert isinstance(rule, RoutingRule)
    norm_weight, eps, offset, weight_in_fp32 = prologue or Prologue(None, 0.0)
    normed, weights, index = _op(hidden_states, norm_weight, eps, offset, weight_in_fp32, prologue is not None, *rule)
    return hidden_states if prologue is None else normed, weights, index


def takes_few_tokens(hidden_states: Tensor) -> bool:
    """Return whether there are so few tokens that the kernels of a step choose their experts."""
    return hidden_states.numel() <= MAX_TOKENS * hidden_states.shape[-1]


def _rule(gate: nn.Module, given: tuple[Tensor, ...]) -> RoutingRule | str:
    describe = getattr(type(gate), "rule", None)
    if describe is None or owner_of(type(gate), "rule") is not owner_of(type(gate), "forward"):
        return "router_without_rule"
    if backend.observed(gate) or any(map(backend.observed, gate.children())):
        return "observed"
    rule: RoutingRule = describe(gate, *given)
    return "grouped_choice" if rule.num_group > 1 and not groups_fit(rule) else rule


def _unsafe(hidden_states: Tensor, rule: RoutingRule, prologue: Prologue | None) -> str | None:
    if type(rule.weight) not in (Tensor, nn.Parameter):
        return "not_a_plain_parameter"
    norm_weight = None if prologue is None else prologue.weight
    if backend.wants_gradient(hidden_states, rule.weight, rule.bias, rule.correction_bias, norm_weight):
        return "gradient"
    if backend.autocasts(hidden_states.device.type):
        return "autocast"
    return None


def _reference(
    hidden_states: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    offset: float,
    weight_in_fp32: bool,
    normed: bool,
    rule: RoutingRule,
) -> tuple[Tensor, Tensor, Tensor]:
    if normed:
        hidden_states = norm_reference(hidden_states, norm_weight, norm_eps, offset, weight_in_fp32)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if rule.logits_in_fp32:
        bias = None if rule.bias is None else rule.bias.float()
        logits = F.linear(tokens.float(), rule.weight.float(), bias)
    else:
        logits = F.linear(tokens.to(rule.weight.dtype), rule.weight, rule.bias)
    if (found := selection_by_aiter(logits, rule, tokens.dtype)) is not None:
        return hidden_states, *found
    return hidden_states, *select_experts(logits, rule, tokens.dtype)


def _forward(
    hidden_states: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    offset: float,
    weight_in_fp32: bool,
    normed: bool,
    *fields: object,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = RoutingRule(*fields)  # type: ignore[arg-type]
    arguments = (hidden_states, norm_weight, norm_eps, offset, weight_in_fp32, normed, rule)
    if backend.uses_triton(hidden_states):
        reason = _refusal(hidden_states, norm_weight, weight_in_fp32, rule)
        if reason is None:
            return _launch(*arguments)
        backend.count_fallback("router", reason)
    x, weights, index = _reference(*arguments)
    # An operator returns no view of its input.
    return (x.contiguous() if normed else x.new_empty(0)), weights, index


def _refusal(hidden_states: Tensor, norm_weight: Tensor | None, weight_in_fp32: bool, rule: RoutingRule) -> str | None:
    experts, hidden_size = rule.weight.shape
    if hidden_size > MAX_HIDDEN_SIZE or experts > MAX_EXPERTS or hidden_states.numel() > MAX_TOKENS * hidden_size:
        return "size"
    if norm_refusal(hidden_states, norm_weight) is not None:
        return "dtype"
    if result_dtype(hidden_states.dtype, norm_weight, weight_in_fp32) != hidden_states.dtype:
        return "dtype"
    others = [t for t in (rule.weight, rule.bias, rule.correction_bias) if t is not None]
    if any(t.dtype not in row_tiles.KERNEL_DTYPES for t in others):
        return "dtype"
    if not rule.logits_in_fp32 and rule.weight.dtype != hidden_states.dtype:
        return "dtype"
    return None if all(t.device == hidden_states.device for t in others) else "device"


def _launch(
    hidden_states: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    offset: float,
    weight_in_fp32: bool,
    normed: bool,
    rule: RoutingRule,
) -> tuple[Tensor, Tensor, Tensor]:
    out, weights, index = _empty(hidden_states, normed, rule)
    tokens = weights.shape[0]
    if tokens == 0:
        return out, weights, index
    x, stride = row_tiles.flatten(hidden_states)
    experts, hidden_size = rule.weight.shape
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    weight = rule.weight.contiguous()
    # One expert or two a program, 4 or 8 warps: all within 4% at 128 experts of 2,048 columns (H100).
    block_e, block_h = 2, 1 << (hidden_size - 1).bit_length()
    overlap = overlaps(x)
    with backend.device_guard(x):
        router_logits_kernel.launch(
            (-(-experts // block_e), tokens, 1),
            (128 if block_h <= 4096 else 256) // WAVE,
            (
                x,
                x if norm_weight is None else norm_weight.contiguous(),
                weight,
                weight if rule.bias is None else rule.bias.contiguous(),
                out,
                logits,
            ),
            (),
            (stride,),
            (norm_eps, offset),
            (
                experts,
                hidden_size,
                normed,
                norm_weight is not None,
                weight_in_fp32,
                rule.bias is not None,
                not rule.logits_in_fp32,
                overlap,
                block_e,
                block_h,
            ),
            overlap=overlap,
        )
    if (found := selection_by_aiter(logits, rule, x.dtype)) is not None:
        return out, *found
    launch_selection(logits, rule, weights, index)
    return out, weights, index


def _empty(hidden_states: Tensor, normed: bool, rule: RoutingRule) -> tuple[Tensor, Tensor, Tensor]:
    hidden_size = rule.weight.shape[1]
    tokens = hidden_states.numel() // hidden_size
    device = hidden_states.device
    dtype = torch.float32 if rule.weights_in_fp32 else hidden_states.dtype
    out = torch.empty(hidden_states.shape if normed else (0,), dtype=hidden_states.dtype, device=device)
    weights = torch.empty(tokens, rule.top_k, dtype=dtype, device=device)
    return out, weights, torch.empty(tokens, rule.top_k, dtype=torch.int64, device=device)


def _fake(
    hidden_states: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    offset: float,
    weight_in_fp32: bool,
    normed: bool,
    *fields: object,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = RoutingRule(*fields)  # type: ignore[arg-type]
    out, weights, index = _empty(hidden_states, normed, rule)
    if normed:
        out = out.to(result_dtype(hidden_states.dtype, norm_weight, weight_in_fp32))
    return out, weights if rule.weights_in_fp32 else weights.to(out.dtype), index


_op = backend.register(
    "router",
    "(Tensor hidden_states, Tensor? norm_weight, float norm_eps, float offset, bool weight_in_fp32, bool normed,"
    " Tensor weight, int top_k, str scores, bool normalize, float eps, float scaling, Tensor? bias,"
    " Tensor? correction_bias, int num_group, bool logits_in_fp32, bool weights_in_fp32, int topk_group,"
    " int group_best, float left_out, float least_sum) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
