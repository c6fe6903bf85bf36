"""A product of many rows with the functions behind it as its last stage, in a captured forward.

M rows (the product of the leading shape), I in_features, O out_features:

    y = f(g(… (x Wᵀ + b)))      f, g … of one number each: GELU in all its forms, ReLU, x * sigmoid(1.702 x), …

A linear layer is put off like a function of torch (`put_off`), and a chain that takes in its result has a node for it.
Where the chain reads nothing else, and nobody the result itself, one kernel computes both: the product is rounded as
torch's is before the functions are computed, so only the order of its sums differs. Everywhere else the product is
torch's own at the time when something reads it.

Which is faster is measured when a forward is rehearsed, once for each size and chain: torch's product and the
functions behind it, cuBLASLt's own last stage where that has the function, and the tiles of `tiles.product_rule`. What
was not measured, or lost, is torch's.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import backend
from ..core.capture import capture
from ..core.launch import collects, overlaps, pretends, processors, rehearses, shared_memory
from ..core.tiles import Tile, product_rule
from .chain_place import Place, in_order
from .chain_text import TYPES, Node, Read, Written, kernel_of
from .put_off import Deferred, PutsOff

FEWEST_ROWS = 64
BLOCK_DEPTH = 64
"""Columns of the operands that are multiplied at a time: 128 bytes of 16-bit numbers."""
GROUP = 8
"""Blocks of rows that follow each other in the order of programs, so that they find the weight in the L2 cache."""
REPEATS, ROUNDS = 6, 4
"""Launches in one measurement, and measurements in turn, of which the shortest counts."""
_FLUSHED = 64 << 20
"""Bytes written before each launch: as in a model, the operands come from memory."""

_NOT_POINTWISE = frozenset({"gather", "cat", "arange"})

_KERNEL = """@triton.jit
def _chain_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, rows, columns, depth, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    high = tl.cdiv(rows, BLOCK_ROWS)
    wide = columns // BLOCK_COLS
    group = tl.program_id(0) // (GROUP * wide)
    height = tl.minimum(high - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * wide)
    row = (group * GROUP + inside % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (inside // height) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    step = tl.arange(0, BLOCK_DEPTH)
    x = x_ptr + (row % rows)[:, None].to(tl.int64) * depth + step[None, :]
    weight = weight_ptr + col[None, :].to(tl.int64) * depth + step[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in tl.range(0, depth, BLOCK_DEPTH, num_stages=STAGES):
        total = tl.dot(tl.load(x), tl.load(weight), total, input_precision="ieee")
        x += BLOCK_DEPTH
        weight += BLOCK_DEPTH
{lines}
    tl.store(out_ptr + row[:, None].to(tl.int64) * columns + col[None, :], {value}, mask=row[:, None] < rows)
"""


@dataclass(eq=False)
class LinearProduct(Deferred):
    """A linear layer's product that nobody has computed yet."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    step: PutsOff
    _node: weakref.ref[Node] | None = field(default=None, init=False)

    @property
    def link(self) -> Node:
        """The leaf of chains, whose numbers are there when the product was computed."""
        node = None if self._node is None else self._node()
        if node is None:
            node = Node("leaf", self.dtype, self.shape, source=self)
            self._node = weakref.ref(node)
        return node

    @property
    def reads(self) -> Sequence[Tensor]:
        """Its operands."""
        return [one for one in (self.input, self.weight, self.bias) if one is not None]

    @property
    def held(self) -> Sequence[Tensor]:
        """Its result's memory, where somebody may still read or write that."""
        return [] if (storage := self.place()) is None else [self.on(storage)]

    def compute(self, out: Tensor) -> None:
        """Run torch's product."""
        multiply(self.input, self.weight, self.bias, out)
        node = None if self._node is None else self._node()
        if node is not None:
            node.tensor, node.source = out, None

    def settle(self) -> None:
        """Compute it, into memory of its own where nobody else holds the result."""
        for held in self.held:
            self.step.settle(held)
            return
        self.compute(self.input.new_empty(self.shape))


def put_off_product(step: PutsOff, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return what stands for `F.linear(input, weight, bias)`, on a device with kernels; None for torch's own."""
    if not _fits(input, weight, bias):
        return None
    known = _CHOSEN.get(Size.of(input, weight, bias), {})
    if _measures(input) and not (rehearses() or collects() or any(known.values())):
        return None
    for operand in (input, weight, bias):
        if operand is not None:
            step.settle(operand)
    return step.put_off(LinearProduct(input, weight, bias, step), (*input.shape[:-1], weight.shape[0]), input)


def _measures(input: Tensor) -> bool:
    """Return whether it is measured what is faster; the interpreter takes the kernel."""
    return input.is_cuda


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernels take a product."""
    operands = [input, weight] if bias is None else [input, weight, bias]
    return (
        all(one.is_contiguous() and one.dtype == input.dtype for one in operands)
        and input.dtype in (torch.float16, torch.bfloat16)
        and weight.dim() == 2
        and input.dim() > 1
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and input.numel() >= FEWEST_ROWS * weight.shape[1]
        and weight.shape[1] % BLOCK_DEPTH == 0
        and weight.shape[0] % BLOCK_DEPTH == 0
        and all(one.data_ptr() % 16 == 0 for one in operands)
    )


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write `F.linear(input, weight, bias)`, by the library that would compute it."""
    flat, rows = out.view(-1, weight.shape[0]), input.view(-1, weight.shape[1])
    if bias is None:
        torch.mm(rows, weight.t(), out=flat)
    else:
        torch.addmm(bias, rows, weight.t(), out=flat)


def sources(node: Node) -> list[LinearProduct]:
    """Return the products that a node takes in and that nobody computed."""
    return [one.source for one in node.nodes if isinstance(one.source, LinearProduct)]


def settle_sources(node: Node) -> None:
    """Compute the products that a node takes in."""
    for source in sources(node):
        source.settle()


# ---- one kernel for both ----


class Size(NamedTuple):
    """Of a product, as what was measured is remembered."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    bias: bool
    device: int

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None) -> Size:
        """Return the size of a product."""
        outputs, inputs = weight.shape
        rows = input.numel() // inputs
        return cls(rows, outputs, inputs, input.dtype, bias is not None, input.get_device())


LIBRARY = "library"
Choice = Tile | str | None
"""A tile; `LIBRARY` for cuBLASLt's last stage; None for a product and the functions behind it."""

_CHOSEN: dict[Size, dict[str, Choice]] = {}
"""By size and kernel's text, what was fastest."""


def forget() -> None:
    """Measure anew."""
    _CHOSEN.clear()


def describe(model: nn.Module) -> list[str]:
    """Return a line for `explain`: whose last stage is what follows, of all that was measured in this process."""
    best = [
        f"{size.rows}x{size.outputs}x{size.inputs} by "
        + (choice if isinstance(choice, str) else f"{choice[0]}x{choice[1]}")
        for size, known in _CHOSEN.items()
        for choice in known.values()
        if choice is not None
    ]
    if not any(_CHOSEN.values()):
        return []
    count = sum(map(len, _CHOSEN.values()))
    return [f"products with what follows as their last stage: {', '.join(best) or 'none'}, of {count} measured"]


def compute_with_product(node: Node, out: Tensor, apart: Callable[[Tensor, Tensor], None]) -> bool:
    """Write a chain that reads one product and nothing else, by one kernel; False where it is to be computed apart.

    Args:
        node: the chain, whose product nobody else reads.
        out: where its numbers go.
        apart: computes it from the numbers of the product, the first argument, into the second.
    """
    (source,) = sources(node)
    leaf = source.link
    if not _is_pointwise(node, leaf):
        return False
    text = _text(node, leaf, source.bias is not None, not (out.is_cuda or pretends()))
    size = Size.of(source.input, source.weight, source.bias)
    index = out.get_device() if out.is_cuda else None
    tiles = product_rule(size.rows, size.outputs, size.inputs, processors(index), shared_memory(index))
    if collects():
        for tile in tiles:
            _launch(text, source, out, tile)
        return False
    if not _measures(out):
        choice: Choice = tiles[0] if tiles else None
    else:
        known = _CHOSEN.setdefault(size, {})
        if text not in known:
            if torch.cuda.is_current_stream_capturing():
                return False
            known[text] = _fastest(text, source, node, tiles, apart)
        choice = known[text]
    if choice is None:
        return False
    _run(choice, text, source, node, out)
    return True


def _is_pointwise(node: Node, leaf: Node) -> bool:
    """Return whether each number of a node is made from the one number of the leaf at the same place."""
    order = in_order(leaf.shape)
    for one in node.nodes - {leaf}:
        if one.kind == "full":
            continue
        if one.tensor is not None or one.source is not None or one.kind in _NOT_POINTWISE or one.shape != leaf.shape:
            return False
        reads = (read for read in one.of if isinstance(read, Read) and read.node.kind != "full")
        if any([s if n > 1 else 0 for n, s in zip(leaf.shape, read.strides, strict=True)] != order for read in reads):
            return False
    return True


def _text(node: Node, leaf: Node, bias: bool, interpreted: bool) -> str:
    """Return the kernel of a product and the functions behind it."""
    written = Written("", interpreted)
    place = Place(written.name, node.shape, "place")
    written.give(leaf, place, "number")
    value = written.value(node, place)
    added = ["total += tl.load(bias_ptr + col).to(tl.float32)[None, :]"] if bias else []
    lines = [*added, f"number = total.to({TYPES[leaf.dtype]})", *written.lines]
    return _KERNEL.format(lines="\n".join(f"    {line}" for line in lines), value=value)


def _launch(text: str, source: LinearProduct, out: Tensor, tile: Tile) -> None:
    block_rows, block_cols, warps, stages = tile
    outputs, inputs = source.weight.shape
    rows = out.numel() // outputs
    programs = -(-rows // block_rows) * (outputs // block_cols)
    overlap = overlaps(out) and programs <= processors(out.get_device() if out.is_cuda else None)
    bias = source.weight if source.bias is None else source.bias
    with backend.device_guard(out):
        kernel_of(text, dot=True).launch(
            (programs, 1, 1), warps, (out, source.input, source.weight, bias), (rows,), (outputs, inputs), (),
            (block_rows, block_cols, BLOCK_DEPTH, GROUP, stages, overlap), overlap=overlap,
        )  # fmt: skip


def _library_stage(node: Node, leaf: Node) -> bool | None:
    """Return whether the library's last stage that is a node is GELU (else ReLU); None where it has none.

    Its GELU is the tanh form, of the product before that is rounded.
    """
    alone = len(node.of) > 0 and isinstance(node.of[0], Read) and node.of[0].node is leaf
    if not alone or node.dtype != leaf.dtype:
        return None
    if node.kind == "gelu_tanh":
        return True
    return False if node.kind == "maximum" and node.of[1:] == (0,) else None


def _by_library(source: LinearProduct, node: Node, out: Tensor) -> None:
    bias, weight = source.bias, source.weight
    assert bias is not None
    rows, gelu = source.input.view(-1, weight.shape[1]), bool(_library_stage(node, source.link))
    torch._addmm_activation(bias, rows, weight.t(), use_gelu=gelu, out=out.view(-1, weight.shape[0]))


def _run(choice: Tile | str, text: str, source: LinearProduct, node: Node, out: Tensor) -> None:
    if isinstance(choice, str):
        _by_library(source, node, out)
    else:
        _launch(text, source, out, choice)


# ---- which is fastest ----


def _fastest(
    text: str, source: LinearProduct, node: Node, tiles: Sequence[Tile], apart: Callable[[Tensor, Tensor], None]
) -> Choice:
    """Return what computes a chain in the shortest time, measured in turn in graphs of their own."""
    from triton import TritonError

    product, out = (source.input.new_empty(source.shape) for _ in range(2))
    out = out.to(node.dtype)

    def one_after_the_other() -> None:
        multiply(source.input, source.weight, source.bias, product)
        apart(product, out)

    runs: dict[Choice, Callable[[], None]] = {None: one_after_the_other}
    if source.bias is not None and torch.version.hip is None and _library_stage(node, source.link) is not None:
        runs[LIBRARY] = functools.partial(_by_library, source, node, out)
    for tile in tiles:
        runs[tile] = functools.partial(_launch, text, source, out, tile)
    times = Timed(out.device)
    for choice, run in runs.items():
        try:
            times.add(choice, run)
        except (RuntimeError, TritonError):  # what a chip cannot run, and a library does not have
            if choice is None:
                return None
    found = times.shortest()
    return min(found, key=lambda choice: found[choice])


class Timed:
    """Measures what the device takes for several ways to compute the same, without the host.

    Args:
        device: on which they run.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
        self._graphs: dict[Choice, torch.cuda.CUDAGraph] = {}

    def add(self, choice: Choice, run: Callable[[], None]) -> None:
        """Capture some runs of one way, each with its operands in memory."""

        def several() -> None:
            for _ in range(REPEATS):
                self._flushed.zero_()
                run()

        self._graphs[choice] = capture(several, run, self._device, torch.cuda.graph_pool_handle())

    def shortest(self) -> dict[Choice, float]:
        """Return ms of each way, measured in turn; what the flushes take is in all of them."""
        times: dict[Choice, float] = dict.fromkeys(self._graphs, math.inf)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(ROUNDS):
            for choice, graph in self._graphs.items():
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[choice] = min(times[choice], start.elapsed_time(end) / REPEATS)
        return times
