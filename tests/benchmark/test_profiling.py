"""Which activities of a GPU are kernels, and which only move memory."""

from __future__ import annotations

import pytest

from rewrite.benchmark import ladder
from rewrite.measure.profiling import by_category, is_copy, is_kernel

COPYING = (
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>",
    "Memcpy DtoD (Device -> Device)",
)


@pytest.mark.parametrize(
    ("name", "kernel", "copy"),
    [
        (COPYING[0], True, True),
        (COPYING[1], True, True),
        (COPYING[2], False, True),
        ("Memcpy HtoD (Pageable -> Device)", False, False),
        ("Memset (Device)", False, False),
        ("_decode_attention_kernel", True, False),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", True, False),
    ],
)
def test_kernels_and_copies(name: str, kernel: bool, copy: bool) -> None:
    assert (is_kernel(name), is_copy(name)) == (kernel, copy)


def test_kernels_are_summed_by_category() -> None:
    times = {
        "_linear_kernel": 2.0,
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": 3.0,
        "_rms_norm_kernel": 1.0,
        "unheard of": 0.5,
    }
    assert by_category(times) == {"gemm": 5.0, "elementwise": 1.0, "other": 0.5}


def test_a_rung_says_what_it_moved() -> None:
    rungs = [
        {"name": "original, eager", "sites": 0, "categories": {"gemm": 100.0, "elementwise": 80.0}},
        {"name": "+ fuse_rms_norm", "sites": 1, "categories": {"gemm": 101.0, "elementwise": 20.0, "sampling": 5.0}},
        {"name": "+ fuse_rope", "sites": 0, "error": "RuntimeError: no"},
        {"name": "+ static_cache", "sites": 1, "categories": {"gemm": 60.0, "elementwise": 20.0, "sampling": 5.0}},
    ]
    notes = ladder.table({"cell": {"batch": 1, "context": 512}, "rungs": rungs}).notes
    assert notes == (
        "+ fuse_rms_norm: norms, elementwise -60 µs, sampling +5 µs",
        "+ static_cache: products -41 µs",
    )
