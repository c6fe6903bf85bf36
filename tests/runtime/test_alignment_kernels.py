"""The kernels of drafted rows against plain torch: what moves a row of a cache, and what looks its text up."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.sampling.prompt_lookup import look_up
from hf_rewrite_runtime.sampling.sampling import Lookup, StepState
from hf_rewrite_runtime.speculative.left_pad_rows import BLOCK, _fits, _launch, _table

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20, 136])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_rows_move_either_way(blocks: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    end = 7 + blocks * (BLOCK >> (head_dim - 1).bit_length())
    shifts, starts = [0, 1, 5, -1, -6, 11, 0], [2, 0, 1, 1, 6, 0, 0]
    rows, heads, capacity = len(shifts), 2, end + 13
    state = StepState(rows, capacity, torch.tensor([end], device=device), torch.tensor(starts, device=device))
    state.shift.copy_(torch.tensor(shifts))
    buffers = [torch.randn(rows, heads, capacity, head_dim, device=device).to(dtype) for _ in range(3)]
    before = [buffer.clone() for buffer in buffers]
    assert all(map(_fits, buffers))
    _launch(_table(buffers[:2]), state)
    assert torch.equal(buffers[2], before[2])
    for moved, was in zip(buffers[:2], before, strict=False):
        wanted = was.clone()
        for row, (shift, start) in enumerate(zip(shifts, starts, strict=True)):
            if end - shift > start:
                wanted[row, :, start + shift : end] = was[row, :, start : end - shift]
        assert torch.equal(moved, wanted)


@pytest.mark.parametrize("ends", [0, 2])
@pytest.mark.parametrize(("tokens", "ngram"), [(1, 1), (5, 2), (8, 3)])
def test_every_row_is_looked_up_by_itself(tokens: int, ngram: int, ends: int, device: torch.device) -> None:
    capacity, rows, generator = 2200, 5, torch.Generator().manual_seed(tokens)
    eos = torch.tensor([3, 5], device=device) if ends else None
    for length, words in ((9, 3), (60, 12), (2049, 40), (2199, 500)):
        text = torch.randint(words, (rows, capacity + 1), generator=generator)
        starts = torch.tensor([0, length // 2, length - 1, length - 3, 1], device=device).clamp_min(0)
        position = torch.tensor([length - 1], device=device)
        state, wanted = (StepState(rows, capacity, position, starts) for _ in range(2))
        for each in (state, wanted):
            each.sequence.copy_(text)
            each.drafted.fill_(77)
        look_up(state, Lookup(tokens, ngram), eos)
        with backend.use_backend("reference"):
            look_up(wanted, Lookup(tokens, ngram), eos)
        for name, tensor in vars(wanted).items():
            assert torch.equal(getattr(state, name), tensor), (name, length)
        for row in range(rows):
            start = int(starts[row])
            alone = StepState(1, capacity, position - start)
            alone.sequence[:, : capacity + 1 - start] = text[row, start:]
            with backend.use_backend("reference"):
                look_up(alone, Lookup(tokens, ngram), eos)
            assert torch.equal(alone.drafts[0], wanted.drafts[row])
            assert (int(alone.drafted), int(alone.matched)) == (int(wanted.drafted[row]), int(wanted.matched[row]))
