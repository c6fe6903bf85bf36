"""ReLU and tanh GELU in the epilogue of cuBLASLt's product, in a captured forward.

On a CPU `torch._addmm_activation` is there too, and rounds the product.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.core import output_layout
from hf_rewrite_runtime.forward.functions import ForwardFunctions
from hf_rewrite_runtime.launching.launch import HIP, rehearsing
from hf_rewrite_runtime.lazy import activated_product
from hf_rewrite_runtime.lazy.activated_product import LinearProduct
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm

pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HIP, reason="cuBLASLt's epilogue"),
]

Function = Callable[..., Any]
OUTPUTS, INPUTS = 48, 32

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
"""The interpreter cuts what it stores in bf16 off."""


def epilogue(ways: Mapping[str, Callable[[], object]], usual: str) -> str:
    """Say of every trial that the epilogue is faster."""
    for run in ways.values():
        run()
    assert usual == "apart"
    return "epilogue"


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the epilogue, whatever is faster."""
    monkeypatch.setattr(activated_product, "fastest", epilogue)
    monkeypatch.setattr(activated_product, "_FASTER", {})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What products were computed with: `gelu`, `relu` or nothing; of trials, too."""
    found: list[str] = []
    activate, multiply = LinearProduct.activate, LinearProduct.multiply

    def activated(self: LinearProduct, gelu: bool, out: Tensor) -> None:
        found.append("gelu" if gelu else "relu")
        activate(self, gelu, out)

    def multiplied(self: LinearProduct, out: Tensor) -> None:
        found.append("")
        multiply(self, out)

    monkeypatch.setattr(LinearProduct, "activate", activated)
    monkeypatch.setattr(LinearProduct, "multiply", multiplied)
    monkeypatch.setattr(activated_product, "_is_faster", lambda *_: True)
    return found


@torch.no_grad()
def forward(function: Function, *given: Any) -> Any:
    with output_layout.free(), rehearsing(), ForwardFunctions(poisons=True):
        return function(*given)


def operands(device: torch.device, dtype: torch.dtype, *leading: int) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(*leading, INPUTS, device=device).to(dtype)
    weight = (torch.randn(OUTPUTS, INPUTS, device=device) / INPUTS**0.5).to(dtype)
    return [x, weight, torch.randn(OUTPUTS, device=device).to(dtype)]


def assert_exact(function: Function, *given: Tensor | None) -> None:
    """Fail unless a function gives in a forward about what it gives outside of one."""
    ours, wanted = forward(function, *given), function(*given)
    exact = function(*(None if tensor is None else tensor.double() for tensor in given))
    assert ours.shape == wanted.shape
    assert_as_exact_as(wanted, ours, exact, torch.finfo(wanted.dtype).eps)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


TAKEN: dict[str, Function] = {
    "gelu": tanh_gelu,
    "gelu, module": nn.GELU("tanh"),
    "relu": F.relu,
    "relu, torch": torch.relu,
    "relu, method": lambda x: x.relu(),
    "relu, module": nn.ReLU(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("leading", [(7,), (3, 5), (1, 2, 3)], ids=str)
def test_one_call(
    leading: tuple[int, ...], name: str, dtype: torch.dtype, device: torch.device, calls: list[str]
) -> None:
    assert_exact(lambda *layer: TAKEN[name](F.linear(*layer)), *operands(device, dtype, *leading))
    assert calls == [name[:4]]


def test_a_feed_forward(device: torch.device, calls: list[str]) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = F.linear(x, weight, bias)
        hidden = tanh_gelu(hidden)
        hidden = F.dropout(hidden, 0.1, training=False)
        return F.linear(hidden, weight.t())

    assert_exact(function, *operands(device, torch.float16, 2, 5))
    assert calls == ["gelu"]


def test_what_reads_the_activated(device: torch.device, calls: list[str]) -> None:
    """It is computed once, and read from memory: by sums, chains of functions and norms."""

    def function(x: Tensor, *layer: Tensor) -> Tensor:
        activated = tanh_gelu(F.linear(x, *layer))
        return F.layer_norm(torch.square(activated) * layer[1], (OUTPUTS,)) + activated.mean(0)

    assert_exact(function, *operands(device, torch.float16, 6))
    assert calls == ["gelu"]


def held(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    return torch.cat((tanh_gelu(product), product))


def read_twice(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    first, second = tanh_gelu(product), torch.tanh(product)
    del product
    return first @ second.mT


def activated_twice(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    first, second = tanh_gelu(product), F.relu(product)
    del product
    return first @ second.mT


def halves(x: Tensor, *layer: Tensor) -> Tensor:
    first, second = F.linear(x, *layer).chunk(2, dim=-1)
    return tanh_gelu(first) * second


def transposed(x: Tensor, *layer: Tensor) -> Tensor:
    return F.relu(F.linear(x, *layer).transpose(0, 1))


def written(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    activated = tanh_gelu(product)
    product.mul_(2)
    return activated + product.sum()


def in_place(x: Tensor, *layer: Tensor) -> Tensor:
    return F.relu(F.linear(x, *layer), inplace=True)


def exact_gelu(x: Tensor, *layer: Tensor) -> Tensor:
    return F.gelu(F.linear(x, *layer))


def added(x: Tensor, *layer: Tensor) -> Tensor:
    product = F.linear(x, *layer)
    return add_layer_norm(product * 0.5, product, layer[1], None, 1e-5)[0]


def attended(x: Tensor, *layer: Tensor) -> Tensor:
    heads = F.linear(x, *layer).view(1, -1, 3, 16).transpose(1, 2).contiguous()
    return F.scaled_dot_product_attention(heads, heads, heads)


APART = [held, read_twice, activated_twice, halves, transposed, written, in_place, exact_gelu, added, attended]


@pytest.mark.parametrize("function", APART, ids=lambda function: function.__name__)
def test_products_that_others_read_are_torchs(function: Function, device: torch.device, calls: list[str]) -> None:
    assert_exact(function, *operands(device, torch.float16, 6))
    assert calls == [""]


def test_what_it_reads_is_read_before_it_is_written(device: torch.device, calls: list[str]) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = weight.clone()
        activated = tanh_gelu(F.linear(x, own, bias))
        own.zero_()
        return activated + own.sum()

    assert_exact(function, *operands(device, torch.float16, 6))
    assert calls == ["gelu"]


LEFT: dict[str, Function] = {
    "no bias": lambda x, w, b: (x, w, None),
    "fp32": lambda x, w, b: (x.float(), w.float(), b.float()),
    "rows with gaps": lambda x, w, b: (torch.cat((x, x), -1)[:, :INPUTS], w, b),
    "weight that lies across": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "no rows": lambda x, w, b: (x[:0], w, b),
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_are_not_put_off(name: str, device: torch.device, calls: list[str]) -> None:
    layer = LEFT[name](*operands(device, torch.float16, 6))
    function = lambda *layer: tanh_gelu(F.linear(*layer))
    torch.testing.assert_close(forward(function, *layer), function(*layer))
    assert not calls


def test_a_call_that_torch_refuses(device: torch.device) -> None:
    x, weight, bias = operands(device, torch.float16, 6)
    with pytest.raises(RuntimeError):
        forward(lambda *layer: tanh_gelu(F.linear(*layer)), x[:, 1:], weight, bias)
    with pytest.raises(TypeError):
        forward(lambda *layer: F.relu(F.linear(*layer), slope=1), x, weight, bias)  # type: ignore[call-arg]


def test_gradients_are_torchs(device: torch.device, calls: list[str]) -> None:
    x, weight, bias = operands(device, torch.float16, 6)
    weight.requires_grad_()
    with ForwardFunctions():
        out = tanh_gelu(F.linear(x, weight, bias))
    assert out.requires_grad
    assert not calls


def test_what_was_read_is_free_at_once(device: torch.device, calls: list[str]) -> None:
    """A product that is never computed holds nothing, without Python's collector of cycles."""
    x, weight, bias = operands(device, torch.float16, 6)
    gc.disable()
    try:
        with torch.no_grad(), rehearsing(), ForwardFunctions():
            inner = x * 2
            gone = weakref.ref(inner)
            activated = tanh_gelu(F.linear(inner, weight, bias))
            del inner
            assert float(activated[0, 0]) == float(activated[0, 0])
            del activated
            dropped = tanh_gelu(F.linear(x, weight, bias))
            del dropped
            float(F.relu(x * 3)[0, 0])
            assert gone() is None
    finally:
        gc.enable()
    assert calls == ["gelu"]


@pytest.mark.parametrize("gelu", [True, False])
def test_the_trial(gelu: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways compute the same, and the faster is taken."""
    given = operands(device, torch.float16, 6)
    product, outs = LinearProduct(*given), [given[0].new_empty(6, OUTPUTS) for _ in range(2)]
    product.stands_for(outs[0])
    for chosen in ("apart", "epilogue"):
        choice = lambda ways, usual: epilogue(ways, usual) and chosen  # noqa: B023
        monkeypatch.setattr(activated_product, "fastest", choice)
        assert activated_product._tried(product, gelu) == (chosen == "epilogue")
    product.activate(gelu, outs[0])
    product.multiply(outs[1])
    activated_product._activate(outs[1].clone(), gelu, outs[1])
    exact = F.linear(*(one.double() for one in given))
    exact = tanh_gelu(exact) if gelu else F.relu(exact)
    assert_as_exact_as(outs[1], outs[0], exact, torch.finfo(torch.float16).eps)


class OnCard:
    """Operands that say that they are on a card."""

    is_cuda = True
    device = "cuda:0"
    dtype = torch.float16

    def __init__(self, *shape: int):
        self.shape = torch.Size(shape)

    def numel(self) -> int:
        return self.shape.numel()


def test_a_size_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never while a graph is captured."""
    tried: list[bool] = []
    monkeypatch.setattr(activated_product, "_tried", lambda _, gelu: tried.append(gelu) or gelu)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    product: Any = LinearProduct(OnCard(6, INPUTS), OnCard(OUTPUTS, INPUTS), OnCard(OUTPUTS))  # type: ignore[arg-type]
    assert not activated_product._is_faster(product, True)
    capturing[0] = False
    for _ in range(2):
        assert activated_product._is_faster(product, True)
        assert not activated_product._is_faster(product, False)
    assert tried == [True, False]
    assert activated_product.describe_process() == [
        f"activations in the epilogue of their product: 6x{OUTPUTS}x{INPUTS}, of 2 tried"
    ]


def test_nothing_is_said_where_nothing_was_tried() -> None:
    assert activated_product.describe_process() == []


@pytest.mark.gpu
def test_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trial chooses gives the same, and a size that lost is no longer put off."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("needs a CUDA device")
    monkeypatch.undo()
    monkeypatch.setattr(activated_product, "_FASTER", {})
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 768, device="cuda", dtype=torch.bfloat16) for n in (6272, 3072))
    bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16)
    weight /= 768**0.5
    for activation in (tanh_gelu, F.relu):
        assert_exact(lambda *layer: activation(F.linear(*layer)), x, weight, bias)  # noqa: B023
    assert len(activated_product._FASTER) == 2
    with torch.no_grad(), ForwardFunctions() as step:
        for faster in (False, True):
            activated_product._FASTER.update(dict.fromkeys(activated_product._FASTER, faster))
            put_off = activated_product.put_off_product(step, x, weight, bias)
            assert (put_off is not None) is faster
