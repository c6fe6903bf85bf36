"""Matrix instructions against sums in Python, with the places of AMD's matrix instruction calculator.

For v_mfma_f32_16x16x16_f16 and its like, of the calculator's "A[i][k]" and "D[i][j]": A[i][k] is in lane 16 (k / 4) +
i, element k % 4; D[i][j] in lane 16 (i / 4) + j, register i % 4. For 32x32: A[i][k] in lane 32 (k / 4) + i, D[i][j] in
lane 32 (i / 4 % 2) + j, register 4 (i / 8) + i % 4.
"""

from __future__ import annotations

import numpy as np
import pytest

from .one_instruction import bits, execute, number, vector, wave
from .small_floats import formats

CASES = {
    "v_mfma_f32_16x16x16_f16": ("gfx942", 16, 16, "f16"), "v_mfma_f32_16x16x16_bf16": ("gfx942", 16, 16, "bf16"),
    "v_mfma_f32_16x16x16f16": ("gfx90a", 16, 16, "f16"), "v_mfma_f32_16x16x16bf16_1k": ("gfx90a", 16, 16, "bf16"),
    "v_mfma_f32_16x16x32_f16": ("gfx950", 16, 32, "f16"), "v_mfma_f32_16x16x32_bf16": ("gfx950", 16, 32, "bf16"),
    "v_mfma_f32_32x32x8_f16": ("gfx942", 32, 8, "f16"), "v_mfma_f32_32x32x16_bf16": ("gfx950", 32, 16, "bf16"),
    "v_mfma_f32_16x16x4_f32": ("gfx942", 16, 4, "f32"), "v_mfma_f32_32x32x2_f32": ("gfx942", 32, 2, "f32"),
    "v_mfma_f32_16x16x32_fp8_fp8": ("gfx942", 16, 32, "fp8"),
    "v_mfma_f32_16x16x32_fp8_bf8": ("gfx950", 16, 32, "fp8 bf8"),
}  # fmt: skip


def code(value: float, kind: str, chip: str) -> int:
    if kind == "f32":
        return bits(value)
    if kind == "f16":
        return bits(value, "e")
    if kind == "bf16":
        return bits(value) >> 16
    return next(c for c in range(256) if formats(chip)[kind].numbers[c] == value)


def held(matrix: np.ndarray, kind: str, chip: str, at: int) -> tuple[dict[int, list[int]], int]:
    """Return the registers of `[M, K]`: K in parts of which lane 64 / M holds one."""
    size, depth = matrix.shape
    each = depth * size // 64
    width = {"f32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
    count = each * width // 32
    registers = {at + register: [0] * 64 for register in range(count)}
    for i in range(size):
        for k in range(depth):
            lane, element = size * (k // each) + i, k % each
            registers[at + element * width // 32][lane] |= (
                code(float(matrix[i, k]), kind, chip) << element * width % 32
            )
    return registers, count


@pytest.mark.parametrize("name", CASES)
def test_places(name: str) -> None:
    chip, size, depth, kinds = CASES[name]
    chance = np.random.default_rng(0)
    a, b = (chance.choice([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0], (size, depth)) for _ in range(2))
    first, second = kinds.split() if " " in kinds else (kinds, kinds)
    (left, n), (right, _) = held(a, first, chip, 0), held(b, second, chip, 40)
    outputs = size * size // 64
    start = {80 + r: [bits(float(100 * r + lane)) for lane in range(64)] for r in range(outputs)}
    span = lambda at: f"v[{at}:{at + n - 1}]" if n > 1 else f"v{at}"
    line = f"{name} v[80:{79 + outputs}], {span(0)}, {span(40)}, "
    state = wave({**left, **right, **start}, on=0)  # whichever lanes are on
    found = execute(state, line + f"v[80:{79 + outputs}]", chip=chip)
    zero = execute(wave({**left, **right}), line + "0", chip=chip)
    for i in range(size):
        for j in range(size):
            lane = 16 * (i // 4) + j if size == 16 else 32 * (i // 4 % 2) + j
            register = i % 4 if size == 16 else 4 * (i // 8) + i % 4
            wanted = sum(float(a[i, k]) * float(b[j, k]) for k in range(depth))
            assert number(vector(zero, 80 + register)[lane]) == wanted
            assert number(vector(found, 80 + register)[lane]) == wanted + 100 * register + lane


@pytest.mark.parametrize(("chip", "name", "kept"), [
    ("gfx90a", "v_mfma_f32_16x16x16f16", False), ("gfx942", "v_mfma_f32_16x16x16_f16", True),
])  # fmt: skip
def test_mi200_takes_subnormals_for_zero(chip: str, name: str, kept: bool) -> None:
    """PyTorch, "Numerical accuracy", "Reduced precision FP16 and BF16 GEMMs … on AMD Instinct MI200 devices"."""
    small = {n: [0x00010001] * 64 for n in (0, 1)}
    ones = {n: [0x3C003C00] * 64 for n in (2, 3)}
    found = execute(wave({**small, **ones}), f"{name} v[4:7], v[0:1], v[2:3], 0", chip=chip)
    assert number(vector(found, 4)[0]) == (16 * 2.0**-24 if kept else 0.0)


def test_accumulators_are_operands() -> None:
    registers = {256: [0x3C003C00] * 64, 257: [0x3C003C00] * 64, 0: [0x40004000] * 64, 1: [0x40004000] * 64}
    found = execute(wave(registers), "v_mfma_f32_16x16x16_f16 a[4:7], a[0:1], v[0:1], 1.0")
    assert number(vector(found, 260)[5]) == 33.0
