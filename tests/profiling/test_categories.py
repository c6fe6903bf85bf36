"""Kernels of both vendors are told apart by their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rewrite.measure import categories
from rewrite.measure.categories import category, operator_category

ROOT = Path(__file__).parents[2]
NAMES = sorted((ROOT / "fixtures" / "profile").glob("names-*.tsv"))


def stored(path: Path) -> list[tuple[str, str]]:
    """Return category and name of each kernel of a list."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pairs = [line.split("\t", 1) for line in lines]
    return [(kind, name) for kind, name in pairs]


@pytest.mark.parametrize("path", NAMES, ids=lambda path: path.stem)
def test_stored_names_have_their_category(path: Path) -> None:
    assert [(category(name), name) for _, name in stored(path)] == stored(path)


@pytest.mark.parametrize("path", NAMES, ids=lambda path: path.stem)
def test_hardly_a_stored_name_is_unknown(path: Path) -> None:
    kinds = [category(name) for _, name in stored(path)]
    assert len(kinds) > 200
    assert kinds.count(categories.OTHER) <= 0.01 * len(kinds)
    assert {categories.GEMM, categories.ATTENTION, categories.ELEMENTWISE, categories.COPIES} < set(kinds)


def test_both_vendors_are_there() -> None:
    assert [path.stem for path in NAMES] == ["names-cuda", "names-rocm"]


def test_every_kernel_of_our_own_is_known() -> None:
    launched = set()
    for path in (ROOT / "runtime").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        launched |= set(re.findall(r"\bKernel\(\s*(_?\w+_kernel)\b", text))
    known = {name for names in categories.OURS.values() for name in names.split()}
    assert launched
    assert {name for name in launched if name != "_nothing_kernel"} == known


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", categories.ATTENTION),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(cutlass_80_simt", categories.GEMM),
        ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>", categories.ELEMENTWISE),
        ("triton_poi_fused_add_all_reduce_0", categories.ELEMENTWISE),
        ("triton_poi_fused_clone_transpose_view_3", categories.COPIES),
        ("triton_tem_fused_addmm_3", categories.GEMM),
        ("void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<float>", categories.ELEMENTWISE),
        ("_linear_kernel.kd", categories.GEMM),
        ("something that nobody has seen", categories.OTHER),
    ],
)
def test_near_misses(name: str, kind: str) -> None:
    assert category(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", categories.GEMM),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", categories.ATTENTION),
        ("aten::transpose", categories.COPIES),
        ("aten::silu", categories.ELEMENTWISE),
        ("aten::argmax", categories.SAMPLING),
    ],
)
def test_operators(name: str, kind: str) -> None:
    assert operator_category(name) == kind
