"""Conversions, against torch's types, tables of the specifications, and exact fractions.

Sources: "MI300" and "CDNA4 Instruction Set Architecture"; OCP, "8-bit Floating Point Specification" revision 1.0,
table 1; OCP, "Microscaling Formats" version 1.0, table 5; for fnuz, Noune et al., "8-bit numerical formats for deep
neural networks" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from .one_instruction import bits, execute, number, pair, split, vector, wave
from .test_isa_floats import floats, rounded

CODES = list(range(256))
FORMATS = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz, ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    ("gfx950", "fp8"): torch.float8_e4m3fn, ("gfx950", "bf8"): torch.float8_e5m2,
}  # fmt: skip
LANDMARKS = {
    ("gfx942", "fp8"): {0x00: 0.0, 0x01: 2.0**-10, 0x7F: 240.0, 0x80: math.nan, 0xFF: -240.0, 0x40: 1.0},
    ("gfx942", "bf8"): {0x01: 2.0**-17, 0x7F: 57344.0, 0x80: math.nan, 0x40: 1.0},
    ("gfx950", "fp8"): {0x01: 2.0**-9, 0x08: 2.0**-6, 0x7E: 448.0, 0x7F: math.nan, 0x38: 1.0, 0xFE: -448.0},
    ("gfx950", "bf8"): {0x01: 2.0**-16, 0x7B: 57344.0, 0x7C: math.inf, 0x7F: math.nan, 0x3C: 1.0},
}  # fmt: skip


def decoded(chip: str, kind: str, codes: list[int]) -> list[float]:
    """Return what `v_cvt_pk_f32_…` gives of codes, in both halves of a register (v_cvt_pk_f32_fp8)."""
    word = [code | (code ^ 1) << 8 | (code ^ 2) << 16 | (code ^ 3) << 24 for code in codes]
    low = execute(wave({0: word}), f"v_cvt_pk_f32_{kind}_e32 v[2:3], v0", chip=chip)
    high = execute(wave({0: word}), f"v_cvt_pk_f32_{kind}_sdwa v[4:5], v0 src0_sel:WORD_1", chip=chip)
    four = [vector(low, 2), vector(low, 3), vector(high, 4), vector(high, 5)]
    return [[number(values[lane]) for values in four] for lane in range(64)]  # type: ignore[return-value]


@pytest.mark.parametrize(("chip", "kind"), FORMATS)
def test_every_code_of_8_bits(chip: str, kind: str) -> None:
    table = torch.tensor(CODES, dtype=torch.uint8).view(FORMATS[chip, kind]).float().tolist()
    for code, value in LANDMARKS[chip, kind].items():
        assert table[code] == value or (math.isnan(table[code]) and math.isnan(value))
    for begin in range(0, 256, 64):
        codes = CODES[begin : begin + 64]
        for code, four in zip(codes, decoded(chip, kind, codes), strict=True):
            wanted = [table[code ^ place] for place in range(4)]
            assert [repr(value) for value in four] == [repr(value) for value in wanted]


@pytest.mark.parametrize(("chip", "kind"), FORMATS)
@pytest.mark.parametrize("saturates", [False, True])
def test_rounding_to_8_bits(chip: str, kind: str, saturates: bool) -> None:
    """v_cvt_pk_fp8_f32 and v_cvt_scalef32_pk_fp8_f32: nearest, ties to even; MODE says what is too large becomes."""
    table = torch.tensor(CODES, dtype=torch.uint8).view(FORMATS[chip, kind]).double()
    finite = sorted({float(value) for value in table if value.isfinite()})
    middle = [(a + b) / 2 for a, b in pairwise(finite)]
    beside = [number(bits(value) + step) for value in middle for step in (-1, 1) if value]
    top = finite[-1]
    values = [*finite, *middle, *beside, 1.01 * top, 2 * top, -1.01 * top, 1e30, -1e30]
    values += [0.0] * (-len(values) % 64)
    mode = ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"] if saturates else []
    line = f"v_cvt_pk_{kind}_f32 v2, v0, v1" if chip == "gfx942" else f"v_cvt_scalef32_pk_{kind}_f32 v2, v0, v1, 1.0"
    upper = " op_sel:[0,0,1]" if chip == "gfx942" else " op_sel:[0,0,0,1]"
    for begin in range(0, len(values), 64):
        part = values[begin : begin + 64]
        held = {0: [bits(value) for value in part], 1: [bits(-value) for value in part], 2: [0xABCDABCD] * 64}
        found = vector(execute(wave(held), *mode, line, chip=chip), 2)
        again = vector(execute(wave(held), *mode, line + upper, chip=chip), 2)
        given = torch.tensor(part, dtype=torch.float64).float()
        given = given.clamp(-top, top) if saturates else given
        for lane, (word, other) in enumerate(zip(found, again, strict=True)):
            assert word >> 16 == other & 0xFFFF == 0xABCD
            assert word & 0xFFFF == other >> 16
            wanted = [value.to(FORMATS[chip, kind]).float().item() for value in (given[lane], -given[lane])]
            if not saturates and (chip, kind) == ("gfx950", "fp8") and abs(part[lane]) > 464:
                wanted = [math.nan, math.nan]  # OFP8, section 5.2.1; torch takes the largest number
            got = [table[word >> shift & 0xFF].item() for shift in (0, 8)]
            assert [repr(v) for v in got] == [repr(v) for v in wanted], part[lane]


def test_scales_are_powers_of_two() -> None:
    """v_cvt_scalef32_pk_f32_fp8, v_cvt_scalef32_pk_fp8_f32 and FP4: only the exponent of the scale counts."""
    held = {0: [0x00004838] * 64, 1: [bits(12.0)] * 64, 2: [bits(24.0)] * 64, 3: [bits(-16.0)] * 64, 9: [0] * 64}
    found = execute(wave(held), "v_cvt_scalef32_pk_f32_fp8 v[4:5], v0, v1", chip="gfx950")
    assert [number(vector(found, at)[0]) for at in (4, 5)] == [8.0, 32.0]  # 1 and 4, times 8
    found = execute(wave(held), "v_cvt_scalef32_pk_fp8_f32 v9, v2, v3, v1", chip="gfx950")
    assert vector(found, 9)[0] == 0x44 | 0xC0 << 8  # 3 and -2
    fours = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for byte, modifier in enumerate(("", " op_sel:[1,0,0]", " op_sel:[0,1,0]", " op_sel:[1,1,0]")):
        codes = [(lane & 15 | (lane * 7 & 15) << 4) << 8 * byte for lane in range(64)]
        found = execute(
            wave({0: codes, 1: [bits(2.0)] * 64}), f"v_cvt_scalef32_pk_f32_fp4 v[4:5], v0, v1{modifier}", chip="gfx950"
        )
        for lane in range(64):
            for register, code in ((4, lane & 15), (5, lane * 7 & 15)):
                assert number(vector(found, register)[lane]) == (-2 if code & 8 else 2) * fours[code & 7]
        small = execute(
            wave({0: codes, 1: [bits(2.0)] * 64}), f"v_cvt_scalef32_pk_bf16_fp4 v4, v0, v1{modifier}", chip="gfx950"
        )
        assert number((vector(small, 4)[5] & 0xFFFF) << 16) == 6.0


def nearest_16(value: float, digits: int) -> int:
    """Return the bits of bfloat16 (8 digits) of a float32, ties to even."""
    word = bits(value)
    down, rest = word >> 16, word & 0xFFFF
    return (
        down + (rest > 0x8000 or (rest == 0x8000 and down & 1 == 1))
        if digits == 8
        else bits(rounded(Fraction(value), "e"), "e")
    )


@pytest.mark.parametrize(("name", "digits"), [("v_cvt_pk_bf16_f32", 8), ("v_cvt_pk_f16_f32", 11)])
def test_pairs_of_16_bits(name: str, digits: int) -> None:
    tie = number(0x3F808000), number(0x3F818000), number(0x3F808001)
    a, b = [*tie, *floats(1)][:64], [*tie[::-1], *floats(2)][:64]
    if digits == 11:
        a, b = ([math.copysign(min(abs(v), 6e4), v) for v in values] for values in (a, b))
    a, b = ([number(bits(v)) for v in values] for values in (a, b))
    found = execute(wave({0: [bits(v) for v in a], 1: [bits(v) for v in b]}), f"{name} v9, v0, v1", chip="gfx950")
    assert vector(found, 9) == [nearest_16(x, digits) | nearest_16(y, digits) << 16 for x, y in zip(a, b, strict=True)]


def test_towards_zero() -> None:
    values = [1.0 + 2.0**-11, -1.0 - 2.0**-11, 65519.0, 0.1] + [1.0] * 60
    found = execute(wave({0: [bits(v) for v in values], 1: [0] * 64}), "v_cvt_pkrtz_f16_f32 v9, v0, v1")
    got = [number(value & 0xFFFF, "e") for value in vector(found, 9)][:4]
    assert got == [1.0, -1.0, 65504.0, 0.0999755859375]


def clipped(low: int, high: int) -> Callable[[float], int]:
    return lambda value: (
        0
        if value != value
        else min(max(math.trunc(value) if abs(value) < math.inf else int(math.copysign(1e30, value)), low), high)
    )


@pytest.mark.parametrize(("name", "kind", "wanted"), [
    ("v_cvt_i32_f32", "f", clipped(-(1 << 31), (1 << 31) - 1)), ("v_cvt_u32_f32", "f", clipped(0, (1 << 32) - 1)),
    ("v_cvt_i32_f64", "d", clipped(-(1 << 31), (1 << 31) - 1)), ("v_cvt_u32_f64", "d", clipped(0, (1 << 32) - 1)),
])  # fmt: skip
def test_to_integers(name: str, kind: str, wanted: Callable[[float], int]) -> None:
    values = [math.nan, math.inf, -math.inf, 0.9, -0.9, 3e9, -3e9, 5e9, 2147483520.0, -1.5, *floats(9, kind, 54)]
    values = [number(bits(value, kind), kind) for value in values]
    coded = [bits(value, kind) for value in values]
    held = split(coded, 0) if kind == "d" else {0: coded}
    found = execute(wave(held), f"{name}_e32 v9, {'v[0:1]' if kind == 'd' else 'v0'}")
    assert vector(found, 9) == [wanted(value) & 0xFFFFFFFF for value in values]


INTEGERS = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x01000001, 0x01000003, *range(57)]


@pytest.mark.parametrize("name", ["v_cvt_f32_i32", "v_cvt_f32_u32", "v_cvt_f64_i32", "v_cvt_f64_u32"])
def test_from_integers(name: str) -> None:
    wide = "f64" in name
    found = execute(wave({0: INTEGERS}), f"{name}_e32 {'v[8:9]' if wide else 'v9'}, v0")
    exact = [value - (1 << 32) if name.endswith("i32") and value >> 31 else value for value in INTEGERS]
    if wide:
        assert [number(value, "d") for value in pair(found, 8)] == [float(value) for value in exact]
    else:
        assert [number(value) for value in vector(found, 9)] == [rounded(Fraction(value)) for value in exact]


def test_between_floats() -> None:
    """v_cvt_f16_f32, v_cvt_f32_f16 (also of the upper half), v_cvt_f32_bf16, v_cvt_f32_f64, v_cvt_f64_f32."""
    values = [math.copysign(min(abs(v), 6e4), v) for v in floats(3)]
    values = [number(bits(v)) for v in values]
    coded = {0: [bits(value) for value in values]}
    halves = vector(execute(wave(coded), "v_cvt_f16_f32_e32 v9, v0"), 9)
    assert halves == [bits(rounded(Fraction(value), "e"), "e") for value in values]
    moved = [half << 16 | 0x1234 for half in halves]
    line = "v_cvt_f32_f16_sdwa v9, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
    for found in (execute(wave({0: halves}), "v_cvt_f32_f16_e32 v9, v0"), execute(wave({0: moved}), line)):
        assert [number(value) for value in vector(found, 9)] == [number(half, "e") for half in halves]
    found = execute(wave({0: moved}), "v_cvt_f32_bf16_e32 v9, v0")
    assert vector(found, 9) == [0x1234 << 16] * 64
    doubles = floats(4, "d")
    found = execute(wave(split([bits(value, "d") for value in doubles], 0)), "v_cvt_f32_f64_e32 v9, v[0:1]")
    assert [number(value) for value in vector(found, 9)] == [rounded(Fraction(value)) for value in doubles]
    found = execute(wave(coded), "v_cvt_f64_f32_e32 v[8:9], v0")
    assert [number(value, "d") for value in pair(found, 8)] == values


def test_bytes_and_packs() -> None:
    found = execute(wave({0: [0xA1B2C3D4] * 64}), *(f"v_cvt_f32_ubyte{n}_e32 v{4 + n}, v0" for n in range(4)))
    assert [number(vector(found, 4 + n)[0]) for n in range(4)] == [0xD4, 0xC3, 0xB2, 0xA1]
    held = {0: [0x11112222] * 64, 1: [0xB3334444] * 64}
    assert vector(execute(wave(held), "v_pack_b32_f16 v9, v0, v1"), 9)[0] == 0x44442222
    assert vector(execute(wave(held), "v_pack_b32_f16 v9, v0, v1 op_sel:[1,1,0]"), 9)[0] == 0xB3331111
    assert vector(execute(wave(held), "v_pack_b32_f16 v9, v0, -|v1| op_sel:[0,1,0]"), 9)[0] == 0xB3332222
    assert vector(execute(wave(held), "v_pack_b32_f16 v9, 1.0, v1"), 9)[0] == 0x44443C00
