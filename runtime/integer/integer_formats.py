"""How checkpoints lay weights of integers out: GPTQ, AWQ and compressed-tensors.

    gptq                  qweight [I b / 32, O], words along the columns; scales [G, O]; qzeros [G, O b / 32], one
                          less than the zero in the first version; g_idx [I], the group of each column
    awq, gemm             qweight [I, O / 8], words along the rows in the order 0 2 4 6 1 3 5 7; scales, qzeros
    compressed-tensors,   weight_packed [O, I b / 32], weight_scale [O, G], weight_shape [2]; with zeros
    pack-quantized        weight_zero_point [O b / 32, G]; of columns in an order weight_g_idx [I]

I in_features, O out_features, b bits, G groups. Words have 32 bits, the first integer in the lowest. `read` gives what
kernels read, and `publish` the same tensors again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .integer_weights import Integers, packed, unpacked

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a layer, by its name."""


@dataclass(frozen=True)
class Format:
    """How a checkpoint lays out the weights of some layers.

    Args:
        bits: of an integer.
        columns: of a group; 0 for all of a row.
        dtype: of the scales.
    """

    bits: int
    columns: int
    dtype: torch.dtype

    def tensors(self, rows: int, cols: int) -> Tensors:
        """Return the tensors of a weight `[rows, cols]`."""
        raise NotImplementedError

    def read(self, given: Mapping[str, Tensor]) -> Integers:
        """Return a weight as kernels read it."""
        raise NotImplementedError

    def publish(self, weight: Integers) -> dict[str, Tensor]:
        """Return a weight in the checkpoint's tensors."""
        raise NotImplementedError

    def fits(self, rows: int, cols: int) -> bool:
        """Return whether a weight of that size can be laid out so, and be read."""
        columns = self.columns or cols
        whole = cols % columns == 0 and rows % (32 // self.bits) == 0 and cols % (32 // self.bits) == 0
        return whole and columns * self.bits % 128 == 0

    def groups(self, cols: int) -> int:
        """Return the groups of a row."""
        return cols // (self.columns or cols)


def _in_order(integers: Tensor, groups: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return integers `[O, I]` with the columns of a group next to each other, and their order if it is another.

    Raises:
        ValueError: if a group has more columns than another, which no kernel reads.
    """
    if torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // columns):
        return integers, None
    if not bool((torch.bincount(groups.long(), minlength=len(groups) // columns) == columns).all()):
        raise ValueError(f"the checkpoint's groups of columns are not of {columns} each")
    order = torch.argsort(groups, stable=True)
    return integers[:, order], order.to(torch.int32)


def _back(integers: Tensor, order: Tensor | None) -> Tensor:
    """Return integers with their columns where they were."""
    return integers if order is None else torch.empty_like(integers).index_copy_(1, order.long(), integers)


def _groups_of(order: Tensor | None, cols: int, columns: int, device: torch.device) -> Tensor:
    """Return the group of each column."""
    plain = torch.arange(cols, dtype=torch.int32, device=device) // columns
    return plain if order is None else torch.empty_like(plain).index_copy_(0, order.long(), plain)


def _half(zero: Tensor, bits: int) -> Tensor | None:
    """Return zeros, or None where all are half of the range."""
    return None if bool((zero == 1 << (bits - 1)).all()) else zero.contiguous()


def _filled(weight: Integers) -> Tensor:
    """Return the zeros of a weight `[O, G]`, int32."""
    if weight.zero is not None:
        return weight.zero.int()
    return torch.full(weight.scale.shape, 1 << (weight.bits - 1), dtype=torch.int32, device=weight.scale.device)


@dataclass(frozen=True)
class Gptq(Format):
    """GPTQ.

    Args:
        less: what a stored zero is less than the zero: 1 in the first version of the format, 0 in the second.
    """

    less: int = 1

    def tensors(self, rows: int, cols: int) -> Tensors:
        """Return the tensors of a weight `[rows, cols]`."""
        in_word, groups = 32 // self.bits, self.groups(cols)
        return {
            "qweight": ((cols // in_word, rows), torch.int32),
            "qzeros": ((groups, rows // in_word), torch.int32),
            "scales": ((groups, rows), self.dtype),
            "g_idx": ((cols,), torch.int32),
        }

    def read(self, given: Mapping[str, Tensor]) -> Integers:
        """Return a weight as kernels read it."""
        words, groups = given["qweight"].t().contiguous(), given["g_idx"]
        columns = len(groups) // len(given["scales"])
        ordered, order = _in_order(unpacked(words, self.bits), groups, columns)
        zero = (unpacked(given["qzeros"], self.bits) + self.less).to(torch.uint8).t()
        scale = given["scales"].t().contiguous()
        words = words if order is None else packed(ordered, self.bits)
        return Integers(words, scale, _half(zero, self.bits), self.bits, columns, order)

    def publish(self, weight: Integers) -> dict[str, Tensor]:
        """Return a weight in the checkpoint's tensors."""
        words, (_, cols) = weight.values, weight.shape
        if weight.order is not None:
            words = packed(_back(unpacked(words, self.bits), weight.order), self.bits)
        return {
            "qweight": words.t().contiguous(),
            "qzeros": packed((_filled(weight) - self.less).t(), self.bits),
            "scales": weight.scale.t().contiguous(),
            "g_idx": _groups_of(weight.order, cols, weight.columns, words.device),
        }


_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight rows each place of a word has."""


def _from_awq(words: Tensor) -> Tensor:
    """Return the integers of AWQ's words, `[…, O / 8]`, as `[…, O]`."""
    places = torch.tensor([_AWQ.index(row) for row in range(8)], device=words.device)
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2)


def _to_awq(integers: Tensor) -> Tensor:
    rows = torch.tensor(_AWQ, device=integers.device)
    return packed(integers.unflatten(-1, (-1, 8))[..., rows].flatten(-2), 4)


@dataclass(frozen=True)
class Awq(Format):
    """AWQ as its `gemm` kernels read it: 4 bits."""

    def tensors(self, rows: int, cols: int) -> Tensors:
        """Return the tensors of a weight `[rows, cols]`."""
        groups = self.groups(cols)
        return {
            "qweight": ((cols, rows // 8), torch.int32),
            "qzeros": ((groups, rows // 8), torch.int32),
            "scales": ((groups, rows), self.dtype),
        }

    def read(self, given: Mapping[str, Tensor]) -> Integers:
        """Return a weight as kernels read it."""
        words = packed(_from_awq(given["qweight"]).t(), 4)
        zero, scale = _from_awq(given["qzeros"]).to(torch.uint8).t(), given["scales"].t().contiguous()
        return Integers(words, scale, _half(zero, 4), 4, words.shape[1] * 8 // scale.shape[1])

    def publish(self, weight: Integers) -> dict[str, Tensor]:
        """Return a weight in the checkpoint's tensors."""
        return {
            "qweight": _to_awq(unpacked(weight.values, 4).t()),
            "qzeros": _to_awq(_filled(weight).t()),
            "scales": weight.scale.t().contiguous(),
        }


@dataclass(frozen=True)
class Compressed(Format):
    """compressed-tensors' `pack-quantized`.

    Args:
        zeros: whether groups have zeros of their own.
        ordered: whether the columns of a group are said by `weight_g_idx`.
    """

    zeros: bool = False
    ordered: bool = False

    def tensors(self, rows: int, cols: int) -> Tensors:
        """Return the tensors of a weight `[rows, cols]`."""
        in_word, groups = 32 // self.bits, self.groups(cols)
        found: Tensors = {
            "weight_packed": ((rows, cols // in_word), torch.int32),
            "weight_scale": ((rows, groups), self.dtype),
            "weight_shape": ((2,), torch.int64),
        }
        if self.zeros:
            found["weight_zero_point"] = ((rows // in_word, groups), torch.int32)
        if self.ordered:
            found["weight_g_idx"] = ((cols,), torch.int32)
        return found

    def read(self, given: Mapping[str, Tensor]) -> Integers:
        """Return a weight as kernels read it."""
        words, scale = given["weight_packed"].contiguous(), given["weight_scale"].contiguous()
        cols = words.shape[1] * 32 // self.bits
        columns, order = cols // scale.shape[1], None
        if self.ordered:
            ordered, order = _in_order(unpacked(words, self.bits), given["weight_g_idx"], columns)
            words = words if order is None else packed(ordered, self.bits)
        zero = None
        if self.zeros:
            zero = _half(unpacked(given["weight_zero_point"].t(), self.bits).to(torch.uint8).t(), self.bits)
        return Integers(words, scale, zero, self.bits, columns, order)

    def publish(self, weight: Integers) -> dict[str, Tensor]:
        """Return a weight in the checkpoint's tensors."""
        words, shape = weight.values, weight.shape
        if weight.order is not None:
            words = packed(_back(unpacked(words, self.bits), weight.order), self.bits)
        found = {
            "weight_packed": words,
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor(shape, device=words.device),
        }
        if self.zeros:
            found["weight_zero_point"] = packed(_filled(weight).t(), self.bits).t().contiguous()
        if self.ordered:
            found["weight_g_idx"] = _groups_of(weight.order, shape[1], weight.columns, words.device)
        return found
