"""The first half of attention in a decode step of 2 to 32 rows, in one kernel: as `qkv_step`'s for one row.

A program takes rows of the weight in pairs, the two columns of a head that rotate together side by side, as a product
of several rows takes a gate beside its other half (`linear.skinny`); so a tile can rotate what it has computed. A
norm of queries or keys needs whole heads, which a tile then is.
"""

from __future__ import annotations

from torch import Tensor

from ..core import backend
from ..launching.launch import Kernel, overlaps, processors, shared_memory
from ..launching.tiles import Tile, head_rule, tile
from ..linear.prologue import norm_arguments
from ..linear.skinny import Work, height_for, skinny_kind
from ..norms.norm_form import Prologue
from .rope_cache import Rotation, head_scale, head_weight, turning

CASES = """
def rows(model, count, columns, normed=False, norm=prologue, **form):
    weight = tensor((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden_size)
    table = columns // 2 if form.get("half_table") else columns
    rotation = Rotation(tensor(count, 1, table), tensor(count, 1, table), **form)
    of_head = prologue(model.head_dim) if normed else None
    x = tensor(count, 1, model.hidden_size)
    tile = form_for_rows(x, weight, model.head_dim, normed)
    norms = (norm(model.hidden_size), of_head, of_head)
    return launch_qkv_rows(x, weight, None, norms, *cache(model, count, CONTEXT), int64(1), rotation, tile)

for model in LLAMAS:
    case(f"{model.name}, 8 rows", rows, model, 8, model.head_dim)
case("8B, 32 rows", rows, LLAMA_8B, 32, 128)
case("1B, 32 columns, 8 rows", rows, LLAMA_1B, 8, 32, interleaved=True, half_table=True)
case("Qwen3 30B-A3B, 8 rows", rows, QWEN3_30B, 8, 128, normed=True)
case("Qwen3 30B-A3B, 32 rows", rows, QWEN3_30B, 32, 128, normed=True)
case("Gemma 9B, normed, 8 rows", rows, GEMMA_9B, 8, 256, normed=True)
case("Gemma 9B, normed, 32", rows, GEMMA_9B, 32, 256, normed=True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.skinny import halves, parts, put_part, rows_of_tile
    from .rope_cache import pair_columns

    @triton.jit
    def _scaled_heads(  # type: ignore[no-untyped-def]
        first, second, norm_ptr, column, other_column, normed, eps, offset, D: tl.constexpr
    ):
        """Apply a norm to a head's columns, `[D / 2, M]` each, where `normed`."""
        inverse = tl.rsqrt(tl.sum(first * first + second * second, 0) / D + eps)[None, :]
        weight = tl.load(norm_ptr + column).to(tl.float32) + offset
        other_weight = tl.load(norm_ptr + other_column).to(tl.float32) + offset
        first = tl.where(normed, first * inverse * weight[:, None], first)
        second = tl.where(normed, second * inverse * other_weight[:, None], second)
        return first, second

    @triton.jit
    def _table(table_ptr, table_stride, at, turns, rows, count, neutral):  # type: ignore[no-untyped-def]
        """Load a column of cosines or sines for each pair, of each row: `[PAIRS, M]`."""
        there = turns[:, None] & (rows < count)[None, :]
        return tl.load(table_ptr + rows[None, :] * table_stride + at[:, None], mask=there, other=neutral).to(
            tl.float32
        )

    @triton.jit
    def _store(target, column, other_column, there, first, second):  # type: ignore[no-untyped-def]
        tl.store(target + column[:, None], first.to(target.dtype.element_ty), mask=there)
        tl.store(target + other_column[:, None], second.to(target.dtype.element_ty), mask=there)

    @triton.jit(do_not_specialize=["capacity", "count"])
    def _qkv_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        weight_ptr,
        bias_ptr,
        q_norm_ptr,
        k_norm_ptr,
        cos_ptr,
        sin_ptr,
        position_ptr,
        part_ptr,
        square_ptr,
        arrived_ptr,
        query_ptr,
        keys_ptr,
        values_ptr,
        capacity,
        count,
        table_stride,
        eps,
        offset,
        q_eps,
        q_offset,
        k_eps,
        k_offset,
        I: tl.constexpr,  # noqa: E741
        H: tl.constexpr,
        HK: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        AHEAD: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        SPLITS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        if AHEAD > 0:
            tl.extra.cuda.gdc_launch_dependents()
        O: tl.constexpr = (H + 2 * HK) * D  # noqa: E741
        split = tl.program_id(0)
        tile = tl.program_id(1)
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        end = tl.minimum(begin + share, I)
        place = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        first_column, second_column, _ = pair_columns(place // 2 % (D // 2), R, D, INTERLEAVED)
        row = place // D * D + tl.where(place % 2 == 0, first_column, second_column)
        y, squares = rows_of_tile(
            x_ptr, norm_ptr, weight_ptr, row, begin, end, count, offset,
            I, O, NORM, NORM_WEIGHT, AHEAD, M, BLOCK_ROWS, BLOCK_COLS, STAGES,
        )  # fmt: skip
        if SPLITS > 1:
            if not put_part(
                part_ptr, square_ptr, arrived_ptr, tile, split, y, squares, count, NORM, WAIT, M, BLOCK_ROWS, SPLITS
            ):
                return
            y, squares = parts(part_ptr, square_ptr, arrived_ptr, tile, count, NORM, M, BLOCK_ROWS, SPLITS)
        if NORM:
            y *= tl.rsqrt(squares / I + eps)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + row, mask=row < O, other=0.0).to(tl.float32)[:, None]
        first, second = halves(y, BLOCK_ROWS, M)
        pairs = tile * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
        head = pairs // (D // 2)
        pair = pairs % (D // 2)
        column, other_column, turns = pair_columns(pair, R, D, INTERLEAVED)
        if Q_NORM:  # a tile is a head
            normed = tile < H
            first, second = _scaled_heads(first, second, q_norm_ptr, column, other_column, normed, q_eps, q_offset, D)
        if K_NORM:
            normed = (tile >= H) & (tile < H + HK)
            first, second = _scaled_heads(first, second, k_norm_ptr, column, other_column, normed, k_eps, k_offset, D)
        rows = tl.arange(0, M)
        if R > 0:
            turns = turns & (head < H + HK)
            at = pair if HALF_TABLE else column
            at_other = pair if HALF_TABLE else other_column
            cos = _table(cos_ptr, table_stride, at, turns, rows, count, 1.0)
            sin = _table(sin_ptr, table_stride, at, turns, rows, count, 0.0)
            other_cos = _table(cos_ptr, table_stride, at_other, turns, rows, count, 1.0)
            other_sin = _table(sin_ptr, table_stride, at_other, turns, rows, count, 0.0)
            before = first
            first = first * cos - second * sin
            second = second * other_cos + before * other_sin
        position = tl.load(position_ptr)
        there = (pairs < O // 2)[:, None] & (rows < count)[None, :]
        of_row = rows.to(tl.int64)[None, :]
        query = query_ptr + (of_row * H + head[:, None]) * D
        _store(query, column, other_column, there & (head < H)[:, None], first, second)
        slot = ((of_row * HK + (head - H)[:, None]) * capacity + position) * D
        is_key = (head >= H) & (head < H + HK)
        _store(keys_ptr + slot, column, other_column, there & is_key[:, None], first, second)
        slot -= HK * capacity * D
        _store(values_ptr + slot, column, other_column, there & (head >= H + HK)[:, None], first, second)

    qkv_rows_kernel = Kernel(_qkv_rows_kernel, dot=True)


def form_for_rows(input: Tensor, weight: Tensor, head_dim: int, normed: bool) -> Tile | None:
    """Return how the work is divided; None where the product and the rest are two kernels.

    Args:
        input: `[B, 1, I]`.
        weight: `[(H + 2 Hk) D, I]`.
        head_dim: D.
        normed: whether queries or keys are normalised, so that a tile has to be a head.
    """
    device = input.get_device() if input.is_cuda else None
    rows, cols = weight.shape
    count = input.numel() // cols
    form = tile(skinny_kind(count), rows, cols, weight.element_size(), device)
    if form is None or not normed:
        return form
    if not 16 <= head_dim <= 256 or head_dim & (head_dim - 1):
        return None
    return head_rule(height_for(count), rows, cols, head_dim, processors(device), shared_memory(device))


def launch_qkv_rows(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norms: tuple[Prologue | None, Prologue | None, Prologue | None],
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    rotation: Rotation | None,
    form: tuple[int, ...],
) -> Tensor:
    """Run the kernel with a `skinny.Form`.

    Args:
        input: `[B, 1, I]`, up to `skinny.MOST_ROWS` rows.
        weight: `[(H + 2 Hk) D, I]`.
        bias: as long; None for none.
        norms: of the input, and of queries and keys over one head, with a weight; None for none.
        keys, values: `[B, Hk, S, D]`, contiguous.
        position: `[1]`, int64.
        rotation: None for none.
        form: whose tiles are heads where queries or keys are normalised.

    Returns:
        The queries `[B, H, 1, D]`.
    """
    batch, kv_heads, capacity, head_dim = keys.shape
    cols = weight.shape[1]
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    query = input.new_empty(batch, heads, 1, head_dim)
    prologue, q_norm, k_norm = norms
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    tables, (table_stride, _), turns = turning(rotation, input)
    overlap = overlaps(input)
    work = Work.of(input, weight, batch, prologue, form)
    block_rows, block_cols, num_warps, splits, stages = work.form
    with backend.device_guard(input):
        qkv_rows_kernel.launch(
            (splits, work.blocks, 1),
            num_warps,
            (
                input.contiguous(), norm, weight, weight if bias is None else bias,
                head_weight(q_norm, input), head_weight(k_norm, input), *tables, position,
                work.part, work.square, work.arrived, query, keys, values,
            ),
            (capacity, batch),
            (table_stride,),
            (eps, offset, *head_scale(q_norm), *head_scale(k_norm)),
            (
                cols, heads, kv_heads, head_dim, *turns, prologue is not None, has_weight, bias is not None,
                q_norm is not None, k_norm is not None, work.ahead(cols) if overlap else 0, work.waits(input),
                work.height, block_rows, block_cols, splits, stages,
            ),
            overlap=overlap,
        )  # fmt: skip
    return query
