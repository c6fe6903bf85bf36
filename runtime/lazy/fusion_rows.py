"""A chain of pointwise functions and the norm of its rows, in one kernel (`pointwise_fusion`, `fusion_text`).

s = f(a, b, …)      n = norm(s)      of the rows of s, which is written too where anything still holds it

LayerNorm   (s - mean(s)) * rsqrt(mean((s - mean(s))²) + eps) * weight + bias      in fp32
RMSNorm     in the rounding orders of `norms.rms_norm`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import row_tiles
from ..launching.launch import pretends
from ..linear.prologue import LayerNormPrologue, Norm
from .fusion_place import Place, part_of
from .fusion_text import TYPES, Node, Text, Written, launch_text
from .lazy_mode import Deferred, LazyMode
from .pointwise_fusion import Chain


@dataclass(eq=False)
class NormedChain(Deferred):
    """The norm of each row of what a chain gives."""

    node: Node
    step: LazyMode
    norm: Norm

    @property
    def reads(self) -> Sequence[Tensor]:
        """What the chain reads, and the parameters."""
        return [*self.node.leaves, *_parameters(self.norm)]

    def compute(self, out: Tensor) -> None:
        """Run the kernel, which writes the chain's own numbers where they are still held."""
        held = self.step.take_out(lambda other: isinstance(other, Chain) and other.node is self.node)
        outs = [(self.node, place) for _, place in held]
        launch_text(text_of_rows(self.node, outs, self.norm, out), [*(place for _, place in outs), out])


def norm_of_chain(step: LazyMode, input: Tensor, norm: Norm) -> Tensor | None:
    """Put off the norm of rows of something put off; None where a chain has no such rows.

    Args:
        step: which knows what is put off.
        input: `[N, H]`.
        norm: its parameters `[H]`.
    """
    found = step.of(input)
    if (
        not isinstance(found, Chain)
        or found.node.shape != tuple(input.shape)
        or input.dtype not in row_tiles.KERNEL_DTYPES
    ):
        return None
    width = input.shape[-1]
    fits = all(
        one.shape == (width,)
        and one.is_contiguous()
        and one.dtype in row_tiles.KERNEL_DTYPES
        and one.device == input.device
        for one in _parameters(norm)
    )
    if not fits or width > row_tiles.MAX_BLOCK_COLS:
        return None
    return step.put_off(NormedChain(found.node, step, norm), input.shape, input, _dtype(input.dtype, norm))


def _parameters(norm: Norm) -> list[Tensor]:
    bias = norm.bias if isinstance(norm, LayerNormPrologue) else None
    return [one for one in (norm.weight, bias) if one is not None]


def _dtype(input: torch.dtype, norm: Norm) -> torch.dtype:
    if isinstance(norm, LayerNormPrologue) or norm.weight is None or norm.weight_in_fp32:
        return input
    return torch.promote_types(input, norm.weight.dtype)


def text_of_rows(node: Node, outs: Sequence[tuple[Node, Tensor]], norm: Norm, out: Tensor) -> Text:
    """Return the kernel that writes `outs`, and the norm of each row of `node` to the last output."""
    width = node.shape[-1]
    count = math.prod(node.shape[:-1])
    block_rows, block_columns, warps = row_tiles.tile(width, count)
    masks = [f"(row < {count})"] * bool(count % block_rows) + ["inside"] * (block_columns != width)
    head = [
        f"row = tl.program_id(0) * {block_rows} + tl.arange(0, {block_rows})[:, None]",
        f"col = tl.arange(0, {block_columns})[None, :]",
        f"inside = col < {width}",
        "zeros = row * 0 + col * 0",
        *([f"mask = {' & '.join(masks)}"] if masks else []),
    ]
    text = Written("mask" if masks else "", not (out.is_cuda or pretends()), "zeros")
    leading = (*node.shape[:-1], 1)

    def coordinate(first: int, last: int) -> str | None:
        if first == last == len(leading) - 1:
            return "col"
        return part_of(text.name, "row", leading, first, last) if last < len(leading) - 1 else None

    place = Place(text.name, node.shape, lambda: text.name(f"row * {width} + col"), coordinate)
    value = text.value(node, place)
    number = text.name(f"{value}.to(tl.float32)")
    x = text.name(f"tl.where(inside, {number}, 0.0)")
    if isinstance(norm, LayerNormPrologue):
        mean = text.name(f"tl.sum({x}, axis=1, keep_dims=True) / {width}")
        x = text.name(f"tl.where(inside, {x} - {mean}, 0.0)")
    square = text.name(f"tl.sum({x} * {x}, axis=1, keep_dims=True) / {width}")
    normed = text.name(f"{x} * tl.rsqrt({square} + {float(norm.eps)!r})")
    if norm.weight is not None:
        weight = text.name(f"{_column(text, norm.weight)}.to(tl.float32) + {float(norm.offset)!r}")
        if not isinstance(norm, LayerNormPrologue) and not norm.weight_in_fp32:
            normed = text.name(f"{normed}.to({TYPES[node.dtype]}).to(tl.float32)")
            weight = text.name(f"{weight}.to({TYPES[norm.weight.dtype]}).to(tl.float32)")
        normed = text.name(f"{normed} * {weight}")
    if isinstance(norm, LayerNormPrologue) and norm.bias is not None:
        normed = text.name(f"{normed} + {_column(text, norm.bias)}.to(tl.float32)")
    last = [(f"{normed}.to({TYPES[out.dtype]})", out)]
    return text.whole(head, place, outs, -(-count // block_rows), warps, last)


def _column(text: Written, parameter: Tensor) -> str:
    """Return the variable with a parameter of each column."""
    before = text.mask, text.zeros
    text.mask, text.zeros = "inside", ""
    loaded = text.load(parameter, "col")
    text.mask, text.zeros = before
    return loaded
