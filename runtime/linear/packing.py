"""One GEMM for projections of the same input.

    legend: N any leading shape, I in_features, O_i out_features of projection i

    y_i = x W_iᵀ + b_i   for all i   =   split(x [W_0; W_1; …]ᵀ + [b_0; b_1; …])

The projections stay the modules they were: after the first call their weights lie one behind the other in one memory
(`joined_storage`), so a state dict has the original's keys, memory does not grow, and an in-place update of a weight
is seen by the packed product. Where packing is not safe the modules themselves are called, and the reason is counted
for `explain`. Where gradients are wanted the products stay apart, and `linear_autograd` makes their gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..core import backend
from ..device.launch_bound import is_launch_bound
from ..guards.place import NAMESPACE
from ..launching.launch import collects
from . import joined_storage
from .linear_autograd import learned_projections

REASONS = {
    "not_linear": "a projection is no plain nn.Linear (an adapter or a quantised layer replaced it)",
    "observed": "a hook, a wrapped forward or a parametrisation watches a projection",
    "gradient": "gradients are wanted, of what no kernel makes them of",
    "not_a_tensor": "the input is no tensor",
    "watched": "torch.func, forward-mode derivatives, a dispatch mode (fake or proxy tensors) or a tensor class of "
    "its own takes part in the call",
    "traced": "torch.jit traces the call, and what packing asks of sizes would become part of the trace",
    "autocast": "autocast chooses the dtype of each product",
    "not_a_plain_parameter": "a weight is a distributed or otherwise special tensor",
    "different_weights": "the weights differ in dtype, device or input size, or one is empty",
    "strided": "a weight does not lie row by row, and what fills it in the order of its memory would notice",
    "device": "torch cannot give parts of this device's memory a storage of their own",
    "shared_storage": "something else uses a weight's memory (a state dict, `.data`, a larger tensor, a process)",
    "shared_weight": "a weight stands twice among the projections, or other projections have packed it",
    "capturing": "a graph was being captured at the first call, when nothing may be allocated",
}

_ALIGNED = 16
"""Elements: the outputs before a slice are a multiple of that, so that kernels may load it in whole vectors."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product of an input, a weight and a bias, as `F.linear` takes them."""
_PLAIN = (Tensor, nn.Parameter)

OF_THE_CALL = {"gradient", "not_a_tensor", "watched", "traced", "autocast", "shared_storage", "capturing"}
"""The reasons that another call may not have."""

_Kind = TypeVar("_Kind", bound=type[nn.Linear])
_casting: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, bool]] = weakref.WeakKeyDictionary()
"""The classes that a file marks, each with the `forward` that it had then, and whether that adds the bias."""

_packed_once: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""First projections of those that lie in one memory, or cannot: a graph to come finds them so. Each with the address
that its weight had: a weight that was moved since asks again."""


def packed_linear(input: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Return `tuple(projection(input) for projection in projections)`, as one product where that is safe.

    Args:
        input: `[N, I]`.
        projections: two or more `nn.Linear(I, O_i)`; biases may differ.

    Returns:
        One `[N, O_i]` for each projection; views of one `[N, ΣO_i]` where the product was packed.
    """
    if is_compiling() and backend.named_none():  # whose code calls the library without our questions
        return tuple(projection(input) for projection in projections)
    if is_launch_bound(input):
        if not backend.interposed() and _packed_once.get(projections[0]) == _address(projections[0]):
            return tuple(projection(input) for projection in projections)  # asking takes longer than two launches
        packed = packed_parameters(input, projections)
        if not (isinstance(packed, str) and packed in OF_THE_CALL):
            _packed_once[projections[0]] = _address(projections[0])
    return multiplied(input, projections, F.linear, _operator)


def packed_linear_dense(input: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Return what `packed_linear` does, where something may ask the results how they lie.

    One row is one product: its slices are contiguous, and begin where a tensor of their own could. Several rows would
    have to be copied apart, which costs what one product gains: they are as many products as projections.

    Args:
        input: `[N, I]`.
        projections: two or more `nn.Linear(I, O_i)`; biases may differ.

    Returns:
        One contiguous `[N, O_i]` for each projection.
    """
    one_row = isinstance(input, Tensor) and input.shape[:-1].numel() == 1
    if one_row and all(getattr(projection, "out_features", 1) % _ALIGNED == 0 for projection in projections):
        # of sizes of one no stride matters but to who asks: these are those of a tensor of its own
        return tuple(part.reshape(-1).view(part.shape) for part in packed_linear(input, *projections))
    return tuple(projection(input) for projection in projections)


def multiplied(
    input: Tensor, projections: Sequence[nn.Module], multiply: Multiply, operator: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Return what `packed_linear` does, the product computed by `multiply`, or by `operator` in a compiled graph."""
    reason = unsafe(input, projections)
    if reason == "gradient" and (learned := learned_projections(input, projections)) is not None:
        return learned
    if reason is not None:
        return _separately(input, projections, reason)
    weights = [_parameter(projection, "weight") for projection in projections]
    biases = [projection._parameters["bias"] for projection in projections]
    if torch.compiler.is_compiling():
        output = operator(weights, biases, input)
    elif isinstance(packed := _packed(weights, biases), str):
        return _separately(input, projections, packed)
    else:
        output = multiply(input, *packed)
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
    return _packed(weights, biases)


def _separately(input: Tensor, projections: Sequence[nn.Module], reason: str) -> tuple[Tensor, ...]:
    backend.count_fallback("packed_linear", reason, projections[0])
    return tuple(projection(input) for projection in projections)


def casts_weight(*, bias: bool) -> Callable[[_Kind], _Kind]:
    """Mark a class whose `forward` is `F.linear(x, self.weight.to(x.dtype))`, with the bias cast and added or not.

    Such a class keeps weights in fp32 and multiplies in the dtype of the activations.
    """

    def mark(kind: _Kind) -> _Kind:
        _casting[kind] = kind.forward, bias
        return kind

    return mark


def is_linear_for(input: Tensor, projection: nn.Module) -> bool:
    """Whether a projection of a marked class computes what an `nn.Linear` of its parameters would, for this input."""
    forward, adds_bias = _casting.get(type(projection), (None, False))
    if forward is None or type(projection).forward is not forward:
        return False
    weight, bias = (projection._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.dtype != input.dtype:
        return False
    return bias is None or (adds_bias and bias.dtype == input.dtype)


def unsafe(
    input: Tensor, projections: Sequence[nn.Module], classes: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> str | None:
    """Return why the projections have to be called themselves, a key of `REASONS`; None where weights will do."""
    if not isinstance(input, Tensor):
        return "not_a_tensor"
    if torch._C._get_tracing_state() is not None:
        return "traced"
    if not backend.is_plain(input) or backend.interposed():
        return "watched"
    gradient = torch.is_grad_enabled()
    if gradient and input.requires_grad:
        return "gradient"
    if backend.autocasts(input.device.type):
        return "autocast"
    for projection in projections:
        if type(projection) not in classes and not (nn.Linear in classes and is_linear_for(input, projection)):
            return "not_linear"
        if backend.observed(projection):
            return "observed"
        if "bias" not in projection._parameters:  # it was deleted
            return "not_a_plain_parameter"
        weight, bias = projection._parameters.get("weight"), projection._parameters["bias"]
        if not backend.is_plain(weight) or (bias is not None and not backend.is_plain(bias)):
            return "not_a_plain_parameter"
        assert weight is not None
        if gradient and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            return "gradient"
    return None


def _parameter(module: nn.Module, name: str) -> Tensor:
    """Return a parameter without the detour through `Module.__getattr__`, which costs 0.5 µs each."""
    parameter = module._parameters[name]
    if parameter is None:
        raise TypeError(f"{type(module).__name__} has no {name}")
    return parameter


def _address(module: nn.Module) -> int:
    """Return where a module's weight lies; 0 if it has none of the usual kind."""
    weight = module._parameters.get("weight")
    return weight.data_ptr() if type(weight) in _PLAIN else 0  # type: ignore[union-attr]


def _packed(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | str:
    """Return weights and biases as one each, moved into one memory where they are not yet; or why they cannot be."""
    weight = as_one(weights)
    if isinstance(weight, str):
        return weight
    present = [bias for bias in biases if bias is not None]
    if not present:
        return weight, None
    bias = as_one(present) if len(present) == len(biases) else _filled_up(weights, biases, present[0])
    return bias if isinstance(bias, str) else (weight, bias)


def as_one(tensors: Sequence[Tensor]) -> Tensor | str:
    """Return tensors as one, moved into one memory where they are not yet; or why they cannot be."""
    if type(tensors[0]) not in _PLAIN:  # admitted: it has no memory that could be joined
        return torch.cat(list(tensors))
    whole = joined_storage.joined(tensors)
    if whole is None and collects():  # a thread beside the one that computes: nothing moves under that one's hands
        return tensors[0].new_empty((sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]))
    return joined_storage.join(tensors) if whole is None else whole


def _filled_up(weights: Sequence[Tensor], biases: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Return biases of which some are missing as one: zeros keep the one rounding of a GEMM with bias."""
    missing = _zeros(max(weight.shape[0] for weight in weights), like.dtype, like.device)
    return torch.cat([missing[: w.shape[0]] if b is None else b for w, b in zip(weights, biases, strict=True)])


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return zeros, as a parameter: what is made of parameters alone is made once (`decode.constant_folding`)."""
    with torch.inference_mode(False):
        return nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)


def register(name: str, multiply: Multiply) -> Callable[..., Tensor]:
    """Register the operator that stands in compiled graphs: there the first run packs, as the first eager call does.

    The input comes last since torch, where it checks a graph's operators in their first run, holds the memory of the
    last argument if that is a parameter.
    """

    def run(weights: Sequence[Tensor], biases: Sequence[Tensor | None], input: Tensor) -> Tensor:
        packed = _packed(weights, biases)
        if isinstance(packed, str):
            backend.count_fallback("packed_linear", packed)
            return torch.cat([F.linear(input, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)
        weight, bias = packed
        return multiply(input, weight, bias)

    def batched(
        info: object, dims: tuple[object, object, int], weights: object, biases: object, input: Tensor
    ) -> tuple[Tensor, int]:
        """Map over inputs inside a compiled `vmap`: one more leading dimension. Weights are parameters, without."""
        return operator(weights, biases, input.movedim(dims[2], 0)), 0

    operator = backend.register(name, "(Tensor[] weights, Tensor?[] biases, Tensor input) -> Tensor", run, _fake)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=backend.library)
    return operator


def _fake(weights: Sequence[Tensor], biases: Sequence[Tensor | None], input: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


_operator = register("packed_linear", F.linear)
