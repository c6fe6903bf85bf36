"""Scalar instructions, each against AMD's text in Python's integers, with SCC.

Source: "MI300 Instruction Set Architecture", SOP1, SOP2, SOPC, SOPK, SOPP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from .assembly_text import EXEC, VCC, instruction
from .machine import assemble
from .one_instruction import WORDS, execute, longs, scalar, signed, wave, words

M = 0xFFFFFFFF
Result = tuple[int, bool | None]
"""A value, and what SCC becomes: None if it stays."""


def overflows(value: int, is_signed: bool) -> bool:
    return not -(1 << 31) <= value < 1 << 31 if is_signed else not 0 <= value <= M


def field(value: int, where: int, width: int, is_signed: bool) -> Result:
    at, count = where & width - 1, min(where >> 16 & 0x7F, width)
    found = (signed(value, width) if is_signed else value) >> at & (1 << count) - 1
    found = signed(found, count) if is_signed and count else found
    return found, found != 0


def nonzero(value: int, width: int = 32) -> Result:
    return value, value % (1 << width) != 0


TWO: dict[str, Callable[[int, int, int], Result]] = {
    "add_u32": lambda a, b, c: (a + b, overflows(a + b, False)),
    "sub_u32": lambda a, b, c: (a - b, overflows(a - b, False)),
    "addc_u32": lambda a, b, c: (a + b + c, overflows(a + b + c, False)),
    "subb_u32": lambda a, b, c: (a - b - c, overflows(a - b - c, False)),
    "add_i32": lambda a, b, c: (a + b, overflows(signed(a) + signed(b), True)),
    "sub_i32": lambda a, b, c: (a - b, overflows(signed(a) - signed(b), True)),
    "absdiff_i32": lambda a, b, c: nonzero(abs(signed(a) - signed(b))),
    "mul_i32": lambda a, b, c: (a * b, None), "mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32, None),
    "min_i32": lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "min_u32": lambda a, b, c: (min(a, b), a < b),
    "max_i32": lambda a, b, c: (max(signed(a), signed(b)), signed(a) > signed(b)),
    "max_u32": lambda a, b, c: (max(a, b), a > b),
    "and_b32": lambda a, b, c: nonzero(a & b), "or_b32": lambda a, b, c: nonzero(a | b),
    "xor_b32": lambda a, b, c: nonzero(a ^ b),
    "andn2_b32": lambda a, b, c: nonzero(a & ~b), "orn2_b32": lambda a, b, c: nonzero(a | ~b & M),
    "nand_b32": lambda a, b, c: nonzero(~(a & b)), "nor_b32": lambda a, b, c: nonzero(~(a | b)),
    "xnor_b32": lambda a, b, c: nonzero(~(a ^ b)), "lshl_b32": lambda a, b, c: nonzero(a << (b & 31)),
    "lshr_b32": lambda a, b, c: nonzero(a >> (b & 31)), "ashr_i32": lambda a, b, c: nonzero(signed(a) >> (b & 31)),
    "bfe_u32": lambda a, b, c: field(a, b, 32, False), "bfe_i32": lambda a, b, c: field(a, b, 32, True),
    "bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31), None),
    "cselect_b32": lambda a, b, c: (a if c else b, None),
    "pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | b << 16, None),
    "pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | b >> 16 << 16, None),
    "pack_hh_b32_b16": lambda a, b, c: (a >> 16 | b >> 16 << 16, None),
    **{f"lshl{n}_add_u32": partial(lambda n, a, b, c: ((a << n) + b, overflows((a << n) + b, False)), n)
       for n in (1, 2, 3, 4)},
}  # fmt: skip
EMITTED = "s_lshl1_add_u32 s_lshl2_add_u32 s_lshl3_add_u32 s_lshl4_add_u32"


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("scc", [False, True])
def test_two_operands(name: str, scc: bool) -> None:
    for a, b in zip(words(1), words(2), strict=True):
        found = execute(wave({}, {1: a, 2: b}, scc=scc), f"s_{name} s0, s1, s2")
        value, wanted = TWO[name](a, b, int(scc))
        assert scalar(found, 0) == value & M, (a, b)
        assert bool(found.scc[0]) == (scc if wanted is None else wanted), (a, b)


LONG: dict[str, Callable[[int, int, bool], Result]] = {
    "and_b64": lambda a, b, c: nonzero(a & b, 64), "or_b64": lambda a, b, c: nonzero(a | b, 64),
    "xor_b64": lambda a, b, c: nonzero(a ^ b, 64), "andn2_b64": lambda a, b, c: nonzero(a & ~b, 64),
    "lshl_b64": lambda a, b, c: nonzero(a << (b & 63), 64), "lshr_b64": lambda a, b, c: nonzero(a >> (b & 63), 64),
    "ashr_i64": lambda a, b, c: nonzero(signed(a, 64) >> (b & 63), 64),
    "cselect_b64": lambda a, b, c: (a if c else b, None),
    "bfe_u64": lambda a, b, c: field(a, b, 64, False), "bfe_i64": lambda a, b, c: field(a, b, 64, True),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_64_bits(name: str) -> None:
    for a, b in zip(longs(1), longs(5), strict=True):
        given = {2: a, 3: a >> 32, 4: b, 5: b >> 32}
        second = "s4" if "sh" in name or "bfe" in name else "s[4:5]"
        found = execute(wave({}, given, scc=True), f"s_{name} s[0:1], s[2:3], {second}")
        value, scc = LONG[name](a, b, True)
        assert scalar(found, 0) | scalar(found, 1) << 32 == value % (1 << 64)
        assert bool(found.scc[0]) == (True if scc is None else scc)


ONE: dict[str, tuple[int, Callable[[int], Result]]] = {
    "mov_b32": (32, lambda a: (a, None)), "not_b32": (32, lambda a: nonzero(~a)),
    "brev_b32": (32, lambda a: (int(f"{a:032b}"[::-1], 2), None)), "abs_i32": (32, lambda a: nonzero(abs(signed(a)))),
    "bcnt1_i32_b32": (32, lambda a: nonzero(a.bit_count())),
    "bcnt0_i32_b32": (32, lambda a: nonzero(32 - a.bit_count())),
    "bcnt1_i32_b64": (64, lambda a: nonzero(a.bit_count())), "sext_i32_i8": (32, lambda a: (signed(a, 8), None)),
    "sext_i32_i16": (32, lambda a: (signed(a, 16), None)),
    "ff1_i32_b32": (32, lambda a: ((a & -a).bit_length() - 1, None)),
    "ff1_i32_b64": (64, lambda a: ((a & -a).bit_length() - 1, None)),
    "flbit_i32_b32": (32, lambda a: (32 - a.bit_length() if a else -1, None)),
    "flbit_i32_b64": (64, lambda a: (64 - a.bit_length() if a else -1, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_one_operand(name: str) -> None:
    width, wanted = ONE[name]
    for a in WORDS if width == 32 else [0, *longs(3)]:
        found = execute(wave({}, {2: a, 3: a >> 32}), f"s_{name} s0, {'s[2:3]' if width == 64 else 's2'}")
        value, scc = wanted(a)
        assert scalar(found, 0) == value & M
        assert bool(found.scc[0]) == (False if scc is None else scc)


def test_moves_of_64_bits() -> None:
    found = execute(wave({}, {2: 5, 3: 6}), "s_mov_b64 s[0:1], s[2:3]", "s_mov_b64 vcc, -1",
                    "s_brev_b64 s[4:5], s[2:3]",
                    "s_not_b64 s[6:7], s[2:3]", "s_mov_b64 s[8:9], 0xffffffff")  # fmt: skip
    assert [scalar(found, n) for n in (0, 1, VCC, VCC + 1)] == [5, 6, M, M]
    assert [scalar(found, n) for n in (4, 5, 6, 7, 8, 9)] == [0x60000000, 0xA0000000, M - 5, M - 6, M, 0]


@pytest.mark.parametrize(("line", "value", "scc"), [
    ("s_movk_i32 s0, 0x8000", -0x8000, False), ("s_addk_i32 s0, 0xffff", 99, False),
    ("s_mulk_i32 s0, -3", -300, False),
    ("s_bitset1_b32 s0, 31", 100 | 1 << 31, False), ("s_bitset0_b32 s0, 2", 96, False),
    ("s_cmovk_i32 s0, 7", 100, False),
    ("s_addk_i32 s0, 0x7fff", 100 + 0x7FFF, False),
])  # fmt: skip
def test_constants_of_16_bits(line: str, value: int, scc: bool) -> None:
    found = execute(wave({}, {0: 100}), line)
    assert (scalar(found, 0), bool(found.scc[0])) == (value & M, scc)


def test_addk_overflows() -> None:
    assert bool(execute(wave({}, {0: 0x7FFFFFFF}), "s_addk_i32 s0, 1").scc[0])


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
EMITTED_COMPARISONS = """
s_cmp_eq_u32 s_cmp_eq_u64 s_cmp_ge_i32 s_cmp_ge_u32 s_cmp_gt_i32 s_cmp_gt_u32 s_cmp_le_i32 s_cmp_lg_u32 s_cmp_lg_u64
s_cmp_lt_i32 s_cmp_lt_u32 s_cmpk_eq_i32 s_cmpk_gt_i32 s_cmpk_gt_u32 s_cmpk_lt_i32 s_cmpk_lt_u32
"""


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons(relation: str) -> None:
    """All of `EMITTED_COMPARISONS`."""
    for a, b in [*zip(words(1), words(2), strict=True), (5, 5), (M, M)]:
        for kind, number in (("i32", signed), ("u32", lambda value: value)):
            found = execute(wave({}, {0: a, 1: b}), f"s_cmp_{relation}_{kind} s0, s1")
            assert bool(found.scc[0]) == RELATIONS[relation](number(a), number(b))
            constant = b & 0xFFFF
            wanted = signed(constant, 16) if kind == "i32" else constant
            found = execute(wave({}, {0: a}), f"s_cmpk_{relation}_{kind} s0, {constant:#x}")
            assert bool(found.scc[0]) == RELATIONS[relation](number(a), wanted)
        if relation in ("eq", "lg"):
            found = execute(wave({}, {0: a, 1: b, 2: a, 3: b + 1}), f"s_cmp_{relation}_u64 s[0:1], s[2:3]")
            assert bool(found.scc[0]) == (relation == "lg")


def test_bits() -> None:
    """s_bitcmp0_b32, s_bitcmp1_b32."""
    for bit in range(32):
        found = execute(wave({}, {0: 0xF0F01234, 1: bit + 32}), "s_bitcmp1_b32 s0, s1")
        assert bool(found.scc[0]) == bool(0xF0F01234 >> bit & 1)
        assert bool(execute(found, f"s_bitcmp0_b32 s0, {bit}").scc[0]) != bool(0xF0F01234 >> bit & 1)


@pytest.mark.parametrize(("name", "wanted"), [
    ("and", lambda a, e: a & e), ("or", lambda a, e: a | e), ("andn2", lambda a, e: a & ~e),
    ("xor", lambda a, e: a ^ e),
])  # fmt: skip
def test_lanes_are_saved(name: str, wanted: Callable[[int, int], int]) -> None:
    """s_and_saveexec_b64, s_or_saveexec_b64, s_andn2_saveexec_b64: the old lanes go out, the new ones are on."""
    a, lanes = 0x00FF00FF_12345678, 0xFFFF0000_FF00FF00
    found = execute(wave({}, {2: a, 3: a >> 32}, on=lanes), f"s_{name}_saveexec_b64 s[0:1], s[2:3]")
    assert scalar(found, 0) | scalar(found, 1) << 32 == lanes
    new = scalar(found, EXEC) | scalar(found, EXEC + 1) << 32
    assert new == wanted(a, lanes) % (1 << 64) == int(found.exec[0])
    assert bool(found.scc[0]) == (new != 0)
    assert [bool(lane) for lane in found.on[0]] == [bool(new >> lane & 1) for lane in range(64)]


@pytest.mark.parametrize(("line", "state", "taken"), [
    ("s_branch .L", {}, True), ("s_cbranch_scc0 .L", {"scc": False}, True),
    ("s_cbranch_scc0 .L", {"scc": True}, False),
    ("s_cbranch_scc1 .L", {"scc": True}, True), ("s_cbranch_vccz .L", {"vcc": 0}, True),
    ("s_cbranch_vccz .L", {"vcc": 1 << 40}, False),
    ("s_cbranch_vccnz .L", {"vcc": 1 << 40}, True), ("s_cbranch_execz .L", {"on": 0}, True),
    ("s_cbranch_execz .L", {"on": 1 << 50}, False),
    ("s_cbranch_execnz .L", {"on": 1 << 50}, True),
])  # fmt: skip
def test_branches(line: str, state: dict[str, Any], taken: bool) -> None:
    target, found = assemble(instruction(line), "gfx942", {".L": 17})(wave(**state))
    assert (target, bool(found[0])) == (17, taken)


@pytest.mark.parametrize("line", ["s_nop 7", "s_setprio 3", "s_sleep 1"])
def test_what_does_nothing(line: str) -> None:
    assert assemble(instruction(line), "gfx942", {})(wave()) is None


def test_control() -> None:
    """s_endpgm, s_barrier."""
    assert [assemble(instruction(line), "gfx942", {})(wave()) for line in ("s_endpgm", "s_barrier")] == [
        "end",
        "barrier",
    ]
