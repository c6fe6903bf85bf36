"""Prompt lookup (Saxena, 2023) on the device: what followed the last tokens where they stood before may follow again.

S capacity, K drafts, E number of end-of-sequence ids. One row.

For every token but the last, `matched` says how many tokens up to it are the last ones of the text; the first of those
with the most is taken, and the tokens behind it are drafted, up to the end of the text or one that ends it. A program
reads the text, which is 8 bytes a token: it runs behind every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..core.launch import WAVE, Kernel, overlaps
from .sampling import Lookup, StepState

CASES = """
from .sampling import Lookup, StepState

def find(tokens, ngram):
    return look_up(StepState(1, CONTEXT, int64(1)), Lookup(tokens, ngram), int64(2))

case("10 after 2", find, 10, 2)
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
        eos_ptr,
        drafts_ptr,
        drafted_ptr,
        matched_ptr,
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
        last = tl.load(position_ptr)
        # The longest match first, of several the leftmost: matched * 2^32 - slot, 0 where nothing matches.
        best = tl.zeros([BLOCK], tl.int64)
        for first in range(0, last, BLOCK):
            slot = first + tl.arange(0, BLOCK).to(tl.int64)
            same = slot < last
            matched = tl.zeros([BLOCK], tl.int64)
            for back in tl.static_range(NGRAM):
                same = same & (slot >= back)
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
        tl.store(drafts_ptr + number, draft, mask=number < TOKENS)
        tl.store(drafted_ptr, tl.min(tl.where(there, TOKENS, number), 0).to(tl.int64))
        tl.store(matched_ptr, length)

    look_up_kernel = Kernel(_look_up_kernel)


def look_up(state: StepState, lookup: Lookup, eos: Tensor | None) -> None:
    """Draft the tokens that follow the last one of a step's text, which is the one at `state.position`.

    Args:
        state: with the whole text in `sequence` `[1, S + 1]`; gets `drafts`, `drafted` and `matched`.
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
            (1, 1, 1),
            512 // WAVE,
            (
                text, state.position, text if eos is None else eos, state.drafts, state.drafted, state.matched,
            ),
            (),
            (),
            (),
            (
                lookup.tokens, lookup.ngram, 0 if eos is None else len(eos), overlap, BLOCK,
                1 << lookup.tokens.bit_length(),
            ),
            overlap=overlap,
        )  # fmt: skip


def _reference(state: StepState, lookup: Lookup, eos: Tensor | None) -> None:
    text, last = state.sequence[0], state.position
    slots = torch.arange(len(text), device=text.device)
    same = slots < last
    matched = torch.zeros_like(slots)
    for back in range(lookup.ngram):
        token = text.index_select(0, (last - back).clamp_min(0))
        same = same & (slots >= back) & (text.roll(back) == token)
        matched += same
    found = (matched * (len(text) + 1) - slots).argmax().view(1)
    length = matched.index_select(0, found)
    at = found + torch.arange(1, lookup.tokens + 1, device=text.device)
    there = (at <= last) & (length > 0)
    drafts = text.index_select(0, at.clamp_max(len(text) - 1)).masked_fill(~there, 0)
    if eos is not None:
        there &= (drafts[:, None] != eos).all(dim=1)
    state.drafts[0, : lookup.tokens] = drafts
    state.drafted.copy_(there.long().cumprod(0).sum())
    state.matched.copy_(length)
