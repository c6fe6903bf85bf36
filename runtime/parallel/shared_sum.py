"""The sum of what each rank has of a few rows, and a residual, in one kernel over memory that the ranks read.

n ranks, C numbers in all, in blocks of `BLOCK`; a program sums one block.

    out = residual + (part of rank 0 + part of rank 1 + …)        in fp32, rounded once

A program writes its block of this rank's part to memory that the others read, tells each of them the number of the
round, waits until all have told it the same, and reads their blocks in the order of the ranks: every rank gets the
same bits. Rounds alternate between two places, so that nobody has to wait at the end: who tells of round k has read
all of round k - 1. Inside a graph the kernel that follows loads its first weights meanwhile.

The memory is torch's (`torch.distributed._symmetric_memory`); per rank, in words of four bytes: two places of
`PROGRAMS` blocks, then for each program the last round of each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..core.launch import WAVE, Kernel, overlaps, wait_for_stores

CASES = """
def sum_of_two(rows, size):
    part = tensor(rows, 1, size)
    launch_shared_sum(part, part, tensor(rows, 1, size), int64(2), int64(PROGRAMS), 0, 2)

case("8B", sum_of_two, 1, LLAMA_8B.hidden_size)
case("8B, 8 rows", sum_of_two, 8, LLAMA_8B.hidden_size)
"""

BLOCK = 1024
PROGRAMS = 64
"""Most blocks of one sum; each has memory of its own."""
WORDS = 2 * PROGRAMS * BLOCK

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..core.arrivals import publish

    @triton.jit(do_not_specialize=["count", "rank"])
    def _shared_sum_kernel(  # type: ignore[no-untyped-def]
        part_ptr,
        residual_ptr,
        out_ptr,
        memory_ptr,
        round_ptr,
        count,
        rank,
        RANKS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        PROGRAMS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Sum one block; `memory_ptr` points to where the memory of each rank begins."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        program = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        at = program * BLOCK + column
        live = at < count
        turn = tl.load(round_ptr + program).to(tl.int32) + 1
        place = ((turn & 1) * PROGRAMS + program) * BLOCK
        rounds = 2 * PROGRAMS * BLOCK + program * RANKS
        part = tl.load(part_ptr + at, mask=live, other=0.0)
        own = tl.load(memory_ptr + rank).to(tl.pointer_type(tl.int32))
        tl.store((own + place).to(tl.pointer_type(part_ptr.dtype.element_ty)) + column, part, mask=live)
        publish(WAIT)
        for other in tl.static_range(RANKS):
            theirs = tl.load(memory_ptr + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + rounds + rank, turn, sem="release", scope="sys")
        for other in tl.static_range(RANKS):
            told = tl.atomic_add(own + rounds + other, 0, sem="acquire", scope="sys")
            while told - turn < 0:  # also when the number of the round has overflown
                told = tl.atomic_add(own + rounds + other, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(RANKS):
            theirs = tl.load(memory_ptr + other).to(tl.pointer_type(tl.int32)) + place
            block = theirs.to(tl.pointer_type(part_ptr.dtype.element_ty)) + column
            total += tl.load(block, mask=live, other=0.0, cache_modifier=".cv").to(tl.float32)
        if RESIDUAL:
            total += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)
        tl.store(round_ptr + program, turn.to(tl.int64))

    shared_sum_kernel = Kernel(_shared_sum_kernel)


def words(ranks: int) -> int:
    """Return how many words of four bytes the memory of a rank has; they have to be zero before the first sum."""
    return WORDS + PROGRAMS * ranks


def takes(part: Tensor, residual: Tensor | None) -> bool:
    """Return whether the kernel sums parts of this size, and adds the residual; what it says has to hold on all ranks.

    Args:
        part: contiguous, of any shape.
        residual: of the same shape; None for none.
    """
    return (
        0 < part.numel() <= PROGRAMS * BLOCK
        and part.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (residual is None or (residual.shape == part.shape and residual.dtype == part.dtype))
        and backend.uses_triton(part)
    )


def launch_shared_sum(
    part: Tensor, residual: Tensor | None, out: Tensor, memory: Tensor, rounds: Tensor, rank: int, ranks: int
) -> None:
    """Run the kernel.

    Args:
        part: `[…]`, C numbers.
        residual: shaped as `part`; None for none.
        out: shaped as `part`.
        memory: `[n]`, int64, the address of every rank's memory, as this one sees it.
        rounds: `[PROGRAMS]`, int64, how many sums each program of this rank has done.
        rank: this one.
        ranks: n.
    """
    count = part.numel()
    overlap = overlaps(part)
    with backend.device_guard(part):
        shared_sum_kernel.launch(
            (-(-count // BLOCK), 1, 1),
            256 // WAVE,
            (part, part if residual is None else residual.contiguous(), out, memory, rounds),
            (count, rank),
            (),
            (),
            (ranks, residual is not None, overlap, wait_for_stores(part), PROGRAMS, BLOCK),
            overlap=overlap,
        )
