"""Pointwise functions of a step are put off and computed together: torch's numbers, in fewer kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED, KERNEL_DTYPES
from torch import Tensor, nn

from hf_rewrite_runtime.attention.eager_step import HANDLERS
from hf_rewrite_runtime.decode.constant_folding import StepConstants
from hf_rewrite_runtime.device.compile_ahead import variants
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.lazy import fusion_place, fusion_text
from hf_rewrite_runtime.lazy.pointwise_fusion import FUNCTIONS
from hf_rewrite_runtime.lazy.step_products import StepProducts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LAST_BITS = 1e-6
"""In fp32: what two libraries make of a function."""
PART = 0.25 if INTERPRETED else 0.3
"""What is added to; on a CPU torch rounds such a number to fp16 first, on a GPU it does not."""

Function = Callable[..., Any]


def step(kind: type[StepProducts] = StepProducts, *, poisons: bool = True) -> StepProducts:
    made = kind({}, HANDLERS, poisons=poisons)
    made.chains = FUNCTIONS
    return made


@torch.no_grad()
def stepped(function: Function, *given: Any) -> Any:
    with step():
        return function(*given)


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    assert (ours.dtype, ours.shape, ours.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert torch.allclose(ours, wanted, rtol=0.0, atol=0.0, equal_nan=wanted.is_floating_point())


def numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of both signs, with zeros and, among floats, what is no number."""
    made = 3.0 * torch.randn(shape, device=device)
    made.view(-1)[::7] = 0.0
    if dtype.is_floating_point and made.numel() > 40:
        made.view(-1)[:40:13] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-6], device=device)
    return made.to(dtype)


EXACT: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: PART + x,
    "sub": lambda x, y: x - y,
    "sub from a number": lambda x, y: PART - x,
    "mul": lambda x, y: x * y,
    "mul by a number": lambda x, y: torch.multiply(x, 1.7),
    "div": lambda x, y: x / y,
    "div by a number": lambda x, y: x / 1.4142135,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "square": lambda x, y: torch.square(x),
    "pow 2": lambda x, y: x**2,
    "pow -1": lambda x, y: torch.pow(x, -1),
    **({} if INTERPRETED else {"sqrt": lambda x, y: torch.sqrt(x)}),  # a CPU's is not to the nearest
    "relu": lambda x, y: F.relu(x),
    "clamp": lambda x, y: x.clamp(-1, 1.5),
    "clamp below": lambda x, y: torch.clamp(x, min=0.25),
    "clamp by tensors": lambda x, y: torch.clamp(x, min=-abs(y), max=abs(y)),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "min and max": lambda x, y: torch.min(x, torch.max(y, x * 2.0)),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where a number": lambda x, y: x.where(x > 0.1, -1.5),
    "where numbers": lambda x, y: torch.where(x > y, -1e9, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, torch.finfo(x.dtype).min),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x.ne(0),
    "lt": lambda x, y: x < 0.1,
    "le": lambda x, y: torch.le(x, y),
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= 0,
    "isinf": lambda x, y: torch.isinf(x),
    "isnan": lambda x, y: x.isnan(),
    "logical": lambda x, y: torch.logical_or(x, y).logical_and(x > 1).logical_not(),
    "bitwise": lambda x, y: ~((x > 0) & (y > 0)) | (x == y) ^ (x < 2),
    "to float": lambda x, y: x.float(),
    "to half": lambda x, y: x.to(torch.float16),
    "to the dtype of another": lambda x, y: x.float().type_as(y),
    "to double": lambda x, y: x.double() * 0.1,
    "quotient of doubles": lambda x, y: (x.double() / y.double()).abs() / 3.0,
    "to bool": lambda x, y: x.bool(),
    "clone": lambda x, y: x.clone(),
    "zeros and ones": lambda x, y: torch.zeros_like(x) + torch.ones_like(x) - torch.full_like(y, 0.3),
    "new_ones": lambda x, y: x + x.new_ones((), dtype=torch.float64),
    "permuted": lambda x, y: (x + y).transpose(0, 1).contiguous(),
    "repeated": lambda x, y: (x - y).repeat(3, 1, 1) * x,
}
"""What is torch's to the last bit."""

CLOSE: dict[str, Function] = {
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(abs(x)),
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: torch.erf(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x),
    "gelu tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "sqrt": lambda x, y: torch.sqrt(abs(x)),
    "sigmoid of doubles": lambda x, y: torch.sigmoid(x.double() * 2.0),
    "root of doubles": lambda x, y: torch.sqrt(abs(x.double())),
    "rsqrt": lambda x, y: torch.rsqrt(abs(x) + 0.1),
    "pow -0.5": lambda x, y: torch.pow(abs(x) + 0.1, -0.5),
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_a_function_is_torchs(name: str, dtype: torch.dtype, device: torch.device, kernels: list[str]) -> None:
    """Behind another one, so that both are one kernel; and read by nobody but a function of its own."""
    x, y = numbers(device, dtype, 5, 70), numbers(device, dtype, 5, 70)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return EXACT[name](-(x * 1.5), y)

    assert_same(stepped(function, x, y), function(x, y))
    assert kernels == ["chain"]
    assert_same(stepped(EXACT[name], x, y), EXACT[name](x, y))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("name", CLOSE)
def test_a_function_of_the_library(name: str, dtype: torch.dtype, device: torch.device, kernels: list[str]) -> None:
    x, y = 2.0 * torch.randn(2, 5, 70, device=device).to(dtype)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return CLOSE[name](-x, y)

    ours, wanted = stepped(function, x, y), function(x, y)
    assert kernels == ["chain"]
    assert ours.dtype == wanted.dtype
    bits = LAST_BITS if dtype == torch.float32 else torch.finfo(dtype).eps
    assert torch.allclose(ours.double(), wanted.double(), rtol=bits, atol=bits)


INTEGERS: dict[str, Function] = {
    "sums": lambda n, b: (n + 3) * n - 2,
    "a sum with a fraction": lambda n, b: (n * 2) + 0.5,
    "quotient": lambda n, b: (n - 1) / 3,
    "in half": lambda n, b: (n * 1000).to(torch.float16),
    "of a half": lambda n, b: (n.half() * 1.3).long(),
    "in 32 bits": lambda n, b: (n.int() * 3).to(torch.int64) + n,
    "bits": lambda n, b: (n & 3) | (n ^ 5),
    "not": lambda n, b: ~(n + 1),
    "truths": lambda n, b: (n > 2) & b | ~b,
    "a truth as a number": lambda n, b: (n > 2).float() + b * 2.5,
    "truth and number": lambda n, b: torch.where(b, n, -1) * 2,
    "positions": lambda n, b: torch.arange(2, 72, device=n.device) + n - torch.zeros_like(n),
    "steps": lambda n, b: torch.arange(0, 140, 2, device=n.device) * n,
    "clamped": lambda n, b: (n + 1).clamp(min=0, max=4),
    "compared": lambda n, b: torch.minimum(n, torch.full_like(n, 2)) == n,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_truths(name: str, device: torch.device, kernels: list[str]) -> None:
    n, b = torch.randint(-5, 9, (3, 70), device=device), torch.rand(3, 70, device=device) > 0.5
    assert_same(stepped(INTEGERS[name], n, b), INTEGERS[name](n, b))
    assert kernels == ["chain"]


LAYOUTS: dict[str, Function] = {
    "rows": lambda x: (x[:1] + 1.0) * x,
    "columns": lambda x: (x[:, :1] + 1.0) * x,
    "part": lambda x: (x[2:5, 3:40] * 2.0) + 1.0,
    "every second": lambda x: (x[:, ::2] * 2.0) + 1.0,
    "transposed leaf": lambda x: (x.T * 2.0).contiguous() + x.T,
    "expanded leaf": lambda x: x[:1, None].expand(2, 4, 70) * 2.0 + 1.0,
    "one number": lambda x: (x[3, 5] * 2.0 + 1.0) * x,
    "alone": lambda x: x[3, 5] * 2.0 + 1.0,
    "broadcast chain": lambda x: (x[0] + 1.0)[None, :, None].expand(3, 70, 2) * torch.ones(3, 70, 2, device=x.device),
    "permuted chain": lambda x: torch.ones(3, 10, 8, 7, device=x.device) * (x + 1.0).view(8, 7, 10).permute(2, 0, 1),
    "permuted result": lambda x: (x + 1.0).view(8, 7, 10).permute(2, 0, 1) * 3.0 - x[0, :10, None, None],
    "permuted and read": lambda x: ((y := (x.T * 2.0)) + y[:, :1]).exp() + 1.0,
    "permuted, in order": lambda x: torch.where(x.T > 0.0, x.T, -1.0).contiguous(),
    "permuted alone": lambda x: x.T * 2.0,
    "two ways": lambda x: (y := x[:, :8] + 1.0) * y.T.contiguous(),
    "reshaped chain": lambda x: (x + 1.0).view(-1, 5).unsqueeze(1) * 2.0,
    "several blocks": lambda x: (x.repeat(40, 1, 1) + 1.0) * x,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, device: torch.device, kernels: list[str]) -> None:
    wide = torch.randn(9, 90, device=device)
    x = wide[1:, 7:77]
    ours, wanted = stepped(LAYOUTS[name], x), LAYOUTS[name](x)
    assert ours.stride() == wanted.stride()
    assert torch.allclose(ours, wanted, rtol=0.0 if "read" not in name else 1e-6, atol=0.0)
    assert "chain" in kernels or "alone" in name


def test_a_mask_is_one_kernel(device: torch.device, kernels: list[str]) -> None:
    """As transformers makes it of positions, a length and padding."""
    padding = torch.rand(2, 24, device=device) > 0.2
    position = torch.tensor([17], device=device)

    def mask(padding: Tensor, position: Tensor) -> Tensor:
        slots = torch.arange(24, device=padding.device)
        slots += 0
        rows = torch.arange(2, device=padding.device)[:, None, None, None]
        queries = (torch.arange(1, device=padding.device) + position)[None, None, :, None]
        columns = slots[None, None, None, :]
        seen = columns.new_ones((), dtype=torch.bool) & (columns <= queries) & (columns > queries - 9)
        return seen & (padding.to(torch.int64) != 0)[rows, columns]

    assert_same(stepped(mask, padding, position), mask(padding, position))
    assert kernels == ["chain"]


def test_a_table_is_looked_up(device: torch.device, kernels: list[str]) -> None:
    table, tokens = nn.Parameter(torch.randn(11, 6, device=device)), torch.tensor([[3, 10, 0]], device=device)
    function = lambda tokens: F.embedding(tokens, table) * 2.5
    assert_same(stepped(function, tokens), function(tokens).detach())
    assert_same(stepped(lambda i: table[i - 11, i * 0 - 1] + 1.0, tokens), (table[tokens - 11, -1] + 1.0).detach())
    assert kernels == ["chain"] * 2


# Who reads what, and when.


def test_what_is_held_is_written_by_the_same_kernel(device: torch.device, kernels: list[str]) -> None:
    x = torch.randn(3, 40, device=device)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first = x * 2.0
        second = first + 1.0
        return first, second, second.half() - 1.0, first.view(-1) > 0.0

    for ours, wanted in zip(stepped(function, x), function(x), strict=True):
        assert_same(ours, wanted)
    assert kernels == ["chain"] * 2  # the last reads the first in another kernel


def test_a_function_alone_is_torchs_own(device: torch.device, kernels: list[str]) -> None:
    x = torch.randn(3, 40, device=device)
    assert_same(stepped(lambda x: (x * 2.0).cumsum(-1), x), (x * 2.0).cumsum(-1))
    assert kernels == []


def test_what_nobody_reads_is_not_computed(device: torch.device, kernels: list[str]) -> None:
    x = torch.randn(3, 40, device=device)

    def function(x: Tensor) -> Tensor:
        (x + 1.0).exp()
        return x.cumsum(-1)

    stepped(function, x)
    assert kernels == []


def test_a_leaf_lives_as_long_as_who_reads_it(device: torch.device) -> None:
    def function(x: Tensor) -> Tensor:
        leaf = x.cumsum(-1)
        later = leaf * 2.0 + 1.0
        del leaf
        gc.collect()
        junk = [torch.full((3, 40), 7.0, device=x.device).cumsum(-1) for _ in range(4)]
        return later + 0.0 * junk[0]

    x = torch.randn(3, 40, device=device)
    assert torch.equal(stepped(function, x), function(x))


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    later = x * 2.0 + 1.0
    x.fill_(5.0)
    return later, x


def written_through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    part = x[1:, 3:]
    later = x * 2.0 + 1.0
    part.index_copy_(0, torch.zeros(1, dtype=torch.int64, device=x.device), part[:1] * 3.0)
    return later, x


def set_in_part(x: Tensor) -> tuple[Tensor, Tensor]:
    later = x * 2.0 + 1.0
    x[0] = later[1]
    return later, x


def added_to_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    later = (x + 1.0) * 2.0
    x += later
    return later, x


def added_to_its_transpose(x: Tensor) -> tuple[Tensor, Tensor]:
    square = x[:, :3].contiguous()
    square += (square.T + 1.0) * 2.0
    return square, x


def added_from_its_own_part(x: Tensor) -> tuple[Tensor, Tensor]:
    bias = x.cumsum(0)
    bias[1:] += bias[:-1] * 1.0 + (x[:1] + 1.0)
    return bias, x


def a_chain_written(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = x + 1.0
    before = first * 3.0
    view = first.view(-1)
    first += x
    first.mul_(2.0)
    return before, first, view - 1.0


def a_chain_written_in_part(x: Tensor) -> tuple[Tensor, Tensor]:
    first = (x + 1.0) * 2.0
    before = first - 1.0
    first[1:] += x[1:] * 2.0
    return before, first


def a_chain_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    first = x.half() * 1.1
    first += x
    return first, first * 2.0


def a_tensor_written_by_a_chain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.cumsum(-1)
    reader, other = x * 2.0, x.cumsum(0) * 3.0
    added = other + 1.0
    x.T.add_(added.T)
    return reader, x, added


def chains_of_chains(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = x.exp() + 1.0
    second = first * 2.0
    summed = first.sum(-1, keepdim=True)
    first.masked_fill_(x > 0.0, 0.0)
    return second / summed, first, first.T @ second


def read_by_a_product(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = (x * 2.0).tanh() + 1.0
    return scaled @ torch.ones(x.shape[1], 2, device=x.device), scaled


def asked_by_the_host(x: Tensor) -> tuple[Tensor, Tensor]:
    most = x.abs() + 1.0
    return (x * 2.0 if bool((most > 0.5).all()) else x), most


def stacked(x: Tensor) -> tuple[Tensor, Tensor]:
    first = x * 2.0 + 1.0
    return torch.stack([first, x, first - 1.0]), first


def of_a_part(x: Tensor) -> tuple[Tensor, Tensor]:
    both = (x * 2.0).exp()
    left, right = both[:, :20], both[:, 20:]
    return left * right + 1.0, both.view(torch.int32) + 0


def gone_and_given_anew(x: Tensor) -> tuple[Tensor, ...]:
    """Memory of attention, which is computed while it is not known that what was put off is gone."""
    query, keys = x[None, :, None, :16].contiguous(), x[None, :, None, 16:32].expand(1, 3, 5, 16).contiguous()
    results = []
    for number in range(20):
        weights = torch.softmax(query @ keys.transpose(-1, -2), -1)
        gone = query + float(number)
        del gone
        attended = weights @ keys
        results.append(attended * 2.0 + 1.0)
    return tuple(results)


def too_large(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = (x + 1.0).repeat(StepProducts.largest // x.numel() + 1, 1, 1) * 2.0
    return wide + 1.0, wide


def long(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x
    for _ in range(150):
        y = y * 1.01 + 0.01
    return y, x


SOUND: tuple[Function, ...] = (
    written, written_through_a_view, set_in_part, added_to_itself, added_to_its_transpose, added_from_its_own_part,
    a_chain_written, a_chain_written_in_part, a_chain_rounded, a_tensor_written_by_a_chain, chains_of_chains,
    read_by_a_product, asked_by_the_host, stacked, of_a_part, gone_and_given_anew,
    too_large, long,
)  # fmt: skip


def differences(function: Function, device: torch.device) -> list[bool]:
    x = torch.randn(3, 40, device=device)
    ours, wanted = stepped(function, x.clone()), function(x.clone())
    return [
        not torch.allclose(a.double(), b.double(), 1e-6, 1e-6) or a.dtype != b.dtype
        for a, b in zip(ours, wanted, strict=True)
    ]


@pytest.mark.parametrize("function", SOUND)
def test_whoever_reads_or_writes_sees_torchs_numbers(function: Function, device: torch.device) -> None:
    assert not any(differences(function, device))


def test_a_chain_written_is_one_kernel(device: torch.device, kernels: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        scaled = (x - 1.0).repeat(4, 1, 1)
        scaled += x
        return scaled

    x = torch.randn(3, 40, device=device)
    assert torch.equal(stepped(function, x), function(x))
    assert kernels == ["chain"]


def test_constants_of_a_step_compute_no_chain(device: torch.device, kernels: list[str]) -> None:
    """They ask whether something that is written is one of theirs."""
    weight, x = nn.Parameter(torch.randn(40, device=device)), torch.randn(3, 40, device=device)

    def function(x: Tensor) -> Tensor:
        scaled = x * weight.half()
        scaled += x
        return scaled

    with torch.no_grad(), step(), StepConstants():
        ours = function(x)
    assert torch.equal(ours, function(x))
    assert kernels == ["chain"]


@pytest.mark.parametrize("form", ["gradient", "alpha", "complex", "given out", "rounded"])
def test_what_is_left_to_torch(form: str, device: torch.device, kernels: list[str]) -> None:
    x = torch.randn(3, 40, device=device)
    weight = nn.Parameter(torch.ones(40, device=device))
    functions: dict[str, Function] = {
        "gradient": lambda x: x * weight + 1.0,
        "alpha": lambda x: torch.add(x, x, alpha=2).sub(x, alpha=3),
        "complex": lambda x: (x * 2j + 1.0).real,
        "given out": lambda x: torch.add(x, 1.0, out=torch.ones_like(x)),
        "rounded": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    }
    with torch.enable_grad(), step():
        ours = functions[form](x)
    assert torch.equal(ours, functions[form](x))
    assert kernels == []


def test_what_torch_refuses_it_says(device: torch.device) -> None:
    x = torch.randn(3, 40, device=device)
    with pytest.raises(RuntimeError, match="must match the size"):
        stepped(lambda x: (x + 1.0) * x[:, :7], x)


# What follows a product stays its last stage.


class Block(nn.Module):
    """A product with an activation, another one and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * 0.22


def test_products_keep_their_stages(device: torch.device, kernels: list[str]) -> None:
    block, x = Block().to(device), torch.randn(1, 1, 16, device=device)
    ours = stepped(block, x)
    assert kernels == ["linear"] * 2
    assert torch.allclose(ours, block(x), 1e-5, 1e-5)


def test_what_a_product_has_no_stage_for_is_a_chain(device: torch.device, kernels: list[str]) -> None:
    product, x = nn.Linear(16, 16, device=device), torch.randn(1, 1, 16, device=device)
    function = lambda x: (product(x) + 1.0).permute(2, 0, 1).unsqueeze(-1) * x
    assert torch.allclose(stepped(function, x), function(x), 1e-5, 1e-5)
    assert kernels == ["linear", "chain"]


def test_attention_with_a_chain_for_a_mask_is_one_kernel(device: torch.device, kernels: list[str]) -> None:
    q = torch.randn(1, 2, 1, 16, device=device)
    k, v = torch.randn(2, 1, 2, 24, 16, device=device)
    position = torch.tensor([9], device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.arange(24, device=q.device) > position
        mask = torch.where(hidden, -1e9, 0.0)[None, None, None, :]
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + mask, -1) @ v

    assert torch.allclose(stepped(attention, q, k, v), attention(q, k, v), 1e-5, 1e-5)
    assert kernels == ["chain", "masked_attention"]


# Mistakes that these tests have to see.


def test_a_missing_rounding_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = fusion_text.Written.cast

    def unrounded(text: Any, value: str, dtype: torch.dtype, to: torch.dtype) -> str:
        through = "tl.float16" if to == torch.float16 else ""
        return value if through and dtype == torch.float32 else cast(text, value, dtype, to)

    x, y = numbers(device, torch.float16, 5, 70), numbers(device, torch.float16, 5, 70)
    function = lambda x, y: (x * 1.7 + y) * y
    assert_same(stepped(function, x, y), function(x, y))
    monkeypatch.setattr(fusion_text.Written, "cast", unrounded)
    with pytest.raises(AssertionError):
        assert_same(stepped(function, x, y), function(x, y))


def test_a_wrong_stride_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 90, device=device)[1:, 7:77]
    address = fusion_place.Place.address
    monkeypatch.setattr(fusion_place.Place, "address", lambda place, _: address(place, _dense(place.shape)))
    seen = []
    for name in ("rows", "columns", "part", "transposed leaf"):
        ours, wanted = stepped(LAYOUTS[name], x), LAYOUTS[name](x)
        seen.append(not torch.equal(ours, wanted))
    assert all(seen)


def _dense(shape: Any) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def test_a_leaf_written_too_early_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(StepProducts):
        def _settle(self, *arguments: Any) -> None:
            """Compute what is read, and nothing that reads what is written."""
            for key in {t.untyped_storage()._cdata for t in arguments[0] if isinstance(t, Tensor)}:
                if key in self._deferred:
                    self._compute(key)

    x = torch.randn(3, 40, device=device)
    y = x.clone()
    with torch.no_grad(), step(Forgetful):
        later, _ = written(y)
    assert not torch.equal(later, x * 2.0 + 1.0)
    assert torch.equal(y, torch.full_like(y, 5.0))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter captures nothing")
def test_a_captured_step_reads_anew(device: torch.device) -> None:
    x, out = torch.randn(4, 1, 1, 64, device=device), torch.empty(4, 1, 1, 64, device=device)

    def run() -> None:
        with step(poisons=False):
            mixed = (x[0].float() * 2.0).tanh().type_as(x).repeat(4, 1, 1, 1) + 1.0
            mixed += x
            out.copy_(mixed.cumsum(0))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream), launch.rehearsing():
        run()
    torch.cuda.synchronize()
    ahead = variants(run, torch.device("cuda", 0)).values()
    assert [job.kernel.jit_function.__name__ for job in ahead] == ["_chain_kernel"]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        run()
    for _ in range(3):
        x.normal_()
        graph.replay()
        wanted = ((x[0] * 2.0).tanh().repeat(4, 1, 1, 1) + 1.0 + x).cumsum(0)
        assert torch.allclose(out, wanted, 1e-6, 1e-6)
