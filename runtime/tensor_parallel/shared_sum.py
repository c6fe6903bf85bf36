"""The sum of what each rank has of a few rows, and a residual, in one kernel over memory that the ranks write to.

n ranks, C numbers in all, in blocks of `BLOCK`; a program sums one block.

    out = residual + (part of rank 0 + part of rank 1 + …)        in fp32, rounded once

A program writes its block of this rank's part into the memory of each other rank, in cells of eight bytes: four of the
part, and the number of the round. It then reads the cells that the others write here until each has this round's
number, and adds them up in the order of the ranks: every rank gets the same bits. A cell is stored and loaded as one,
so that nothing else has to be ordered and no rank reads another's memory: a sum waits for one store to cross (NCCL's
protocol LL does the same). Rounds alternate between two places: who writes cells of round k has had those of round
k - 1 of everyone, who wrote them after having read round k - 2. Inside a graph the kernel that follows loads its first
weights meanwhile.

The memory is torch's (`torch.distributed._symmetric_memory`), zero at first; per rank `[2, n, PROGRAMS, BLOCK]` cells,
by place, writer and program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import HIP, WAVE, Kernel, overlaps

CASES = """
def sum_of_two(rows, size):
    part = tensor(rows, 1, size)
    launch_shared_sum(part, part, tensor(rows, 1, size), int64(2), int64(PROGRAMS), 0, 2)

if not HIP:  # where the library sums
    case("8B", sum_of_two, 1, LLAMA_8B.hidden_size)
    case("8B, 8 rows", sum_of_two, 8, LLAMA_8B.hidden_size)
"""

BLOCK = 1024
PROGRAMS = 64
"""Most blocks of one sum; each has memory of its own."""
ALIGNED = 16
"""Bytes to which what the kernel reads is aligned."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _number(word, HIGH: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the number, in fp32, of a word, or of its lower or higher half."""
        if WIDE:
            number = word.to(dtype, bitcast=True)
        else:
            number = (word >> 16 if HIGH else word).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return number

    @triton.jit
    def _half(number, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
        return number.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF

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
        WIDE: tl.constexpr,
        PROGRAMS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Sum one block of `count` words; `memory_ptr` points to where the memory of each rank begins."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        own = tl.load(memory_ptr + rank).to(tl.pointer_type(tl.int64))
        neighbour = tl.load(memory_ptr + (rank + 1) % RANKS)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        dtype: tl.constexpr = part_ptr.dtype.element_ty
        CELLS: tl.constexpr = BLOCK if WIDE else BLOCK // 2
        program = tl.program_id(0)
        cell = tl.arange(0, CELLS)
        at = program * CELLS + cell
        live = at < count
        turn = tl.load(round_ptr + program).to(tl.int32) + 1
        word = tl.load(part_ptr.to(tl.pointer_type(tl.int32)) + at, mask=live, other=0)
        if RESIDUAL:
            added = tl.load(residual_ptr.to(tl.pointer_type(tl.int32)) + at, mask=live, other=0)
        told = (turn.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
        place = ((turn & 1) * RANKS * PROGRAMS + program) * BLOCK + cell
        for step in tl.static_range(1, RANKS):
            address = neighbour if step == 1 else tl.load(memory_ptr + (rank + step) % RANKS)
            theirs = address.to(tl.pointer_type(tl.int64))
            tl.store(theirs + place + rank * (PROGRAMS * BLOCK), told, mask=live)
        first = tl.zeros([CELLS], tl.float32)
        second = tl.zeros([CELLS], tl.float32)
        for other in tl.static_range(RANKS):
            cells = own + place + other * (PROGRAMS * BLOCK)
            wanted = live & (other != rank)
            got = tl.load(cells, mask=wanted, other=told, volatile=True)
            while tl.max(((got >> 32).to(tl.int32) != turn).to(tl.int32), 0) != 0:
                got = tl.load(cells, mask=wanted, other=told, volatile=True)
            word = got.to(tl.int32)
            first += _number(word, False, WIDE, dtype)
            if not WIDE:
                second += _number(word, True, WIDE, dtype)
        if RESIDUAL:
            first += _number(added, False, WIDE, dtype)
            if not WIDE:
                second += _number(added, True, WIDE, dtype)
        total = first.to(tl.int32, bitcast=True) if WIDE else _half(first, dtype) | (_half(second, dtype) << 16)
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + at, total, mask=live)
        tl.store(round_ptr + program, turn.to(tl.int64))

    shared_sum_kernel = Kernel(_shared_sum_kernel)


NOT_HERE = HIP
"""Whether the ranks leave sums to the library: that a cell arrives as one was read for NVIDIA's cards alone."""


def words(ranks: int) -> int:
    """Return how many words of four bytes the memory of a rank has; they have to be zero before the first sum."""
    return 2 * ranks * PROGRAMS * BLOCK * 2


def takes(part: Tensor, residual: Tensor | None) -> bool:
    """Return whether the kernel sums parts of this size, and adds the residual; what it says has to hold on all ranks.

    Args:
        part: contiguous, of any shape.
        residual: of the same shape; None for none.
    """
    return (
        0 < part.numel() <= PROGRAMS * BLOCK
        and part.nbytes % 4 == 0
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
    part, residual = _aligned(part), None if residual is None else _aligned(residual.contiguous())
    overlap = overlaps(part)
    with backend.device_guard(part):
        shared_sum_kernel.launch(
            (-(-part.numel() // BLOCK), 1, 1),
            256 // WAVE,
            (part, part if residual is None else residual, out, memory, rounds),
            (part.nbytes // 4, rank),
            (),
            (),
            (ranks, residual is not None, overlap, part.element_size() == 4, PROGRAMS, BLOCK),
            overlap=overlap,
        )


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()
