"""Products of many rows whose last stage is the functions behind them, in a captured forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from tolerances import assert_as_exact_as
from torch import Tensor

from rewrite.runtime.core import layout, tiles
from rewrite.runtime.core.launch import rehearsing
from rewrite.runtime.forward.functions import ForwardFunctions
from rewrite.runtime.norms.add_layer_norm import add_layer_norm
from rewrite.runtime.products import product_chain
from rewrite.runtime.products.product_chain import LIBRARY, Choice

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

Function = Callable[..., Any]
OUTPUTS, INPUTS = 192, 128

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
"""The interpreter cuts what it stores in bf16 off."""


@pytest.fixture(autouse=True)
def tile_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the first tile, whatever is faster."""
    monkeypatch.setattr(product_chain, "_fastest", lambda text, source, node, tiles, apart: tiles[0])
    product_chain.forget()
    yield
    product_chain.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tiles of the kernels that computed a product with its functions."""
    found: list[tuple[int, ...]] = []
    launch = product_chain._launch

    def recorded(text: str, source: Any, out: Tensor, tile: tuple[int, ...]) -> None:
        found.append(tile)
        launch(text, source, out, tile)

    monkeypatch.setattr(product_chain, "_launch", recorded)
    return found


@torch.no_grad()
def forward(function: Function, *given: Any) -> Any:
    with layout.free(), rehearsing(), ForwardFunctions(poisons=True):
        return function(*given)


def operands(device: torch.device, dtype: torch.dtype, *leading: int, bias: bool = True) -> list[Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(*leading, INPUTS, device=device).to(dtype)
    weight = (torch.randn(OUTPUTS, INPUTS, device=device) / INPUTS**0.5).to(dtype)
    return [x, weight, torch.randn(OUTPUTS, device=device).to(dtype) if bias else None]


def assert_exact(function: Function, *given: Tensor | None) -> None:
    """Fail unless a function gives in a forward about what it gives outside of one."""
    ours, wanted = forward(function, *given), function(*given)
    exact = function(*(None if tensor is None else tensor.double() for tensor in given))
    assert ours.shape == wanted.shape
    assert_as_exact_as(wanted, ours, exact, torch.finfo(wanted.dtype).eps)


ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "by hand": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x.float().pow(3).to(x.dtype)))),
    "relu": F.relu,
    "silu": F.silu,
    "squared": lambda x: torch.square(F.relu(x)),
    "scaled": lambda x: F.gelu(x) * 0.5 + 1,
    "in fp32": lambda x: F.gelu(x.float()).to(x.dtype),
    "factor": lambda x: x * 0.125,
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_kernel(name: str, dtype: torch.dtype, bias: bool, device: torch.device, launched: list[Any]) -> None:
    activation = ACTIVATIONS[name]
    function = lambda x, weight, bias: activation(F.linear(x, weight, bias))
    assert_exact(function, *operands(device, dtype, 3, 43, bias=bias))
    assert len(launched) == 1


def test_the_product_is_rounded_before_its_functions(device: torch.device, launched: list[Any]) -> None:
    """Sums of whole numbers are the same in any order, and too large for fp16: the rest is torch's, bit for bit."""
    torch.manual_seed(0)
    x, weight = (torch.randint(-16, 17, (n, INPUTS), device=device).half() for n in (96, OUTPUTS))
    function = lambda x, weight: (F.linear(x, weight).float() * 3).half()
    assert torch.equal(forward(function, x, weight), function(x, weight))
    assert len(launched) == 1


@pytest.mark.parametrize("leading", [(64,), (2, 64), (1, 77), (3, 43), (5, 4, 13), (193,)], ids=str)
def test_shapes(leading: tuple[int, ...], device: torch.device, launched: list[Any]) -> None:
    assert_exact(lambda *given: F.gelu(F.linear(*given)), *operands(device, torch.float16, *leading))
    assert len(launched) == 1


@pytest.mark.parametrize("tile", [(128, 64, 4, 2), (64, 64, 4, 1), (128, 64, 8, 2), (64, 64, 4, 3)], ids=str)
def test_tiles(tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows in groups, the last of which is not full; sums of several steps."""
    monkeypatch.setattr(product_chain, "product_rule", lambda *_: [tile])
    monkeypatch.setattr(product_chain, "GROUP", 2)
    assert_exact(lambda *given: F.gelu(F.linear(*given)), *operands(device, torch.float16, 321))


def feed_forward(x: Tensor, weight: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    hidden = F.linear(x, weight, bias)
    hidden = F.gelu(hidden)
    hidden = F.dropout(hidden, 0.1, training=False)
    return F.linear(hidden, second)


def test_a_feed_forward(device: torch.device, launched: list[Any]) -> None:
    x, weight, bias = operands(device, torch.float16, 2, 40)
    assert weight is not None
    assert_exact(feed_forward, x, weight, bias, weight.t().contiguous())
    assert len(launched) == 1


def held(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    return torch.cat((F.gelu(product), product))


def read_twice(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    first, second = F.gelu(product), torch.tanh(product)
    del product
    return first @ second.mT


def halves(x: Tensor, *layer: Tensor) -> Tensor:
    first, second = F.linear(x, *layer).chunk(2, dim=-1)
    return F.gelu(first) * second


def transposed(x: Tensor, *layer: Tensor) -> Tensor:
    return F.gelu(F.linear(x, *layer).transpose(0, 1))


def written(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    activated = F.gelu(product)
    product.mul_(2)
    return activated + product.sum()


def with_another(x: Tensor, *layer: Tensor) -> Tensor:
    return F.gelu(F.linear(x, *layer)) * layer[1]


def normed(x: Tensor, *layer: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(F.linear(x, *layer)), (OUTPUTS,))


def added(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    return add_layer_norm(product * 0.5, product, layer[1], None, 1e-5)[0]


def attended(x: Tensor, *layer: Tensor) -> Tensor:
    heads = F.linear(x, *layer).view(1, -1, 3, 64).transpose(1, 2).contiguous()
    return F.scaled_dot_product_attention(heads, heads, heads)


def reduced(x: Tensor, *layer: Tensor) -> Tensor:
    return F.gelu(F.linear(x, *layer)).mean(0)


APART = [held, read_twice, halves, transposed, written, with_another, normed, added, attended]


@pytest.mark.parametrize("function", APART, ids=lambda function: function.__name__)
def test_products_that_others_read_are_torchs(function: Function, device: torch.device, launched: list[Any]) -> None:
    assert_exact(function, *operands(device, torch.float16, 96))
    assert not launched


def test_what_the_kernel_reads_is_read_before_it_is_written(device: torch.device, launched: list[Any]) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = weight.clone()
        activated = F.gelu(F.linear(x, own, bias))
        own.zero_()
        return activated + own.sum()

    assert_exact(function, *operands(device, torch.float16, 96))
    assert len(launched) == 1


def test_a_function_of_the_activated_reads_it(device: torch.device, launched: list[Any]) -> None:
    assert_exact(reduced, *operands(device, torch.float16, 96))
    assert len(launched) == 1


def test_an_activated_product_that_two_read(device: torch.device, launched: list[Any]) -> None:
    """It is computed once, and read from memory."""

    def function(x: Tensor, *layer: Tensor) -> Tensor:
        activated = F.gelu(F.linear(x, *layer))
        return activated.sum(0) + activated.mean(0)

    assert_exact(function, *operands(device, torch.float16, 96))
    assert len(launched) == 1


LEFT: dict[str, Function] = {
    "few rows": lambda x, w, b: (x[:63], w, b),
    "fp32": lambda x, w, b: (x.float(), w.float(), b.float()),
    "rows with gaps": lambda x, w, b: (torch.cat((x, x), -1)[:, :INPUTS], w, b),
    "weight that lies across": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "odd outputs": lambda x, w, b: (x, w[:100], b[:100]),
    "odd inputs": lambda x, w, b: (x[:, :96].contiguous(), w[:, :96].contiguous(), b),
    "unaligned bias": lambda x, w, b: (x, w, torch.cat((b[:1], b))[1:]),
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_the_kernel_does_not_take(name: str, device: torch.device, launched: list[Any]) -> None:
    x, weight, bias = LEFT[name](*operands(device, torch.float16, 96))
    assert_exact(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, weight, bias)
    assert not launched


def test_gradients_are_torchs(device: torch.device, launched: list[Any]) -> None:
    x, weight, bias = operands(device, torch.float16, 96)
    assert weight is not None
    weight.requires_grad_()
    with ForwardFunctions():
        out = F.gelu(F.linear(x, weight, bias))
    assert out.requires_grad
    assert not launched


def test_what_was_read_is_free_at_once(device: torch.device) -> None:
    """A product that is never computed holds nothing, without Python's collector of cycles."""
    x, weight, bias = operands(device, torch.float16, 96)
    gc.disable()
    try:
        with torch.no_grad(), rehearsing(), ForwardFunctions():
            inner = x * 2
            gone = weakref.ref(inner)
            activated = F.gelu(F.linear(inner, weight, bias))
            del inner
            assert float(activated[0, 0]) == float(activated[0, 0])
            del activated
            dropped = F.gelu(F.linear(x, weight, bias))
            del dropped
            float(F.relu(x * 3)[0, 0])
            assert gone() is None
    finally:
        gc.enable()


class FakeTimes:
    """Runs every way once, and says that each takes as long as `ms` has it."""

    ms: dict[Any, float]
    failing: Choice = None

    def __init__(self, device: torch.device):
        self.added: list[Choice] = []

    def add(self, choice: Choice, run: Callable[[], None]) -> None:
        if self.failing is not None and choice == self.failing:
            raise RuntimeError("out of resources")
        run()
        self.added.append(choice)

    def shortest(self) -> dict[Choice, float]:
        return {choice: self.ms.get(choice, 2.0) for choice in self.added}


TILE, OTHER = (64, 64, 4, 2), (128, 64, 4, 2)


@pytest.mark.parametrize(
    ("ms", "failing", "chosen"),
    [
        ({None: 1.0}, None, None),
        ({None: 3.0, TILE: 1.0}, None, TILE),
        ({None: 3.0, TILE: 1.0, OTHER: 1.5}, TILE, OTHER),
        ({None: 3.0, LIBRARY: 1.0}, None, LIBRARY),
    ],
)
def test_the_fastest_is_taken(
    ms: dict[Any, float], failing: Choice, chosen: Choice, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(product_chain, "Timed", FakeTimes)
    monkeypatch.setattr(FakeTimes, "ms", ms, raising=False)
    monkeypatch.setattr(FakeTimes, "failing", failing)
    found: list[Choice] = []
    x, weight, bias = operands(device, torch.float16, 96)
    with torch.no_grad(), rehearsing(), ForwardFunctions() as step:
        product = F.linear(x, weight, bias)
        with torch._C.DisableTorchFunction():
            node = step.of(product).link
            relu = product_chain.Node(
                "maximum", product.dtype, product.shape, (product_chain.Read(node, product.stride()), 0)
            )
            text = product_chain._text(relu, node, True, INTERPRETED)
            apart = lambda numbers, out: torch.clamp_min(numbers, 0, out=out)
            source = node.source
            found.append(product_chain._fastest(text, source, relu, [TILE, OTHER], apart))
    assert found == [chosen]


def test_what_lost_is_no_longer_put_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(device, torch.float16, 96)
    size = product_chain.Size.of(x, weight, bias)
    step = ForwardFunctions()
    monkeypatch.setattr(product_chain, "_measures", lambda _: True)
    for known, put_off in (({}, False), ({"GELU": None}, False), ({"GELU": None, "ReLU": LIBRARY}, True)):
        monkeypatch.setitem(product_chain._CHOSEN, size, known)
        assert (product_chain.put_off_product(step, x, weight, bias) is not None) is put_off
        with rehearsing():
            assert product_chain.put_off_product(step, x, weight, bias) is not None


def test_it_says_which_products_have_a_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_chain.describe(torch.nn.Module()) == []
    size = product_chain.Size(96, 192, 128, torch.float16, True, 0)
    monkeypatch.setitem(product_chain._CHOSEN, size, {"a": TILE, "b": LIBRARY, "c": None})
    assert product_chain.describe(torch.nn.Module()) == [
        "products with what follows as their last stage: 96x192x128 by 64x64, 96x192x128 by library, of 3 measured"
    ]


def test_the_rule_for_tiles() -> None:
    """Tiles divide the output and fit into the card; few rows get small ones, so that every processor has one."""
    h100, a100, mi300 = (132, 227 << 10), (108, 163 << 10), (304, 64 << 10)
    for rows in (64, 128, 197, 4096, 16384):
        for columns in (64, 1024, 3072, 4096, 5120, 192):
            for card in (h100, a100, mi300):
                found = tiles.product_rule(rows, columns, 1024, *card)
                assert 0 < len(found) <= tiles.PRODUCT_TILES
                for block_rows, block_cols, _, stages in found:
                    assert columns % block_cols == 0
                    assert stages >= 2
                    assert stages * 128 * (block_rows + block_cols) + tiles.SPARED <= card[1]
    assert tiles.product_rule(16384, 4096, 1024, *h100)[0][:2] == (128, 128)
    assert tiles.product_rule(128, 4096, 1024, *h100)[0][:2] == (64, 64)
    assert tiles.product_rule(128, 4096, 64, *h100)[0][3] == 1


@pytest.mark.gpu
def test_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial takes a second, and what it chooses gives the same."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")
    monkeypatch.undo()
    product_chain.forget()
    device = torch.device("cuda")
    x, weight, bias = operands(device, torch.bfloat16, 8, 512)
    for activation in (F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu):
        assert_exact(lambda *given: activation(F.linear(*given)), x, weight, bias)  # noqa: B023
    (known,) = product_chain._CHOSEN.values()
    assert len(known) == 3
    product_chain.forget()
