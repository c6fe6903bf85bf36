"""Rows that have come unequally far are brought to end at one slot again, as rows of a left-padded batch do.

B rows, Hk key/value heads, S capacity, D and Dv head_dim of keys and values.

Of a step of several tokens each row keeps as many as were right. What a row has is moved by the difference: the row
that is ahead stays where it is, and a row that is behind begins so many slots later; what lies before is hidden, as
padding is. Masks, windows and kernels see a padded batch and nothing new, and a token's distance to those before it
stays. The price is that keys and values of a row are read and written once wherever it did not keep pace with the
first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.layers import PreallocatedLayer
from ..core import backend
from ..core.launch import WAVE, Kernel, overlaps
from ..core.rows import KERNEL_DTYPES
from .graph import DecodeGraph, Program
from .lookup import look_up
from .proof import distance
from .sampling import NO_END, StepState

OFFERS: dict[str, dict[str, str]] = {}

CASES = """
from .sampling import StepState

def move(model, rows):
    kept = [tensor(rows, model.kv_heads, CONTEXT, model.head_dim) for _ in range(2)]
    return _launch(*kept, StepState(rows, CONTEXT, int64(1), int64(rows)))

case("8B, 8 rows", move, LLAMA_8B, 8)
"""

BLOCK_SLOTS = 128
"""Slots that a program holds at a time."""
BLOCK_COLUMNS = 64
"""Of a head, which a program moves."""
ALIKE = 0.1
"""Largest relative distance of logits where rows lie in other slots. Another order of sums gives 0.02 in bf16, a model
that takes the slot for the position 0.5 and more; where it is in doubt, rows keep pace."""
FARTHEST = 16
"""Slots by which rows are moved to try that."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["capacity"])
    def _move_rows_kernel(  # type: ignore[no-untyped-def]
        keys_ptr,
        values_ptr,
        position_ptr,
        starts_ptr,
        shift_ptr,
        capacity,
        HK: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0) // HK
        shift = tl.load(shift_ptr + row)
        if shift == 0:
            return
        start = tl.load(starts_ptr + row)
        end = tl.load(position_ptr) - shift
        blocks = tl.cdiv(end - start, BLOCK_SLOTS)
        head = tl.program_id(0).to(tl.int64) * capacity
        column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        for number in range(blocks):
            # The last slots first where they move to the right: nothing is overwritten that has not been read.
            block = tl.where(shift > 0, blocks - 1 - number, number)
            slot = (start + block * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS))[:, None]
            keys = tl.load(keys_ptr + (head + slot) * D + column, mask=(slot < end) & (column < D), other=0.0)
            values = tl.load(values_ptr + (head + slot) * DV + column, mask=(slot < end) & (column < DV), other=0.0)
            tl.debug_barrier()  # a warp may write where another one reads
            moved = head + slot + shift
            tl.store(keys_ptr + moved * D + column, keys, mask=(slot < end) & (column < D))
            tl.store(values_ptr + moved * DV + column, values, mask=(slot < end) & (column < DV))

    move_rows_kernel = Kernel(_move_rows_kernel)


class Alignment(Program):
    """The graph that moves rows by `state.shift`; what drafts for the next step follows."""

    def _rehearse(self) -> None:
        graph = self._decode()
        assert graph is not None
        graph.state.shift.zero_()
        self._run()

    def _run(self) -> None:
        graph = self._decode()
        assert graph is not None
        align(graph)
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


def align(graph: DecodeGraph) -> None:
    """Move rows by `state.shift`, so that each ends before `state.position`; all of it on the device."""
    state = graph.state
    for layer in graph.cache.attention_layers:
        _move(layer, state)
    state.sequence.copy_(_shifted(state.sequence, 1, state.shift))
    # A row that has ended lies where it may be overwritten: it sees a slot, whatever that holds.
    starts = torch.where(state.finished, torch.minimum(state.starts, state.position), state.starts + state.shift)
    graph.hide_before(starts)


def aligns(graph: DecodeGraph, tokens: Tensor) -> bool:
    """Return whether steps compute the same where rows lie in other slots; the graph stays as it is.

    Tried once, by moving all rows: a model that takes the slot for the position, say, computes something else. It is
    not where there is no room for that.

    Args:
        graph: which began with a mask.
        tokens: `[B, n]` of a step; with n = 1 only the step of one is tried.
    """
    state, length = graph.state, graph.cache.length
    if graph.aligns is None:
        far = min(FARTHEST, graph.cache.capacity - length - tokens.shape[1])
        if far <= 0:
            return False
        before, logits = state.copy(), []
        state.input_ids.copy_(tokens[:, :1])
        with graph.model._optimize_model_for_decode():
            for shift in (0, far, -far):
                state.position.fill_(length + max(shift, 0))
                state.shift.fill_(shift)
                align(graph)
                if shift >= 0:
                    several = [] if tokens.shape[1] == 1 else [graph.forward_several(tokens)]
                    logits.append(torch.cat([graph.forward()[:, None], *several], dim=1).float())
        state.restore(before)
        graph.hide_before(state.starts)
        graph.aligns = distance(logits[1], logits[0]) < ALIKE
    return graph.aligns


def moved_bytes(graph: DecodeGraph) -> float:
    """Return how many bytes an alignment reads and writes for each slot, where every row moves."""
    return 2 * graph.cache.nbytes / graph.cache.capacity


def _move(layer: PreallocatedLayer, state: StepState) -> None:
    buffers = layer.buffers
    if _fits(buffers):
        _launch(buffers[0], buffers[1], state)
        return
    for buffer in buffers:
        buffer.copy_(_shifted(buffer, buffer.dim() - 2, state.shift))


def _shifted(tensor: Tensor, dimension: int, shift: Tensor) -> Tensor:
    """Return a tensor `[B, …]` with each row moved along a dimension; what comes in at an end is of its own."""
    slots = torch.arange(tensor.shape[dimension], device=tensor.device)
    sources = (slots - shift[:, None]).clamp(0, len(slots) - 1)
    shape = [1] * tensor.dim()
    shape[0], shape[dimension] = sources.shape
    return tensor.gather(dimension, sources.view(shape).expand(tensor.shape))


def _fits(buffers: list[Tensor]) -> bool:
    return (
        len(buffers) == 2
        and all(buffer.dim() == 4 and buffer.is_contiguous() and buffer.dtype in KERNEL_DTYPES for buffer in buffers)
        and buffers[0].shape[:3] == buffers[1].shape[:3]
        and backend.nothing_watches(buffers[0])
        and backend.uses_triton(buffers[0])
    )


def _launch(keys: Tensor, values: Tensor, state: StepState) -> None:
    batch, heads, capacity, head_dim = keys.shape
    overlap = overlaps(keys)
    columns = -(-max(head_dim, values.shape[3]) // BLOCK_COLUMNS)
    with backend.device_guard(keys):
        move_rows_kernel.launch(
            (batch * heads, columns, 1),
            256 // WAVE,
            (keys, values, state.position, state.starts, state.shift),
            (capacity,),
            (),
            (),
            (heads, head_dim, values.shape[3], overlap, BLOCK_SLOTS, BLOCK_COLUMNS),
            overlap=overlap,
        )
