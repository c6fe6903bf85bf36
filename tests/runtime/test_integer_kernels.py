"""Weights of integers of 4 and 8 bits: every integer, and products against fp64."""

from __future__ import annotations

import pytest
import torch
from block_weights import Norm
from conftest import INTERPRETED
from torch import Tensor

from hf_rewrite_runtime.integer import integer_skinny
from hf_rewrite_runtime.integer.integer_linear import launch_integer_row
from hf_rewrite_runtime.integer.integer_rows import launch_integer_rows
from hf_rewrite_runtime.integer.integer_skinny import Form, form_for, launch_integer_skinny
from hf_rewrite_runtime.integer.integer_weights import (
    Integers,
    dequantized,
    packed,
    reason_against,
    reference,
    unpacked,
)
from hf_rewrite_runtime.linear.prologue import prologue_of

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

FORMS = {
    "4 bits": (4, 128, False, False),
    "groups of 32": (4, 32, False, False),
    "zeros": (4, 128, True, False),
    "groups of 64": (4, 64, True, False),
    "one scale a row": (4, 384, False, False),
    "an order": (4, 128, True, True),
    "8 bits": (8, 128, False, False),
    "8 bits, groups of 16, zeros": (8, 16, True, False),
}


def integers(device: torch.device, rows: int, cols: int, form: str, scale: torch.dtype = torch.float16) -> Integers:
    bits, columns, zero, ordered = FORMS[form]
    words = torch.randint(-(2**31), 2**31, (rows, cols * bits // 32)).int()
    scales = ((torch.rand(rows, cols // columns) + 0.1) * 2.0**-bits).to(scale)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8).to(device) if zero else None
    order = torch.randperm(cols).int().to(device) if ordered else None
    return Integers(words.to(device), scales.to(device), zeros, bits, columns, order)


def product(x: Tensor, weight: Integers, bias: Tensor | None, norm: Norm | None, residual: Tensor | None) -> Tensor:
    wide = x.double() if norm is None else norm(x.double()).double()
    wide = wide if weight.order is None else wide[..., weight.order.long()]
    y = wide @ reference(weight, torch.float64).T
    y = y if bias is None else y + bias.double()
    return y if residual is None else y + residual.double()


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (2 * eps if dtype != torch.float32 else 4e-6), error


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_lie_in_words_from_the_lowest_bits(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 64))
    words = packed(numbers, bits)
    assert torch.equal(unpacked(words, bits).long(), numbers)
    in_bytes = words.view(torch.uint8).int()
    first = in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(-2)
    assert torch.equal(first.long(), numbers)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantised_bit_for_bit(form: str, dtype: torch.dtype, device: torch.device) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts a bf16 off")
    weight = integers(device, 6, 384, form)
    assert reason_against(weight) is None
    assert torch.equal(dequantized(weight, dtype), reference(weight, torch.float64).to(dtype))


@pytest.mark.parametrize("kind", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32 if INTERPRETED else torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_row(form: str, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    weight = integers(device, 24, 384, form)
    x, bias = torch.randn(1, 384, device=device).to(dtype) + 1, torch.randn(24, device=device).to(dtype)
    norm = Norm(torch.rand(384, device=device).to(dtype) + 0.5)
    residual = None if kind else torch.randn(1, 24, device=device).to(dtype)
    out = torch.full((1, 12 if kind else 24), torch.nan, device=device, dtype=dtype)
    for tile in (None, (2, 4, 1)):
        launch_integer_row(x, weight, bias, prologue_of(norm), residual, out, kind, tile)
        wanted = product(x, weight, bias, norm, residual)
        if kind:
            gate, up = wanted.chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
        close(out, wanted, dtype)


@pytest.mark.parametrize("kind", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("form", "count"),
    [("4 bits", 5), ("zeros", 2), ("one scale a row", 13)],
)
def test_on_matrix_units(form: str, count: int, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """With a last step that begins in the one before, and a last tile of rows that does."""
    torch.manual_seed(0)
    weight = integers(device, 80, 768 if form == "one scale a row" else 640, form)
    cols = weight.shape[1]
    x, bias = (torch.randn(count, cols, device=device) + 1).to(dtype), torch.randn(80, device=device).to(dtype)
    norm = Norm((torch.rand(cols, device=device) + 0.5).to(dtype))
    residual = None if kind else torch.randn(count, 80, device=device).to(dtype)
    assert form_for(x, weight, prologue_of(norm), kind) is not None
    for normed, tile in ((norm, Form(1, 1, 1)), (None, Form(2, 2, 2)), (norm, Form(2, 4, 1))):
        out = torch.full((count, 40 if kind else 80), torch.nan, device=device, dtype=dtype)
        prologue = None if normed is None else prologue_of(normed)
        launch_integer_skinny(x, weight, bias, prologue, residual, out, kind, tile)
        wanted = product(x, weight, bias, normed, residual)
        if kind:
            gate, up = wanted.chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
        close(out, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32 if INTERPRETED else torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 16, 29])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "an order"])
def test_several_rows(form: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    weight = integers(device, 40, 384, form)
    x, bias = torch.randn(count, 384, device=device).to(dtype), torch.randn(40, device=device).to(dtype)
    residual = torch.randn(count, 40, device=device).to(dtype)
    for norm, tile in ((None, None), (Norm(torch.rand(384, device=device).to(dtype)), (16, 4, 3, 2))):
        out = torch.full((count, 40), torch.nan, device=device, dtype=dtype)
        prologue = None if norm is None or dtype == torch.float16 else prologue_of(norm)
        if prologue is None and norm is not None:
            continue  # the norm of an fp16 is the module's
        launch_integer_rows(x, weight, bias, prologue, residual, out, tile)
        close(out, product(x, weight, bias, norm, residual), dtype)


@pytest.mark.parametrize("finite", [True, False])
def test_threads_that_are_elsewhere_are_asked_once(
    finite: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that writes no numbers is left to other kernels; an input without numbers says nothing of it."""
    launched = []

    def elsewhere(*given: object) -> None:
        launched.append(given)
        given[5].fill_(torch.nan)  # type: ignore[attr-defined]

    monkeypatch.setattr(integer_skinny, "launch_integer_skinny", elsewhere)
    monkeypatch.setattr(integer_skinny, "_agrees", {})
    weight = integers(device, 32, 256, "4 bits")
    x = torch.ones(4, 256, dtype=torch.float16, device=device) * (1.0 if finite else torch.nan)
    for _ in range(2):
        assert not integer_skinny.run_integer_skinny(x, weight, None, None, None, x.new_empty(4, 32))
    assert len(launched) == (1 if finite else 2)
    assert list(integer_skinny._agrees.values()) == ([False] if finite else [])
