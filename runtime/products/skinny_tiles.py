"""Tiles of products of 2 to 32 rows: their sums, and those of programs that share one; formulas as in `skinny`."""

from __future__ import annotations

from ..core import backend

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..core.arrivals import publish

    @triton.jit
    def _weight(  # type: ignore[no-untyped-def]
        row_ptr,
        row,
        start,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Load columns of the rows of a program; a mask only where the tiles do not divide the weight."""
        col = start + tl.arange(0, BLOCK_COLS)
        if I % BLOCK_COLS == 0:
            if O % BLOCK_ROWS == 0:
                return tl.load(row_ptr + col)
            else:
                return tl.load(row_ptr + col, mask=(row < O)[:, None], other=0.0)
        else:
            return tl.load(row_ptr + col, mask=(row < O)[:, None] & (col < I)[None, :], other=0.0)

    @triton.jit
    def _input(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        rows,
        start,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        WEIGHT: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Load columns of all rows, times the norm's weight where there is one, and their squares in fp32."""
        col = start + tl.arange(0, BLOCK_COLS)
        mask = (rows < count)[:, None]
        if I % BLOCK_COLS:
            mask = mask & (col < I)[None, :]
        x = tl.load(x_ptr + rows[:, None] * I + col, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        square = wide * wide
        if NORM and WEIGHT:
            norm = tl.load(norm_ptr + col, mask=col < I, other=0.0).to(tl.float32) + offset
            x = (wide * norm[None, :]).to(x.dtype)
        return x, square

    @triton.jit
    def halves(y, BLOCK_ROWS: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return every first and every second row."""
        return tl.split(tl.permute(tl.reshape(y, [BLOCK_ROWS // 2, 2, M]), (0, 2, 1)))

    @triton.jit
    def rows_of_tile(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        weight_ptr,
        column,
        begin,
        end,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        AHEAD: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Multiply rows `column` of the weight with all rows, in columns `begin` to `end`: `[BLOCK_ROWS, M]`, fp32.

        Also returns the sums of squares of the rows in these columns, `[M]`; zeros without a norm. With AHEAD that
        many tiles of the weight, one or two, are on their way while the kernel before ends.
        """
        rows = tl.arange(0, M)
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * I
        first = begin
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        squares = tl.zeros([M], tl.float32)
        if NORM:
            square = tl.zeros([M, BLOCK_COLS], tl.float32)
        if AHEAD > 0:
            weight = _weight(weight_row, column, begin, I, O, BLOCK_ROWS, BLOCK_COLS)
            if AHEAD > 1:
                next_weight = _weight(weight_row, column, begin + BLOCK_COLS, I, O, BLOCK_ROWS, BLOCK_COLS)
            tl.extra.cuda.gdc_wait()
            x, more = _input(x_ptr, norm_ptr, rows, begin, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
            first += BLOCK_COLS
            if AHEAD > 1:
                x, more = _input(x_ptr, norm_ptr, rows, first, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
                if NORM:
                    square += more
                y = tl.dot(next_weight, tl.trans(x), y, input_precision="ieee")
                first += BLOCK_COLS
        for start in tl.range(first, end, BLOCK_COLS, num_stages=STAGES):
            weight = _weight(weight_row, column, start, I, O, BLOCK_ROWS, BLOCK_COLS)
            x, more = _input(x_ptr, norm_ptr, rows, start, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
        if NORM:
            squares = tl.sum(square, 1)
        return y, squares

    @triton.jit
    def rows_of_two_tiles(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        weight_ptr,
        column,
        more_column,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        AHEAD: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        EXTRA: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Do what `rows_of_tile` does for all columns of BLOCK_ROWS and of EXTRA rows of the weight."""
        ROWS: tl.constexpr = BLOCK_ROWS + EXTRA
        rows = tl.arange(0, M)
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * I
        more_row = weight_ptr + more_column.to(tl.int64)[:, None] * I
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        z = tl.zeros([EXTRA, M], tl.float32)
        squares = tl.zeros([M], tl.float32)
        square = tl.zeros([M, BLOCK_COLS], tl.float32)
        first = 0
        if AHEAD > 0:
            weight = _weight(weight_row, column, 0, I, O, ROWS, BLOCK_COLS)
            more_weight = _weight(more_row, more_column, 0, I, O, ROWS, BLOCK_COLS)
            tl.extra.cuda.gdc_wait()
            x, more = _input(x_ptr, norm_ptr, rows, 0, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            x = tl.trans(x)
            y = tl.dot(weight, x, y, input_precision="ieee")
            z = tl.dot(more_weight, x, z, input_precision="ieee")
            first += BLOCK_COLS
        for start in tl.range(first, I, BLOCK_COLS, num_stages=STAGES):
            weight = _weight(weight_row, column, start, I, O, ROWS, BLOCK_COLS)
            more_weight = _weight(more_row, more_column, start, I, O, ROWS, BLOCK_COLS)
            x, more = _input(x_ptr, norm_ptr, rows, start, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            x = tl.trans(x)
            y = tl.dot(weight, x, y, input_precision="ieee")
            z = tl.dot(more_weight, x, z, input_precision="ieee")
        if NORM:
            squares = tl.sum(square, 1)
        return y, z, squares

    @triton.jit
    def put_part(  # type: ignore[no-untyped-def]
        part_ptr,
        square_ptr,
        arrived_ptr,
        tile,
        split,
        y,
        squares,
        count,
        NORM: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """Write what this program has of a tile's sums; return whether it is the last: then `parts` has them all."""
        rows = tl.arange(0, M)
        inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
        part = part_ptr + (tile.to(tl.int64) * SPLITS + split) * M * BLOCK_ROWS + inner
        there = (rows < count)[None, :]
        tl.store(part, y, mask=there)
        if NORM:
            tl.store(square_ptr + (tile * SPLITS + split) * M + rows, squares, mask=rows < count)
        publish(WAIT)
        return tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1

    @triton.jit
    def parts(  # type: ignore[no-untyped-def]
        part_ptr,
        square_ptr,
        arrived_ptr,
        tile,
        count,
        NORM: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """Add up what all programs of a tile have written, in their order, and leave its counter as it was."""
        tl.store(arrived_ptr + tile, 0)
        rows = tl.arange(0, M)
        inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
        part = part_ptr + tile.to(tl.int64) * SPLITS * M * BLOCK_ROWS + inner
        there = (rows < count)[None, :]
        square_row = square_ptr + tile * SPLITS * M + rows
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        squares = tl.zeros([M], tl.float32)
        for one in tl.static_range(SPLITS):
            y += tl.load(part + one * M * BLOCK_ROWS, mask=there, other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(square_row + one * M, mask=rows < count, other=0.0, cache_modifier=".cg")
        return y, squares
