"""Moves between lanes, each against the figure of AMD's text as a list of source lanes.

Sources: "MI300 Instruction Set Architecture",
"DPP" (DPP_QUAD_PERM to DPP_ROW_BCAST31), DS_SWIZZLE_B32, DS_PERMUTE_B32,
DS_BPERMUTE_B32, V_READLANE_B32; "CDNA4", V_PERMLANE16_SWAP_B32.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .one_instruction import ALL, execute, scalar, vector, wave

GIVEN = [1000 + lane for lane in range(64)]
MOVES: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1, "quad_perm:[2,3,0,1]": lambda lane: lane ^ 2,
    "quad_perm:[3,2,1,0]": lambda lane: lane ^ 3, "quad_perm:[0,0,0,0]": lambda lane: lane & ~3,
    "row_shr:1": lambda lane: lane - 1 if lane % 16 >= 1 else None,
    "row_shr:8": lambda lane: lane - 8 if lane % 16 >= 8 else None,
    "row_shl:3": lambda lane: lane + 3 if lane % 16 < 13 else None,
    "row_ror:8": lambda lane: lane // 16 * 16 + (lane + 8) % 16,
    "row_ror:3": lambda lane: lane // 16 * 16 + (lane - 3) % 16,
    "row_mirror": lambda lane: lane ^ 15, "row_half_mirror": lambda lane: lane ^ 7,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None, "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "wave_shr:1": lambda lane: lane - 1 if lane else None, "wave_ror:1": lambda lane: (lane - 1) % 64,
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("on", [ALL, 0xFFFF00FF_0F3FFFFE], ids=["all", "some"])
def test_dpp(move: str, bound: bool, on: int) -> None:
    """v_mov_b32_dpp and v_add_u32_dpp: without a source zero, or (no bound_ctrl) nothing is written."""
    rest = "row_mask:0xf bank_mask:0xf" + (" bound_ctrl:1" if bound else "")
    found = execute(wave({0: GIVEN, 1: [7] * 64, 2: [5] * 64, 3: [6] * 64}, on=on),
                    f"v_mov_b32_dpp v2, v0 {move} {rest}", f"v_add_u32_dpp v3, v0, v1 {move} {rest}")  # fmt: skip
    for lane in range(64):
        source = MOVES[move](lane)
        there = source is not None and on >> source & 1
        written = on >> lane & 1 and (bound or there)
        value = GIVEN[source] if there and source is not None else 0
        assert vector(found, 2)[lane] == (value if written else 5)
        assert vector(found, 3)[lane] == (value + 7 if written else 6)


def test_rows_and_banks_of_dpp() -> None:
    line = "v_mov_b32_dpp v2, v0 row_mirror row_mask:0xa bank_mask:0x5 bound_ctrl:1"
    found = vector(execute(wave({0: GIVEN, 2: [5] * 64}), line), 2)
    for lane in range(64):
        assert found[lane] == (GIVEN[lane ^ 15] if lane // 16 in (1, 3) and lane % 16 // 4 in (0, 2) else 5)


@pytest.mark.parametrize("on", [ALL, 0xFFFF00FF_0F3FFFFE], ids=["all", "some"])
def test_permutations(on: int) -> None:
    to = [(lane * 13 + 5) % 64 for lane in range(64)]
    held = {0: GIVEN, 1: [4 * lane for lane in to], 2: [5] * 64, 3: [5] * 64}
    found = execute(wave(held, on=on), "ds_bpermute_b32 v2, v1, v0", "ds_permute_b32 v3, v1, v0")
    for lane in range(64):
        if on >> lane & 1:
            assert vector(found, 2)[lane] == (GIVEN[to[lane]] if on >> to[lane] & 1 else 0)
            source = to.index(lane)
            assert vector(found, 3)[lane] == (GIVEN[source] if on >> source & 1 else 0)
        else:
            assert vector(found, 2)[lane] == vector(found, 3)[lane] == 5


@pytest.mark.parametrize(("offset", "source"), [
    ("swizzle(QUAD_PERM,2,3,0,1)", lambda lane: lane ^ 2), ("0x8000", lambda lane: lane & ~3),
    ("swizzle(SWAP,16)", lambda lane: lane ^ 16), ("swizzle(REVERSE,8)", lambda lane: lane ^ 7),
    ("swizzle(BROADCAST,4,1)", lambda lane: lane & ~3 | 1), ("swizzle(BITMASK_PERM,\"0000p\")", None),
    ("0x401f", lambda lane: lane ^ 16), ("0x1c", lambda lane: lane & ~3),
])  # fmt: skip
def test_swizzles(offset: str, source: Callable[[int], int] | None) -> None:
    """ds_swizzle_b32."""
    if source is None:
        with pytest.raises(Exception, match="BITMASK_PERM"):
            execute(wave({0: GIVEN}), f"ds_swizzle_b32 v2, v0 offset:{offset}")
        return
    found = vector(execute(wave({0: GIVEN}), f"ds_swizzle_b32 v2, v0 offset:{offset}"), 2)
    assert found == [GIVEN[source(lane)] for lane in range(64)]


@pytest.mark.parametrize("width", [32, 16])
def test_swaps(width: int) -> None:
    """v_permlane32_swap_b32 and v_permlane16_swap_b32: lane l of the second against l + width of the first."""
    other = [2000 + lane for lane in range(64)]
    found = execute(wave({0: GIVEN, 1: other}), f"v_permlane{width}_swap_b32_e32 v0, v1", chip="gfx950")
    first, second = list(GIVEN), list(other)
    for lane in range(64):
        if lane % (2 * width) < width:
            first[lane + width], second[lane] = other[lane], GIVEN[lane + width]
    assert (vector(found, 0), vector(found, 1)) == (first, second)


def test_single_lanes() -> None:
    found = execute(wave({0: GIVEN}, {5: 70}, on=0xF0), "v_readfirstlane_b32 s0, v0", "v_readlane_b32 s1, v0, 9",
                    "v_readlane_b32 s2, v0, s5", "v_writelane_b32 v0, s0, 63",
                    "v_writelane_b32 v0, 11, s5")  # fmt: skip
    assert [scalar(found, number) for number in (0, 1, 2)] == [1004, 1009, 1006]
    assert vector(found, 0) == [*GIVEN[:6], 11, *GIVEN[7:63], 1004]
    assert scalar(execute(wave({0: GIVEN}, on=0), "v_readfirstlane_b32 s0, v0"), 0) == 1000
