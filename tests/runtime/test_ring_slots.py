"""Rings of LDS slots whose index a compiler no longer wraps are found in what Triton makes of a kernel."""

from __future__ import annotations

import pytest

from rewrite.kernels import findings
from rewrite.kernels.assembly import Figures, Row, lost_slots

UP = "%next = arith.addi %slot, %one : i32"
WRAPS = f"""
{UP}
%is_last = arith.cmpi sge, %next, %two : i32
%index = arith.select %is_last, %zero, %next : i32
%held = ttg.memdesc_index %ring[%index] : !ttg.memdesc<2x64x16xbf16, #shared> -> !ttg.memdesc<64x16xbf16, #shared>
"""

ONE_SLOT = """
%x_20 = ttg.memdesc_index %x[%c0_i32] : !ttg.memdesc<2x32x32xbf16, #smem, mutable> -> !ttg.memdesc<32x32xbf16>
ttg.local_store %x_19, %x_20 : tensor<32x32xbf16, #blocked> -> !ttg.memdesc<32x32xbf16, #shared1, #smem, mutable>
%total_31:2 = scf.for %i = %2 to %3 step %c32_i64 iter_args(%t = %total) -> (tensor<32x32xf32, #mma>)  : i64 {
  ttg.local_store %x_52, %x_20 : tensor<32x32xbf16, #blocked> -> !ttg.memdesc<32x32xbf16, #shared1, #smem, mutable>
  scf.yield %t : tensor<32x32xf32, #mma>
} loc(#loc9)
"""
WRITE = "ttg.local_store %x_52, %x_20 : tensor<32x32xbf16, #blocked>"
TAKEN = "%x_20 = ttg.memdesc_index %x[%at] : !ttg.memdesc<2x32x32xbf16> -> !ttg.memdesc<32x32xbf16>"
ANEW = ONE_SLOT.replace("%x_20 =", "%x_21 =").replace(f"  {WRITE}", f"  {TAKEN}\n  {WRITE}")
TO_LDS = "amdg.buffer_load_to_local %p[%at] mask = %m into %x_20 {contiguity = 4 : i32} : <bf16>[tensor<16xi32>]"


@pytest.mark.parametrize(
    ("ttgir", "found"),
    [
        (WRAPS, 0),
        (WRAPS.replace("[%index]", "[%next]"), 1),
        (WRAPS.replace("[%index]", "[%next]").replace("memdesc<2x", "memdesc<3x"), 1),
        (WRAPS.replace("[%index]", "[%next]").replace("memdesc<2x", "memdesc<1x"), 0),
        (WRAPS.replace("%ring[%index]", "%ring[%zero]"), 0),
        (ONE_SLOT, 1),
        (ONE_SLOT.replace("memdesc<2x", "memdesc<1x"), 0),
        (ONE_SLOT.replace(WRITE, TO_LDS), 1),
        (ONE_SLOT.replace(WRITE, "ttg.async_copy_global_to_local %p, %x_20 mask %m : tensor<16xbf16>"), 1),
        (ANEW, 0),
    ],
)
def test_an_index_that_only_goes_up(ttgir: str, found: int) -> None:
    assert lost_slots(ttgir) == found


def test_it_is_a_finding() -> None:
    figures = Figures(40, 0, 30, 0, 0, 900, {128: 4}, {}, False, False, lost_slots=2)
    row = Row("gfx950", "decode_attention", "Llama 8B", 256, figures=figures, compiler="triton 3.9.0")
    assert [finding.kind for finding in findings.judge([row])] == ["ring slots"]
