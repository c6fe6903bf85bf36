"""What torch's operations are in the ring: functions of elements, by the operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ring

_aten = torch.ops.aten


def elements(value: Any) -> Tensor:
    """Return what a tensor or a number is in the ring."""
    own = getattr(value, "elements", None)
    if own is not None:
        return own
    return ring.elements(value) if isinstance(value, Tensor) else torch.tensor(ring.element(_in_fp32(float(value))))


def _in_fp32(number: float) -> float:
    """Round a number of the host, as a kernel that is given it and a tensor of fp32 do."""
    return float(torch.tensor(number, dtype=torch.float32))


def _dims(dim: Any, x: Tensor) -> list[int]:
    return list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)


def _add(a: Any, b: Any, alpha: float = 1) -> Tensor:
    return ring.add(elements(a), elements(b) if alpha == 1 else ring.mul(elements(b), elements(alpha)))


def _sub(a: Any, b: Any, alpha: float = 1) -> Tensor:
    return ring.sub(elements(a), elements(b) if alpha == 1 else ring.mul(elements(b), elements(alpha)))


def _mul(a: Any, b: Any) -> Tensor:
    return ring.mul(elements(a), elements(b))


def _div(a: Any, b: Any) -> Tensor:
    return ring.div(elements(a), elements(b))


def _pow(a: Any, exponent: Any) -> Tensor:
    if not isinstance(exponent, (int, float)) or isinstance(a, (int, float)):
        raise ring.Meaningless("a power with an exponent that is computed")
    if exponent == int(exponent):
        found = ring.power(elements(a), abs(int(exponent)))
        return found if exponent >= 0 else ring.inverse(found)
    named = {0.5: "sqrt", -0.5: "rsqrt"}
    return ring.oracle(named.get(exponent, f"pow {exponent}"), elements(a))


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = _dims(dim, x)
    count = math.prod(x.shape[one] for one in dims)
    return ring.div(ring.total(elements(x), dims, keepdim), torch.tensor(count))


def _sum(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    return ring.total(elements(x), _dims(dim, x), keepdim)


def _var_mean(x: Any, dim: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    mean = _mean(x, dim, True)
    centred = ring.sub(elements(x), mean)
    return _mean(ring.mul(centred, centred), dim, keepdim), mean


def _product(a: Any, b: Any) -> Tensor:
    return ring.matmul(elements(a), elements(b))


def _addmm(bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _product(a, b)
    return ring.add(_mul(bias, beta), product if alpha == 1 else ring.mul(product, elements(alpha)))


def softmax(x: Any, dim: int, half: bool = False) -> Tensor:
    """Return the softmax over a dimension: the largest need not be taken off."""
    exponents = ring.exp(elements(x))
    return ring.div(exponents, ring.total(exponents, dim, True))


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, None, None]:
    dims = list(range(-len(shape), 0))
    variance, mean = _var_mean(x, dims, True)
    normed = ring.mul(ring.sub(elements(x), mean), ring.oracle("rsqrt", ring.add(variance, elements(eps))))
    normed = normed if weight is None else ring.mul(normed, elements(weight))
    return normed if bias is None else ring.add(normed, elements(bias)), None, None


def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, c: int, hxw: int, groups: int, eps: float
) -> tuple[Tensor, None, None]:
    parts = elements(x).reshape(n, groups, -1)
    normed = _layer_norm(parts, parts.shape[2:], None, None, eps)[0].view(n, c, -1)
    for number, function in ((weight, ring.mul), (bias, ring.add)):
        normed = normed if number is None else function(normed, elements(number)[:, None])
    return normed.view(x.shape), None, None


def _gelu(x: Any, approximate: str = "none") -> Tensor:
    value = elements(x)
    if approximate == "none":
        inner = ring.oracle("erf", ring.mul(value, elements(math.sqrt(0.5))))
        return ring.mul(ring.mul(value, elements(0.5)), ring.add(inner, torch.ones_like(inner)))
    cube = ring.mul(elements(0.044715), ring.power(value, 3))
    inner = ring.mul(elements(math.sqrt(2 / math.pi)), ring.add(value, cube))
    return ring.mul(ring.mul(value, elements(0.5)), ring.add(ring.tanh(inner), torch.ones_like(inner)))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    found = elements(x)
    found = found if min is None else ring.maximum(found, elements(min))
    return found if max is None else ring.minimum(found, elements(max))


def _ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of an order: values, and their places where it has some."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = function(ring.key(elements(x)), *args, **kwargs)
        return ring.of_key(found) if isinstance(found, Tensor) else (ring.of_key(found[0]), found[1])

    return run


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, out: Any, groups: int
) -> Tensor:
    value, taps = elements(x), elements(weight)
    if transposed or value.dim() != 3:
        raise ring.Meaningless("a convolution of more than one dimension")
    value = torch.nn.functional.pad(value, (padding[0], padding[0]))
    width = (taps.shape[2] - 1) * dilation[0] + 1
    windows = value.unfold(2, width, stride[0])[..., :: dilation[0]]  # [N, C, T, K]
    n, _, length, _ = windows.shape
    windows = windows.reshape(n, groups, -1, length, taps.shape[2]).permute(0, 1, 3, 2, 4).flatten(3)
    found = ring.matmul(windows, taps.reshape(groups, -1, windows.shape[3]).transpose(1, 2))
    found = found.permute(0, 1, 3, 2).reshape(n, -1, length)
    return found if bias is None else ring.add(found, elements(bias)[:, None])


def _solve_triangular(a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Return x of `a x = b`, row by row."""
    if upper or not left:
        raise ring.Meaningless("an upper triangle, or one to the right")
    matrix, found = elements(a), elements(b).clone()
    matrix, found = (
        matrix.expand(*found.shape[:-2], *matrix.shape[-2:]),
        found.expand(*matrix.shape[:-2], *found.shape[-2:]).clone(),
    )
    for row in range(matrix.shape[-1]):
        known = ring.matmul(matrix[..., row : row + 1, :row], found[..., :row, :])[..., 0, :]
        rest = ring.sub(found[..., row, :], known)
        found[..., row, :] = rest if unitriangular else ring.div(rest, matrix[..., row, row, None])
    return found


def _named(name: str) -> Callable[[Any], Tensor]:
    return lambda x: ring.oracle(name, elements(x))


def _of(function: Callable[..., Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: function(elements(x))


def _like(number: int) -> Callable[..., Tensor]:
    return lambda x: torch.full_like(elements(x), number)


def _new(number: int) -> Callable[..., Tensor]:
    return lambda x, size: torch.full(tuple(size), number)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as its definition says."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


def _fused_attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as torch calls its kernel for a CPU."""
    return elements(_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)), None


_ORACLES = (
    "rsqrt", "sqrt", "cos", "sin", "log", "log1p", "log2", "erf", "exp2", "floor", "ceil",
)  # fmt: skip
_IN_PLACE = (
    "add", "sub", "mul", "div", "neg", "pow", "clamp", "relu", "sigmoid", "tanh", "exp", "copy", "fill", "zero",
    "masked_fill", "index_add", "scatter_add",
)  # fmt: skip
_MOVES = (
    "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "slice", "select", "cat", "stack",
    "clone", "contiguous", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "index", "gather",
    "embedding", "alias", "detach", "as_strided", "repeat", "repeat_interleave", "chunk", "flatten",
    "index_copy", "index_copy_", "index_put", "index_put_", "_unsafe_index", "index_select", "narrow", "unfold",
    "roll", "flip", "tril", "triu", "constant_pad_nd", "scatter", "scatter_", "select_scatter", "slice_scatter",
    "diagonal", "lift_fresh", "view_as", "expand_as", "unsqueeze_", "squeeze_", "transpose_", "masked_select",
    "_reshape_alias", "pixel_shuffle",
)  # fmt: skip

FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.nn.functional.scaled_dot_product_attention: _attention}

COMPUTES: dict[Any, Callable[..., Any]] = {
    _aten.add: _add,
    _aten.sub: _sub,
    _aten.rsub: lambda a, b, alpha=1: _sub(b, a, alpha),
    _aten.mul: _mul,
    _aten.div: _div,
    _aten.neg: _of(ring.neg),
    _aten.reciprocal: _of(ring.inverse),
    _aten.pow: _pow,
    _aten.square: lambda x: _pow(x, 2),
    _aten.mean: _mean,
    _aten.sum: _sum,
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.matmul: _product,
    _aten.addmm: _addmm,
    _aten.baddbmm: _addmm,
    _aten._softmax: softmax,
    _aten._safe_softmax: softmax,
    _aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention,
    _aten.native_layer_norm: _layer_norm,
    _aten.native_group_norm: _group_norm,
    _aten.exp: _of(ring.exp),
    _aten.expm1: lambda x: ring.sub(ring.exp(elements(x)), torch.tensor(1)),
    _aten.sigmoid: _of(ring.sigmoid),
    _aten.tanh: _of(ring.tanh),
    _aten.silu: lambda x: ring.mul(elements(x), ring.sigmoid(elements(x))),
    _aten.gelu: _gelu,
    _aten.relu: lambda x: _clamp(x, min=0),
    _aten.softplus: _named("softplus"),
    _aten.clamp: _clamp,
    _aten.clamp_min: _clamp,
    _aten.clamp_max: lambda x, most: _clamp(x, max=most),
    _aten.maximum: lambda a, b: ring.maximum(elements(a), elements(b)),
    _aten.minimum: lambda a, b: ring.minimum(elements(a), elements(b)),
    _aten.abs: lambda x: torch.where(ring.key(elements(x)) < 0, ring.neg(elements(x)), elements(x)),
    _aten.topk: _ordered(torch.topk),
    _aten.sort: _ordered(torch.sort),
    _aten.max: _ordered(torch.max),
    _aten.min: _ordered(torch.min),
    _aten.amax: _ordered(torch.amax),
    _aten.amin: _ordered(torch.amin),
    _aten.convolution: _convolution,
    _aten.linalg_solve_triangular: _solve_triangular,
    _aten.cumsum: lambda x, dim: elements(x).cumsum(dim) % ring.modulus(),
    _aten.where: lambda condition, a, b: torch.where(condition, elements(a), elements(b)),
    _aten.masked_fill: lambda x, mask, value: torch.where(mask, elements(value), elements(x)),
    _aten.index_add: lambda x, dim, index, y: elements(x).index_add(dim, index, elements(y)) % ring.modulus(),
    _aten.scatter_add: lambda x, dim, index, y: elements(x).scatter_add(dim, index, elements(y)) % ring.modulus(),
    _aten._to_copy: lambda x: elements(x).clone(),
    _aten.copy: lambda x, y: elements(y).expand(x.shape),
    _aten.fill: lambda x, value: elements(value).expand(x.shape),
    _aten.zero: _like(0),
    _aten.zeros_like: _like(0),
    _aten.ones_like: _like(1),
    _aten.empty_like: _like(0),
    _aten.full_like: lambda x, value: elements(value).expand(x.shape).clone(),
    _aten.new_zeros: _new(0),
    _aten.new_ones: _new(1),
    _aten.new_empty: _new(0),
    **{getattr(_aten, name): _named(name) for name in _ORACLES},
}
"""What an operation makes of elements; the first of several is one of them."""

INTO: dict[Any, Any] = {getattr(_aten, f"{name}_"): getattr(_aten, name) for name in _IN_PLACE}
"""Operations in place, and those that they are."""

MOVES = {getattr(_aten, name) for name in _MOVES if hasattr(_aten, name)}
"""Operations that move elements and compute nothing."""
COMPARES = {getattr(_aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
ASKS = {getattr(_aten, name) for name in ("argmax", "argmin", "argsort", "isnan", "any", "all")}
"""Operations on the order of elements whose results are none."""
