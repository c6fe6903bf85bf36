"""The kernel of a chain of pointwise functions (`lazy.pointwise_fusion`): its text and its launch.

    o[i] = f(g(a[i₁], b[i₂]), c[i₃], …)         i over the numbers of the output, iₙ what broadcasting makes of it

Shapes and strides stand in the text as numbers, so that an index is a sum of a few products, and chains of the same
structure are one kernel. Where a kernel reads along one dimension and writes along another they are arguments, which
serve other sizes, too. What a function gives is rounded to the dtype that torch gives it, and products and sums are
not contracted: sums, products, quotients, roots, comparisons and casts are torch's, bit for bit. Other functions are
those of the vendor's library in fp32, as torch's are, and may differ in the last bit of it.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps, pretends
from .fusion_place import Place, by_coordinates, in_order, part_of

BLOCK = 256
"""Numbers of a program, where each launch counts: two a thread."""
LARGE = 1 << 16
"""Numbers of a result from which on memory counts, not the launch."""
LARGE_BLOCK = 1024
"""Numbers of a program then: eight a thread, 128 bits of 16-bit numbers."""
TILE = 64
"""Rows and columns of a program that reads along the one and writes along the other."""
SHORTEST = 16
"""Numbers of a dimension along which it is worth reading: 32 bytes of 16-bit numbers, what memory gives at once."""
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

    from ..device.pdl import follow

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
        joined: of a `cat`, the dimension, and the size in it of each of `of`.
    """

    def __init__(
        self, kind: str, dtype: torch.dtype, shape: Sequence[int], of: Sequence[Read | float] = (),
        at: torch.dtype | None = None, tensor: Tensor | None = None,
        joined: tuple[int, tuple[int, ...]] | None = None,
    ):  # fmt: skip
        self.kind, self.dtype, self.shape, self.joined = kind, dtype, tuple(shape), joined
        self.of, self.at, self.tensor = tuple(of), at or dtype, tensor
        before = [one.node for one in self.of if isinstance(one, Read)]
        self._before: frozenset[Node] = frozenset(before).union(*(node._before for node in before))

    @property
    def nodes(self) -> frozenset[Node]:
        """It and all that it is computed from; made anew, since what holds itself would hold memory for long."""
        return self._before | {self}

    @property
    def functions(self) -> int:
        """How many functions it takes."""
        return sum(node.kind != "leaf" for node in self.nodes)

    @property
    def key(self) -> Hashable:
        """What two nodes have in common that give the same numbers, while nobody writes what they read."""
        known: dict[Node, int] = {}
        parts: list[Hashable] = []

        def number(node: Node) -> int:
            if node not in known:
                reads = [
                    (number(one.node), one.strides, one.shape) if isinstance(one, Read) else one for one in node.of
                ]
                memory = None if node.tensor is None else node.tensor.untyped_storage()._cdata
                start = None if node.tensor is None else node.tensor.storage_offset()
                parts.append((node.kind, node.dtype, node.shape, node.joined, node.at, memory, start, *reads))
                known[node] = len(known)
            return known[node]

        number(self)
        return tuple(parts)

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


class Text(NamedTuple):
    """The kernel of a chain, and how it is launched."""

    text: str
    tensors: list[Tensor]
    """That it reads, in the order of its arguments."""
    programs: int
    warps: int
    numbers: tuple[int, ...] = ()
    """Arguments of the launch behind the tensors."""


class Written:
    """Lines that compute nodes at indices.

    Args:
        mask: the variable that says which indices are there; empty where all are.
        interpreted: whether Triton's interpreter runs them.
        zeros: the variable of zeros in the shape of a program, where coordinates have parts of that: what is loaded
            under a mask has the mask's shape.
    """

    def __init__(self, mask: str, interpreted: bool, zeros: str = ""):
        self.zeros = zeros
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        self.interpreted = interpreted
        self.mask = mask
        self._names: dict[str, str] = {}
        self._values: dict[tuple[Node, str, str], str] = {}
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
        index = f"{index} + {self.zeros}" if self.mask and self.zeros else index
        return self.name(f"tl.load({self._pointers[at]} + {index}{self.masked})")

    @property
    def masked(self) -> str:
        """The argument of a load or store for the indices that are there."""
        return f", mask={self.mask}" if self.mask else ""

    def value(self, node: Node, place: Place) -> str:
        """Return the variable with what a node is at a place in its numbers."""
        at = node, place.flat, self.mask
        if at not in self._values:
            self._values[at] = self._value(node, place)
        return self._values[at]

    def read(self, one: Read, place: Place) -> str:
        """Return the variable with what is read from a place in the numbers of who reads."""
        if one.node.tensor is not None:
            return self.load(one.node.tensor, place.address(one.strides))
        return self.value(one.node, place.within(one.node.shape, one.strides))

    def _value(self, node: Node, place: Place) -> str:
        if node.tensor is not None:
            return self.load(node.tensor, place.flat)
        if node.kind == "full":
            return self.cast(self.number(node.of[0], node.dtype), _wide(node.dtype), node.dtype)  # type: ignore[arg-type]
        if node.kind == "arange":
            start, step = (self.number(number, node.dtype) for number in node.of)  # type: ignore[arg-type]
            return self.name(f"{start} + {place.flat} * {step}")
        wide = _wide(node.at)
        if node.kind == "div" and not isinstance(node.of[1], Read) and not self.interpreted:
            divisor = torch.tensor(node.of[1], dtype=torch.float64, device="cpu")
            inverse = float((1.0 / divisor).to(wide))  # as torch does on a GPU
            node = Node("mul", node.dtype, node.shape, (node.of[0], inverse))
        if node.kind == "gather":
            return self._gathered(node, place)
        if node.joined is not None:
            return self._joined(node, place, *node.joined)
        given = [self.operand(node, one, place) for one in node.of]
        names = (_INTERPRETED if self.interpreted else _COMPILED) | (_DOUBLE if wide == torch.float64 else _ROUNDED)
        if node.kind == "same":
            return self.cast(given[0], wide, node.dtype)
        made = torch.bool if node.kind in _TRUTHS else wide
        return self.cast(self.name(_TEXTS[node.kind].format(*given, **names)), made, node.dtype)

    def operand(self, node: Node, one: Read | float, place: Place) -> str:
        """Return the variable with an operand of a node, in what it is computed in."""
        if not isinstance(one, Read):
            return self.number(one, node.at, exact=node.kind not in _COMPARES)
        value = self.read(one, place)
        if one is node.of[0] and node.kind == "where":
            return self.cast(value, one.node.dtype, torch.bool)
        return self.cast(self.cast(value, one.node.dtype, node.at), node.at, _wide(node.at))

    def _gathered(self, node: Node, place: Place) -> str:
        """Return the variable with what stands in a table; beyond its ends, where torch would complain, the first."""
        table, *given = node.of
        assert isinstance(table, Read)
        at = []
        for one, size, stride in zip(given, table.shape, table.strides, strict=True):
            where = self.operand(node, one, place)
            where = self.name(f"tl.where({where} < 0, {where} + {size}, {where})")
            at.append(f"tl.where(({where} >= 0) & ({where} < {size}), {where}, 0) * {stride}")
        return self.value(table.node, Place(self.name, table.node.shape, self.name(" + ".join(at))))

    def _joined(self, node: Node, place: Place, dim: int, sizes: Sequence[int]) -> str:
        """Return the variable with a number of one of several tensors, which lie one after the other."""
        along, whole = place.coordinate(dim), node.shape[dim]
        before, start, found = self.mask, 0, ""
        for one, size in zip(node.of, sizes, strict=True):
            assert isinstance(one, Read)
            bounds = [f"({along} >= {start})"] * bool(start) + [f"({along} < {start + size})"] * (start + size < whole)
            inside = self.name(" & ".join(bounds) or f"{along} >= 0")
            self.mask = self.name(f"{before} & {inside}") if before else inside
            value = self.cast(self.read(one, place.shifted(dim, start, size)), one.node.dtype, node.dtype)
            self.mask, start = before, start + size
            found = self.name(f"tl.where({inside}, {value}, {found})") if found else value
        return found

    def number(self, number: float, dtype: torch.dtype, exact: bool = True) -> str:
        """Return the variable with a number, rounded to the dtype that is computed in, or first to `dtype` itself."""
        wide = _wide(dtype)
        if not wide.is_floating_point:
            return self.name(f"tl.full((1,), {bool(number) if wide == torch.bool else int(number)}, {TYPES[wide]})")
        value = float(torch.tensor(number, dtype=wide if exact else dtype, device="cpu"))
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

    def whole(
        self, head: Sequence[str], place: Place, outs: Sequence[tuple[Node, Tensor]], programs: int, warps: int,
        last: Sequence[tuple[str, Tensor]] = (),
    ) -> Text:  # fmt: skip
        """Return the kernel that writes nodes, and behind them what else there are expressions for, in order.

        Args:
            head: lines that say what the index of a program is, and `mask`.
            place: of a program, in the numbers of each node.
            outs: nodes, and where they are written.
            programs: of the launch.
            warps: of each.
            last: expressions at the place, and where they are written: contiguous.
        """
        stores = list[tuple[str, str]]()
        for node, out in outs:
            own = place if node.shape == place.shape else Place(self.name, node.shape, place.flat)
            where = own.flat if out.is_contiguous() else own.address(out.stride())
            stores.append((where, self.value(node, own)))
        stores += [(place.flat, expression) for expression, _ in last]
        pointers = [f"out{number}_ptr" for number in range(len(stores))]
        lines = [
            f"tl.store({at} + {i}, {value}{self.masked})" for at, (i, value) in zip(pointers, stores, strict=True)
        ]
        lines = ["follow(OVERLAP)", *head, *self.lines, *lines]
        first = f"@triton.jit\ndef _chain_kernel({', '.join((*pointers, *self.pointers))}, OVERLAP: tl.constexpr):\n"
        return Text(first + "".join(f"    {line}\n" for line in lines), self.tensors, programs, warps)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def text_of(outs: Sequence[tuple[Node, Tensor]], interpreted: bool) -> Text:
    """Return the kernel that writes nodes of one size."""
    size = outs[0][1].numel()
    turned = _turned(outs[0][0]) if size > LARGE and len(outs) == 1 else None
    if turned is not None:
        return _tile(*outs[0], turned, interpreted)
    block = LARGE_BLOCK if size > LARGE else max(WAVE, min(BLOCK, 1 << (size - 1).bit_length()))
    text = Written("mask" if size % block else "", interpreted)
    head = [f"i = tl.program_id(0) * {block} + tl.arange(0, {block})", *([f"mask = i < {size}"] if text.mask else [])]
    warps = max(1, block // ((8 if size > LARGE else 2) * WAVE))
    return text.whole(head, Place(text.name, outs[0][0].shape, "i"), outs, -(-size // block), warps)


def _turned(node: Node) -> int | None:
    """Return the dimension in which numbers that a node reads lie next to each other, if that is not its last one."""
    last = len(node.shape) - 1
    for one in node.of:
        if not isinstance(one, Read) or len(one.strides) != len(node.shape):
            continue
        if list(one.strides) == in_order(node.shape):
            found = _turned(one.node) if one.node.shape == node.shape else None
            if found is not None:
                return found
        elif one.strides[last] > 1 and node.shape[last] >= SHORTEST:
            wanted = (place for place in range(last) if one.strides[place] == 1 and node.shape[place] >= SHORTEST)
            if (found := next(wanted, None)) is not None:
                return found
    return None


def is_turned(node: Node) -> bool:
    """Return whether a function reads numbers in another order than it writes them."""
    return _turned(node) is not None


def _tile(node: Node, out: Tensor, turned: int, interpreted: bool) -> Text:
    """Return the kernel that reads along one dimension and writes along the last, a square of both at a time."""
    shape, last = node.shape, len(node.shape) - 1
    blocks = {dim: -(-shape[dim] // TILE) for dim in (turned, last)}
    masks = [f"(c{dim} < {shape[dim]})" for dim in (turned, last) if shape[dim] % TILE]
    text = Written("mask" if masks else "", interpreted, "zeros")
    others = [1 if dim in blocks else size for dim, size in enumerate(shape)]
    head = [
        f"high, wide = tl.cdiv({shape[turned]}, {TILE}), tl.cdiv({shape[last]}, {TILE})",
        "rest = tl.program_id(0) // (high * wide)",
        f"along = tl.program_id(0) // wide % high * {TILE}",
        f"c{turned} = (along + tl.arange(0, {TILE}))[:, None]",
        f"c{last} = (tl.program_id(0) % wide * {TILE} + tl.arange(0, {TILE}))[None, :]",
        f"zeros = c{turned} * 0 + c{last} * 0",
        *([f"mask = {' & '.join(masks)}"] if masks else []),
    ]

    def coordinate(first: int, end: int) -> str | None:
        if first != end:
            return None
        return f"c{first}" if first in blocks else part_of(text.name, "rest", others, first, first)

    place = Place(
        text.name, shape, lambda: by_coordinates(text.name, shape, lambda dim: str(coordinate(dim, dim))), coordinate
    )
    programs = math.prod(others) * blocks[turned] * blocks[last]
    return _of_any_size(text.whole(head, place, [(node, out)], programs, TILE * TILE // (8 * WAVE)))


_SIZE = re.compile(r"(?<![\w.+-])(?<!// )(?<!% )(?<!\(1,\), )[1-9]\d{2,}(?![\w.])")
"""A size or stride of 100 or more in a text: no part of a name or of another number, and no operand of a function.

Nor what an index is divided by: Triton sees from a constant which of the quotients lie next to each other.
"""


def _of_any_size(made: Text) -> Text:
    """Return the kernel with arguments for its sizes and strides, of which Triton knows whether 16 divides them."""
    sizes = [*dict.fromkeys(map(int, _SIZE.findall(made.text)))]
    names = {str(size): f"size{number}" for number, size in enumerate(sizes)}
    text = _SIZE.sub(lambda found: names[found.group()], made.text)
    text = text.replace("OVERLAP: tl.constexpr", ", ".join((*names.values(), "OVERLAP: tl.constexpr")), 1)
    return made._replace(text=text, numbers=tuple(sizes))


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
    launch_text(text_of(outs, not (first.is_cuda or pretends())), [out for _, out in outs])


def launch_text(made: Text, outs: Sequence[Tensor]) -> None:
    """Run a kernel on the tensors that it writes, and on those that it reads."""
    overlap = overlaps(outs[0])
    with backend.device_guard(outs[0]):
        given, grid = (*outs, *made.tensors), (made.programs, 1, 1)
        kernel_of(made.text).launch(grid, made.warps, given, (), made.numbers, (), (overlap,), overlap=overlap)
