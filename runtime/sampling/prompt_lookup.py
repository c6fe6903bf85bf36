"""Prompt lookup (Saxena, 2023) on the device: what followed the last tokens where they stood before may follow again.

B rows, S capacity, K drafts, E number of end-of-sequence ids.

For every token of a row but the last, `matched` says how many tokens up to it are the last ones of the text; the first
of those with the most is taken, and the tokens behind it are drafted, up to the end of the text or one that ends it.
Padding is no part of the text. A program reads a row, which is 8 bytes a token: it runs behind every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps
from .sampling import Lookup, StepState

CASES = """
from .sampling import Lookup, StepState

def find(rows, tokens, ngram):
    return look_up(StepState(rows, CONTEXT, int64(1), int64(rows)), Lookup(tokens, ngram), int64(2))

case("10 after 2", find, 8, 10, 2)
"""

BLOCK = 2048
"""Tokens that the program compares at a time."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _look_up_kernel(  # type: ignore[no-untyped-def]
        text_ptr,
        position_ptr,
        starts_ptr,
        eos_ptr,
        drafts_ptr,
        drafted_ptr,
        matched_ptr,
        text_stride,
        drafts_stride,
        TOKENS: tl.constexpr,
        NGRAM: tl.constexpr,
        ENDS: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_TOKENS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        text_ptr += row * text_stride
        start = tl.load(starts_ptr + row)
        last = tl.load(position_ptr)
        # The longest match first, of several the leftmost: matched * 2^32 - slot, 0 where nothing matches.
        best = tl.zeros([BLOCK], tl.int64)
        for first in range(start, last, BLOCK):
            slot = first + tl.arange(0, BLOCK).to(tl.int64)
            same = slot < last
            matched = tl.zeros([BLOCK], tl.int64)
            for back in tl.static_range(NGRAM):
                same = same & (slot >= start + back)
                token = tl.load(text_ptr + tl.maximum(last - back, 0))
                there = tl.load(text_ptr + tl.maximum(slot - back, 0), mask=slot < last, other=-1)
                same = same & (there == token)
                matched += same.to(tl.int64)
            best = tl.maximum(best, tl.where(matched > 0, matched * 4294967296 - slot, 0))
        top = tl.max(best, 0)
        length = (top + 4294967295) // 4294967296
        number = tl.arange(0, BLOCK_TOKENS)
        at = length * 4294967296 - top + 1 + number
        # None where nothing matched: no scalar in a mask, which Triton 3.9's interpreter makes a number.
        there = (number < TOKENS * tl.minimum(length, 1)) & (at <= last)
        draft = tl.load(text_ptr + at, mask=there, other=0)
        for end in tl.static_range(ENDS):
            there = there & (draft != tl.load(eos_ptr + end))
        tl.store(drafts_ptr + row * drafts_stride + number, draft, mask=number < TOKENS)
        tl.store(drafted_ptr + row, tl.min(tl.where(there, TOKENS, number), 0).to(tl.int64))
        tl.store(matched_ptr + row, length)

    look_up_kernel = Kernel(_look_up_kernel)


def look_up(state: StepState, lookup: Lookup, eos: Tensor | None) -> None:
    """Draft the tokens that follow the last one of each row, which is the one at `state.position`.

    Args:
        state: with the whole text in `sequence` `[B, S + 1]`; gets `drafts`, `drafted` and `matched`.
        lookup: how many, and after how many.
        eos: `[E]` ids that are not drafted, nor is what follows one; None for none.
    """
    text = state.sequence
    if not (backend.nothing_watches(text) and backend.uses_triton(text)):
        _reference(state, lookup, eos)
        return
    overlap = overlaps(text)
    with backend.device_guard(text):
        look_up_kernel.launch(
            (len(text), 1, 1),
            512 // WAVE,
            (
                text, state.position, state.starts, text if eos is None else eos, state.drafts, state.drafted,
                state.matched,
            ),
            (),
            (text.stride(0), state.drafts.stride(0)),
            (),
            (
                lookup.tokens, lookup.ngram, 0 if eos is None else len(eos), overlap, BLOCK,
                1 << lookup.tokens.bit_length(),
            ),
            overlap=overlap,
        )  # fmt: skip


def _reference(state: StepState, lookup: Lookup, eos: Tensor | None) -> None:
    text, last, start = state.sequence, state.position, state.starts[:, None]
    slots = torch.arange(text.shape[1], device=text.device)
    same = (slots < last) & (slots >= start)
    matched = torch.zeros_like(text)
    for back in range(lookup.ngram):
        token = text.index_select(1, (last - back).clamp_min(0))
        same = same & (slots >= start + back) & (text.roll(back, dims=1) == token)
        matched += same
    found = (matched * (len(slots) + 1) - slots).argmax(dim=1, keepdim=True)
    length = matched.gather(1, found)
    at = found + torch.arange(1, lookup.tokens + 1, device=text.device)
    there = (at <= last) & (length > 0)
    drafts = text.gather(1, at.clamp_max(len(slots) - 1)).masked_fill(~there, 0)
    if eos is not None:
        there &= (drafts[..., None] != eos).all(dim=-1)
    state.drafts[:, : lookup.tokens] = drafts
    state.drafted.copy_(there.long().cumprod(1).sum(dim=1))
    state.matched.copy_(length[:, 0])
