"""Functions of torch in a captured forward: chains of any size, joins, norms behind; attention reads views."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED, KERNEL_DTYPES
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.core import backend, lazy_hooks, output_layout
from hf_rewrite_runtime.forward import functions
from hf_rewrite_runtime.forward.functions import ForwardFunctions
from hf_rewrite_runtime.lazy import fusion_place, fusion_rows, fusion_text
from hf_rewrite_runtime.lazy.fusion_text import LARGE
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

Function = Callable[..., Any]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the chains' kernels are, in the order of their launches."""
    found: list[str] = []
    run = fusion_text.launch_text

    def recorded(made: fusion_text.Text, outs: Any) -> None:
        found.append(made.text)
        run(made, outs)

    monkeypatch.setattr(fusion_text, "launch_text", recorded)
    monkeypatch.setattr(fusion_rows, "launch_text", recorded)
    return found


@torch.no_grad()
def forward(function: Function, *given: Any, free: bool = True) -> Any:
    with output_layout.free(free), ForwardFunctions(poisons=True):
        return function(*given)


def assert_exact(function: Function, *given: Tensor) -> None:
    """Fail unless a function gives in a forward about what it gives outside of one."""
    ours, wanted = forward(function, *given), function(*given)
    exact = function(*(tensor.double() for tensor in given))
    assert_as_exact_as(wanted, ours, exact, torch.finfo(wanted.dtype).eps)


def numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def rotated(states: Tensor, cos: Tensor, sin: Tensor, prefix: int) -> Tensor:
    """Rotate what lies behind a prefix, as vision models with registers do."""
    before, rest = states.split((prefix, states.shape[-2] - prefix), dim=-2)
    half = rest.shape[-1] // 2
    turned = torch.cat((-rest[..., half:], rest[..., :half]), dim=-1)
    return torch.cat((before, rest * cos + turned * sin), dim=-2)


@pytest.mark.parametrize("free", [False, True], ids=["as torch", "free layout"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_rotation_behind_a_prefix_is_one_kernel(
    device: torch.device, dtype: torch.dtype, free: bool, texts: list[str]
) -> None:
    packed = numbers(device, dtype, 2, 13, 3, 4, 16)
    states, cos, sin = packed[:, :, 1].transpose(1, 2), numbers(device, dtype, 10, 16), numbers(device, dtype, 10, 16)
    ours = forward(rotated, states, cos, sin, 3, free=free)
    assert torch.equal(ours, rotated(states, cos, sin, 3))
    assert len(texts) == 1


JOINS: dict[str, Function] = {
    "first dimension": lambda x, y: torch.cat((x * 2, y + 1), dim=0),
    "last of three": lambda x, y: torch.cat((x, y * 3, x), dim=-1),
    "in the middle": lambda x, y: torch.cat([x - y, y], 1) * 2,
    "parts": lambda x, y: torch.cat((x[..., 5:], -x[..., :5]), dim=-1) + y,
    "permuted": lambda x, y: torch.cat((x.transpose(0, 1), y.transpose(0, 1) * 2), dim=-1),
    "of joins": lambda x, y: torch.cat((torch.cat((x, y), 1) + 1, torch.cat((y, x), 1)), dim=2),
    "expanded": lambda x, y: torch.cat((x[:1].expand(3, -1, -1), y), dim=1) * 2,
    "two dtypes": lambda x, y: torch.cat((x.float() * 2, y), dim=1),
    "one row": lambda x, y: torch.cat((x[0, 0], y[0, 0] * 2)),
}


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_joins_are_torchs(name: str, dtype: torch.dtype, device: torch.device, texts: list[str]) -> None:
    x, y = numbers(device, dtype, 3, 7, 12), numbers(device, dtype, 3, 7, 12)
    ours, wanted = forward(JOINS[name], x, y), JOINS[name](x, y)
    assert ours.dtype == wanted.dtype
    assert torch.equal(ours, wanted)
    assert texts


def test_a_part_is_read_where_it_is(device: torch.device, texts: list[str]) -> None:
    """Beyond its ends lies somebody else's memory, or none."""
    x, y = numbers(device, torch.float32, 4, 8, 16), numbers(device, torch.float32, 4, 8, 16)
    forward(lambda: torch.cat((x * 2, y), dim=1))
    loads = [line for line in texts[0].splitlines() if "tl.load" in line]
    assert len(loads) == 2
    assert all("mask=" in line for line in loads)
    assert "mask=" not in texts[0].splitlines()[-1]  # all of the result is there


VIEWS: dict[str, Function] = {
    "a stride that is no multiple": lambda x, row: (x.view(36, 7) * row).view(7, 36).t() + 1,
    "two dimensions as one": lambda x, row: (x * row[:, None]).view(3, 84).transpose(0, 1) * 2,
    "one as two": lambda x, row: ((x * row[:, None]).view(3, 84) + 1).view(3, 12, 7).transpose(1, 2) * 2,
    "others of the same size": lambda x, row: (x * row[:, None]).view(3, 12, 7).transpose(1, 2) - x,
    "all in another order": lambda x, row: (x * row[:, None]).permute(2, 0, 1) * x.permute(2, 0, 1),
    "of a broadcast": lambda x, row: (row * 2).view(7, 1).expand(7, 12) + x,
}


@pytest.mark.parametrize("free", [False, True], ids=["as torch", "free layout"])
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_viewed_is_taken_in(name: str, free: bool, device: torch.device, texts: list[str]) -> None:
    x, row = numbers(device, torch.float32, 3, 7, 12), numbers(device, torch.float32, 7)
    assert torch.equal(forward(VIEWS[name], x, row, free=free), VIEWS[name](x, row))
    assert len(texts) == 1


def test_a_join_of_nothing_is_torchs(device: torch.device, texts: list[str]) -> None:
    x = numbers(device, torch.float32, 3, 4)
    assert torch.equal(forward(lambda x: torch.cat((x[:0], x, torch.empty(0, device=x.device))), x), x)
    assert not texts


TURNED: dict[str, tuple[tuple[int, ...], Function]] = {
    "two": ((300, 290), lambda x: x.t().contiguous()),
    "batches": ((3, 170, 192), lambda x: F.relu(x * 2).transpose(1, 2).contiguous()),
    "heads": ((2, 200, 4, 64), lambda x: (x + 1).permute(0, 2, 3, 1).contiguous()),
    "with a table": ((2, 256, 160), lambda x: x.transpose(1, 2) + x[0, :, 0]),
    "of a part": ((2, 200, 400), lambda x: x[:, :, 7:271].transpose(1, 2).contiguous() * 2),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_what_is_turned_is_read_and_written_in_squares(
    name: str, dtype: torch.dtype, device: torch.device, texts: list[str]
) -> None:
    shape, function = TURNED[name]
    x = numbers(device, dtype, *shape)
    ours, wanted = forward(function, x), function(x)
    assert wanted.numel() > LARGE
    assert torch.equal(ours, wanted)
    assert ["[None, :]" in text for text in texts] == [True]


def test_what_is_turned_is_one_kernel_of_all_sizes(device: torch.device, texts: list[str]) -> None:
    """As the layers of a convolution over sound, each half as long as the one before, and of other batches."""
    function = lambda x: F.relu(x * 2).transpose(1, 2).contiguous()
    for batch, length in ((2, 499), (2, 999), (3, 201)):
        x = numbers(device, torch.float32, batch, length, 512)
        assert torch.equal(forward(function, x), function(x))
    assert len(texts) == 3
    assert len({*texts}) == 1


def test_sizes_that_stay_in_the_text(device: torch.device, texts: list[str]) -> None:
    """Operands of functions, and what an index is divided by."""
    x, row = numbers(device, torch.float32, 2, 120, 300), numbers(device, torch.float32, 2, 120, 3)
    function = lambda x, row: torch.where(x > 128, x, x * 1000.0).transpose(1, 2) + row.repeat(1, 1, 100).mT
    assert torch.equal(forward(function, x, row), function(x, row))
    index = torch.arange(2 * 120 * 300, device=device).view(2, 120, 300)
    number = lambda index: (index * 1234 - 567).transpose(1, 2).contiguous()
    assert torch.equal(forward(number, index), number(index))
    assert "1234" in texts[-1]
    assert "567" in texts[-1]


NORMS: dict[str, Function] = {
    "LayerNorm": lambda s, w, b: F.layer_norm(s, s.shape[-1:], w, b, 1e-5),
    "without a bias": lambda s, w, b: F.layer_norm(s, s.shape[-1:], w, None, 1e-5),
    "bare": lambda s, w, b: F.layer_norm(s, s.shape[-1:], None, None, 1e-5),
    "RMSNorm, Llama": lambda s, w, b: rms_norm(s, w, 1e-6),
    "RMSNorm, Gemma": lambda s, w, b: rms_norm(s, w, 1e-6, offset=1.0, weight_in_fp32=True),
    "RMSNorm, bare": lambda s, w, b: rms_norm(s, None, 1e-6),
}


def exact_norm(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if "RMS" not in name:
        return NORMS[name](x, weight, bias)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return normed if "bare" in name else normed * (weight + ("Gemma" in name))


@pytest.mark.parametrize("width", [48, 64, 1000])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_the_last_stage_of_a_chain(
    name: str, dtype: torch.dtype, width: int, device: torch.device, texts: list[str]
) -> None:
    x, y = numbers(device, dtype, 2, 5, width), numbers(device, dtype, 2, 5, width)
    scale, weight, bias = (numbers(device, dtype, width) for _ in range(3))

    def function(keep: bool) -> tuple[Tensor, Tensor | None]:
        summed = x * scale + y
        normed = NORMS[name](summed, weight, bias)
        return normed, summed if keep else None

    with backend.use_backend("reference"):
        wanted, sums = function(True)
        assert sums is not None
    exact = exact_norm(name, sums.double(), weight.double(), bias.double())
    for keep in (True, False):
        normed, summed = forward(function, keep)
        assert_as_exact_as(wanted, normed, exact, torch.finfo(dtype).eps)
        assert summed is None or torch.equal(summed, sums)
    assert len(texts) == 2
    assert [text.count("tl.store") for text in texts] == [2, 1]  # a sum that nobody holds is not written


def test_a_norm_of_two_dtypes_is_the_wider_one(device: torch.device, texts: list[str]) -> None:
    x, weight = numbers(device, torch.float16, 5, 64), numbers(device, torch.float32, 64)
    function = lambda: rms_norm(x * 2, weight, 1e-6)
    with backend.use_backend("reference"):
        wanted = function()
    ours = forward(function)
    assert ours.dtype == wanted.dtype == torch.float32
    exact = exact_norm("RMSNorm", (x * 2).double(), weight.double(), weight.double())
    assert_as_exact_as(wanted, ours, exact, torch.finfo(torch.float16).eps)
    assert len(texts) == 1


@pytest.mark.parametrize("rows", [4097, 3])
@pytest.mark.parametrize("width", [32, 24])
def test_rows_that_share_a_program(rows: int, width: int, device: torch.device, texts: list[str]) -> None:
    shapes = ((rows, width), (rows, 1), (width,), (width,))
    given = [numbers(device, torch.float32, *shape) for shape in shapes]
    assert_exact(lambda x, y, scale, w: F.layer_norm(x * scale + y, (width,), w, None, 1e-5), *given)
    assert len(texts) == 1


def test_operators_that_add_and_norm_are_one_chain(device: torch.device, texts: list[str]) -> None:
    given = [numbers(device, torch.float32, *shape) for shape in ((6, 64), (6, 64), (64,), (64,))]
    layer_norm = lambda h, r, scale, weight: add_layer_norm(h * scale, r, weight, None, 1e-5)[0]
    rms = lambda h, r, scale, weight: add_rms_norm(h * scale, r, weight, 1e-5)[0]
    for function in (layer_norm, rms):
        texts.clear()
        assert_exact(function, *given)
        assert len(texts) == 1


def test_a_norm_over_two_dimensions_is_torchs(device: torch.device) -> None:
    x = numbers(device, torch.float32, 3, 4, 8)
    function = lambda: F.layer_norm(x * 2, (4, 8))
    assert torch.equal(forward(function), function())


def test_attention_reads_where_its_inputs_lay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = numbers(device, torch.float32, 2, 9, 3, 4, 16)
    strides: list[tuple[int, ...]] = []

    def function(packed: Tensor) -> Tensor:
        query, key, value = (packed[:, :, place].transpose(1, 2).contiguous() for place in range(3))
        return F.scaled_dot_product_attention(query * 0.5, key, value)

    def noted(step: Any, tensor: Tensor) -> Tensor:
        found = uncopied(step, tensor)
        strides.append(found.stride())
        return found

    uncopied = functions.uncopied
    monkeypatch.setattr(functions, "uncopied", noted)
    assert_exact(function, packed)
    contiguous = (4 * 9 * 16, 9 * 16, 16, 1)
    assert strides == [contiguous, (1728, 16, 192, 1), (1728, 16, 192, 1)]  # the query is multiplied in the copy


def test_unaligned_rows_are_copied_for_attention(device: torch.device) -> None:
    packed = numbers(device, torch.float32, 2, 9, 2, 7)

    def function() -> Tensor:
        with ForwardFunctions() as step:
            query = packed.transpose(1, 2).contiguous()
            with torch._C.DisableTorchFunction():
                assert functions.uncopied(step, query) is query
        return query

    with torch.no_grad():
        assert torch.equal(function(), packed.transpose(1, 2))


MASKS: dict[str, tuple[Function, bool]] = {
    "true": (lambda x: x.new_ones((), dtype=torch.bool).expand(2, 1, 9, 9), True),
    "zero": (lambda x: torch.zeros(1, 1, 9, 9, device=x.device, dtype=x.dtype), True),
    "false": (lambda x: torch.zeros(1, 1, 9, 9, device=x.device, dtype=torch.bool), False),
    "minus one": (lambda x: torch.full((1, 1, 9, 9), -1.0, device=x.device, dtype=x.dtype), False),
    "causal": (lambda x: torch.arange(9, device=x.device)[:, None] >= torch.arange(9, device=x.device), False),
    "memory": (lambda x: HELD[x.device.type], False),
}
HELD: dict[str, Tensor] = {}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_hides_nothing_is_not_read(name: str, device: torch.device) -> None:
    HELD[device.type] = torch.ones(1, 1, 9, 9, dtype=torch.bool, device=device)
    mask, hides_nothing = MASKS[name]
    x = numbers(device, torch.float32, 2, 4, 9, 16)
    with torch.no_grad(), ForwardFunctions() as step:
        made = mask(x)
        with torch._C.DisableTorchFunction():
            assert functions.hides_nothing(step, made) is hides_nothing
    ours = forward(lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x)))
    wanted = F.scaled_dot_product_attention(x, x, x, attn_mask=None if hides_nothing else mask(x))
    assert torch.equal(ours.nan_to_num(), wanted.nan_to_num())


def test_norms_and_convolutions_read_in_order(device: torch.device, texts: list[str]) -> None:
    x = numbers(device, torch.float32, 2, 300, 160)
    kernel = numbers(device, torch.float32, 8, 300, 3) / 30

    turned = x.transpose(1, 2).contiguous()
    for function in (
        lambda: F.layer_norm(x.transpose(1, 2), (300,)), lambda: F.conv1d(F.relu(turned).transpose(1, 2), kernel)
    ):  # fmt: skip
        texts.clear()
        assert torch.equal(forward(function), function())
        assert ["[None, :]" in text for text in texts] == [True]


def test_dropout_in_evaluation_is_nothing(device: torch.device, texts: list[str]) -> None:
    x = numbers(device, torch.float32, 40)
    assert torch.equal(forward(lambda: F.dropout(x * 2, 0.5, training=False) + 1), x * 2 + 1)
    assert len(texts) == 1


def test_what_was_read_is_free_at_once(device: torch.device) -> None:
    """Memory that a chain was made from goes when the chain is computed, without Python's collector of cycles."""
    gc.disable()
    try:
        with torch.no_grad(), ForwardFunctions():
            leaf = torch.randn(64, device=device)
            gone = weakref.ref(leaf)
            summed = leaf * 2 + 1
            del leaf
            assert gone() is not None
            assert float(summed[0]) == float(summed[0])
            assert gone() is None
    finally:
        gc.enable()


def test_what_a_large_chain_took_in_is_not_written_besides(device: torch.device, texts: list[str]) -> None:
    x = numbers(device, torch.float32, LARGE + 64)

    def function() -> tuple[Tensor, Tensor]:
        first = x * 2 + 1
        second = first * 3
        return second.clone().data_ptr() and second, first

    for ours, wanted in zip(forward(function), function(), strict=True):
        assert torch.equal(ours, wanted)
    assert all(text.count("tl.store") == 1 for text in texts)


def test_steps_alone_have_kernels_of_steps(device: torch.device) -> None:
    with torch.no_grad(), ForwardFunctions():
        assert not lazy_hooks.defers()


@pytest.mark.parametrize(
    ("shape", "strides", "into", "parts"),
    [
        ((2, 3, 4), (4, 8, 1), (3, 2, 4), [[(1, 1)], [(0, 1)], [(2, 1)]]),
        ((3, 2, 2), (4, 2, 1), (3, 4), [[(0, 1)], [(1, 2), (2, 1)]]),
        ((5, 4), (0, 1), (4,), [[(1, 1)]]),
        ((3, 4), (4, 1), (3, 2, 2), None),
        ((2, 2), (6, 1), (3, 4), None),
        ((4, 2), (1, 3), (2, 4), None),
    ],
)
def test_coordinates_are_sums_or_unknown(
    shape: Any, strides: Any, into: Any, parts: Any, device: torch.device
) -> None:
    assert fusion_place._parts(shape, strides, into) == parts


def test_in_inference_mode(device: torch.device, texts: list[str]) -> None:
    x, weight = numbers(device, torch.float32, 6, 64), numbers(device, torch.float32, 64)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        summed = x * 2 + 1
        summed *= 3
        return F.layer_norm(summed, (64,), weight), summed, torch.cat((x, -x), dim=1)[:, 3:]

    with torch.inference_mode():
        wanted = function(x)
        with output_layout.free(), ForwardFunctions(poisons=True):
            ours = function(x)
        exact = F.layer_norm(wanted[1].double(), (64,), weight.double())
        assert_as_exact_as(wanted[0], ours[0], exact, torch.finfo(torch.float32).eps)
        assert all(torch.equal(one, other) for one, other in zip(ours[1:], wanted[1:], strict=True))
    assert len(texts) == 2


@pytest.mark.parametrize("dim", [0, 2, -1])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_normed_weight_is_that_of_torch(
    device: torch.device, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[bool] = []

    def seen(*given: Any) -> Tensor | None:
        found = functions._weight_norm(*given)
        own.append(found is not None)
        return found

    monkeypatch.setitem(functions._FUNCTIONS, torch._weight_norm, seen)
    direction = nn.Parameter(numbers(device, dtype, 24, 6, 16))
    length = numbers(device, dtype, *(size if dim % 3 == place else 1 for place, size in enumerate((24, 6, 16))))
    assert_exact(lambda v, g: torch._weight_norm(v, g, dim), direction, nn.Parameter(length))
    assert own == [dim >= 0 and dtype.itemsize == 2]  # -1 stands for the length of the whole
