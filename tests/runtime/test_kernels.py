"""Every kernel against fp64, with the reference's own error as the yardstick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import exact
import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from layouts import LAYOUTS
from tolerances import assert_as_exact_as

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device import row_tiles
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.rotary import rotary, rotary_single

gated_activation = importlib.import_module("hf_rewrite_runtime.linear.gated_activation")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

EPS = 1e-5
FAMILIES = {
    "llama": {},
    "gemma": {"offset": 1.0, "weight_in_fp32": True},
    "olmo2": {"weight_in_fp32": True},
    "offset_in_weight_dtype": {"offset": 1.0},
}
SHAPES = [(1, 1), (3, 33), (1, 63), (63, 127), (127, 128), (5, 1000), (2, 3, 4, 80), (2, 20000), (1, 131072), (0, 64)]
ACTIVATIONS: dict[str, Any] = {
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.nn.ReLU(),
    "relu2": None,
}

dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def check(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    truth: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
) -> None:
    """Compare one operator with fp64 and with its reference; its inputs must come out unchanged.

    `kernel` stands in for the operator where it runs its kernel: planted bugs come in there.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    got = (kernel or function)(*inputs)
    # torch lays the result out as the input lies; where that is expanded or by columns, no kernel writes it
    orders = [tensor.stride() for tensor in tensors if tensor.numel()]
    odd = any(0 in order or list(order) != sorted(order, reverse=True) for order in orders)
    assert {reason for _, reason in backend.fallbacks()} <= ({"layout"} if odd else set()), "the kernel did not run"
    with backend.use_backend("reference"):
        reference = function(*inputs)
    wanted = truth(*inputs)
    if isinstance(got, torch.Tensor):
        got, reference, wanted = (got,), (reference,), (wanted,)
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (*tensors, *got))
    for ours, theirs, right in zip(got, reference, wanted, strict=True):
        assert ours.stride() == theirs.stride()
        assert all(ours.data_ptr() != tensor.data_ptr() for tensor in tensors if ours.numel())
        assert_as_exact_as(theirs, ours, right, eps)
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)


def summed(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + x


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, **family: Any) -> None:
    offset = family.get("offset", 0.0)
    check(lambda x, w: rms_norm(x, w, EPS, **family), (x, weight), lambda x, w: exact.rms_norm(x, w, EPS, offset))


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_shapes(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rms_norm(torch.randn(shape, device=device, dtype=dtype), torch.randn(shape[-1], device=device, dtype=dtype))


@dtypes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["fp32_weight", "same_dtype"])
def test_rms_norm_families(
    device: torch.device, family: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = torch.randn(7, 96, device=device, dtype=dtype)
    check_rms_norm(x, torch.randn(96, device=device, dtype=weight_dtype or dtype), **FAMILIES[family])


@layouts
def test_rms_norm_layouts(device: torch.device, poisoned: None, layout: Callable[..., torch.Tensor]) -> None:
    x = layout(torch.randn(3, 5, 4, 72, device=device))
    check_rms_norm(x, layout(torch.randn(1, 72, device=device))[0])


@dtypes
def test_rms_norm_without_weight_and_of_tiny_rows(device: torch.device, dtype: torch.dtype) -> None:
    check_rms_norm(torch.randn(9, 64, device=device, dtype=dtype), None)
    check_rms_norm(1e-3 * torch.randn(9, 64, device=device, dtype=dtype), None)


def test_rms_norm_of_many_short_rows(device: torch.device, poisoned: None) -> None:
    assert row_tiles.tile(16, 4097)[0] > 1
    check_rms_norm(torch.randn(4097, 16, device=device), torch.randn(16, device=device))


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, device=device, dtype=dtype)
    check(
        lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
        (x, residual, torch.randn(shape[-1], device=device, dtype=dtype)),
        lambda x, residual, weight: (
            exact.rms_norm(summed(x, residual), weight, EPS),
            summed(x, residual).double(),
        ),
    )


@layouts
@pytest.mark.parametrize("family", FAMILIES)
def test_add_rms_norm_layouts(device: torch.device, layout: Callable[..., torch.Tensor], family: str) -> None:
    x, residual = layout(torch.randn(3, 5, 72, device=device)), torch.randn(3, 5, 72, device=device).half()
    offset = FAMILIES[family].get("offset", 0.0)
    check(
        lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS, **FAMILIES[family]),
        (x, residual, torch.randn(72, device=device)),
        lambda x, residual, weight: (
            exact.rms_norm(summed(x, residual), weight, EPS, offset),
            summed(x, residual).double(),
        ),
    )


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device, dtype=dtype) + 0.5
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    check(lambda x, w: layer_norm(x, w, None, EPS), (x, weight), lambda x, w: exact.layer_norm(x, w, None, EPS))


@layouts
@pytest.mark.parametrize("weight_shape", [(72,), (4, 72)], ids=str)
def test_layer_norm_layouts(
    device: torch.device, layout: Callable[..., torch.Tensor], weight_shape: tuple[int, ...]
) -> None:
    x = layout(torch.randn(3, 5, 4, 72, device=device))
    weight, bias = torch.randn(2, *weight_shape, device=device)
    check(lambda *inputs: layer_norm(*inputs, EPS), (x, weight, bias), lambda *i: exact.layer_norm(*i, EPS))


@dtypes
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
@pytest.mark.parametrize("shape", [(3, 33), (2, 5, 1000), (2, 20000), (0, 64)], ids=str)
def test_add_layer_norm(
    device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype, affine: str
) -> None:
    x, residual = torch.randn(2, *shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-1], device=device, dtype=dtype) if "weight" in affine else None
    bias = torch.randn(shape[-1], device=device, dtype=dtype) if "bias" in affine else None
    check(
        lambda *inputs: add_layer_norm(*inputs, EPS),
        (x, residual, weight, bias),
        lambda x, residual, w, b: (
            exact.layer_norm(summed(x, residual), w, b, EPS),
            summed(x, residual).double(),
        ),
    )


def check_gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> None:
    check(
        lambda gate, up: gated_activation._op(gate, up, kind),
        (gate, up),
        lambda gate, up: exact.gated_activation(gate, up, kind),
    )


@dtypes
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (2, 5, 63), (0, 64)], ids=str)
def test_gated_activation(
    device: torch.device, poisoned: None, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gate, up = 3.0 * torch.randn(2, *shape, device=device, dtype=dtype)
    check_gated(gate, up, kind)


@layouts
def test_gated_activation_layouts(device: torch.device, poisoned: None, layout: Callable[..., torch.Tensor]) -> None:
    gate, up = torch.randn(2, 3, 4, 1100, device=device)
    check_gated(layout(gate), up, "silu")
    check_gated(gate, layout(up), "gelu_tanh")


def test_gated_activation_of_halves_in_two_dtypes(device: torch.device) -> None:
    both = torch.randn(4, 600, device=device)
    first, second = both.chunk(2, dim=-1)
    check_gated(second, first, "silu")
    check_gated(second.half(), first, "gelu")


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_gated_activation_passes_on_what_is_not_finite(device: torch.device, kind: str) -> None:
    infinite = [] if kind == "gelu" else [torch.inf]  # torch's CPU GELU of infinity is NaN
    gate = torch.tensor([torch.nan, -1e30, 1e30, -0.0, *infinite], device=device)
    got = gated_activation._op(gate, torch.ones_like(gate), kind)
    with backend.use_backend("reference"):
        reference = gated_activation._op(gate, torch.ones_like(gate), kind)
    torch.testing.assert_close(got, reference, rtol=1e-6, atol=0.0, equal_nan=True)


def rotary_inputs(
    device: torch.device, dtype: torch.dtype, head_dim: int, table: int, batch: int = 2, tokens: int = 5
) -> tuple[torch.Tensor, ...]:
    """Queries and keys as views of one packed projection, and tables `[B, S, table]`."""
    states = torch.randn(batch, tokens, 9 * head_dim, device=device, dtype=dtype)
    q, k, _ = (
        x.view(batch, tokens, -1, head_dim) for x in states.split((5 * head_dim, 2 * head_dim, 2 * head_dim), -1)
    )
    angle = 6.28 * torch.rand(batch, tokens, table, device=device)
    return q.transpose(1, 2), k.transpose(1, 2), angle.cos().to(dtype), angle.sin().to(dtype)


def check_rotary(inputs: tuple[torch.Tensor, ...], **form: Any) -> None:
    layout = {name: form.get(name, False) for name in ("interleaved", "half_table", "deinterleave")}
    columns = inputs[2].shape[-1] * (2 if layout["half_table"] else 1)
    form = {"partial": columns < inputs[0].shape[-1], **form}
    check(
        lambda q, k, cos, sin: rotary(q, k, cos, sin, **form),
        inputs,
        lambda q, k, cos, sin: (exact.rotary(q, cos, sin, **layout), exact.rotary(k, cos, sin, **layout)),
    )


@dtypes
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 32), (80, 80), (80, 20), (33, 30), (128, 64), (512, 512)])
def test_rotary(
    device: torch.device, poisoned: None, dtype: torch.dtype, interleaved: bool, head_dim: int, rotated: int
) -> None:
    check_rotary(rotary_inputs(device, dtype, head_dim, rotated), interleaved=interleaved)


@dtypes
@pytest.mark.parametrize(
    "form",
    [
        {"half_table": True},
        {"half_table": True, "interleaved": True},
        {"half_table": True, "interleaved": True, "deinterleave": True},
        {"half_table": True, "interleaved": True, "stacked": True, "partial": False},
        {"half_table": True, "as_given": True},
        {"in_fp32": True},
        {"in_fp32": True, "interleaved": True},
    ],
    ids=lambda form: "-".join(form),
)
def test_rotary_forms(device: torch.device, dtype: torch.dtype, form: dict[str, bool]) -> None:
    check_rotary(rotary_inputs(device, dtype, 48, 16 if form.get("partial", True) else 24), **form)


@dtypes
def test_rotary_by_complex_numbers(device: torch.device, dtype: torch.dtype) -> None:
    q, k, cos, sin = rotary_inputs(device, dtype, 48, 24)
    form = {"interleaved": True, "half_table": True, "in_fp32": True}
    wanted = rotary(q, k, cos.float(), sin.float(), **form)
    table = torch.complex(cos.float(), sin.float()).unsqueeze(1)
    for got in (rotary(q, k, table, None, None, **form), rotary(q, k, table.squeeze(1), None, **form)):
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0)
    paired = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous()) * table
    torch.testing.assert_close(wanted[0], torch.view_as_real(paired).flatten(-2).to(dtype))


def test_stacked_pairs_are_a_new_tensor_and_written_halves_lie_as_given(device: torch.device) -> None:
    q, k, cos, sin = rotary_inputs(device, torch.float32, 16, 8)
    stacked, _ = rotary(q, k, cos, sin, interleaved=True, half_table=True, stacked=True)
    assert stacked.is_contiguous()
    written, _ = rotary(q, k, cos, sin, half_table=True, as_given=True)
    assert written.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("keep_dtype", [False, True])
def test_rotary_with_fp32_tables(device: torch.device, keep_dtype: bool) -> None:
    q, k, cos, sin = rotary_inputs(device, torch.float16, 40, 40)
    check_rotary((q, k, cos.float(), sin.float()), keep_dtype=keep_dtype)


def test_rotary_of_one_shared_table_row_and_no_tokens(device: torch.device) -> None:
    q, k, cos, sin = rotary_inputs(device, torch.float32, 16, 16)
    check_rotary((q, k, cos[:1], sin[:1]))
    check_rotary((q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]))


@layouts
def test_rotary_layouts(device: torch.device, poisoned: None, layout: Callable[..., torch.Tensor]) -> None:
    q, k, cos, sin = rotary_inputs(device, torch.float32, 24, 16)
    check_rotary((layout(q.contiguous()), k, layout(cos), sin))
    check_rotary((q, layout(k.contiguous()), cos, layout(sin)))


@pytest.mark.parametrize("unsqueeze_dim", [2, -2])
def test_rotary_with_heads_after_tokens(device: torch.device, unsqueeze_dim: int) -> None:
    q, k, cos, sin = rotary_inputs(device, torch.float32, 24, 24)
    wanted = rotary(q, k, cos, sin)
    got = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(wanted, got, strict=True))
    single = rotary_single(q.transpose(1, 2), cos, sin, unsqueeze_dim)
    assert torch.equal(single, got[0])
    without_batch = rotary(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0], -2)
    assert torch.equal(without_batch[1], got[1][0])
    assert not backend.fallbacks()


@pytest.mark.skipif(INTERPRETED, reason="needs gigabytes of device memory")
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    x = torch.randn(70_000, 32_768, device=device, dtype=torch.bfloat16)
    weight = torch.randn(32_768, device=device, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, EPS)[-3:], rms_norm(x[-3:], weight, EPS))
    assert torch.equal(gated_activation._op(x, x, "silu")[-3:], gated_activation._op(x[-3:], x[-3:], "silu"))
    q, cos = x.view(1, -1, 256, 128).transpose(1, 2), torch.rand(1, x.shape[0], 128, device=device).bfloat16()
    got = rotary_single(q, cos, cos)
    assert torch.equal(got[:, :, -3:], rotary_single(q[:, :, -3:], cos[:, -3:], cos[:, -3:]))


@pytest.mark.skipif(INTERPRETED or torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_the_current_one() -> None:
    x = torch.randn(4, 256, device="cuda:1")
    with torch.cuda.device(0):
        check_rms_norm(x, torch.ones(256, device="cuda:1"))


@pytest.mark.skipif(INTERPRETED, reason="needs a device")
def test_inside_a_cuda_graph(device: torch.device) -> None:
    x, weight = torch.randn(4, 256, device=device), torch.randn(256, device=device)
    rms_norm(x, weight, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(x, weight, EPS)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, rms_norm(x, weight, EPS))


def halves_rotated(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, cos, sin = tensors
    return tuple(exact.rotary(x, cos, sin, interleaved=False, half_table=False, deinterleave=False) for x in (q, k))


def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, weight, EPS, offset=1.0, weight_in_fp32=True)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gated_activation._op(gate, up, "silu")


@pytest.mark.parametrize(
    "bug", ["eps", "offset", "rounding order", "unrounded sum", "halves swapped", "pairs", "last columns"]
)
def test_planted_bug_is_caught(device: torch.device, bug: str) -> None:
    x, y = torch.randn(2, 64, 256, device=device)
    weight = torch.randn(256, device=device)
    large = ((30.0 * x + 1000.0).half(), (30.0 * y + 1000.0).half())
    rotated = rotary_inputs(device, torch.float32, 32, 32)
    planted: dict[str, tuple[Any, ...]] = {
        "eps": (
            lambda x: rms_norm(x, None, EPS),
            (1e-3 * x,),
            lambda x: exact.rms_norm(x, None, EPS),
            lambda x: rms_norm(x, None, 0.0),
        ),
        "offset": (
            gemma,
            (x, weight),
            lambda x, w: exact.rms_norm(x, w, EPS, 1.0),
            lambda x, w: rms_norm(x, w, EPS, weight_in_fp32=True),
        ),
        "rounding order": (
            gemma,
            (x.half(), weight.half()),
            lambda x, w: exact.rms_norm(x, w, EPS, 1.0),
            lambda x, w: rms_norm(x, w, EPS, offset=1.0),
        ),
        "unrounded sum": (
            lambda x, r: add_layer_norm(x, r, None, None, EPS),
            large,
            lambda x, r: (exact.layer_norm(r + x, None, None, EPS), (r + x).double()),
            lambda x, r: (layer_norm(x.float() + r.float(), None, None, EPS).half(), x + r),
        ),
        "halves swapped": (
            silu,
            (x, y),
            lambda gate, up: exact.gated_activation(gate, up, "silu"),
            lambda gate, up: silu(up, gate),
        ),
        "pairs": (rotary, rotated, halves_rotated, lambda *inputs: rotary(*inputs, interleaved=True)),
        "last columns": (
            rotary,
            rotated,
            halves_rotated,
            lambda *inputs: tuple(x * (torch.arange(32, device=device) < 16) for x in rotary(*inputs)),
        ),
    }
    function, inputs, truth, kernel = planted[bug]
    check(function, inputs, truth)
    with pytest.raises(AssertionError):
        check(function, inputs, truth, kernel)
