"""One GEMM for projections of the same input.

    legend: N any leading shape, I in_features, O_i out_features of projection i

    y_i = x W_iᵀ + b_i   for all i   =   split(x [W_0; W_1; …]ᵀ + [b_0; b_1; …])

The projections stay the modules they were: after the first call their weights are *views* of one packed tensor, so a
state dict has the original's keys, memory does not grow, and an in-place update of a weight is seen by the packed
product. Where packing is not safe the modules themselves are called, and the reason is counted for `explain`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..core import backend

OFFERS: dict[str, dict[str, str]] = {
    "packed_linear": {
        "shapes": "[N, I] -> ([N, O_i], …)",
        "computes": """
def packed_linear(input, *projections):
    return tuple(projection(input) for projection in projections)
""",
        "step": "attention.qkv_step",
        "fp8": "fp8.fp8_packed_linear",
    },
}

REASONS = {
    "not_linear": "a projection is no plain nn.Linear (an adapter or a quantised layer replaced it)",
    "observed": "a hook, a wrapped forward or a parametrisation watches a projection",
    "gradient": "gradients are wanted",
    "not_a_tensor": "the input is no tensor",
    "traced": "torch.jit traces the call, and what packing asks of sizes would become part of the trace",
    "autocast": "autocast chooses the dtype of each product",
    "not_a_plain_parameter": "a weight is a distributed or otherwise special tensor",
    "different_weights": "the weights differ in dtype, device or input size",
    "shared_storage": "a weight shares its memory with something else",
    "shared_weight": "a weight stands twice among the projections, or other projections have packed it",
    "capturing": "a graph was being captured at the first call, when nothing may be allocated",
}

_lock = threading.Lock()
_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For every packed tensor, weak references to those that it was packed with, itself included, in their order."""
_multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

RETURNED_BYTES = 16 * 2**20
"""Weights of this size, once packed, leave their old memory to the device and not to torch's allocator."""


def packed_linear(input: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Return `tuple(projection(input) for projection in projections)`, as one product where that is safe.

    Args:
        input: `[N, I]`.
        projections: two or more `nn.Linear(I, O_i)`; biases may differ.

    Returns:
        One `[N, O_i]` for each projection; views of one `[N, ΣO_i]` where the product was packed.
    """
    reason = unsafe(input, projections)
    if reason is not None:
        return _separately(input, projections, reason)
    weights = [_parameter(projection, "weight") for projection in projections]
    biases = [projection._parameters["bias"] for projection in projections]
    if torch.compiler.is_compiling():
        output = _operator(input, weights, biases)
    elif (reason := _pack_all(weights, biases)) is None:
        output = _one_product(input, weights, biases)
    else:
        return _separately(input, projections, reason)
    # The method of the same name that takes a size or sizes is Python and costs 2 µs more.
    return output.split_with_sizes([weight.size(0) for weight in weights], -1)


def packed_parameters(input: Tensor, projections: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | str:
    """Return the weight `[ΣO_i, I]` and bias `[ΣO_i]` of projections of `input` as one, or why they are not one.

    For kernels that read weights themselves; also for a single projection. The reason is a key of `REASONS`.
    """
    if (reason := unsafe(input, projections)) is not None:
        return reason
    weights = [_parameter(projection, "weight") for projection in projections]
    biases = [projection._parameters["bias"] for projection in projections]
    if (reason := _pack_all(weights, biases)) is not None:
        return reason
    return _packed_weight(weights), _packed_bias(weights, biases)


def _separately(input: Tensor, projections: Sequence[nn.Module], reason: str) -> tuple[Tensor, ...]:
    backend.count_fallback("packed_linear", reason, projections[0])
    return tuple(projection(input) for projection in projections)


def unsafe(input: Tensor, projections: Sequence[nn.Module]) -> str | None:
    """Return why the projections have to be called themselves, a key of `REASONS`; None where weights will do."""
    if not isinstance(input, Tensor):
        return "not_a_tensor"
    if torch._C._get_tracing_state() is not None:
        return "traced"
    gradient = torch.is_grad_enabled()
    if gradient and input.requires_grad:
        return "gradient"
    if torch.is_autocast_enabled(input.device.type):
        return "autocast"
    for projection in projections:
        if type(projection) is not nn.Linear:
            return "not_linear"
        if backend.observed(projection):
            return "observed"
        weight, bias = projection._parameters.get("weight"), projection._parameters.get("bias")
        if type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
            return "not_a_plain_parameter"
        if gradient and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            return "gradient"
    return None


def _parameter(module: nn.Module, name: str) -> Tensor:
    """Return a parameter without the detour through `Module.__getattr__`, which costs 0.5 µs each."""
    parameter = module._parameters[name]
    if parameter is None:
        raise TypeError(f"{type(module).__name__} has no {name}")
    return parameter


def _one_product(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return _multiply(input, _packed_weight(weights), _packed_bias(weights, biases))


def multiply_with(product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
    """Compute packed products by `product`, of input, weight and bias, in place of `F.linear`; `gemm` does so."""
    global _multiply
    _multiply = product


def _packed_weight(weights: Sequence[Tensor]) -> Tensor:
    columns = weights[0].size(1)
    return weights[0].as_strided((sum([weight.size(0) for weight in weights]), columns), (columns, 1))


def _packed_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    if len(present) == len(biases):
        return present[0].as_strided((sum([bias.size(0) for bias in present]),), (1,))
    # Some projections have no bias: zeros keep the one rounding of a GEMM with bias, which a later addition would not.
    missing = present[0].new_zeros(max(weight.shape[0] for weight in weights))
    parts = [missing[: w.shape[0]] if b is None else b for w, b in zip(weights, biases, strict=True)]
    return torch.cat(parts)


def _pack_all(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> str | None:
    """Make weights and biases adjacent; return None, or the reason why they cannot be."""
    if (reason := _pack(weights)) is not None:
        return reason
    present = [bias for bias in biases if bias is not None]
    return _pack(present) if len(present) == len(biases) else None


def _pack(tensors: Sequence[Tensor]) -> str | None:
    """Move `tensors` into one storage, one behind the other, unless they lie so already.

    A tensor belongs to one group for as long as all of that group are alive: two layers that share a weight would else
    take it from each other at every call, and from each other's hands while another thread computes.
    """
    if _adjacent(tensors):
        return None
    first = tensors[0]
    if first.is_meta or any(_kind(tensor) != _kind(first) for tensor in tensors):
        return "different_weights"
    if not all(_may_move(tensor) for tensor in tensors):
        return "shared_storage"
    if len({tensor.data_ptr() for tensor in tensors}) < len(tensors) and first.numel():
        return "shared_weight"
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return "capturing"
    # Inference tensors could never take part in training again, so the packed tensor is a normal one in any mode.
    with _lock, torch.inference_mode(False), torch.no_grad():
        if _adjacent(tensors):  # another thread was here first
            return None
        if any(_belongs_elsewhere(tensor, tensors) for tensor in tensors):
            return "shared_weight"
        packed = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, packed.split([t.shape[0] for t in tensors]), strict=True):
            tensor.data = part
            tensor._is_packed_view = True  # type: ignore[attr-defined]
        group = tuple(weakref.ref(tensor) for tensor in tensors)
        for tensor in tensors:
            _groups[tensor] = group
        if packed.is_cuda and packed.nbytes >= RETURNED_BYTES:
            # The allocator keeps what was freed for tensors of these sizes, and there will be none.
            torch.cuda.empty_cache()
    return None


def _belongs_elsewhere(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether a group that is not part of `tensors` has packed this one and still needs it.

    A part keeps its order in the larger group, and its product is right at every moment of the move.
    """
    others = [reference() for reference in _groups.get(tensor, ())]
    if not others or any(other is None for other in others):
        return False
    own = [id(tensor) for tensor in tensors]
    parts = (own[start : start + len(others)] for start in range(len(own)))
    return [id(other) for other in others] not in parts


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    expected, dtype, width = first.data_ptr(), first.dtype, first.stride(0)
    for tensor in tensors:
        if tensor.data_ptr() != expected or tensor.dtype != dtype:
            return False
        if tensor.stride(0) != width or not tensor.is_contiguous():
            return False
        expected += tensor.nbytes
    storage = first.untyped_storage()
    return expected <= storage.data_ptr() + storage.nbytes()


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape[1:]


def _may_move(tensor: Tensor) -> bool:
    """Return whether nothing but this tensor, or a group that this module packed, uses its storage."""
    if getattr(tensor, "_is_packed_view", False):
        return True
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _implementation(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Run inside compiled graphs: there the first run packs, as the first eager call does."""
    if (reason := _pack_all(weights, biases)) is None:
        return _one_product(input, weights, biases)
    backend.count_fallback("packed_linear", reason)
    return torch.cat([F.linear(input, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)


def _fake(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


_operator = backend.register(
    "packed_linear", "(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor", _implementation, _fake
)
