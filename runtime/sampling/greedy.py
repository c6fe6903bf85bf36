"""The end of a greedy decode step in two kernels: the most probable token, and what the next step needs to know.

B rows, V vocabulary, S capacity, E number of end-of-sequence ids. Of equal logits the first one is taken; NaN counts
as the largest, as in `torch.argmax`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import WAVE, Kernel, overlaps
from .prompt_lookup import look_up
from .sampling import Sampling, StepState, advance, select

CASES = """
from .sampling import Sampling

def token(rows, model):
    sampling = Sampling([], False, int64(2), int64(1))
    return choose(tensor(rows, model.vocabulary), StepState(rows, CONTEXT, int64(1)), sampling)

case("8B", token, 1, LLAMA_8B)
case("Gemma 9B, 16 rows", token, 16, GEMMA_9B)
"""

BLOCK = 2048
MOST_ROWS = 32
"""More rows take torch's operators: one program holds the best of every block of every row."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _best_of_block_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, best_ptr, index_ptr, vocabulary, row_stride, OVERLAP: tl.constexpr, BLOCK: tl.constexpr
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(1).to(tl.int64)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + column, mask=column < vocabulary, other=float("-inf"))
        logits = logits.to(tl.float32)
        logits = tl.where(logits != logits, float("inf"), logits)
        best = tl.max(logits, 0)
        at = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_ptr + at, best)
        tl.store(index_ptr + at, tl.min(tl.where(logits == best, column, 0x7FFFFFFF), 0))

    @triton.jit(do_not_specialize=["rows", "blocks"])
    def _take_best_kernel(  # type: ignore[no-untyped-def]
        best_ptr,
        index_ptr,
        eos_ptr,
        pad_ptr,
        finished_ptr,
        position_ptr,
        position_ids_ptr,
        input_ids_ptr,
        sequence_ptr,
        rows,
        blocks,
        sequence_stride,
        ENDS: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_BLOCKS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.arange(0, BLOCK_ROWS)
        block = tl.arange(0, BLOCK_BLOCKS)
        live = row < rows
        at = row[:, None] * blocks + block[None, :]
        there = live[:, None] & (block < blocks)[None, :]
        bests = tl.load(best_ptr + at, mask=there, other=float("-inf"))
        indices = tl.load(index_ptr + at, mask=there, other=0x7FFFFFFF)
        best = tl.max(bests, 1)
        token = tl.min(tl.where(bests == best[:, None], indices, 0x7FFFFFFF), 1).to(tl.int64)
        if ENDS > 0:
            finished = tl.load(finished_ptr + row, mask=live, other=0) != 0
            token = tl.where(finished, tl.load(pad_ptr), token)
            for end in tl.static_range(ENDS):
                finished = finished | (token == tl.load(eos_ptr + end))
            tl.store(finished_ptr + row, finished, mask=live)
        position = tl.load(position_ptr) + 1
        tl.store(position_ptr, position)
        tl.store(position_ids_ptr + row, tl.load(position_ids_ptr + row, mask=live, other=0) + 1, mask=live)
        tl.store(input_ids_ptr + row, token, mask=live)
        tl.store(sequence_ptr + row * sequence_stride + position, token, mask=live)

    best_of_block_kernel = Kernel(_best_of_block_kernel)
    take_best_kernel = Kernel(_take_best_kernel)


def choose(logits: Tensor, state: StepState, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Choose a token for each row, write it down and move on to the next slot.

    Args:
        logits: `[B, V]`.
        state: of the step.
        sampling: how.

    Returns:
        Logits and processed scores, as `select` returns them.
    """
    if _takes(logits, sampling):
        _take_best(logits, state, sampling)
        scores = logits
    else:
        tokens, logits, scores = select(logits, state, sampling)
        advance(tokens, state, sampling)
    if sampling.lookup is not None and sampling.lookup.ngram:
        look_up(state, sampling.lookup, sampling.eos)
    return logits, scores


def _takes(logits: Tensor, sampling: Sampling) -> bool:
    return (
        not (sampling.forms or sampling.sample or sampling.keep)
        and logits.shape[0] <= MOST_ROWS
        and logits.stride(1) == 1
        and logits.dtype in KERNEL_DTYPES
        and backend.nothing_watches(logits)
        and backend.uses_triton(logits)
    )


def _take_best(logits: Tensor, state: StepState, sampling: Sampling) -> None:
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // BLOCK)
    best = logits.new_empty(rows * blocks, dtype=torch.float32)
    index = logits.new_empty(rows * blocks, dtype=torch.int32)
    ends = 0 if sampling.eos is None else len(sampling.eos)
    eos, pad = (state.input_ids, state.input_ids) if ends == 0 else (sampling.eos, sampling.pad)
    assert eos is not None
    assert pad is not None
    overlap = overlaps(logits)
    with backend.device_guard(logits):
        best_of_block_kernel.launch(
            (blocks, rows, 1), 256 // WAVE, (logits, best, index), (), (vocabulary, logits.stride(0)), (),
            (overlap, BLOCK), overlap=overlap,
        )  # fmt: skip
        take_best_kernel.launch(
            (1, 1, 1),
            128 // WAVE,
            (
                best, index, eos, pad, state.finished, state.position, state.position_ids, state.input_ids,
                state.sequence,
            ),
            (rows, blocks),
            (state.sequence.stride(0),),
            (),
            (ends, overlap, 1 << (rows - 1).bit_length(), 1 << (blocks - 1).bit_length()),
            overlap=overlap,
        )  # fmt: skip
