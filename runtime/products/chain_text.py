"""The kernel of a chain of pointwise functions (`products.chain`): its text, made from the functions, and its launch.

    o[i] = f(g(a[i₁], b[i₂]), c[i₃], …)         i over the numbers of the output, iₙ what broadcasting makes of it

Shapes and strides stand in the text as numbers, so that an index is a sum of a few products, and chains of the same
structure are one kernel. What a function gives is rounded to the dtype that torch gives it, and products and sums are
not contracted: sums, products, quotients, roots, comparisons and casts are torch's, bit for bit. Other functions are
those of the vendor's library in fp32, as torch's are, and may differ in the last bit of it.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..core.launch import WAVE, Kernel, overlaps, pretends

BLOCK = 256
"""Numbers of a program."""
TYPES = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What torch computes in."""

if backend.triton_installed():
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from ..core.follow import follow

    @triton.jit
    def quotient(x, y):  # type: ignore[no-untyped-def]
        """Return what is to the nearest of doubles."""
        return x / y

    @triton.jit
    def tanh_by_exp(x):  # type: ignore[no-untyped-def]
        """Return what the vendor's library does not give an interpreter."""
        return (2.0 / (1.0 + tl.exp(x.to(tl.float64) * -2.0)) - 1.0).to(x.dtype)


class Read(NamedTuple):
    """What a function reads of another's numbers, or of memory, at a place of its own shape."""

    node: Node
    strides: tuple[int, ...]
    shape: tuple[int, ...] = ()
    """Of what a `gather` looks up in, to which the strides belong."""


class Node:
    """A function of numbers, `kind` one of `_TEXTS`, or memory (`leaf`).

    Args:
        kind: the function.
        dtype: of what it gives.
        shape: likewise, contiguous.
        of: what it is given.
        at: the dtype that its operands are brought to; by default that of what it gives.
        tensor: the memory of a leaf.
    """

    def __init__(
        self, kind: str, dtype: torch.dtype, shape: Sequence[int], of: Sequence[Read | float] = (),
        at: torch.dtype | None = None, tensor: Tensor | None = None,
    ):  # fmt: skip
        self.kind, self.dtype, self.shape = kind, dtype, tuple(shape)
        self.of, self.at, self.tensor = tuple(of), at or dtype, tensor
        before = [one.node for one in self.of if isinstance(one, Read)]
        self.nodes: frozenset[Node] = frozenset({self}).union(*(node.nodes for node in before))
        """It and all that it is computed from."""

    @property
    def functions(self) -> int:
        """How many functions it takes."""
        return sum(node.kind != "leaf" for node in self.nodes)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that it is computed from."""
        return [node.tensor for node in self.nodes if node.tensor is not None]


_TEXTS = {
    "same": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "{0} * -1",
    "abs": "tl.abs({0})", "div": "{div}({0}, {1})", "sqrt": "{sqrt}({0})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}",
    "isinf": "tl.abs({0}) == float('inf')", "isnan": "{0} != {0}",
    "where": "tl.where({0}, {1}, {2})",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "exp": "{library}.exp({0})", "log": "{library}.log({0})", "erf": "{library}.erf({0})",
    "tanh": "{tanh}({0})", "rsqrt": "{library}.rsqrt({0})",
    "sigmoid": "{div}(1.0, 1.0 + {library}.exp({0} * -1))",
    "silu": "{div}({0}, 1.0 + {library}.exp({0} * -1))",
    "gelu": "{0} * 0.5 * (1.0 + {library}.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "0.5 * {0} * (1.0 + {tanh}(0.7978845608028654 * ({0} + 0.044715 * ({0} * {0} * {0}))))",
}  # fmt: skip
_TRUTHS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isinf", "isnan"})
_COMPARES = _TRUTHS | {"where", "maximum", "minimum"}
"""Where a number is brought to the operands' dtype before anything is computed; elsewhere to what is computed in."""
_COMPILED = {"library": "libdevice", "tanh": "libdevice.tanh"}
_INTERPRETED = {"library": "tl", "tanh": "tanh_by_exp"}
"""Triton's interpreter has no vendor's library."""
_ROUNDED = {"div": "tl.div_rn", "sqrt": "tl.sqrt_rn"}
"""To the nearest: `/` and `tl.sqrt` are approximate in fp32."""
_DOUBLE = {"div": "quotient", "sqrt": "tl.sqrt"}


class _Text:
    """Lines that compute nodes at indices."""

    def __init__(self, mask: str, interpreted: bool):
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        self.interpreted = interpreted
        self.mask = mask
        self._names: dict[str, str] = {}
        self._values: dict[tuple[Node, str], str] = {}
        self._pointers: dict[tuple[Any, ...], str] = {}

    @property
    def pointers(self) -> list[str]:
        """The names of the pointers to `tensors`."""
        return [*self._pointers.values()]

    def name(self, expression: str) -> str:
        """Return the variable that has an expression's value."""
        if expression not in self._names:
            self._names[expression] = f"v{len(self._names)}"
            self.lines.append(f"{self._names[expression]} = {expression}")
        return self._names[expression]

    def load(self, tensor: Tensor, index: str) -> str:
        """Return the number of a tensor at an index from where it begins."""
        at = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype)
        if at not in self._pointers:
            self._pointers[at] = f"in{len(self.tensors)}_ptr"
            self.tensors.append(tensor)
        if index.isdecimal():  # a block of one, as all else are blocks
            return self.name(f"tl.load({self._pointers[at]} + tl.full((1,), {index}, tl.int32))")
        return self.name(f"tl.load({self._pointers[at]} + {index}{self.mask})")

    def value(self, node: Node, index: str) -> str:
        """Return the variable with what a node is at an index into its numbers."""
        if (node, index) not in self._values:
            self._values[node, index] = self._value(node, index)
        return self._values[node, index]

    def _value(self, node: Node, index: str) -> str:
        if node.kind == "leaf":
            assert node.tensor is not None
            return self.load(node.tensor, index)
        if node.kind == "full":
            return self.cast(self.number(node.of[0], node.dtype), _wide(node.dtype), node.dtype)  # type: ignore[arg-type]
        if node.kind == "arange":
            start, step = (self.number(number, node.dtype) for number in node.of)  # type: ignore[arg-type]
            return self.name(f"{start} + {index} * {step}")
        wide = _wide(node.at)
        if node.kind == "div" and not isinstance(node.of[1], Read) and not self.interpreted:
            inverse = float(1.0 / torch.tensor(node.of[1], dtype=wide))  # as torch does on a GPU
            node = Node("mul", node.dtype, node.shape, (node.of[0], inverse))
        if node.kind == "gather":
            return self._gathered(node, index)
        given = [self.operand(node, one, index) for one in node.of]
        names = (_INTERPRETED if self.interpreted else _COMPILED) | (_DOUBLE if wide == torch.float64 else _ROUNDED)
        if node.kind == "same":
            return self.cast(given[0], wide, node.dtype)
        made = torch.bool if node.kind in _TRUTHS else wide
        return self.cast(self.name(_TEXTS[node.kind].format(*given, **names)), made, node.dtype)

    def operand(self, node: Node, one: Read | float, index: str) -> str:
        """Return the variable with an operand of a node, in what it is computed in."""
        if not isinstance(one, Read):
            return self.number(one, node.at, exact=node.kind not in _COMPARES)
        value = self.value(one.node, self.index(node.shape, one, index))
        if one is node.of[0] and node.kind == "where":
            return self.cast(value, one.node.dtype, torch.bool)
        return self.cast(self.cast(value, one.node.dtype, node.at), node.at, _wide(node.at))

    def _gathered(self, node: Node, index: str) -> str:
        """Return the variable with what stands in a table; beyond its ends, where torch would complain, the first."""
        table, *given = node.of
        assert isinstance(table, Read)
        at = []
        for one, size, stride in zip(given, table.shape, table.strides, strict=True):
            place = self.operand(node, one, index)
            place = self.name(f"tl.where({place} < 0, {place} + {size}, {place})")
            at.append(f"tl.where(({place} >= 0) & ({place} < {size}), {place}, 0) * {stride}")
        return self.value(table.node, self.name(" + ".join(at)))

    def number(self, number: float, dtype: torch.dtype, exact: bool = True) -> str:
        """Return the variable with a number, rounded to the dtype that is computed in, or first to `dtype` itself."""
        wide = _wide(dtype)
        if not wide.is_floating_point:
            return self.name(f"tl.full((1,), {bool(number) if wide == torch.bool else int(number)}, {TYPES[wide]})")
        value = float(torch.tensor(number, dtype=wide if exact else dtype))
        text = repr(value) if math.isfinite(value) else f"float('{value}')"
        return self.name(f"tl.full((1,), {text}, {TYPES[wide]})")

    def cast(self, value: str, dtype: torch.dtype, to: torch.dtype) -> str:
        """Return a variable in another dtype, rounded as torch rounds."""
        if dtype == to:
            return value
        if to == torch.bool:
            return self.name(f"{value} != 0")
        if to in _WIDE and dtype != torch.float32:
            value = self.cast(value, dtype, torch.float32)
        return self.name(f"{value}.to({TYPES[to]})")

    def index(self, shape: Sequence[int], read: Read, index: str) -> str:
        """Return the index into what is read, for an index into the numbers of `shape`."""
        parts, runs, inner = list[str](), list[list[int]](), 1
        # of runs, from the last dimension: size, stride, and the numbers of all dimensions behind
        for size, stride in zip(shape[::-1], read.strides[::-1], strict=True):
            if size != 1:
                if runs and stride == runs[-1][0] * runs[-1][1]:
                    runs[-1][0] *= size
                else:
                    runs.append([size, stride, inner])
                inner *= size
        for size, stride, behind in runs:
            if stride:
                place = f"{index} // {behind}" if behind > 1 else index
                place = f"{place} % {size}" if size * behind < inner else place
                parts.append(f"({place}) * {stride}" if stride > 1 else f"({place})" if place != index else place)
        text = " + ".join(parts) or "0"
        return text if text == index or text.isdecimal() else self.name(text)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def text_of(outs: Sequence[tuple[Node, Tensor]], interpreted: bool) -> tuple[str, list[Tensor], int]:
    """Return the text of the kernel that writes nodes of one size, the tensors that it reads, and its block."""
    size = outs[0][1].numel()
    block = max(WAVE, min(BLOCK, 1 << (size - 1).bit_length()))
    text = _Text(", mask=mask" if size % block else "", interpreted)
    stores = []
    for number, (node, out) in enumerate(outs):
        where = "i" if out.is_contiguous() else text.index(node.shape, Read(node, out.stride()), "i")
        stores.append(f"tl.store(out{number}_ptr + {where}, {text.value(node, 'i')}{text.mask})")
    pointers = [f"out{number}_ptr" for number in range(len(outs))] + text.pointers
    lines = [
        "follow(OVERLAP)",
        f"i = tl.program_id(0) * {block} + tl.arange(0, {block})",
        *([f"mask = i < {size}"] if text.mask else []),
        *text.lines,
        *stores,
    ]
    head = f"@triton.jit\ndef _chain_kernel({', '.join(pointers)}, OVERLAP: tl.constexpr):\n"
    return head + "".join(f"    {line}\n" for line in lines), text.tensors, block


@functools.cache
def kernel_of(text: str) -> Kernel:
    """Return the kernel of a text, where Triton finds it as it finds that of a file."""
    name = f"<chain {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    scope: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, "libdevice": libdevice}
    scope |= {"follow": follow, "quotient": quotient, "tanh_by_exp": tanh_by_exp}
    exec(compile(text, name, "exec"), scope)
    _chain_kernel = scope["_chain_kernel"]
    chain_kernel = Kernel(_chain_kernel, contracts=False)
    return chain_kernel


def launch_chain(outs: Sequence[tuple[Node, Tensor]]) -> None:
    """Write the numbers of nodes of one size, in one kernel."""
    first = outs[0][1]
    text, tensors, block = text_of(outs, not (first.is_cuda or pretends()))
    programs, warps = -(-first.numel() // block), max(1, block // (2 * WAVE))
    given = (*(out for _, out in outs), *tensors)
    overlap = overlaps(first)
    with backend.device_guard(first):
        kernel_of(text).launch((programs, 1, 1), warps, given, (), (), (), (overlap,), overlap=overlap)
