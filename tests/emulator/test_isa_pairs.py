"""Vector instructions on two floats at a time, against exact fractions that are rounded once.

Sources: "MI300 Instruction Set Architecture", VOP3P.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from .one_instruction import bits, execute, number, vector, wave
from .test_isa_floats import EXACT, floats, fractions, registers, rounded, same

PACKED_FLOATS = {"add": (2, EXACT["add"][1]), "mul": (2, EXACT["mul"][1]), "fma": (3, EXACT["fma"][1])}


@pytest.mark.parametrize("name", PACKED_FLOATS)
def test_pairs_of_words(name: str) -> None:
    """v_pk_add_f32, v_pk_mul_f32, v_pk_fma_f32: op_sel names the word of the first result, op_sel_hi of the second."""
    count, function = PACKED_FLOATS[name]
    given = [(floats(2 * k), floats(2 * k + 1)) for k in range(count)]
    held: dict[int, list[int]] = {}
    for position, (low, high) in enumerate(given):
        held |= registers(low, 2 * position, "f") | registers(high, 2 * position + 1, "f")
    operands = ", ".join(f"v[{2 * k}:{2 * k + 1}]" for k in range(count))
    first, second = [0, 1, 0][:count], [1, 0, 1][:count]
    minus = [0, 1, 0][:count]
    line = f"v_pk_{name}_f32 v[20:21], {operands} op_sel:{first} op_sel_hi:{second} neg_lo:{minus} neg_hi:{minus}"
    found = execute(wave(held), line.replace(", 1", ",1").replace(", 0", ",0"))
    for register, chosen in ((20, first), (21, second)):
        lanes = zip(*(given[k][chosen[k]] for k in range(count)), strict=True)
        wanted = [
            rounded(function(*(Fraction(-v if m else v) for v, m in zip(lane, minus, strict=True)))) for lane in lanes
        ]
        same([number(value) for value in vector(found, register)], wanted)


def test_pairs_of_scalars_and_constants() -> None:
    held, given = registers([2.0] * 64, 0, "f") | registers([3.0] * 64, 1, "f"), {4: bits(10.0), 5: bits(20.0)}
    found = execute(wave(held, given), "v_pk_mul_f32 v[2:3], v[0:1], s[4:5] op_sel_hi:[1,0]")
    assert [number(vector(found, at)[0]) for at in (2, 3)] == [20.0, 30.0]
    found = execute(wave(held, given), "v_pk_add_f32 v[2:3], v[0:1], 1.0 op_sel_hi:[1,0]")
    assert [number(vector(found, at)[0]) for at in (2, 3)] == [3.0, 4.0]
    found = execute(wave(held, given), "v_pk_mov_b32 v[2:3], v[0:1], s[4:5] op_sel:[1,0]")
    assert [number(vector(found, at)[0]) for at in (2, 3)] == [3.0, 10.0]


@pytest.mark.parametrize("name", ["add", "mul", "fma", "max", "min"])
def test_pairs_of_halves(name: str) -> None:
    """v_pk_mul_f16 and others."""
    count, function = EXACT[name]
    low, high = ([floats(10 * upper + k, "e") for k in range(count)] for upper in (0, 1))
    held = {k: [bits(a, "e") | bits(b, "e") << 16 for a, b in zip(low[k], high[k], strict=True)] for k in range(count)}
    found = execute(wave(held), f"v_pk_{name}_f16 v9, {', '.join(f'v{k}' for k in range(count))}")
    for shift, lanes in ((0, low), (16, high)):
        got = [number(value >> shift & 0xFFFF, "e") for value in vector(found, 9)]
        same(got, [fractions(function, "e")(*lane) for lane in zip(*lanes, strict=True)])


def test_mixed_widths() -> None:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: op_sel_hi says which operands are halves, op_sel which half."""
    halves = bits(1.5, "e") | bits(-2.0, "e") << 16
    held = {0: [halves] * 64, 1: [bits(10.0)] * 64, 2: [bits(0.25)] * 64, 9: [0x11112222] * 64}
    cases = {
        "op_sel_hi:[1,0,0]": 1.5 * 10 + 0.25, "op_sel:[1,0,0] op_sel_hi:[1,0,0]": -2.0 * 10 + 0.25,
    }  # fmt: skip
    for modifiers, wanted in cases.items():
        assert number(vector(execute(wave(held), f"v_fma_mix_f32 v3, v0, v1, v2 {modifiers}"), 3)[0]) == wanted
        low = vector(execute(wave(held), f"v_fma_mixlo_f16 v9, v0, v1, v2 {modifiers}"), 9)[0]
        assert (low >> 16, number(low & 0xFFFF, "e")) == (0x1111, wanted)
        high = vector(execute(wave(held), f"v_fma_mixhi_f16 v9, v0, v1, v2 {modifiers}"), 9)[0]
        assert (high & 0xFFFF, number(high >> 16, "e")) == (0x2222, wanted)
    negative = vector(execute(wave(held), "v_fma_mix_f32 v3, v0, v1, neg(0) op_sel_hi:[1,0,0]"), 3)[0]
    assert number(negative) == 15.0


def test_dot_products_of_pairs() -> None:
    a = bits(1.5, "e") | bits(-2.0, "e") << 16
    b = bits(4.0, "e") | bits(0.5, "e") << 16
    held = {0: [a] * 64, 1: [b] * 64, 2: [bits(100.0)] * 64}
    assert number(vector(execute(wave(held), "v_dot2_f32_f16 v3, v0, v1, v2"), 3)[0]) == 105.0
    assert number(vector(execute(wave(held), "v_dot2c_f32_f16 v2, v0, v1"), 2)[0]) == 105.0
