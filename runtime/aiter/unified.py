"""aiter's `unified_attention` (Triton) on the preallocated cache: one token a row, in place of `decode_attention`.

B rows, H query heads, Hk key/value heads, D head_dim, S capacity, P `PAGE`, p the position of the token. The kernel
reads pages through a table, and takes every stride of keys and values, so a cache `[B, Hk, S, D]` is read where it
lies, as overlapping pages of which one begins at each slot:

    pages[i, t, h, d] = memory[(i + t) D + h S D + d]              strides (D, D, S D, 1)
    table[b, j] = b Hk S + starts[b] + j P                         lengths[b] = p + 1 - starts[b]

So left padding is no tokens of a row, of whatever length. Rotation and the write of the token come before, as for
`decode_attention`. What the kernel reads of a page behind the last token has no weight, but has to be finite, and
the last page of the last head ends behind the cache: `allocate` gives it the room.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel
from . import aiter_calls
from .aiter_attention import LEAST, MAX_HEAD_DIM
from .aiter_norms import DTYPES

CASES = """
case("8B, 8 rows", page_tables, int64(1), int64(8), (8, LLAMA_8B.kv_heads, LONG_CONTEXT))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["row_size", "pages"])
    def _page_tables_kernel(  # type: ignore[no-untyped-def]
        position_ptr,
        starts_ptr,
        table_ptr,
        lengths_ptr,
        row_size,
        pages,
        PAGE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        start = tl.load(starts_ptr + row)
        page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        first = row.to(tl.int64) * row_size + start + page * PAGE
        tl.store(table_ptr + row.to(tl.int64) * pages + page, first.to(tl.int32), mask=page < pages)
        if tl.program_id(1) == 0:
            tl.store(lengths_ptr + row, (tl.load(position_ptr) + 1 - start).to(tl.int32))

    page_tables_kernel = Kernel(_page_tables_kernel)

PAGE = 32
"""Slots of a page. Older releases take it for the tile, of which three have to fit into 64 KiB; and it divides every
capacity of a decode graph."""
MODULES = ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention")
"""From 0.1.10 on, and before."""
_KEYWORDS = (
    "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "window_size",
    "block_table", "softcap", "q_descale", "k_descale", "v_descale", "sinks",
)  # fmt: skip

Reference = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def unified_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor,
    rule: tuple[float, int | None, float | None, Tensor | None],
    reference: Reference,
) -> Tensor | None:
    """Return `decode_attention` by aiter; None, with a counted reason, where the bundled form is to run.

    Args:
        query: `[B, H, 1, D]`.
        keys: `[B, Hk, S, D]`, those of a cache, the token's own slot included.
        values: likewise.
        position: `[1]`, int64.
        starts: `[B]`, int64, the first slot of each row that is no padding.
        rule: scaling, sliding window, bound of the scores, and sinks.
        reference: the same in plain torch, of the first five of these.

    Returns:
        `[B, 1, H D]`.
    """
    if not aiter_calls.chosen("unified_attention", query):
        return None
    scaling, window, softcap, sinks = rule
    reason = _refusal(query, keys, values, sinks)
    if reason is not None:
        aiter_calls.refuse("unified_attention", reason)
        return None
    function = aiter_calls.function(
        "unified_attention", "unified_attention", ("q", "k", "v", "out"), _KEYWORDS, MODULES
    )
    if function is None:
        return None
    shape = (keys.shape[0], keys.shape[1], keys.shape[2])

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, starts: Tensor) -> Tensor:
        batch, heads, _, head_dim = q.shape
        table, lengths = page_tables(position, starts, shape)
        out = q.new_empty(batch, heads, head_dim)
        function(
            q.reshape(batch, heads, head_dim).contiguous(), paged(k), paged(v), out,
            cu_seqlens_q=_ends(batch, q.device), max_seqlen_q=1, seqused_k=lengths, max_seqlen_k=shape[2],
            softmax_scale=scaling, causal=True, window_size=(-1 if window is None else window - 1, 0),
            block_table=table, softcap=softcap or 0.0, q_descale=None, k_descale=None, v_descale=None, sinks=sinks,
        )  # fmt: skip
        return out.view(batch, 1, heads * head_dim)

    def proof() -> bool:
        return _holds(call, reference, query, shape)

    # The scale of the scores, the window and the strides are constants of the kernel: another one is another variant.
    variant = (query.dtype, query.device, *query.shape, *shape, *rule[:3], None if sinks is None else sinks.dtype)
    given = (query, keys, values, position, starts)
    return aiter_calls.run("unified_attention", query, variant, lambda: call(*given), proof)


def _refusal(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> str | None:
    if query.dtype not in DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        return "dtype"
    if not query.numel():
        return "empty"
    batch, heads, _, head_dim = query.shape
    if head_dim > MAX_HEAD_DIM or head_dim % 16 or keys.shape[3] != head_dim or values.shape != keys.shape:
        return "head_dim"
    if keys.shape[0] != batch or heads % keys.shape[1] or (sinks is not None and sinks.shape != (heads,)):
        return "heads"
    lies = keys.is_contiguous() and values.is_contiguous() and not keys.shape[2] % PAGE
    counted = keys.shape[0] * keys.shape[1] * keys.shape[2] < 2**31
    beside = sinks is None or (sinks.is_contiguous() and sinks.device == query.device)
    return None if lies and counted and beside and _has_room(keys) and _has_room(values) else "layout"


def paged(tensor: Tensor) -> Tensor:
    """Return a cache `[B, Hk, S, D]` as pages `[B Hk S - (Hk - 1) S, P, Hk, D]`, one for each slot of the first heads.

    The last one ends `P - 1` slots behind the tensor.
    """
    batch, heads, capacity, dim = tensor.shape
    pages = (batch * heads - heads + 1) * capacity
    return tensor.as_strided((pages, PAGE, heads, dim), (dim, dim, capacity * dim, 1))


def page_tables(position: Tensor, starts: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the table of pages `[B, S / P]` and the lengths `[B]` of rows, int32, for `(B, Hk, S)`."""
    batch, heads, capacity = shape
    pages = capacity // PAGE
    if not backend.uses_triton(starts):
        first = torch.arange(batch, device=starts.device) * (heads * capacity) + starts
        table = first[:, None] + torch.arange(pages, device=starts.device) * PAGE
        return table.to(torch.int32), (position + 1 - starts).to(torch.int32)
    table = starts.new_empty(batch, pages, dtype=torch.int32)
    lengths = starts.new_empty(batch, dtype=torch.int32)
    block = min(1024, 1 << (pages - 1).bit_length())
    with backend.device_guard(starts):
        page_tables_kernel.launch(
            (batch, -(-pages // block), 1),
            max(1, min(256, block) // WAVE),
            (position, starts, table, lengths),
            (heads * capacity, pages),
            (),
            (),
            (PAGE, block),
        )
    return table, lengths


def allocate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros for keys or values `[B, Hk, S, D]`, with zeros behind them as far as a page may reach."""
    batch, heads, capacity, dim = shape
    room = torch.zeros((batch * heads * capacity + PAGE) * dim, dtype=dtype, device=device)
    return room[: room.shape[0] - PAGE * dim].view(shape)


def _has_room(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor goes on for a page."""
    behind = tensor.storage_offset() + tensor.numel() + (PAGE - 1) * tensor.shape[3]
    return bool(behind * tensor.element_size() <= tensor.untyped_storage().nbytes())


@functools.cache
def _ends(batch: int, device: torch.device) -> Tensor:
    """Return where the queries of each row end, after a 0: one token a row. The proof makes it, before any capture."""
    with torch.inference_mode(False):
        return torch.arange(batch + 1, dtype=torch.int32, device=device)


def _holds(call: Any, reference: Reference, query: Tensor, shape: tuple[int, int, int]) -> bool:
    """Return whether aiter is as near to fp32 as twice torch in the same dtype, or as aiter's own tests ask.

    Of a cache of the same sizes, full and half full, whose rows start in different slots, none a multiple of another.
    """
    batch, _, capacity = shape
    cache = (*shape, query.shape[3])
    q, *rest = aiter_calls.many_samples(query, tuple(query.shape), cache, cache)
    k, v = (allocate(cache, query.dtype, query.device).copy_(numbers) for numbers in rest)
    starts = torch.arange(batch, device=query.device) * 7 % (capacity // 4)
    for last in (capacity - 1, capacity // 2 + 1):
        position = torch.tensor([last], device=query.device)
        got = call(q, k, v, position, starts)
        for row in {0, batch // 2, batch - 1}:
            x, keys, values = (each[row : row + 1] for each in (q, k, v))
            where = position, starts[row : row + 1]
            exact = reference(x.float(), keys.float(), values.float(), *where)
            own = (reference(x, keys, values, *where).float() - exact).abs().max()
            error = (got[row : row + 1].float() - exact).abs().max()
            if not bool(torch.isfinite(got).all() & (error <= torch.clamp(2 * own, min=LEAST))):
                return False
    return True
