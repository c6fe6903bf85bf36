"""The experts of a sparse mixture that are a list of modules, for a few tokens: the kernels of `fused_experts`.

N tokens, H hidden_size, E experts, K experts a token, M intermediate size of an expert. Experts that are modules of
their own stay so: from the first call on their weights lie one behind the other in one memory, gate and up of an
expert, then those of the next, `[E, 2 M, H]`, and likewise `[E, H, M]` (`products/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import backend, rows
from ..products import packing
from .experts import MAX_TOKENS, _op, _sorting_pays
from .form import ExpertsForm, Gating, gating
from .joined_experts import are_joined

REASONS = {
    "form": "an expert is of another class than the one whose form was read, or says none",
    "observed": "a hook, a wrapped forward or a parametrisation watches an expert",
    "biased": "a projection of an expert has a bias",
    "unknown_activation": "the activation is none that the kernel computes, or the experts differ in it",
    "different_sizes": "the experts differ in size, or their number is not that of the choice",
    "shapes": "each token has not as many weights as experts, there is none, or the output is strided",
    "gradient": "gradients are wanted",
    "dtype": "the tensors differ in dtype, or have one that the kernel does not take",
    "device": "the tensors are on different devices",
    "many_tokens": "reading an expert once for all of its tokens is faster",
}
"""Beside those of `packing`."""


class ExpertParts(NamedTuple):
    """The parts of an expert that is `down(activation(gate(x)) * up(x))`; its class has a method `expert_parts()`."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module
    activation: Callable[[Tensor], Tensor]
    """A module or function."""


def add_experts(
    output: Tensor,
    hidden_states: Tensor,
    experts: nn.ModuleList,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    count: int | None = None,
    *,
    strays: bool = False,
    dense: bool = False,
) -> bool:
    """Add to `output`, in place, the weighted sum of each token's experts; False where the caller's loop has to do it.

    Args:
        output: `[…, H]`, N tokens, in memory of its own.
        hidden_states: `[…, H]`, N tokens.
        experts: E modules whose class has a method `expert_parts`.
        top_k_index: `[…, K]` experts of each token.
        top_k_weights: `[…, K]`, in the hidden states' dtype or fp32.
        count: what the caller takes for E; None where that is the length of the list.
        strays: whether an index may be none of 0 to E - 1, and is nobody's then.
        dense: whether `top_k_weights` is `[…, E]`, with a weight for every expert.

    Raises:
        RuntimeError: in a stream capture, for more tokens than the kernels are for.
    """
    if torch.compiler.is_compiling() or not _has_kernels(hidden_states):
        return False
    capturing = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    wide = len(experts) if dense else top_k_index.shape[-1]
    found = _unfit(output, hidden_states, top_k_index, top_k_weights, wide) or _packed(hidden_states, experts, count)
    index = top_k_index.reshape(-1, top_k_index.shape[-1])
    if not isinstance(found, str) and not capturing:
        nbytes = found[0].nbytes + found[1].nbytes
        given = (index.shape[0], index.shape[1], len(experts))
        joined = are_joined(*given, found[0].dtype)
        found = "many_tokens" if not joined and _sorting_pays(*given, nbytes) else found
    if isinstance(found, str):
        backend.count_fallback("add_experts", found, experts)
        return False
    if capturing and index.shape[0] > MAX_TOKENS:
        raise RuntimeError(f"{index.shape[0]} tokens are too many for a graph of experts that are a list")
    gate_up, down, how = found
    weights = top_k_weights.reshape(-1, wide)
    known = (index >= 0) & (index < len(experts)) if strays else None
    index = index if known is None else index.clamp(0, len(experts) - 1)
    weights = weights.gather(-1, index) if dense else weights
    weights = weights if known is None else torch.where(known, weights, 0.0)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    output.view(tokens.shape).add_(_op(tokens, index, weights, gate_up, down, None, *how))
    return True


def _has_kernels(tokens: Tensor) -> bool:
    """Return whether the kernels run: on a CPU the loop over the experts that were hit is faster."""
    return backend.uses_triton(tokens) and tokens.dtype in rows.KERNEL_DTYPES


def _unfit(output: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, wide: int) -> str:
    """Return why the kernels may not read the tensors, empty where they may; each token has `wide` weights."""
    given = (output, tokens, index, weights)
    if any(tensor.dim() < 2 or not tensor.numel() for tensor in given) or not output.is_contiguous():
        return "shapes"
    width, top_k = tokens.shape[-1], index.shape[-1]
    rows_of_each = {t.numel() // n for t, n in ((output, width), (tokens, width), (index, top_k), (weights, wide))}
    if output.shape[-1] != width or weights.shape[-1] != wide or len(rows_of_each) > 1:
        return "shapes"
    takes = (tokens.dtype, torch.float32)
    if output.dtype != tokens.dtype or weights.dtype not in takes or index.dtype != torch.int64:
        return "dtype"
    if len({tensor.device for tensor in given}) > 1:
        return "device"
    return "gradient" if backend.wants_gradient(output, tokens, weights) else ""


def _packed(tokens: Tensor, experts: nn.ModuleList, count: int | None) -> tuple[Tensor, Tensor, Gating] | str:
    """Return the weights of all experts as two, and how they are gated; or why that cannot be."""
    if count is not None and count != len(experts):
        return "different_sizes"
    found = [_parts_of(expert) for expert in experts]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return "form"
    if any(backend.observed(expert) for expert in experts):
        return "observed"
    projections = [projection for part in parts for projection in (part.gate, part.up, part.down)]
    if (reason := packing.unsafe(tokens, projections)) is not None:
        return reason
    ways = {gating(ExpertsForm(part.activation)) for part in parts}
    how = ways.pop()
    if how is None or ways:
        return "unknown_activation"
    if any(projection._parameters["bias"] is not None for projection in projections):
        return "biased"
    entered = [_weight(projection) for part in parts for projection in (part.gate, part.up)]
    downs = [_weight(part.down) for part in parts]
    size, hidden_size = entered[0].shape
    wanted = torch.Size((hidden_size, size))
    if any(w.shape != (size, hidden_size) for w in entered) or any(w.shape != wanted for w in downs):
        return "different_sizes"
    if hidden_size != tokens.shape[-1]:
        return "shapes"
    if any(w.dtype != tokens.dtype or w.device != tokens.device for w in (*entered, *downs)):
        return "dtype"
    gate_up = packing.as_one(entered)
    if isinstance(gate_up, str):
        return gate_up
    down = packing.as_one(downs)
    if isinstance(down, str):
        return down
    return gate_up.view(len(parts), 2 * size, hidden_size), down.view(len(parts), hidden_size, size), how


def _weight(projection: nn.Module) -> Tensor:
    weight = projection._parameters["weight"]
    assert weight is not None
    return weight


def _parts_of(expert: nn.Module) -> ExpertParts | None:
    """Return what an expert's class says of it, None where that is said of another class's `forward`."""
    kinds = type(expert).__mro__
    says = next((kind for kind in kinds if "expert_parts" in kind.__dict__), None)
    if says is None or says is not next((kind for kind in kinds if "forward" in kind.__dict__), None):
        return None
    parts: ExpertParts = expert.expert_parts()  # type: ignore[operator]
    return parts
