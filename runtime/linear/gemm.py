"""Which library or kernel computes a linear projection, chosen by the size of the product.

M rows of the input, K in_features, N out_features:

    y = x Wᵀ + b

A path returns the product, or None where it cannot; then `F.linear`, the vendor's library as torch calls it, does it.
`gemm.json` beside the package's modeling file says which path was fastest for a size on a chip. Without an entry few
rows take the kernels of `linear` and `skinny`, and from `threshold()` rows on aiter is asked, which has gates.
Nothing of torch is replaced: a rewritten forward calls `routed_linear`, and `routed_packed_linear` for what is packed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..aiter import aiter_gemm
from ..core import backend
from ..launching import card_tables
from . import packing, preshuffle
from .linear import few_rows, takes_few_rows
from .skinny import MOST_ROWS

THRESHOLD = 64
"""Rows from which aiter is asked: below, a general product is latency, and its dispatch costs more than it gains."""

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]


class Path(NamedTuple):
    """A way to compute a product."""

    run: Run
    """Of input `[..., K]`, weight `[N, K]` and bias `[N]` or None; returns `[..., N]`, or None where it cannot."""
    takes_bias: bool = True
    """Whether it adds the bias; else that is an operator behind it, and rounds once more."""
    many_rows: bool = False
    """Whether it is only for `threshold()` rows and more."""


class Product(NamedTuple):
    """A size, as the tables have it: rows are rounded up to a power of two."""

    rows: int
    outputs: int
    inputs: int
    dtype: str
    bias: bool

    def __str__(self) -> str:
        return f"{self.rows}x{self.outputs}x{self.inputs} {self.dtype}" + (" bias" if self.bias else "")


PATHS: dict[str, Path] = {}
"""By the name that the table uses."""

_counts: Counter[str] = Counter()
_listener: Callable[[Product, str], None] | None = None
_tried: dict[Product, str] = {}
_threshold = THRESHOLD


def offer(name: str, path: Path) -> None:
    """Add a path, or replace one."""
    PATHS[name] = path


def routed_linear(input: Tensor, projection: nn.Module) -> Tensor:
    """Return `projection(input)`, computed by the path for its size.

    The module itself is called, and the reason counted, where it is no plain `nn.Linear`, where something observes it,
    under autocast and where gradients are wanted: the reasons are those of `packing.REASONS`.

    Args:
        input: `[..., K]`.
        projection: `nn.Linear(K, N)`.

    Returns:
        `[..., N]`.
    """
    reason = packing.unsafe(input, (projection,))
    if reason is not None:
        backend.count_fallback("routed_linear", reason, projection)
        output: Tensor = projection(input)
        return output
    weight = projection._parameters["weight"]
    assert weight is not None
    result: Tensor = _operator(input, weight, projection._parameters["bias"])
    return result


def routed_packed_linear(input: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Return `packed_linear(input, *projections)`, the one product computed by the path for its size.

    Args:
        input: `[..., K]`.
        projections: two or more `nn.Linear(K, N_i)`.

    Returns:
        One `[..., N_i]` for each projection.
    """
    multiply = functools.partial(_product_of_parts, projections)
    return packing.multiplied(input, projections, multiply, _packed_operator)


def _product_of_parts(projections: Sequence[nn.Module], input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `product` of a packed weight, which is told the parameters that it is made of."""
    preshuffle.tell(weight, [projection._parameters["weight"] for projection in projections])
    return product(input, weight, bias)


def product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `input @ weight.T + bias` by the path for its size."""
    if input.numel() and input.dtype == weight.dtype and backend.get_backend() != "reference":
        size = size_of(input, weight, bias)
        rows = input.numel() // weight.shape[1]
        name = route(size, rows, weight.get_device() if weight.is_cuda else None)
        if _listener is not None:
            _listener(size, name)
        found = by_path(name, input, weight, bias, rows)
        if found is not None:
            _counts[name] += 1
            return found
    _counts["vendor"] += 1
    return F.linear(input, weight, bias)


def by_path(name: str, input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor | None:
    """Return the product by one path, None where it cannot; a bias that it does not take is added behind it."""
    path = PATHS.get(name)
    if path is None or (path.many_rows and rows < _threshold):
        return None
    if bias is None or path.takes_bias:
        return path.run(input, weight, bias)
    found = path.run(input, weight, None)
    return None if found is None else found + bias


def route(size: Product, rows: int, device: int | None) -> str:
    """Return the name of the path for a size of `rows` rows: tried out, as the table says, or by the rule."""
    name = _tried.get(size) if _tried else None
    return name or _table(device).get(str(size)) or rule(rows)


def rule(rows: int) -> str:
    """Return the path for a size that the table does not have."""
    if rows <= MOST_ROWS:
        return "skinny"
    return "aiter" if rows >= _threshold else "vendor"


def size_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    """Return the size under which the tables have a product."""
    outputs, inputs = weight.shape
    rows = input.numel() // inputs
    return Product(1 << (rows - 1).bit_length(), outputs, inputs, _DTYPES[weight.dtype], bias is not None)


class _Names(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        return self.setdefault(dtype, str(dtype).removeprefix("torch."))


_DTYPES = _Names()


def threshold() -> int:
    """Return the rows from which aiter is asked."""
    return _threshold


def set_threshold(rows: int) -> None:
    """Ask aiter from so many rows on, where the table says nothing.

    Raises:
        ValueError: if `rows` is less than 1.
    """
    global _threshold
    if rows < 1:
        raise ValueError(f"a threshold of {rows} rows: it has to be 1 or more")
    _threshold = rows


# ---- tables ----


@card_tables.cached
def _table(device: int | None) -> Mapping[str, str]:
    name = "cpu" if device is None else torch.cuda.get_device_properties(device).name
    chip = card_tables.read(card_tables.GEMM).get(name, {})
    found = {size: entry["path"] for size, entry in chip.get("products", {}).items()}
    for path in sorted({*found.values()} - {*PATHS}):
        backend.warn_once(f"gemm.json says '{path}', which is no path here ({', '.join(PATHS)}): torch multiplies")
    return found


def try_out(entries: Mapping[Product, str]) -> None:
    """Put entries before the table, in place of those tried out before."""
    global _tried
    _tried = dict(entries)


def listen(listener: Callable[[Product, str], None] | None) -> None:
    """Tell `listener` of every product and the path that was asked; None for nobody."""
    global _listener
    _listener = listener


def counts() -> dict[str, int]:
    """Return how many products each path computed since the process began."""
    return dict(_counts)


# ---- paths ----


def _skinny(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    if not takes_few_rows(input) or not weight.is_contiguous() or weight.device != input.device:
        return None
    return few_rows(input, weight, bias, None, None)


def _preferring(library: str) -> Run:
    """Return a product by one of AMD's two libraries; the preference is torch's and holds for the call.

    Another thread's product in the same moment may take that library too: the same numbers from other kernels.
    """

    def run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if torch.version.hip is None or not input.is_cuda:
            return None
        prefer = torch.backends.cuda.preferred_blas_library
        before = prefer()
        prefer(library)
        try:
            return F.linear(input, weight, bias)
        finally:
            prefer(before)

    return run


offer("vendor", Path(F.linear))
offer("skinny", Path(_skinny))
offer("hipblaslt", Path(_preferring("hipblaslt")))
offer("rocblas", Path(_preferring("hipblas")))
offer("aiter", Path(aiter_gemm.mm))
offer("preshuffled", Path(preshuffle.multiply, takes_bias=False, many_rows=True))


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


_operator = backend.register("routed_linear", "(Tensor input, Tensor weight, Tensor? bias) -> Tensor", product, _fake)
_packed_operator = packing.register("routed_packed_linear", product)


def describe_process() -> list[str]:
    """Return a line for `explain`."""
    return [f"products: {', '.join(f'{count} by {name}' for name, count in sorted(_counts.items()))}"] * bool(_counts)
