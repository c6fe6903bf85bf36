"""What a step puts off: which kernels are left, and that whoever reads or writes something else sees no difference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from torch import Tensor, nn

from hf_rewrite_runtime.attention.eager_step import HANDLERS
from hf_rewrite_runtime.attention.masked_attention import masked_attention
from hf_rewrite_runtime.attention.step_attention import StepAttention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.cache.token import write_token
from hf_rewrite_runtime.lazy.pending_ops import POINTS, activation_of
from hf_rewrite_runtime.lazy.pointwise_fusion import FUNCTIONS
from hf_rewrite_runtime.lazy.step_products import StepProducts
from hf_rewrite_runtime.linear.conv1d_weight import launch_transposed
from hf_rewrite_runtime.linear.prologue import LayerNormPrologue
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SIZE = 16
CLOSE = 1e-5
"""Relative, in fp32: sums in another order."""


class Transposed(nn.Module):
    """A product whose weight lies `[in, out]`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Layer(nn.Module):
    """Two norms, a product of three parts and what stands for attention, a product, two more with an activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor], product: Callable[[int, int], nn.Module] = nn.Linear):
        super().__init__()
        self.first, self.second = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.qkv, self.out = product(SIZE, 3 * SIZE), product(SIZE, SIZE)
        self.up, self.down = product(SIZE, 2 * SIZE), product(2 * SIZE, SIZE)
        self.dropout, self.activation = nn.Dropout(0.5), activation
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split(SIZE, dim=-1)
        return self.out(torch.softmax(query * key, -1) * value)

    def block(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(x))))


class Sequential(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        residual = x
        return residual + self.block(self.second(x))


class Parallel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.second(x)) + self.attention(self.first(x)) + x


class Added(Layer):
    def forward(self, x: Tensor) -> Tensor:
        second = self.second
        normed, residual = add_layer_norm(self.attention(self.first(x)), x, second.weight, second.bias, second.eps)
        return self.block(normed) + residual


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def seven_digits(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.GELU(),
    "new_gelu": new_gelu,
    "seven_digits": seven_digits,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": nn.ReLU(),
    "relu2": lambda x: torch.square(F.relu(x)),
}


def assert_close(ours: Tensor, exact: Tensor, close: float = CLOSE) -> None:
    assert (ours.double() - exact).norm() < close * exact.norm()


@torch.no_grad()
def stepped(model: Callable[..., Any], *given: Any) -> Any:
    with StepProducts(poisons=True):
        return model(*given)


@pytest.mark.parametrize("form", [Sequential, Parallel, Added])
def test_a_layer_is_four_products(form: type[Layer], device: torch.device, kernels: list[str]) -> None:
    model, x = form(new_gelu).eval().to(device), torch.randn(1, 1, SIZE, device=device) + 3.0
    ours = stepped(model, x)
    assert kernels == ["linear"] * 4
    assert_close(ours, model.double()(x.double()))


@pytest.mark.parametrize("form", [Sequential, Parallel])
@pytest.mark.parametrize("held", [False, True])
def test_weights_that_lie_transposed(held: bool, form: type[Layer], device: torch.device, kernels: list[str]) -> None:
    """They are laid out as a `Linear`'s, unless somebody else would not see what is written to them then."""
    model, x = form(new_gelu, Transposed).eval().to(device), torch.randn(1, 1, SIZE, device=device)
    kept = model.state_dict() if held else {}
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ours = stepped(model, x)
    assert kernels == ["transposed_linear" if held else "linear"] * 4
    assert model.up.weight.is_contiguous() is held
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
        assert weight.shape == before[name].shape
        assert not held or weight.data_ptr() == kept[name].data_ptr()
    again = stepped(model, x)
    assert torch.equal(ours, again)
    assert_close(ours, model.double()(x.double()))


def test_a_weight_of_two_modules_is_not_turned(device: torch.device, kernels: list[str]) -> None:
    one, other = Transposed(SIZE, SIZE).to(device), Transposed(SIZE, SIZE).to(device)
    other.weight.data = one.weight.data
    x = torch.randn(1, 1, SIZE, device=device)
    ours = stepped(lambda: (one(x), other(x)))
    assert kernels == ["transposed_linear"] * 2
    with torch.no_grad():
        one.weight.mul_(2.0)
        assert torch.equal(one.weight, other.weight)
        assert_close(ours[0], ((one(x) - one.bias) / 2 + one.bias).double())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_the_last_stage_of_its_product(
    activation: str, device: torch.device, kernels: list[str]
) -> None:
    product, function = nn.Linear(SIZE, SIZE, device=device), ACTIVATIONS[activation]
    x = 3.0 * torch.randn(1, 1, SIZE, device=device)
    ours = stepped(lambda: function(product(x)))
    assert kernels == ["linear"]
    assert_close(ours, function(product.double()(x.double())))


def test_several_rows(device: torch.device, kernels: list[str]) -> None:
    model = Sequential(new_gelu).eval().to(device, torch.float16)
    x = torch.randn(3, 1, SIZE, device=device).half()
    ours = stepped(model, x)
    assert kernels == ["skinny_linear"] * 4
    assert_close(ours, model.double()(x.double()), 5e-3)


def test_what_a_kernel_reads_is_computed_before_it(device: torch.device, kernels: list[str]) -> None:
    """As the bias of Whisper's keys and values, of which keys have none, and weights of norms that a step makes."""
    product, bias = nn.Linear(SIZE, SIZE, bias=False, device=device), torch.randn(SIZE // 2, device=device)
    weight, x = torch.rand(SIZE, device=device), torch.randn(1, 1, SIZE, device=device)

    def layer() -> Tensor:
        joined, gain = torch.cat([bias.new_zeros(SIZE // 2), bias]), 1.0 + weight.tanh()
        return F.linear(F.layer_norm(x, (SIZE,), gain, joined), product.weight, joined)

    step = StepProducts(poisons=True)
    step.chains = FUNCTIONS
    with torch.no_grad(), step:
        ours = layer()
    assert sorted(kernels) == ["chain", "chain", "linear"]
    assert_close(ours, layer().double())


def test_a_norm_with_a_root_mean_square(device: torch.device, kernels: list[str]) -> None:
    product, weight = nn.Linear(SIZE, SIZE, device=device), torch.rand(SIZE, device=device)
    x = torch.randn(1, 1, SIZE, device=device)
    ours = stepped(lambda: product(rms_norm(x, weight, 1e-5)))
    assert kernels == ["linear"]
    assert_close(ours, product(rms_norm(x, weight, 1e-5)).double())


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "behind": lambda y: y * 0.22,
    "before": lambda y: -3 * y,
    "quotient": lambda y: y / 7.0,
    "twice": lambda y: 0.5 * (y * 12.0),
    "none": lambda y: y * 1.0,
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", [nn.Linear, Transposed])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_number_is_a_stage_of_its_product(
    factor: str, layout: Callable[[int, int], nn.Module], rows: int, device: torch.device, kernels: list[str]
) -> None:
    """What scaled residuals are (Granite, MiniCPM)."""
    dtype = torch.float32 if rows == 1 else torch.float16
    product, function = layout(SIZE, SIZE).to(device, dtype), FACTORS[factor]
    x, residual = torch.randn(2, rows, 1, SIZE, device=device).to(dtype)
    ours = stepped(lambda: residual + function(product(x)))
    assert len(kernels) == 1
    assert_close(ours, residual.double() + function(product.double()(x.double())), CLOSE if rows == 1 else 5e-3)


@pytest.mark.parametrize("size", [SIZE, 9000])
@pytest.mark.parametrize("first", [True, False], ids=["residual first", "norm first"])
def test_a_residual_is_a_stage_of_its_norm(first: bool, size: int, device: torch.device, kernels: list[str]) -> None:
    """What stands behind the norms of Gemma and OLMo 2; the larger size is read in several blocks."""
    weight = torch.rand(size, device=device)
    x, residual = torch.randn(2, 1, 1, size, device=device)

    def layer() -> Tensor:
        normed = rms_norm(x, weight, 1e-5, offset=1.0, weight_in_fp32=True)
        return residual + normed if first else normed + residual

    ours = stepped(layer)
    assert kernels == ["rms_norm"]
    kernels.clear()
    assert_close(ours, layer().double())


def test_a_sum_in_the_residual_s_dtype(device: torch.device, kernels: list[str]) -> None:
    """What Mamba's residuals in fp32 are."""
    product = nn.Linear(SIZE, SIZE, device=device).half()
    x, residual = torch.randn(1, 1, SIZE, device=device).half(), torch.randn(1, 1, SIZE, device=device)
    ours = stepped(lambda: residual + product(x)[:, None, ...].squeeze(1))
    assert kernels == ["linear"]
    assert ours.dtype == torch.float32
    assert_close(ours, residual.double() + product.double()(x.double()))


def test_a_parameter_s_other_side_is_a_weight(device: torch.device, kernels: list[str]) -> None:
    """What the step computes itself is none: kernels begin to load weights before the one before them has ended."""
    product, x = nn.Linear(SIZE, 8, device=device), torch.randn(1, 1, SIZE, device=device)
    kept, other = product.weight.T, torch.randn(8, SIZE, device=device).T
    for weight in (product.weight.T, kept, other):
        assert_close(stepped(torch.matmul, x, weight), torch.matmul(x, weight).double())
    assert kernels == ["linear"] * 2


def read_twice(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    normed = norm(x)
    return product(normed) + normed, normed.sum(), product(normed)[..., 3:], product(normed) * product(normed)


def written_after(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    x = x.clone()
    normed = norm(x)
    x.mul_(2.0)
    y = product(normed)
    return y, x


def written_itself(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(norm(x))
    y += x
    z = product(x)
    z[..., 1:] = 0.0
    return y, z, torch.add(product(x), x, alpha=2)


def residual_written(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    residual = x.clone()
    y = residual + product(x)
    residual.zero_()
    return y, residual


def seen_in_part(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(norm(x)).view(SIZE, 1)
    return y.T, y[2:5], y.transpose(0, 1).reshape(-1), y.view(4, -1).transpose(0, 1).reshape(-1), y.to(torch.float64)


def half_an_activation(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(x)
    inner = torch.tanh(0.79 * (y + 0.04 * torch.pow(y, 3.0)))
    return 0.5 * y * (1.0 + inner), inner, 2 * y, y * torch.sigmoid(1.7 * y), -y, F.relu(y + 1.0), F.gelu(2 * y)


def of_two_products(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    first, second = product(x), product(norm(x))
    return F.silu(first) * second, first + second, first + second + x, F.relu(first) + F.relu(second), first + first


def with_other_shapes(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(x)
    sums = y + x[0, 0, :1], y + torch.ones(3, 1, SIZE, device=x.device), y + x.double(), y - x
    return *sums, F.layer_norm(x.view(2, -1, 8), (8,)), product(x.expand(2, 3, SIZE)), x @ product.weight.T


def scaled(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(x)
    half = y * 0.5
    per_column = y * x
    return half + x, half, x + y * 3 + x, x + (y * 0.5 + 1.0), per_column + x, x + y * torch.tensor(0.5), (x + y) * 2


def normed_and_added(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    weight, residual = torch.linspace(0.5, 2.0, SIZE, device=x.device), x.clone()
    normed = rms_norm(x, weight, 1e-5)
    total = residual + normed
    again = normed + product(total)
    residual.zero_()
    return total, product(total), again, normed, normed + x + x, norm(x) + x, normed + normed, residual


def looked_into(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y = product(x)
    parts = y[:, None], y[..., 2:5], y[0], y[:, 0, None, -1], y[None, 0]
    z = product(x)
    z[:, None][..., :3] = 7.0
    return *parts, y[y > 0], y[..., [1, 2]], z, product(x)[0, 0, 3] * 2


def in_another_dtype(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    y, ids = product(x), torch.arange(SIZE, device=x.device)[None, None]
    whole = y + ids, y + (ids > 3), ids + y, y + x.double(), x.to(torch.complex64) + y, y + x.half()
    return *whole, rms_norm(x, None, 1e-5) + x.double()


def dropped(x: Tensor, norm: nn.Module, product: nn.Module) -> Any:
    return F.dropout(product(x), 0.5, training=False), F.dropout(x, 1.0, training=True)


@pytest.mark.parametrize(
    "function",
    [
        read_twice, written_after, written_itself, residual_written, seen_in_part, half_an_activation,
        of_two_products, with_other_shapes, scaled, normed_and_added, looked_into, in_another_dtype, dropped,
    ],
)  # fmt: skip
def test_whoever_else_reads_or_writes_sees_no_difference(function: Callable[..., Any], device: torch.device) -> None:
    norm, product = nn.LayerNorm(SIZE, device=device), nn.Linear(SIZE, SIZE, device=device)
    x = torch.randn(1, 1, SIZE, device=device)
    ours = stepped(function, x, norm, product)
    with torch.no_grad():
        theirs = function(x, norm, product)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_what_reads_unseen_reads_nan(device: torch.device) -> None:
    """The comparison with an ordinary step is what catches code that torch's functions do not tell of."""
    product, x = nn.Linear(SIZE, SIZE, device=device), torch.randn(1, 1, SIZE, device=device)

    def unseen() -> Tensor:
        y = product(x)
        with torch._C.DisableTorchFunction():
            return y * 2

    assert stepped(unseen).isnan().all()


def test_activations_are_told_by_their_values() -> None:
    names = {"new_gelu": "gelu_tanh", "seven_digits": "gelu_tanh"}
    for name, activation in ACTIVATIONS.items():
        assert activation_of(activation(POINTS)) == names.get(name, name)
    others = [
        lambda x: x * torch.sigmoid(1.7 * x),
        torch.tanh,
        lambda x: 1.001 * F.gelu(x),
        lambda x: F.relu(x) + 1e-3,
    ]
    assert [activation_of(other(POINTS)) for other in others] == [None] * len(others)


@pytest.mark.parametrize(("inputs", "outputs"), [(70, 50), (600, 70)])
def test_transposed_products(inputs: int, outputs: int, device: torch.device, poisoned: None) -> None:
    x, weight = torch.randn(1, 1, inputs) + 5.0, torch.randn(inputs, outputs) / inputs**0.5
    gain, shift, bias = torch.rand(inputs) + 0.5, torch.randn(inputs), torch.randn(outputs)
    residual = torch.randn(1, 1, outputs)
    out = torch.empty(1, 1, outputs, device=device)
    on = [t.to(device) for t in (x, weight, bias, gain, shift, residual)]
    with torch.no_grad():
        launch_transposed(*on[:3], LayerNormPrologue(on[3], on[4], 1e-5), on[5], out, "gelu_tanh")
    normed = F.layer_norm(x.double(), (inputs,), gain.double(), shift.double(), 1e-5)
    exact = F.gelu(normed @ weight.double() + bias, approximate="tanh") + residual
    assert_close(out.cpu(), exact)


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda rows, heads, queries, slots: None,
    "bools": lambda rows, heads, queries, slots: (
        torch.arange(slots).remainder(7).lt(2).expand(rows, 1, queries, slots)
    ),
    "holes": lambda rows, heads, queries, slots: torch.arange(slots).gt(slots - 9).expand(rows, 1, 1, slots),
    "of heads": lambda rows, heads, queries, slots: torch.randn(1, heads, 1, slots).where(
        torch.arange(slots) < slots - 5, torch.finfo(torch.float32).min
    ),
    "of queries": lambda rows, heads, queries, slots: torch.randn(rows, heads, queries, slots),
}


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "queries", "dims", "slots", "mask"),
    [
        (1, 3, 3, 1, (16, 16), 100, "bools"),
        (1, 3, 3, 1, (16, 16), 100, "of heads"),
        (2, 4, 2, 1, (12, 20), 70, "holes"),
        (2, 4, 2, 1, (12, 20), 70, "of heads"),
        (2, 4, 2, 1, (12, 20), 50, "none"),
        (2, 2, 2, 3, (16, 8), 33, "of queries"),
        (2, 2, 2, 3, (16, 8), 33, "bools"),
        (1, 11, 1, 1, (8, 8), 60, "of heads"),
        (1, 11, 1, 1, (8, 8), 60, "holes"),
    ],
)
def test_masked_attention(
    rows: int, heads: int, kv_heads: int, queries: int, dims: tuple[int, int], slots: int, mask: str,
    device: torch.device, poisoned: None, kernels: list[str],
) -> None:  # fmt: skip
    query = torch.randn(rows, queries, heads, dims[0]).transpose(1, 2)
    key, value = torch.randn(rows, kv_heads, slots, dims[0]), torch.randn(rows, kv_heads, slots, dims[1])
    given = MASKS[mask](rows, heads, queries, slots)
    if given is not None and given.dtype == torch.bool:  # what nobody may see may be anything
        hidden = ~given.expand(rows, 1, queries, slots).any(2)[:, :, :, None]
        key, value = key.masked_fill(hidden, math.nan), value.masked_fill(hidden, math.nan)
    on = [None if t is None else t.to(device) for t in (query, key, value, given)]
    with torch.no_grad():
        ours = masked_attention(*on, scale=0.3, enable_gqa=True)  # type: ignore[arg-type]
    wide = [t.nan_to_num().double() for t in (query, key, value)]
    exact = F.scaled_dot_product_attention(
        *wide, given.double() if given is not None and given.dtype != torch.bool else given, scale=0.3, enable_gqa=True
    )
    assert kernels == ["masked_attention"]
    assert ours is not None
    assert_close(ours.cpu(), exact)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dims", "slots", "at"),
    [
        (1, 3, 3, (16, 16), 100, 99),
        (2, 4, 2, (12, 20), 70, 31),
        (1, 11, 1, (8, 8), 60, 0),
        (1, 2, 2, (16, 16), 2000, 7),
    ],
)
@pytest.mark.parametrize("written", [True, False])
def test_slots_from_before_the_step_are_read_ahead(
    written: bool, rows: int, heads: int, kv_heads: int, dims: tuple[int, int], slots: int, at: int,
    device: torch.device, kernels: list[str],
) -> None:  # fmt: skip
    cache = PreallocatedCache(1, rows, slots, device)
    layer = cache.attention_layers[0]
    layer.allocate(kv_heads, *dims, torch.float32, device)
    assert layer.keys is not None
    assert layer.values is not None
    layer.keys.normal_()
    layer.values.normal_()
    cache.position.fill_(at)
    query, mask = torch.randn(rows, heads, 1, dims[0], device=device), torch.arange(slots, device=device) <= at
    new = [torch.randn(rows, kv_heads, 1, dim, device=device) for dim in dims]
    with torch.no_grad(), cache.step():
        pairs = [(layer.keys, layer.values)]
        other = PreallocatedCache(1, rows, slots, device)
        attention = StepAttention(cache) if written else StepAttention(other, pairs)
        keys, values = cache.update(*new, 0)
        ours = attention.plain(query, keys, values, mask[None, None, None], enable_gqa=True)
        exact = F.scaled_dot_product_attention(query, keys, values, mask[None, None, None], enable_gqa=True)
        assert attention.newest(keys, values) is (cache.position if written else "none")
        assert attention.newest(keys.clone(), values) is attention.newest(keys, keys.clone()) is None
        keys.mul_(1.0)  # by something that nobody watches
        assert attention.newest(keys, values) is None
    assert kernels == ["write_token", "masked_attention"]
    assert ours is not None
    assert_close(ours, exact.double())


def attends(cache: PreallocatedCache, heads: int, new: list[Tensor], mask: Tensor | None, layer: int) -> Tensor:
    """A layer of a step, whose query lies beside its key and value."""
    query = new[0].repeat(1, heads // new[0].shape[1], 1, 1)
    keys, values = cache.update(*new, layer)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def reads_keys(cache: PreallocatedCache, heads: int, new: list[Tensor], mask: Tensor | None, layer: int) -> Tensor:
    keys, values = cache.update(*new, layer)
    return keys.sum() + values.sum()


def writes_its_key(cache: PreallocatedCache, heads: int, new: list[Tensor], mask: Tensor | None, layer: int) -> Tensor:
    keys, values = cache.update(*new, layer)
    new[0].zero_()
    return F.scaled_dot_product_attention(new[1], keys, values, attn_mask=mask, enable_gqa=True)


def says_nothing(cache: PreallocatedCache, heads: int, new: list[Tensor], mask: Tensor | None, layer: int) -> Tensor:
    cache.update(*new, layer)
    return new[0] + 1.0


@pytest.mark.parametrize(
    ("form", "left"),
    [
        (attends, ["masked_attention"]),
        (reads_keys, ["write_token"]),
        (writes_its_key, ["write_token", "masked_attention"]),
        (says_nothing, ["write_token"]),
    ],
)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "slots", "at"), [(1, 4, 4, 100, 63), (2, 4, 2, 70, 0), (1, 33, 1, 60, 59)]
)
def test_attention_writes_the_token(
    form: Callable[..., Tensor], left: list[str], rows: int, heads: int, kv_heads: int, slots: int, at: int,
    device: torch.device, kernels: list[str],
) -> None:  # fmt: skip
    mask = torch.arange(slots, device=device) <= at
    results = []
    new = [[torch.randn(rows, kv_heads, 1, 16, device=device) for _ in range(2)] for _ in range(2)]
    for defers in (True, False):
        torch.manual_seed(1)
        cache = PreallocatedCache(2, rows, slots, device)
        for layer in cache.attention_layers:
            layer.allocate(kv_heads, 16, 16, torch.float32, device)
            for held in layer.buffers:
                held.normal_()
        cache.position.fill_(at)
        given = [[tensor.clone() for tensor in pair] for pair in new]
        with torch.no_grad(), cache.step():
            attention = StepAttention(cache)
            handlers = {**HANDLERS, F.scaled_dot_product_attention: attention}
            instead = {F.scaled_dot_product_attention: attention.plain}
            with StepProducts(instead, handlers, poisons=True) if defers else contextlib.nullcontext():
                out = [form(cache, heads, given[at], mask[None, None, None], at) for at in range(2)]
            if defers:
                assert kernels == left * 2
        results.append([*out, *cache.buffers])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_attention_of_other_forms_is_torch_s(device: torch.device) -> None:
    query, key = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 9, 16, device=device)
    with torch.no_grad():
        assert masked_attention(query, key, key, is_causal=True) is None
        assert masked_attention(query, key, key, dropout_p=0.1) is None
        assert masked_attention(query.repeat(1, 2, 1, 1), key, key) is None
        assert masked_attention(query.expand(1, 2, 17, 16), key, key) is None
        assert masked_attention(query, key, key, torch.zeros(9, device=device)) is None
    assert masked_attention(query.requires_grad_(), key, key) is None


@pytest.mark.parametrize("rows", [1, 2])
def test_one_write_of_key_and_value(rows: int, device: torch.device, kernels: list[str]) -> None:
    keys, values = torch.zeros(rows, 3, 9, 8, device=device), torch.zeros(rows, 3, 9, 20, device=device)
    key = torch.randn(rows, 1, 3, 8, device=device).transpose(1, 2)
    value, position = torch.randn(rows, 3, 1, 20, device=device), torch.tensor([4], device=device)
    exact = keys.index_copy(2, position, key), values.index_copy(2, position, value)
    with torch.no_grad():
        write_token(keys, values, key, value, position)
    assert kernels == ["write_token"]
    assert torch.equal(keys, exact[0])
    assert torch.equal(values, exact[1])


def bloom(query: Tensor, keys: Tensor, values: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
    heads = query.shape[1]
    flat = [t.reshape(heads, -1, t.shape[-1]) for t in (query, keys, values)]
    scores = alibi.baddbmm(batch1=flat[0], batch2=flat[1].transpose(-1, -2), beta=1.0, alpha=0.3)
    weights = F.softmax(scores.view(1, heads, 1, -1) + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(F.dropout(weights, 0.1, training=False).view(heads, 1, -1), flat[2])


def usual(query: Tensor, keys: Tensor, values: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(query, keys.transpose(-1, -2)) / 3.0
    return torch.matmul(torch.softmax((scores + mask).float(), dim=-1).to(values.dtype), values)


def read_between(query: Tensor, keys: Tensor, values: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
    scores = 0.3 * torch.matmul(query, keys.transpose(-1, -2)) + mask
    weights = scores.softmax(-1)
    attended = torch.matmul(weights, values)
    other = torch.add(torch.matmul(query, keys.transpose(-1, -2)), mask, alpha=2).to("cpu", torch.float64, copy=True)
    return attended + weights.amax() + scores[..., :1] + other.to(query)[..., :1]


@pytest.mark.parametrize(("form", "taken"), [(bloom, 1), (usual, 1), (read_between, 1)])
def test_attention_that_is_written_out(
    form: Callable[..., Tensor], taken: int, device: torch.device, kernels: list[str]
) -> None:
    query = torch.randn(1, 3, 1, 8, device=device)
    keys, values = torch.randn(1, 3, 20, 8, device=device), torch.randn(1, 3, 20, 8, device=device)
    alibi, mask = torch.randn(3, 1, 20, device=device), torch.zeros(1, 1, 1, 20, device=device)
    mask[..., 15:] = torch.finfo(torch.float32).min
    with torch.no_grad(), StepProducts({}, HANDLERS, poisons=True):
        ours = [form(query, keys, values, alibi, mask) for _ in range(2)]
        mask[..., 10:] = torch.finfo(torch.float32).min
        ours.append(form(query, keys, values, alibi, mask))
    shorter = form(query, keys, values, alibi, mask)
    mask[..., 10:15] = 0.0
    whole = form(query, keys, values, alibi, mask)
    assert kernels == ["masked_attention"] * 3 * taken
    for mine, expected in zip(ours, (whole, whole, shorter), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
