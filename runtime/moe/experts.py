"""The experts of a sparse mixture for a few tokens: two kernels that read only the chosen experts' weights.

N tokens, H hidden_size, E experts, K experts a token, M intermediate size of an expert, e(n, k) the k-th expert of
token n and p(n, k) its weight:

    gated(n, k) = activation(W_gate[e] x_n) * (W_up[e] x_n)                    [N, K, M]
    y_n         = Σ_k p(n, k) W_down[e] gated(n, k)  (+ residual_n)            [N, H]

The sum over the experts is taken inside the second kernel, in a fixed order: the same bits on every run. Where a rank
has some of the experts, those from FIRST on, the kernels leave out what is another's; else FIRST is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..core import backend
from ..device import row_tiles
from ..launching.launch import WAVE, chip_of, overlaps
from ..tensor_parallel.forwards import summed
from .batched_experts import are_joined, launch_joined
from .block_experts import block_experts, block_experts_of
from .by_aiter import experts_by_aiter
from .experts_autograd import fits as fits_training
from .experts_autograd import trained_experts
from .experts_in_out import launch_transposed
from .form import ExpertsForm, Gating, form_of, gated, gating
from .grouped import grouped_experts
from .mxfp4 import MxExperts

CASES = """
def run(sizes, form=None):
    x, chosen = tensor(1, 1, sizes.hidden_size), int64(1, sizes.top_k)
    return fused_experts(x, Experts(sizes, form), chosen, tensor(1, sizes.top_k), residual=x)

def half(sizes):
    x, chosen, count = tensor(1, sizes.hidden_size), int64(1, sizes.top_k), sizes.experts // 2
    gate_up = tensor(count, 2 * sizes.intermediate_size, sizes.hidden_size)
    down = tensor(count, sizes.hidden_size, sizes.intermediate_size)
    return _op(x, chosen, tensor(1, sizes.top_k), gate_up, down, None, *Gating(), None, None, count)

for sizes in (QWEN3_MOE, MIXTRAL):
    case(sizes.name, run, sizes)
case("half of the experts", half, QWEN3_MOE)
case(MINIMAX_M3.name, run, MINIMAX_M3, ExpertsForm(alpha=1.7, limit=7.0, shift=1.0))
case(GPT_OSS.name, run, GPT_OSS, ExpertsForm(None, 1.7, 7.0, 1.0, interleaved=True, transposed=True, biased=True))
case(LLAMA4_SCOUT.name, run, LLAMA4_SCOUT, ExpertsForm(nn.SiLU(), transposed=True))
case(WIDE_COLUMNS.name, run, WIDE_COLUMNS, ExpertsForm(nn.SiLU(), transposed=True))
"""

if backend.triton_installed():
    from .experts_kernels import experts_down_kernel, experts_gate_up_kernel

# Of eight tiles for each kernel, the fastest or within 1% of it for 1 to 16 tokens of Qwen3-30B-A3B and Mixtral 8x7B
# (H100, triton 3.6): 2 to 16 rows and 128 to 1,024 columns; 2,048 to 8,192 weights in one load over all experts.
GATE_UP_TILE = (4, 1024, 128)
"""Rows, columns, threads."""
DOWN_ROWS, DOWN_THREADS = 4, 128
_IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")
MAX_TOKENS = 64
SORTING_BYTES, GROUPED_SHARE = 340e6, 0.85
"""What an H100 reads in the time of sorting tokens by expert, and the share of that rate that `grouped_mm` reaches."""

REASONS = {
    "observed": "a hook, a wrapped forward or a parametrisation watches the experts",
    "layout": "the experts' weights are laid out in a way that no form says, ungated, sharded or normed after",
    "not_a_plain_parameter": "a weight is a distributed, quantised or otherwise special tensor",
    "unknown_activation": "the activation is none that the kernel computes, or something observes it",
    "gradient": "gradients are wanted",
    "autocast": "autocast chooses the dtype of each product",
    "other_implementation": "other kernels were asked for by set_experts_implementation",
    "many_tokens": "sorting the tokens by expert is faster",
    "dtype": "the tensors differ in dtype, or have one that the kernel does not take",
    "device": "the tensors are on different devices",
    "threads_elsewhere": "Triton gave threads other places than MXFP4 on tensor cores needs: other kernels run",
}


def fused_experts(
    hidden_states: Tensor,
    experts: nn.Module,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    residual: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Return the weighted sum of each token's experts, times `scaling`, plus `residual`.

    Args:
        hidden_states: `[..., H]`, N tokens.
        experts: a module with `gate_up_proj` `[E, 2 M, H]`, gates first, `down_proj` `[E, H, M]` and `act_fn`, as
            transformers' `use_experts_implementation` describes them. It is called where the kernels do not fit and
            on the CPU, where copying the chosen weights would cost more than its loop.
        top_k_index: `[N, K]`, integers.
        top_k_weights: `[N, K]`, in the hidden states' dtype or fp32.
        residual: shaped as `hidden_states`; None for none.
        scaling: a number.

    Returns:
        Shaped as `hidden_states`, in its dtype.
    """
    chosen = (top_k_index, top_k_weights)
    if (dealt := summed(experts)) is not None:
        with dealt.lifted():
            part = _computed(hidden_states, experts, chosen, None, scaling, dealt.some)
        return dealt.finished(part, residual)
    return _computed(hidden_states, experts, chosen, residual, scaling, None)


def _computed(
    hidden_states: Tensor,
    experts: nn.Module,
    chosen: tuple[Tensor, Tensor],
    residual: Tensor | None,
    scaling: float,
    mine: Any,
) -> Tensor:
    """Return what `fused_experts` does; where this rank has some of the experts (`mine` says which), what they add."""
    top_k_index, top_k_weights = chosen
    ranks = 1 if mine is None else mine.ranks.size
    parts = experts.packed_parts() if isinstance(experts, MxExperts) else block_experts_of(experts)
    parts = None if _has_a_say(experts) else parts
    if parts is not None and not backend.autocasts(hidden_states.device.type):
        nbytes = parts.gate_up.nbytes + parts.down.nbytes
        many = _sorting_pays(top_k_index.shape[0], top_k_index.shape[1] / ranks, parts.down.values.shape[0], nbytes)
        if mine is not None:
            top_k_index, top_k_weights = mine.own(*chosen)
        return block_experts(hidden_states, parts, top_k_index, top_k_weights, residual, scaling, many)
    form = form_of(experts, some=mine is not None)
    how = None if form is None else gating(form, scaling)
    reason = unsafe(hidden_states, experts, top_k_index, top_k_weights, residual, form, how, ranks)
    if reason is None and (torch.compiler.is_compiling() or backend.uses_triton(hidden_states)):
        assert how is not None
        weights = (experts.gate_up_proj, experts.down_proj)
        biased = form is not None and form.biased
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if biased else (None, None)
        first = -1 if mine is None else mine.first
        fused: Tensor = _op(hidden_states, *chosen, *weights, residual, *how, *biases, first)
        return fused
    if mine is not None:
        top_k_index, top_k_weights = mine.own(*chosen)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if mine is None and reason == "many_tokens" and how is not None and backend.nothing_watches(tokens):
        given = (hidden_states, top_k_index, top_k_weights, _weights(experts), residual, how)
        found = experts_by_aiter(*given, biased=form is not None and form.biased)
        if found is not None:
            return found
    output: Tensor | None = None
    if reason == "many_tokens" and how is not None and _is_sorted_here(tokens, experts, form):
        names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        gate_up, down, *both = (experts._parameters.get(name) for name in names)
        both = both if form is not None and form.biased else [None, None]
        sorted_ones = (tokens.contiguous(), top_k_index, top_k_weights, gate_up, down, (both[0], both[1]), how)
        output = grouped_experts(*sorted_ones)  # type: ignore[arg-type]
    if reason == "gradient" and _is_trained_here(tokens, experts, top_k_index, top_k_weights, form, how):
        assert how is not None
        output = trained_experts(tokens, top_k_index, top_k_weights, *_weights(experts), how.activation)
        output = output if scaling == 1.0 else output * scaling
    if output is None:
        if reason is not None:
            backend.count_fallback("fused_experts", reason, experts)
        output = _called(experts, tokens, top_k_index, top_k_weights, reason)
        output = output if scaling == 1.0 else output * scaling
    output = output.view(hidden_states.shape)
    return output if residual is None else residual + output


def _is_trained_here(
    tokens: Tensor, experts: nn.Module, index: Tensor, weights: Tensor, form: ExpertsForm | None, how: Gating | None
) -> bool:
    """Return whether operators of ours make the gradients; else torch does, of what the experts' own call computes."""
    if form is None or how is None or form.biased:
        return False
    return fits_training(tokens, index, weights, *_weights(experts), how)


def _weights(experts: nn.Module) -> tuple[Tensor, Tensor]:
    """Return `gate_up_proj` and `down_proj`, which are there: plain tensors where a rank has a part of them."""
    return experts._parameters["gate_up_proj"], experts._parameters["down_proj"]  # type: ignore[return-value]


def _is_sorted_here(tokens: Tensor, experts: nn.Module, form: ExpertsForm | None) -> bool:
    """Return whether many tokens are sorted and multiplied by our own kernel: on AMD's chips.

    torch's grouped product asks the host there where each group ends, once a layer, and cannot be captured.
    """
    chip = chip_of(tokens)
    if chip is None or chip.backend != "hip" or not backend.nothing_watches(tokens):
        return False
    names = ("gate_up_proj", "down_proj") + (("gate_up_proj_bias", "down_proj_bias") if form and form.biased else ())
    given = [experts._parameters[name] for name in names]  # plain tensors where a rank has a part of them
    alike = all(t is not None and t.dtype == tokens.dtype and t.device == tokens.device for t in given)
    return alike and tokens.dtype in row_tiles.KERNEL_DTYPES and tokens.numel() > 0 and backend.uses_triton(tokens)


def _has_a_say(experts: nn.Module) -> bool:
    """Return whether something watches the experts' call, or other kernels were asked for."""
    asked = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return backend.observed(experts) or asked not in _IMPLEMENTATIONS


def _called(
    experts: nn.Module, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor, reason: str | None
) -> Tensor:
    """Call the experts, sorted by expert where that was found to be faster or nothing may be asked of the host.

    `generate()` sets `batched_mm` for decoding, which copies an expert for each token that takes it, and the eager
    loop asks the host which experts were hit: no graph can hold it.
    """
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if tokens.is_cuda and tokens.dtype == torch.bfloat16 and not backend.observed(experts):
        capturing = torch.cuda.is_current_stream_capturing()
        if (implementation == "eager" and capturing) or (implementation == "batched_mm" and reason == "many_tokens"):
            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, tokens, top_k_index, top_k_weights)
    return experts(tokens, top_k_index, top_k_weights)


def unsafe(
    hidden_states: Tensor,
    experts: nn.Module,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    residual: Tensor | None,
    form: ExpertsForm | None,
    how: Gating | None,
    ranks: int = 1,
) -> str | None:
    """Return why the kernels may not stand for the module, of which `ranks` have a part each; None if they may."""
    if backend.observed(experts):
        return "observed"
    if form is None:
        return "layout"
    if getattr(getattr(experts, "config", None), "_experts_implementation", None) not in _IMPLEMENTATIONS:
        return "other_implementation"
    names = ("gate_up_proj", "down_proj") + (("gate_up_proj_bias", "down_proj_bias") if form.biased else ())
    tensors = [experts._parameters.get(name) for name in names]
    kinds = (Tensor, nn.Parameter)
    if any(type(tensor) not in kinds or tensor.element_size() == 1 for tensor in tensors):  # type: ignore[union-attr]
        return "not_a_plain_parameter"
    if not _lies_so(form, [tensor for tensor in tensors if tensor is not None]):
        return "layout"
    if how is None:
        return "unknown_activation"
    if backend.wants_gradient(hidden_states, top_k_weights, residual, *tensors):
        return "gradient"
    if backend.autocasts(hidden_states.device.type):
        return "autocast"
    tokens, top_k = top_k_index.shape
    down: Tensor = experts.down_proj  # type: ignore[assignment]
    if not form.transposed and are_joined(tokens, top_k / ranks, down.shape[0], hidden_states.dtype):
        return None
    return "many_tokens" if sorting_is_faster(tokens, top_k / ranks, down) else None


def _lies_so(form: ExpertsForm, tensors: list[Tensor]) -> bool:
    """Return whether the kernels take weights, and biases, that lie as a form says."""
    gate_up, down = tensors[:2]
    size = down.shape[1] if form.transposed else down.shape[2]
    if gate_up.shape[2 if form.transposed else 1] != 2 * size or not all(t.is_contiguous() for t in tensors):
        return False
    return form.transposed or not (form.interleaved or form.biased)


def sorting_is_faster(tokens: int, top_k: float, down_proj: Tensor) -> bool:
    """Return whether so many tokens hit the same experts so often that sorting them by expert pays.

    Where a rank has some of the experts, `top_k` is how many of a token's are its on average.

    The kernels read an expert once for each token that takes it; sorted, it is read once. With tokens spread evenly
    this is right for all of 1 to 512 tokens of Qwen3-30B-A3B (from 32) and Mixtral 8x7B (from 4), in bf16 on an H100.
    """
    return _sorting_pays(tokens, top_k, down_proj.shape[0], 3 * down_proj.nbytes)


def _sorting_pays(tokens: int, top_k: float, experts: int, nbytes: int) -> bool:
    if tokens > MAX_TOKENS:
        return True
    expert_bytes = nbytes / experts
    hit = experts * (1.0 - (1.0 - top_k / experts) ** tokens)
    return tokens * top_k * expert_bytes > hit * expert_bytes / GROUPED_SHARE + SORTING_BYTES


def _reference(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    residual: Tensor | None,
    how: Gating,
    biases: Sequence[Tensor | None],
    first: int = -1,
) -> Tensor:
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    count, top_k = index.shape
    if first >= 0:
        index = index - first
        here = (index >= 0) & (index < down_proj.shape[0])
        index, weights = torch.where(here, index, 0), torch.where(here, weights, 0.0).to(weights.dtype)
    flat, share = index.reshape(-1), weights.reshape(-1, 1)
    x = tokens.repeat_interleave(top_k, dim=0)
    both = _product(x, gate_up_proj[flat], biases[0], flat, how)
    gate, up = (both[:, ::2], both[:, 1::2]) if how.interleaved else both.chunk(2, dim=-1)
    down = _product(gated(gate, up, how), down_proj[flat], biases[1], flat, how) * share
    output = down.view(count, top_k, tokens.shape[-1]).sum(dim=1).to(hidden_states.dtype).view(hidden_states.shape)
    output = output if how.scaling == 1.0 else output * how.scaling
    return output if residual is None else residual + output


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, how: Gating) -> Tensor:
    """Return each row times the weight of its expert."""
    output = torch.bmm(weight.mT if how.transposed else weight, x.unsqueeze(-1)).squeeze(-1)
    return output if bias is None else output + bias[expert]


def _forward(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    residual: Tensor | None,
    *rest: Any,
) -> Tensor:
    fields = len(Gating._fields)
    how, biases, first = Gating(*rest[:fields]), (*rest[fields:], None, None)[:2], (*rest[fields + 2 :], -1)[0]
    arguments = (hidden_states, index, weights, gate_up_proj, down_proj, residual, how, biases, first)
    if first < 0:
        both, biased = (gate_up_proj, down_proj), biases[0] is not None
        output = experts_by_aiter(hidden_states, index, weights, both, residual, how, biased=biased)
        if output is not None:
            return output
    if backend.uses_triton(hidden_states):
        reason = _refusal(hidden_states, index, weights, (gate_up_proj, down_proj, residual, *biases))
        if reason is None:
            return _launch(*arguments)
        backend.count_fallback("fused_experts", reason)
    return _reference(*arguments)


def _refusal(hidden_states: Tensor, index: Tensor, weights: Tensor, others: Sequence[Tensor | None]) -> str | None:
    dtype = hidden_states.dtype
    same = [tensor for tensor in others if tensor is not None]
    if dtype not in row_tiles.KERNEL_DTYPES or weights.dtype not in (dtype, torch.float32):
        return "dtype"
    if any(tensor.dtype != dtype for tensor in same):
        return "dtype"
    return None if all(tensor.device == hidden_states.device for tensor in (*same, index, weights)) else "device"


def _launch(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    residual: Tensor | None,
    how: Gating,
    biases: Sequence[Tensor | None],
    first: int,
) -> Tensor:
    out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    if out.numel() == 0:
        return out
    if how.transposed:
        pairs = (gate_up_proj, down_proj), (biases[0], biases[1])
        launch_transposed(hidden_states, index, weights, *pairs, residual, out, how, first)
    else:
        joined = are_joined(index.shape[0], index.shape[1], down_proj.shape[0], hidden_states.dtype)
        launch = launch_joined if joined else _launch_packed
        launch(hidden_states, index, weights, gate_up_proj, down_proj, residual, out, how, first)
    return out


def _launch_packed(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
    first: int,
) -> None:
    tokens, top_k = index.shape
    experts, hidden_size, intermediate_size = down_proj.shape
    x, x_stride = row_tiles.flatten(hidden_states)
    index, index_stride = row_tiles.flatten(index)
    weights, weights_stride = row_tiles.flatten(weights)
    added, added_stride = (x, x_stride) if residual is None else row_tiles.flatten(residual)
    gated = torch.empty(tokens, top_k, intermediate_size, dtype=x.dtype, device=x.device)
    sizes = (experts, top_k, hidden_size, intermediate_size)
    overlap = overlaps(x)
    rows_m, cols_h, threads = GATE_UP_TILE
    block_k = 1 << (top_k - 1).bit_length()
    block_m = min(max(1024 // block_k, 128), max(1 << (intermediate_size - 1).bit_length(), 16))
    with backend.device_guard(x):
        experts_gate_up_kernel.launch(
            (-(-intermediate_size // rows_m), top_k, tokens),
            threads // WAVE,
            (x, index, gate_up_proj, gated),
            (),
            (x_stride, index_stride),
            (how.alpha, how.largest, how.shift),
            (*sizes, how.activation, how.bounded, first, overlap, rows_m, cols_h),
            overlap=overlap,
        )
        experts_down_kernel.launch(
            (-(-hidden_size // DOWN_ROWS), tokens, 1),
            DOWN_THREADS // WAVE,
            (gated, index, weights, down_proj, added, out),
            (),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (*sizes, first, residual is not None, overlap, block_k, DOWN_ROWS, block_m),
            overlap=overlap,
        )


def _fake(hidden_states: Tensor, *rest: Any) -> Tensor:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


_op = backend.register(
    "fused_experts",
    "(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj,"
    " Tensor? residual, str activation, float alpha=1.0, float? limit=None, float shift=0.0, bool interleaved=False,"
    " bool transposed=False, float scaling=1.0, Tensor? gate_up_bias=None, Tensor? down_bias=None,"
    " int first=-1) -> Tensor",
    _forward,
    _fake,
)
