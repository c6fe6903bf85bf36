"""A token's query, key and value that attention itself is to prepare: norms, rotary embedding and the cache write.

In a step `rope_cache` may be put off (`core.deferring`). `decode_attention` takes it in where it is what reads the
query next: a program normalises and rotates the heads that it takes, in fp32 and rounded once as `rope_cache` does;
the one with the newest slot writes the key and the value there. That is a launch less a layer. Whatever else reads the
query, the keys or the values first gets them from the kernel of `rope_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend, deferring
from ..products.prologue import Prologue
from ..products.put_off import Deferred

WIDEST = 256
"""The largest head_dim of `decode_attention`."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def prepared_heads(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        cos_ptr,
        sin_ptr,
        eps,
        offset,
        column,
        there,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        NORM: tl.constexpr,
    ):
        """Load heads, normalise and rotate them: `[heads, BLOCK_D]`, fp32.

        `x_ptr` is where heads begin, `[heads, 1]` or one; `column` is `[1, BLOCK_D]`, `there` says which are loaded.
        """
        x = tl.load(x_ptr + column, mask=there, other=0.0).to(tl.float32)
        turns = column < R
        first = column % 2 == 0 if INTERLEAVED else column < R // 2
        if R > 0:
            if INTERLEAVED:
                partner = tl.where(first, column + 1, column - 1)
                at = column // 2 if HALF_TABLE else column
            else:
                partner = tl.where(first, column + R // 2, column - R // 2)
                at = column % (R // 2) if HALF_TABLE else column
            partner = tl.where(turns, partner, column)
            other = tl.load(x_ptr + partner, mask=there, other=0.0).to(tl.float32)
            cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x *= inverse * (tl.load(norm_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset)
        if R > 0:
            if NORM:
                other *= inverse * (tl.load(norm_ptr + partner, mask=column < D, other=0.0).to(tl.float32) + offset)
            x = x * cos + tl.where(first, -other, other) * sin
        return x


class Rows(NamedTuple):
    """What `rope_cache` reads of one token a row."""

    q: Tensor
    """`[B, 1, H D]`, dense in its last dimension; keys and values `[B, 1, Hk D]` likewise."""
    k: Tensor
    v: Tensor
    cos: Tensor | None
    """`[B or 1, 1, …]`; None for no rotation, as of sines."""
    sin: Tensor | None
    columns: int
    """R, 0 for no rotation."""
    interleaved: bool
    half_table: bool
    q_norm: Prologue | None
    """An RMSNorm over one head, with a weight; None for none, as of keys."""
    k_norm: Prologue | None


def row_tables(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights of both norms, cosines and sines; any tensor for those that there are none of."""
    q_norm, k_norm = head_weight(rows.q_norm, rows.q), head_weight(rows.k_norm, rows.q)
    return q_norm, k_norm, rows.q if rows.cos is None else rows.cos, rows.q if rows.sin is None else rows.sin


def row_strides(rows: Rows) -> tuple[int, int, int, int]:
    """Return how far the rows of queries, keys, values and tables are apart; 0 for one row of tables."""
    table = 0 if rows.cos is None or rows.cos.shape[0] == 1 else rows.cos.stride(0)
    return rows.q.stride(0), rows.k.stride(0), rows.v.stride(0), table


def head_weight(norm: Prologue | None, other: Tensor) -> Tensor:
    """Return the weight of a norm over a head; `other` where there is none."""
    return other if norm is None or norm.weight is None else norm.weight


def head_scale(norm: Prologue | None) -> tuple[float, float]:
    """Return eps and offset of a norm over a head."""
    return (0.0, 0.0) if norm is None else (norm.eps, norm.offset)


@dataclass(eq=False)
class Prepared(Deferred):
    """What `rope_cache` writes, put off."""

    rows: Rows
    query: Tensor | None
    """`[B, H, 1, D]`, not written yet; None where attention has done the rest and nobody may want it."""
    keys: Tensor
    values: Tensor
    position: Tensor
    write: Callable[[Prepared, Tensor], None]
    """Runs the kernel of `rope_cache`, which writes a query and the rest."""
    done: bool = False
    """Whether it has run."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """What it is computed from."""
        return [self.rows.q, self.rows.k, self.rows.v, *row_tables(self.rows), self.position]

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Write all three, whichever was asked for."""
        if not self.done:
            self.write(self, self.on(storage) if self.query is None else self.query)
        self.done = True

    def run(self) -> None:
        """Write all three."""
        assert self.query is not None
        self.write(self, self.query)
        self.done = True

    def is_for(self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> bool:
        """Return whether attention of this query to these buffers can prepare it."""
        return query is self.query and keys is self.keys and values is self.values and position is self.position

    def attended(self) -> None:
        """Take note that attention has prepared what it reads: the query is written if something else reads it."""
        query, self.query = self.query, None
        assert query is not None
        deferring.write(self, query)


def is_put_off(prepared: Prepared) -> bool:
    """Return whether a query waits for the attention that is to read it, in a step whose kernels may be put off."""
    query = prepared.query
    if query is None or query.shape[3] > WIDEST or not deferring.defers():
        return False
    return deferring.write(prepared, query, prepared.keys, prepared.values)
