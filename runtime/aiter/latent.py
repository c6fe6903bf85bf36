"""aiter's latent attention of a step (`mla_decode_fwd`), in place of the second half of `latent_attention`.

B rows, H heads, L latent_rank, R rotated columns, S capacity, p the position of the token:

    row b reads slots s with starts[b] <= s <= p
    scores[h, s] = (absorbed[h] · c[s] + turned[h] · k[s]) * scaling          mixed[h] = softmax(scores)[h] c

Its kernels are assembly for L = 512, R = 64, bf16, and 16 or 128 heads, and read rows `[c, k]` of 576 columns. The
bundled kernels read latents and keys each on its own, so where this operator is named (`REWRITE_AITER_ON=mla_decode`)
a layer allocates both in one memory, of which they are slices; where aiter then refuses, torch's operators attend.

Rows of a cache have as many tokens as they have, one behind the other: a page is a slot, and a list of slots without
gaps is made in each layer of a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, processors
from . import aiter_calls
from .aiter_attention import LEAST

CASES = """
case("DeepSeek V3, 8 rows", slot_lists, int64(1), int64(8), LONG_CONTEXT)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["capacity", "rows"])
    def _slot_lists_kernel(  # type: ignore[no-untyped-def]
        position_ptr,
        starts_ptr,
        slots_ptr,
        ends_ptr,
        capacity,
        rows,
        BLOCK: tl.constexpr,
    ):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        after = (tl.load(position_ptr) + 1).to(tl.int32)
        slot = tl.zeros((BLOCK,), tl.int32)
        end = after * 0
        if tl.program_id(0) == 0:
            tl.store(ends_ptr, end)
        for row in range(rows):
            start = tl.load(starts_ptr + row).to(tl.int32)
            slot = tl.where((place >= end) & (place < end + after - start), row * capacity + start + place - end, slot)
            end += after - start
            if tl.program_id(0) == 0:
                tl.store(ends_ptr + row + 1, end)
        tl.store(slots_ptr + place, slot)

    slot_lists_kernel = Kernel(_slot_lists_kernel)

RANK, ROPE = 512, 64
HEADS = frozenset({16, 128})
MOST_SPLITS = 16
_BLOCK = 1024
_KEYWORDS = (
    "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q", "sm_scale", "num_kv_splits",
    "num_kv_splits_indptr",
)  # fmt: skip


def joins(heads: int, rank: int, rope: int, dtype: torch.dtype) -> bool:
    """Return whether a layer of these sizes is to keep latents and keys in one memory."""
    return (heads, rank, rope, dtype) == (1, RANK, ROPE, torch.bfloat16) and aiter_calls.candidate("mla_decode")


def allocate(batch: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeros for latents `[B, 1, S, L]` and keys `[B, 1, S, R]`, row beside row."""
    both = torch.zeros(batch, 1, capacity, RANK + ROPE, dtype=torch.bfloat16, device=device)
    return both[..., :RANK], both[..., RANK:]


def joined(latents: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Return the pages `[B S, 1, 1, L + R]` that latents and keys are slices of; None where they are not."""
    if latents is None or keys is None or latents.dtype != torch.bfloat16 or keys.dtype != latents.dtype:
        return None
    batch, heads, capacity, rank = latents.shape
    width = rank + keys.shape[3]
    strides = (capacity * width, capacity * width, width, 1)
    follows = keys.data_ptr() - latents.data_ptr() == rank * latents.element_size()
    alike = latents.stride() == keys.stride() == strides and latents.shape[:3] == keys.shape[:3] and heads == 1
    same = latents.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    if not (follows and alike and same):
        return None
    return latents.as_strided((batch * capacity, 1, 1, width), (width, width, width, 1))


def attend(
    queries: tuple[Tensor, Tensor], pages: Tensor, position: Tensor, starts: Tensor, scaling: float
) -> Tensor | None:
    """Return what each head mixes of the latents; None, with a counted reason, where torch is to attend.

    Args:
        queries: absorbed `[B, H, L]` and turned `[B, H, R]`.
        pages: of `joined`, the token's own slot included.
        position: `[1]`, int64.
        starts: `[B]`, int64.
        scaling: of the scores.

    Returns:
        `[B, H, L]`.
    """
    absorbed, turned = queries
    if not aiter_calls.chosen("mla_decode", absorbed):
        return None
    reason = _refusal(absorbed, turned, pages)
    if reason is not None:
        aiter_calls.refuse("mla_decode", reason)
        return None
    tensors = ("q", "kv_buffer", "o")
    function = aiter_calls.function("mla_decode", "mla_decode_fwd", tensors, _KEYWORDS, "aiter.mla")
    if function is None:
        return None
    batch, heads, _ = absorbed.shape
    capacity = pages.shape[0] // batch
    splits, split_ends, query_ends, ones = _divided(batch, absorbed.device)

    def call(absorbed: Tensor, turned: Tensor, pages: Tensor, position: Tensor, starts: Tensor) -> Tensor:
        slots, ends = slot_lists(position, starts, capacity)
        out = absorbed.new_empty(batch, heads, RANK)
        function(
            torch.cat((absorbed, turned), -1), pages, out, qo_indptr=query_ends, kv_indptr=ends, kv_indices=slots,
            kv_last_page_lens=ones, max_seqlen_q=1, sm_scale=scaling, num_kv_splits=splits,
            num_kv_splits_indptr=split_ends,
        )  # fmt: skip
        return out

    def proof() -> bool:
        return _holds(call, absorbed, capacity, scaling)

    variant = (absorbed.dtype, absorbed.device, batch, heads, capacity, scaling)
    given = (absorbed, turned, pages, position, starts)
    return aiter_calls.run("mla_decode", absorbed, variant, lambda: call(*given), proof)


def _refusal(absorbed: Tensor, turned: Tensor, pages: Tensor) -> str | None:
    if not {absorbed.dtype, turned.dtype, pages.dtype} <= {torch.bfloat16}:
        return "dtype"
    if not absorbed.numel():
        return "empty"
    if absorbed.shape[1] not in HEADS:
        return "latent_heads"
    sized = absorbed.shape[2] == RANK and turned.shape == (*absorbed.shape[:2], ROPE) and pages.shape[3] == RANK + ROPE
    return None if sized and not pages.shape[0] % absorbed.shape[0] and pages.shape[0] < 2**31 else "layout"


def slot_lists(position: Tensor, starts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the slots that rows read, one row behind the other, `[B S]`, and where each ends, `[B + 1]`, int32.

    What follows the last row is slot 0, also behind the list: a kernel may look further than it reads.
    """
    rows = starts.shape[0]
    size = -(-(rows * capacity + 1) // _BLOCK) * _BLOCK
    slots = torch.empty(size, dtype=torch.int32, device=starts.device)
    ends = torch.empty(rows + 1, dtype=torch.int32, device=starts.device)
    if backend.uses_triton(starts):
        with backend.device_guard(starts):
            given = (position, starts, slots, ends)
            slot_lists_kernel.launch((size // _BLOCK, 1, 1), 256 // WAVE, given, (capacity, rows), (), (), (_BLOCK,))
    else:
        lengths = position + 1 - starts
        ends[0] = 0
        ends[1:] = lengths.cumsum(0)
        place = torch.arange(size, device=starts.device)
        row = torch.searchsorted(ends[1:].long(), place, right=True)
        inside = row.clamp(max=rows - 1)
        slot = inside * capacity + starts[inside] + place - ends[inside]
        slots.copy_(torch.where(row < rows, slot, 0))
    return slots[: rows * capacity], ends


@functools.cache
def _divided(batch: int, device: torch.device) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the parts of a row, where the parts of each row end, and its query, `[B + 1]`, and ones, `[B]`, int32.

    aiter would make the second once for all cards of a process. The proof makes these, before any capture.
    """
    count = processors(device.index) if device.type == "cuda" else 1
    splits = max(1, min(MOST_SPLITS, count // batch))
    with torch.inference_mode(False):
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return splits, ends * splits, ends, torch.ones_like(ends[1:])


def reference(absorbed: Tensor, turned: Tensor, pages: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Return `attend` in plain torch; `visible` `[B, S]` are the slots that each row reads."""
    rows = pages.view(visible.shape[0], visible.shape[1], -1)
    latents, keys = rows.split([absorbed.shape[2], turned.shape[2]], -1)
    scores = torch.matmul(absorbed, latents.transpose(1, 2)) + torch.matmul(turned, keys.transpose(1, 2))
    scores = (scores * scaling).masked_fill(~visible[:, None], float("-inf"))
    weights = torch.softmax(scores.float(), -1).to(latents.dtype)
    return torch.matmul(weights, latents.masked_fill(~visible[..., None], 0.0))


def _holds(call: Any, like: Tensor, capacity: int, scaling: float) -> bool:
    """Return whether aiter is as near to fp32 as twice torch in bf16, or as its own tests ask.

    Of a cache of the same sizes, full and half full, whose rows start in different slots.
    """
    batch, heads, _ = like.shape
    shapes = (batch, heads, RANK), (batch, heads, ROPE), (batch * capacity, 1, 1, RANK + ROPE)
    absorbed, turned, pages = aiter_calls.many_samples(like, *shapes)
    absorbed = absorbed / 4
    starts = torch.arange(batch, device=like.device) * 7 % max(1, capacity // 4)
    slots = torch.arange(capacity, device=like.device)
    for last in (capacity - 1, capacity // 2):
        got = call(absorbed, turned, pages, torch.tensor([last], device=like.device), starts)
        for row in {0, batch // 2, batch - 1}:
            visible = ((slots <= last) & (slots >= starts[row]))[None]
            a, t, read = absorbed[row : row + 1], turned[row : row + 1], pages.view(batch, -1)[row]
            exact = reference(a.float(), t.float(), read.float(), visible, scaling)
            own = (reference(a, t, read, visible, scaling).float() - exact).abs().max()
            error = (got[row : row + 1].float() - exact).abs().max()
            if not bool(torch.isfinite(got).all() & (error <= torch.clamp(2 * own, min=LEAST))):
                return False
    return True
