"""Vector instructions on integers, each against AMD's text of it in Python's integers, which have no width.

Sources: "MI300 Instruction Set Architecture", chapters VOP1, VOP2, VOP3 and VOPC; bitop3 from "CDNA4".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .isa_errors import UnknownInstruction
from .one_instruction import execute, longs, pair, scalar, signed, split, vector, wave, words

M = 0xFFFFFFFF


def _field(value: int, offset: int, width: int) -> int:
    return value >> (offset & 31) & (1 << (width & 31)) - 1


def _signed_field(value: int, offset: int, width: int) -> int:
    return signed(_field(value, offset, width), width & 31) if width & 31 else 0


def _perm(a: int, b: int, select: int) -> int:
    source = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    chosen = []
    for code in select.to_bytes(4, "little"):
        if code >= 13:
            chosen.append(255)
        elif code == 12:
            chosen.append(0)
        elif code >= 8:
            chosen.append(255 * (source[2 * (code - 8) + 1] >> 7))
        else:
            chosen.append(source[code])
    return int.from_bytes(bytes(chosen), "little")


def _leading_signs(value: int) -> int:
    text = f"{value:032b}"
    return next((at for at in range(1, 32) if text[at] != text[0]), M)


def _s24(value: int) -> int:
    return signed(value, 24)


WORD: dict[str, tuple[int, Callable[..., int]]] = {
    "and_b32": (2, lambda a, b: a & b), "or_b32": (2, lambda a, b: a | b), "xor_b32": (2, lambda a, b: a ^ b),
    "xnor_b32": (2, lambda a, b: ~(a ^ b)), "not_b32": (1, lambda a: ~a), "mov_b32": (1, lambda a: a),
    "lshlrev_b32": (2, lambda a, b: b << (a & 31)), "lshrrev_b32": (2, lambda a, b: b >> (a & 31)),
    "ashrrev_i32": (2, lambda a, b: signed(b) >> (a & 31)), "add_u32": (2, lambda a, b: a + b),
    "sub_u32": (2, lambda a, b: a - b), "subrev_u32": (2, lambda a, b: b - a), "add_i32": (2, lambda a, b: a + b),
    "sub_i32": (2, lambda a, b: a - b),
    "add3_u32": (3, lambda a, b, c: a + b + c), "add_lshl_u32": (3, lambda a, b, c: (a + b) << (c & 31)),
    "lshl_add_u32": (3, lambda a, b, c: (a << (b & 31)) + c), "lshl_or_b32": (3, lambda a, b, c: a << (b & 31) | c),
    "and_or_b32": (3, lambda a, b, c: a & b | c), "or3_b32": (3, lambda a, b, c: a | b | c),
    "xad_u32": (3, lambda a, b, c: (a ^ b) + c), "bfe_u32": (3, _field), "bfe_i32": (3, _signed_field),
    "bfi_b32": (3, lambda a, b, c: a & b | ~a & c),
    "bfm_b32": (2, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "bfrev_b32": (1, lambda a: int(f"{a:032b}"[::-1], 2)), "perm_b32": (3, _perm),
    "alignbit_b32": (3, lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "alignbyte_b32": (3, lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "mul_lo_u32": (2, lambda a, b: a * b), "mul_hi_u32": (2, lambda a, b: a * b >> 32),
    "mul_hi_i32": (2, lambda a, b: signed(a) * signed(b) >> 32),
    "mul_u32_u24": (2, lambda a, b: (a % (1 << 24)) * (b % (1 << 24))),
    "mul_hi_u32_u24": (2, lambda a, b: (a % (1 << 24)) * (b % (1 << 24)) >> 32),
    "mul_i32_i24": (2, lambda a, b: _s24(a) * _s24(b)),
    "mad_u32_u24": (3, lambda a, b, c: (a % (1 << 24)) * (b % (1 << 24)) + c),
    "mad_i32_i24": (3, lambda a, b, c: _s24(a) * _s24(b) + c),
    "max_u32": (2, max), "min_u32": (2, min), "max_i32": (2, lambda a, b: max(signed(a), signed(b))),
    "min_i32": (2, lambda a, b: min(signed(a), signed(b))), "max3_u32": (3, max), "min3_u32": (3, min),
    "max3_i32": (3, lambda *given: max(map(signed, given))), "min3_i32": (3, lambda *given: min(map(signed, given))),
    "med3_i32": (3, lambda *given: sorted(map(signed, given))[1]), "med3_u32": (3, lambda *given: sorted(given)[1]),
    "sad_u32": (3, lambda a, b, c: abs(a - b) + c),
    "ffbh_u32": (1, lambda a: 32 - a.bit_length() if a else M), "ffbh_i32": (1, _leading_signs),
    "ffbl_b32": (1, lambda a: (a & -a).bit_length() - 1 if a else M),
    "bcnt_u32_b32": (2, lambda a, b: a.bit_count() + b),
    "lshlrev_b16": (2, lambda a, b: (b << (a & 15)) & 0xFFFF),
    "lshrrev_b16": (2, lambda a, b: (b & 0xFFFF) >> (a & 15)),
    "ashrrev_i16": (2, lambda a, b: (signed(b, 16) >> (a & 15)) & 0xFFFF),
    "add_u16": (2, lambda a, b: (a + b) & 0xFFFF), "sub_u16": (2, lambda a, b: (a - b) & 0xFFFF),
    "subrev_u16": (2, lambda a, b: (b - a) & 0xFFFF), "mul_lo_u16": (2, lambda a, b: (a * b) & 0xFFFF),
    "mad_legacy_u16": (3, lambda a, b, c: (a * b + c) & 0xFFFF), "mad_u16": (3, lambda a, b, c: (a * b + c) & 0xFFFF),
    "max_u16": (2, lambda a, b: max(a & 0xFFFF, b & 0xFFFF)), "min_u16": (2, lambda a, b: min(a & 0xFFFF, b & 0xFFFF)),
    "max_i16": (2, lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF),
    "min_i16": (2, lambda a, b: min(signed(a, 16), signed(b, 16)) & 0xFFFF),
}  # fmt: skip


@pytest.mark.parametrize("name", WORD)
def test_words(name: str) -> None:
    count, wanted = WORD[name]
    for seed in range(4):
        given = [words(3 * seed + operand) for operand in range(count)]
        operands = ", ".join(f"v{operand}" for operand in range(count))
        found = execute(wave(dict(enumerate(given))), f"v_{name} v9, {operands}")
        assert vector(found, 9) == [wanted(*lane) & M for lane in zip(*given, strict=True)]


@pytest.mark.parametrize("name", ["accvgpr_read_b32", "accvgpr_write_b32", "accvgpr_mov_b32"])
def test_accumulators(name: str) -> None:
    """v_accvgpr_read_b32, v_accvgpr_write_b32, v_accvgpr_mov_b32."""
    to, source = {
        "accvgpr_read_b32": ("v9", "a3"),
        "accvgpr_write_b32": ("a9", "v3"),
        "accvgpr_mov_b32": ("a9", "a3"),
    }[name]
    given = words(0)
    found = execute(wave({259 if source == "a3" else 3: given}), f"v_{name} {to}, {source}")
    assert vector(found, 265 if to == "a9" else 9) == given


LONG: dict[str, tuple[tuple[int, ...], Callable[..., int]]] = {
    "mov_b64": ((64,), lambda a: a), "lshlrev_b64": ((32, 64), lambda a, b: b << (a & 63)),
    "lshrrev_b64": ((32, 64), lambda a, b: b >> (a & 63)),
    "ashrrev_i64": ((32, 64), lambda a, b: signed(b, 64) >> (a & 63)),
    "lshl_add_u64": ((64, 32, 64), lambda a, b, c: (a << (b & 7)) + c),
    "mad_u64_u32": ((32, 32, 64), lambda a, b, c: a * b + c),
    "mad_i64_i32": ((32, 32, 64), lambda a, b, c: signed(a) * signed(b) + c),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_longs(name: str) -> None:
    widths, wanted = LONG[name]
    given, registers, operands = [], {}, []
    for position, width in enumerate(widths):
        values = longs(7 * position) if width == 64 else words(5 + position)
        at = 10 + 2 * position
        registers |= split(values, at) if width == 64 else {at: values}
        operands.append(f"v[{at}:{at + 1}]" if width == 64 else f"v{at}")
        given.append(values)
    carry = "vcc, " if name.startswith("mad") else ""
    found = execute(wave(registers), f"v_{name} v[2:3], {carry}{', '.join(operands)}")
    assert pair(found, 2) == [wanted(*lane) % (1 << 64) for lane in zip(*given, strict=True)]


CARRIES: dict[str, Callable[[int, int, int], int]] = {
    "add_co_u32": lambda a, b, c: a + b, "sub_co_u32": lambda a, b, c: a - b, "subrev_co_u32": lambda a, b, c: b - a,
    "addc_co_u32": lambda a, b, c: a + b + c, "subb_co_u32": lambda a, b, c: a - b - c,
    "subbrev_co_u32": lambda a, b, c: b - a - c,
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIES)
def test_carries(name: str) -> None:
    a, b, mask = words(1), words(2), 0xF0F0A5A5_0FF01234
    reads = ", vcc" if "c_co" in name or "bb" in name or "bbrev" in name else ""
    found = execute(wave({0: a, 1: b}, vcc=mask), f"v_{name}_e64 v9, s[4:5], v0, v1{reads}")
    exact = [CARRIES[name](x, y, mask >> lane & 1) for lane, (x, y) in enumerate(zip(a, b, strict=True))]
    assert vector(found, 9) == [value & M for value in exact]
    carried = sum((value < 0 or value > M) << lane for lane, value in enumerate(exact))
    assert scalar(found, 4) | scalar(found, 5) << 32 == carried


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", ["u16", "i16", "u32", "i32", "u64", "i64"])
def test_comparisons(relation: str, kind: str) -> None:
    """Among others v_cmp_eq_u16 to v_cmp_ge_i64; lanes that are off give 0."""
    width = int(kind[1:])
    a = longs(3) if width == 64 else words(3)
    b = [
        value if lane % 3 == 0 else other
        for lane, (value, other) in enumerate(zip(a, longs(4) if width == 64 else words(4), strict=True))
    ]
    registers = {**split(a, 0), **split(b, 2)} if width == 64 else {0: a, 2: b}
    left, right = ("v[0:1]", "v[2:3]") if width == 64 else ("v0", "v2")
    on = 0xFFFF0000_FFFFFFF7
    found = execute(wave(registers, on=on), f"v_cmp_{relation}_{kind}_e64 s[4:5], {left}, {right}")
    mask = (1 << width) - 1
    number: Any = (lambda value: signed(value, width)) if kind[0] == "i" else (lambda value: value & mask)
    wanted = sum(
        RELATIONS[relation](number(x), number(y)) << lane for lane, (x, y) in enumerate(zip(a, b, strict=True))
    )
    assert scalar(found, 4) | scalar(found, 5) << 32 == wanted & on


def test_cndmask() -> None:
    a, b, mask = words(5), words(6), 0x123456789ABCDEF0
    found = execute(wave({0: a, 1: b}, vcc=mask), "v_cndmask_b32_e32 v9, v0, v1, vcc")
    assert vector(found, 9) == [y if mask >> lane & 1 else x for lane, (x, y) in enumerate(zip(a, b, strict=True))]
    found = execute(wave({0: a, 1: b}, vcc=mask), "v_cndmask_b32_e64 v9, -v0, |v1|, vcc")
    wanted = [
        y & 0x7FFFFFFF if mask >> lane & 1 else x ^ 0x80000000 for lane, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    assert vector(found, 9) == wanted


@pytest.mark.parametrize("table", [0x36, 0xC8, 0xDE, 0xEC, 0x96, 0x01])
@pytest.mark.parametrize("width", [16, 32])
def test_bitop3(table: int, width: int) -> None:
    """v_bitop3_b16 and v_bitop3_b32: bit 4 a + 2 b + c of the table."""
    given = [words(operand) for operand in range(3)]
    found = execute(wave(dict(enumerate(given))), f"v_bitop3_b{width} v9, v0, v1, v2 bitop3:{table:#x}", chip="gfx950")
    wanted = [
        sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(width))
        for a, b, c in zip(*given, strict=True)
    ]
    assert vector(found, 9) == wanted


def test_mbcnt_counts_the_lanes_before() -> None:
    """v_mbcnt_lo_u32_b32 and v_mbcnt_hi_u32_b32: a mask's bits below the own lane, of either half."""
    mask = 0x8000_0001_F00F_1235
    found = execute(
        wave({}, {0: mask, 1: mask >> 32}), "v_mbcnt_lo_u32_b32 v1, s0, 0", "v_mbcnt_hi_u32_b32 v1, s1, v1"
    )
    assert vector(found, 1) == [(mask & (1 << lane) - 1).bit_count() for lane in range(64)]


@pytest.mark.parametrize(("name", "wanted"), [
    ("sub_u32", lambda a, b: max(a - b, 0)), ("add_u32", lambda a, b: min(a + b, M)),
    ("sub_i32", lambda a, b: min(max(signed(a) - signed(b), -(1 << 31)), (1 << 31) - 1)),
])  # fmt: skip
def test_clamp(name: str, wanted: Callable[[int, int], int]) -> None:
    a, b = words(8), words(9)
    found = execute(wave({0: a, 1: b}), f"v_{name}_e64 v9, v0, v1 clamp")
    assert vector(found, 9) == [wanted(x, y) & M for x, y in zip(a, b, strict=True)]


PACKED: dict[str, Callable[[int, int], int]] = {
    "lshlrev_b16": lambda a, b: b << (a & 15), "lshrrev_b16": lambda a, b: b >> (a & 15),
    "add_u16": lambda a, b: a + b,
    "ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15), "sub_i16": lambda a, b: a - b,
    "mul_lo_u16": lambda a, b: a * b, "max_i16": lambda a, b: max(signed(a, 16), signed(b, 16)), "min_u16": min,
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("low", "high"), [((0, 0), (1, 1)), ((0, 0), (0, 1)), ((1, 0), (0, 1))])
def test_pairs_of_16_bits(name: str, low: tuple[int, int], high: tuple[int, int]) -> None:
    """v_pk_lshlrev_b16 and others, with the halves that op_sel and op_sel_hi name."""
    a, b = words(10), words(11)
    modifiers = f"op_sel:[{low[0]},{low[1]}] op_sel_hi:[{high[0]},{high[1]}]"
    found = execute(wave({0: a, 1: b}), f"v_pk_{name} v9, v0, v1 {modifiers}")
    half = lambda value, upper: value >> 16 * upper & 0xFFFF
    wanted = [
        PACKED[name](half(x, low[0]), half(y, low[1])) & 0xFFFF
        | (PACKED[name](half(x, high[0]), half(y, high[1])) & 0xFFFF) << 16
        for x, y in zip(a, b, strict=True)
    ]
    assert vector(found, 9) == wanted


def test_a_constant_shift_of_both_halves() -> None:
    found = execute(wave({0: [0x00030001] * 64}), "v_pk_lshlrev_b16 v9, 7, v0 op_sel_hi:[0,1]")
    assert vector(found, 9) == [0x01800080] * 64


@pytest.mark.parametrize(("select", "wanted"), [
    ("BYTE_0", 0xD4), ("BYTE_3", 0xF1), ("WORD_0", 0x93D4), ("WORD_1", 0xF1A2), ("DWORD", 0xF1A293D4),
])  # fmt: skip
def test_parts_of_a_register(select: str, wanted: int) -> None:
    """SDWA: a part is read, from the sign on or from zero, and a part is written."""
    given = wave({0: [0xF1A293D4] * 64, 1: [M] * 64, 9: [0x11223344] * 64})
    rest = "dst_sel:DWORD dst_unused:UNUSED_PAD"
    found = execute(given, f"v_and_b32_sdwa v2, v0, v1 {rest} src0_sel:{select} src1_sel:DWORD")
    assert vector(found, 2)[0] == wanted
    width = {"B": 8, "W": 16, "D": 32}[select[0]]
    found = execute(given, f"v_and_b32_sdwa v2, sext(v0), v1 {rest} src0_sel:{select} src1_sel:DWORD")
    assert vector(found, 2)[0] == signed(wanted, width) & M
    kept = "dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD"
    found = execute(given, f"v_and_b32_sdwa v9, v0, v1 {kept}", "v_mov_b32_e32 v3, v9")
    assert vector(found, 3)[0] == 0x1122D444
    padded = kept.replace("PRESERVE", "PAD")
    assert vector(execute(given, f"v_and_b32_sdwa v9, v0, v1 {padded}"), 9)[0] == 0xD400


@pytest.mark.parametrize("line", [
    "v_frobnicate_b32 v0, v1", "v_add_u32_e64 v0, -v1, v2", "v_and_b32_e64 v0, v1, v2 clamp", "s_sleep_var s0",
    "ds_add_u32 v0, v1", "buffer_load_dword v0, v1, s[0:3], 0 idxen", "flat_load_dword v0, v[1:2]",
    "v_cmpx_eq_u32 v0, v1",
    "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[0:1], v[2:3], a[0:3]", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3",
    "v_pk_mul_f32 v[0:1], v[2:3], 1.0",
])  # fmt: skip
def test_what_nobody_described_is_refused(line: str) -> None:
    with pytest.raises(UnknownInstruction, match=line.split()[0]):
        execute(wave(), line)
