"""Rows that have come unequally far are brought to end at one slot again, as rows of a left-padded batch do.

B rows, H heads of a buffer (key/value heads), S capacity, D head_dim.

Of a step of several tokens each row keeps as many as were right. What a row has is moved by the difference: the row
that is ahead stays where it is, and a row that is behind begins so many slots later; what lies before is hidden, as
padding is. Masks, windows and kernels see a padded batch and nothing new, and a token's distance to those before it
stays. The price is that keys and values of a row are read and written once wherever it did not keep pace with the
first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..core.rounding_noise import distance
from ..decode.step_graph import DecodeGraph, Program
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import WAVE, Kernel, overlaps
from ..sampling.prompt_lookup import look_up
from ..sampling.sampling import NO_END, StepState

CASES = """
from ..sampling.sampling import StepState

def move(model, rows):
    kept = [tensor(rows, model.kv_heads, CONTEXT, model.head_dim) for _ in range(2)]
    return _launch(_table(kept), StepState(rows, CONTEXT, int64(1), int64(rows)))

case("8B, 8 rows", move, LLAMA_8B, 8)
"""

BLOCK = 8192
"""Numbers that a program holds at a time."""
ALIKE = 0.1
"""Largest relative distance of logits where rows lie in other slots, however far rounding takes them
(`Validator.rounding`). Another order of sums gives 0.02 in bf16; where it is in doubt, rows keep pace."""
FARTHEST = 16
"""Slots by which rows are moved to try that."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["capacity"])
    def _move_rows_kernel(  # type: ignore[no-untyped-def]
        table_ptr,
        like_ptr,
        position_ptr,
        starts_ptr,
        shift_ptr,
        capacity,
        H: tl.constexpr,
        D: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0) // H
        shift = tl.load(shift_ptr + row)
        if shift == 0:
            return
        start = tl.load(starts_ptr + row)
        end = tl.load(position_ptr) - shift
        blocks = tl.cdiv(end - start, BLOCK_SLOTS)
        kept_ptr = tl.load(table_ptr + tl.program_id(1)).to(tl.pointer_type(like_ptr.dtype.element_ty))
        kept_ptr += tl.program_id(0).to(tl.int64) * capacity * D
        column = tl.arange(0, BLOCK_D)[None, :]
        for number in range(blocks):
            # The last slots first where they move to the right: nothing is overwritten that has not been read.
            block = tl.where(shift > 0, blocks - 1 - number, number)
            slot = (start + block * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS))[:, None]
            there = (slot < end) & (column < D)
            at = kept_ptr + slot * D + column
            to = at + shift * D
            if D % 8 == 0:
                at, to = tl.multiple_of(at, (16, 16)), tl.multiple_of(to, (16, 16))
            kept = tl.load(at, mask=there, other=0.0)
            tl.debug_barrier()  # a warp may write where another one reads
            tl.store(to, kept, mask=there)

    move_rows_kernel = Kernel(_move_rows_kernel)


class Table(NamedTuple):
    """Buffers of a cache that one launch moves."""

    addresses: Tensor
    """`[N]` int64."""
    buffers: list[Tensor]
    """Those, each `[B, H, S, D]`."""


class Alignment(Program):
    """The graph that moves rows by `state.shift`; what drafts for the next step follows."""

    _tables: list[Table] | None = None

    def _rehearse(self) -> None:
        graph = self._decode()
        assert graph is not None
        graph.state.shift.zero_()
        self._run()

    def _run(self) -> None:
        graph = self._decode()
        assert graph is not None
        if self._tables is None:  # before anything is captured
            self._tables = tables_of(graph)
        align(graph, self._tables)
        if self.sampling is not None and self.sampling.lookup is not None and self.sampling.lookup.ngram:
            look_up(graph.state, self.sampling.lookup, self.sampling.eos)


def fall_in(state: StepState, taken: Tensor) -> None:
    """Let the position be behind the row that is ahead of all that go on, and note how far each of them has to move.

    Args:
        state: of a step in which rows took tokens.
        taken: `[B]`, how many each.
    """
    seen = state.position + state.length_offset - state.behind[:, 0] + taken
    state.finished.logical_or_(seen >= state.most)
    ahead = (taken - state.behind[:, 0]).masked_fill(state.finished, -NO_END).amax().view(1)
    ahead = torch.where(state.finished.all(), 0, ahead)
    shift = (ahead - taken).masked_fill(state.finished, 0)
    state.shift.copy_(shift)
    state.behind.add_(shift[:, None])
    state.position.add_(ahead)
    state.position_ids.add_(taken[:, None]).masked_fill_(state.finished[:, None], 0)


def align(graph: DecodeGraph, tables: Sequence[Table]) -> None:
    """Move rows by `state.shift`, so that each ends before `state.position`; all of it on the device.

    Args:
        graph: whose rows they are.
        tables: of its cache, `tables_of`; what is in none of them is moved by torch.
    """
    state = graph.state
    for table in tables:
        _launch(table, state)
    held = {id(buffer) for table in tables for buffer in table.buffers}
    for buffer in graph.cache.buffers:
        if id(buffer) not in held:
            buffer.copy_(_shifted(buffer, buffer.dim() - 2, state.shift))
    state.sequence.copy_(_shifted(state.sequence, 1, state.shift))
    # A row that has ended lies where it may be overwritten: it sees a slot, whatever that holds.
    starts = torch.where(state.finished, torch.minimum(state.starts, state.position), state.starts + state.shift)
    graph.buffers.hide_before(starts)


def aligns(graph: DecodeGraph, tokens: Tensor) -> bool:
    """Return whether steps compute the same where rows lie in other slots; the graph stays as it is.

    Tried once, by moving all rows: a model that takes the slot for the position, say, computes something else. It is
    not where there is no room for that.

    Args:
        graph: which began with a mask.
        tokens: `[B, n]` of a step; with n = 1 only the step of one is tried.
    """
    state, length = graph.state, graph.cache.length
    if graph.validator.aligns is None:
        far = min(FARTHEST, graph.cache.capacity - length - tokens.shape[1])
        if far <= 0:
            return False
        before, logits, tables = state.copy(), [], tables_of(graph)
        state.input_ids.copy_(tokens[:, :1])
        with graph.call.as_for_decoding():
            for shift in (0, far, -far):
                state.position.fill_(length + max(shift, 0))
                state.shift.fill_(shift)
                align(graph, tables)
                if shift >= 0:
                    several = [] if tokens.shape[1] == 1 else [graph.call.forward_several(tokens)]
                    logits.append(torch.cat([graph.call.forward()[:, None], *several], dim=1).float())
        state.restore(before)
        graph.buffers.hide_before(state.starts)
        graph.validator.aligns = distance(logits[1], logits[0]) <= min(graph.validator.rounding, ALIKE)
    return graph.validator.aligns


def moved_bytes(graph: DecodeGraph) -> float:
    """Return how many bytes an alignment reads and writes for each slot, where every row moves."""
    return 2 * graph.cache.nbytes / graph.cache.capacity


def tables_of(graph: DecodeGraph) -> list[Table]:
    """Return the buffers of a cache that the kernel moves, those of one form together."""
    alike: dict[Hashable, list[Tensor]] = {}
    for buffer in filter(_fits, graph.cache.buffers):
        alike.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
    return [_table(buffers) for buffers in alike.values()]


def _table(buffers: list[Tensor]) -> Table:
    addresses = [buffer.data_ptr() for buffer in buffers]
    return Table(torch.tensor(addresses, dtype=torch.int64, device=buffers[0].device), buffers)


def _shifted(tensor: Tensor, dimension: int, shift: Tensor) -> Tensor:
    """Return a tensor `[B, …]` with each row moved along a dimension; what comes in at an end is of its own."""
    slots = torch.arange(tensor.shape[dimension], device=tensor.device)
    sources = (slots - shift[:, None]).clamp(0, len(slots) - 1)
    shape = [1] * tensor.dim()
    shape[0], shape[dimension] = sources.shape
    return tensor.gather(dimension, sources.view(shape).expand(tensor.shape))


def _fits(buffer: Tensor) -> bool:
    return (
        buffer.dim() == 4
        and buffer.is_contiguous()
        and buffer.data_ptr() % 16 == 0
        and buffer.dtype in KERNEL_DTYPES
        and buffer.shape[3] <= BLOCK // 16
        and backend.nothing_watches(buffer)
        and backend.uses_triton(buffer)
    )


def _launch(table: Table, state: StepState) -> None:
    first = table.buffers[0]
    batch, heads, capacity, head_dim = first.shape
    overlap = overlaps(first)
    block = 1 << (head_dim - 1).bit_length()
    with backend.device_guard(first):
        move_rows_kernel.launch(
            (batch * heads, len(table.buffers), 1),
            256 // WAVE,
            (table.addresses, first, state.position, state.starts, state.shift),
            (capacity,),
            (),
            (),
            (heads, head_dim, overlap, BLOCK // block, block),
            overlap=overlap,
        )
