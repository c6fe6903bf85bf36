"""Matrix instructions: D = A B^T + C, dense, with blocks of one (MI300 and CDNA4 ISA, "Matrix fused-multiply-add").

Legend: M x M outputs, K products each. Of the two operands lane l holds row l % M and, of K in order, the part that
belongs to l // M; of the output column l % M and, of every group of four rows, those that belong to l // M.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import Instruction, Operand
from .isa_errors import UnknownInstruction
from .small_floats import Format, from_bfloat16, from_float16
from .waves import LANE, U32, Waves

F32, F64 = np.float32, np.float64
_NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_?(f32|f16|bf16_1k|bf16|(?:[fb]p?f?8_)?[fb]p?f?8)")


def matrix_instruction(one: Instruction, chip: str, eight: dict[str, Format]) -> Callable[[Waves], None]:
    """Return what a `v_mfma_…` does.

    Raises:
        UnknownInstruction: it is of several blocks, sparse, scaled or of integers.
    """
    match = _NAME.fullmatch(one.name)
    if match is None or one.modifiers:
        raise UnknownInstruction(one.text)
    size, depth, kind = int(match[1][:2]), int(match[2]), match[3]
    each = size * depth // 64
    per_register = {"f32": 1, "f16": 2, "bf16": 2, "bf16_1k": 2}.get(kind, 4)
    to, a, b, c = one.operands
    outputs = size * size // 64
    if any(operand.count * per_register != each for operand in (a, b)) or to.count != outputs:
        raise UnknownInstruction(one.text)  # of several blocks, which have more outputs
    # MI200's matrix units take subnormals of 16 bits for zero and give none (PyTorch, "Numerical accuracy"; rocBLAS)
    least = {"f16": F32(2.0**-14), "f32": F32(0)}.get(kind, np.finfo(F32).tiny) if chip == "gfx90a" else F32(0)
    read_a, read_b = (_elements(operand, kind, i, each // per_register, eight) for i, operand in enumerate((a, b)))
    rows, columns = _outputs(size, outputs)
    start = F32(c.value) if c.kind == "constant" else None

    def run(waves: Waves) -> None:
        left, right = (_matrix(read(waves), size, depth, least) for read in (read_a, read_b))
        product = (left @ right.transpose(0, 2, 1))[:, rows, columns]  # [N, outputs, 64]
        total = (
            start if start is not None else waves.vector[c.number : c.number + outputs].view(F32).transpose(1, 0, 2)
        )
        found = (product + total).astype(F32)
        if least:
            found = np.where(np.abs(found) < np.finfo(F32).tiny, F32(0), found)
        waves.vector[to.number : to.number + outputs] = found.view(U32).transpose(1, 0, 2)

    return run


def _elements(operand: Operand, kind: str, position: int, registers: int, eight: dict[str, Format]) -> Any:
    """Return a reader of `[N, 64, elements]` in float32."""
    number = operand.number
    of_kind = kind.split("_")[min(position, kind.count("_"))] if kind[-1] == "8" else kind
    width: Any = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "bf16_1k": np.uint16}.get(of_kind, np.uint8)
    numbers: Any = {
        "f32": lambda bits: bits.view(F32), "f16": from_float16, "bf16": from_bfloat16, "bf16_1k": from_bfloat16,
    }.get(of_kind)  # fmt: skip
    if numbers is None:
        table = eight[of_kind].numbers
        numbers = lambda codes: table[codes]

    def read(waves: Waves) -> Any:
        words = np.ascontiguousarray(waves.vector[number : number + registers].transpose(1, 2, 0))
        return numbers(words.view(width))

    return read


def _matrix(elements: Any, size: int, depth: int, least: Any) -> Any:
    """Return `[N, M, K]` in float64 of what lanes hold, what is less than `least` as zero."""
    count = len(elements)
    blocks = elements.reshape(count, 64 // size, size, -1).transpose(0, 2, 1, 3).reshape(count, size, depth)
    if least:
        blocks = np.where(np.abs(blocks) < least, F32(0), blocks)
    return blocks.astype(F64)


def _outputs(size: int, count: int) -> tuple[Any, Any]:
    """Return the row and column of each output, `[outputs, 64]`."""
    number = np.arange(count)[:, None]
    low, high = 4 * (LANE // 16) + number, 8 * (number // 4) + 4 * (LANE // 32) + number % 4
    rows = low if size == 16 else high
    return rows, np.broadcast_to(LANE % size, rows.shape)
