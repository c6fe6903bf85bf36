"""Products take the path that the table or the rule says, compute the same, and fall back with the reason counted."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_rewrite_runtime.aiter import aiter_calls
from hf_rewrite_runtime.core import aiter_probe, backend
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.launching import card_tables
from hf_rewrite_runtime.linear import gemm, packing, preshuffle
from hf_rewrite_runtime.linear.gemm import Product, routed_linear, routed_packed_linear

INPUTS, OUTPUTS = 32, 48


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    backend.reset_fallbacks()
    monkeypatch.setattr(gemm, "PATHS", dict(gemm.PATHS))
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    gemm._counts.clear()
    card_tables.forget()
    yield
    gemm.set_threshold(gemm.THRESHOLD)
    gemm.try_out({})
    gemm.listen(None)
    card_tables.forget()


class Recorder:
    """A path that notes its calls."""

    def __init__(self, refuses: bool = False):
        self.biases: list[bool] = []
        self.refuses = refuses

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        self.biases.append(bias is not None)
        return None if self.refuses else F.linear(input, weight, bias)


def offered(name: str, **options: Any) -> Recorder:
    recorder = Recorder(options.pop("refuses", False))
    gemm.offer(name, gemm.Path(recorder, **options))
    return recorder


def projection(bias: bool = True) -> nn.Linear:
    return nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False)


def rows(count: int) -> Tensor:
    return torch.randn(count, INPUTS)


def write_table(products: dict[str, str]) -> None:
    entries = {size: {"path": path} for size, path in products.items()}
    (card_tables.folder() / card_tables.GEMM).write_text(json.dumps({"cpu": {"products": entries}}))
    card_tables.forget()


@pytest.mark.parametrize("shape", [(2, 5, INPUTS), (1, INPUTS), (0, INPUTS), (INPUTS,), (3, 70, INPUTS)])
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_projection(shape: tuple[int, ...], bias: bool) -> None:
    module, x = projection(bias), torch.randn(shape)
    assert torch.equal(routed_linear(x, module), module(x))
    assert gemm.counts() == {"vendor": 1}
    assert not backend.fallbacks()


@pytest.mark.parametrize(
    ("count", "path"), [(1, "skinny"), (32, "skinny"), (33, "vendor"), (63, "vendor"), (64, "aiter")]
)
def test_the_rule(count: int, path: str) -> None:
    heard: list[tuple[Product, str]] = []
    gemm.listen(lambda size, name: heard.append((size, name)))
    aiter = offered("aiter")
    routed_linear(rows(count), projection())
    assert heard == [(Product(1 << (count - 1).bit_length(), OUTPUTS, INPUTS, "float32", True), path)]
    assert len(aiter.biases) == (count >= 64)


def test_the_threshold_is_ours_to_set() -> None:
    aiter, module = offered("aiter"), projection()
    gemm.set_threshold(128)
    routed_linear(rows(127), module)
    assert not aiter.biases
    routed_linear(rows(128), module)
    assert aiter.biases == [True]
    with pytest.raises(ValueError, match="1 or more"):
        gemm.set_threshold(0)


def test_what_a_path_refuses_the_vendor_computes() -> None:
    aiter, module, x = offered("aiter", refuses=True), projection(), rows(64)
    assert torch.equal(routed_linear(x, module), module(x))
    assert len(aiter.biases) == 1
    assert gemm.counts() == {"vendor": 1}


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_added_behind_a_path_that_takes_none(bias: bool) -> None:
    path, module, x = offered("aiter", takes_bias=False), projection(bias), rows(64)
    torch.testing.assert_close(routed_linear(x, module), module(x))
    assert path.biases == [False]
    assert gemm.counts() == {"aiter": 1}


def test_the_table_goes_before_the_rule() -> None:
    path, module = offered("mine"), projection()
    write_table({f"128x{OUTPUTS}x{INPUTS} float32 bias": "mine"})
    for count, calls in ((128, 1), (65, 2), (64, 2), (129, 2)):  # rows are rounded up to a power of two
        routed_linear(rows(count), module)
        assert len(path.biases) == calls
    routed_linear(rows(128), projection(bias=False))
    assert len(path.biases) == 2


def test_a_path_that_is_not_here_is_said() -> None:
    write_table({f"128x{OUTPUTS}x{INPUTS} float32 bias": "cutlass"})
    module, x = projection(), rows(128)
    with pytest.warns(RuntimeWarning, match="'cutlass', which is no path here"):
        assert torch.equal(routed_linear(x, module), module(x))


def test_what_is_tried_out_goes_first() -> None:
    path, module = offered("mine"), projection()
    gemm.try_out({Product(4, OUTPUTS, INPUTS, "float32", True): "mine"})
    routed_linear(rows(3), module)
    gemm.try_out({})
    routed_linear(rows(3), module)
    assert len(path.biases) == 1


def test_packed_products_take_the_same_way() -> None:
    path, one, two = offered("aiter"), projection(), projection()
    x = rows(64)
    first, second = routed_packed_linear(x, one, two)
    assert path.biases == [True]
    torch.testing.assert_close(first, one(x))
    torch.testing.assert_close(second, two(x))


class Adapter(nn.Linear):
    """A layer that an adapter or a quantisation put in."""


def hooked(module: nn.Linear) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


def special(module: nn.Linear) -> nn.Module:
    class Special(nn.Parameter):
        pass

    module._parameters["weight"] = Special(module.weight.data, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("not_linear", lambda module: Adapter(INPUTS, OUTPUTS).requires_grad_(False)),
        ("observed", hooked),
        ("gradient", lambda module: module.requires_grad_(True)),
        ("not_a_plain_parameter", special),
    ],
)
def test_the_module_itself_is_called(reason: str, change: Any) -> None:
    aiter, x = offered("aiter"), rows(64)
    module = change(projection())
    output = routed_linear(x, module)
    assert torch.equal(output, module(x))
    assert output.requires_grad == (reason == "gradient")
    assert not aiter.biases
    assert backend.fallbacks() == {("routed_linear", reason): 1}
    assert reason in packing.REASONS
    assert backend.last_reasons(nn.ModuleList([module])) == {"0": f"routed_linear: {reason}"}


def test_autocast_chooses_the_dtype() -> None:
    module, x = projection(), rows(64)
    with torch.autocast("cpu", torch.bfloat16):
        assert routed_linear(x, module).dtype == torch.bfloat16
    assert backend.fallbacks() == {("routed_linear", "autocast"): 1}


def test_gradients_are_the_projection_s() -> None:
    ours, theirs, x = projection().requires_grad_(True), None, rows(5).requires_grad_(True)
    theirs, y = copy.deepcopy(ours), x.detach().clone().requires_grad_(True)
    routed_linear(x, ours).square().sum().backward()
    theirs(y).square().sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert torch.equal(x.grad, y.grad)


def test_the_reference_backend_is_torch() -> None:
    aiter = offered("aiter")
    with backend.use_backend("reference"):
        routed_linear(rows(64), projection())
    assert not aiter.biases


def test_compiled_whole() -> None:
    path, module, x = offered("aiter"), projection(), rows(64)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x: routed_linear(x * 2, module) + 1, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x * 2) + 1)
        compiled(x)
    assert path.biases == [True, True]
    torch.library.opcheck(
        getattr(torch.ops, backend.NAMESPACE).routed_linear.default,
        (x, module.weight, module.bias),
        test_utils="test_faketensor",
    )


def test_explain_says_who_multiplied() -> None:
    module = projection()
    routed_linear(rows(64), module)
    assert "products: 1 by vendor" in explain(module).process  # beside what other tests of this process counted


@pytest.mark.skipif(torch.version.hip is not None, reason="asks for nothing of ROCm elsewhere")
@pytest.mark.parametrize("library", ["hipblaslt", "rocblas"])
def test_a_preference_is_for_rocm_only(library: str) -> None:
    module, x = projection(), rows(64)
    assert gemm.PATHS[library].run(x, module.weight, module.bias) is None


class OnRocm:
    """A tensor's stand-in for what the preference looks at."""

    is_cuda = True


@pytest.mark.parametrize(("path", "library"), [("hipblaslt", "hipblaslt"), ("rocblas", "hipblas")])
def test_a_preference_ends_with_the_call(path: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["default"]

    def prefer(name: str | None = None) -> str:
        said.append(name or "?")
        return "before"

    def fails(*arguments: object) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(F, "linear", lambda *arguments: said.append("product"))
    gemm.PATHS[path].run(OnRocm(), None, None)  # type: ignore[arg-type]
    assert said == ["default", "?", library, "product", "before"]
    monkeypatch.setattr(F, "linear", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        gemm.PATHS[path].run(OnRocm(), None, None)  # type: ignore[arg-type]
    assert said[-1] == "before"


# ---- a second copy of the weight; aiter's functions are simulated ----


class Order:
    """Stands in for aiter: the columns turned round."""

    def __init__(self) -> None:
        self.shuffled = 0

    def shuffle(self, weight: Tensor) -> Tensor:
        self.shuffled += 1
        return weight.flip(1).contiguous()

    def multiply(self, input: Tensor, shuffled: Tensor, weight: Tensor) -> Tensor:
        return F.linear(input.flip(-1), shuffled)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """A chip that has the order, and a table that asks for it."""
    made = Order()
    monkeypatch.setattr(aiter_probe, "chip", lambda device=None: "gfx942")
    before = preshuffle._kernels
    preshuffle.offer(preshuffle.Kernels(made.shuffle, made.multiply))
    write_table(
        {f"{count}x{OUTPUTS}x{INPUTS} bfloat16{bias}": "preshuffled" for count in (2, 64) for bias in ("", " bias")}
    )
    yield made
    preshuffle.offer(before)


@pytest.mark.parametrize("bias", [True, False])
def test_preshuffled_once(order: Order, bias: bool) -> None:
    module, x = projection(bias).bfloat16(), rows(64).bfloat16()
    for _ in range(2):
        torch.testing.assert_close(routed_linear(x, module), module(x), atol=0.02, rtol=0.0)
    assert order.shuffled == 1
    assert gemm.counts() == {"preshuffled": 2}
    assert preshuffle.nbytes() == module.weight.nbytes
    module.weight.data = module.weight.data.clone()
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(routed_linear(x, module), module(x), atol=0.04, rtol=0.0)
    assert order.shuffled == 2
    del module
    assert preshuffle.nbytes() == 0


def test_few_rows_read_the_weight_itself(order: Order) -> None:
    module = projection().bfloat16()
    routed_linear(rows(2).bfloat16(), module)
    assert (order.shuffled, gemm.counts()) == (0, {"vendor": 1})


def test_chips_without_the_order(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_probe, "chip", lambda device=None: "gfx90a")
    module, x = projection().bfloat16(), rows(64).bfloat16()
    assert torch.equal(routed_linear(x, module), module(x))
    assert order.shuffled == 0


def test_packed_weights_have_one_copy(order: Order) -> None:
    """Which a write to any of them makes anew; one alone has another."""
    modules = [nn.Linear(INPUTS, size).bfloat16().requires_grad_(False) for size in (16, OUTPUTS - 16)]
    x = rows(64).bfloat16()

    def check(times: int) -> None:
        for got, module in zip(routed_packed_linear(x, *modules), modules, strict=True):
            torch.testing.assert_close(got, module(x), atol=0.05, rtol=0.0)
        assert order.shuffled == times

    check(1)
    check(1)
    assert preshuffle.nbytes() == sum(module.weight.nbytes for module in modules)
    for number in range(2):
        with torch.no_grad():
            modules[number].weight.mul_(2)
        check(2 + number)
    modules[1].weight.data = modules[1].weight.data.clone()  # moved into one memory again, with all that is in it
    check(4)
    modules.clear()
    assert preshuffle.nbytes() == 0


def test_what_has_no_copy() -> None:
    unknown = torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    assert not preshuffle.fits(unknown)
    assert not preshuffle.fits(nn.Parameter(torch.zeros(OUTPUTS, INPUTS)))
    assert not preshuffle.fits(nn.Parameter(torch.zeros(OUTPUTS + 1, INPUTS, dtype=torch.bfloat16)))


class Aiter:
    """`shuffle_weight` and the GEMM of a release, which knows such a weight by an attribute; or does not."""

    def __init__(self, knows: bool):
        self.knows = knows

    def function(self, operator: str, path: str, *rest: object) -> Any:
        return self.shuffle_weight if path == "shuffle_weight" else self.mm

    def shuffle_weight(self, x: Tensor, layout: tuple[int, int]) -> Tensor:
        assert layout == (16, 16)
        shuffled = x.flip(1).contiguous()
        shuffled.is_shuffled = True  # type: ignore[attr-defined]
        return shuffled

    def mm(self, inp: Tensor, weights: Tensor, bias: None) -> Tensor:
        return F.linear(inp.flip(-1) if self.knows and getattr(weights, "is_shuffled", False) else inp, weights)


@pytest.mark.filterwarnings("ignore:aiter")
@pytest.mark.parametrize("knows", [True, False])
def test_aiter_s_order_is_used_once_proven(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_probe, "chip", lambda device=None: "gfx950")
    monkeypatch.setattr(aiter_calls, "chosen", lambda operator, tensor: True)
    monkeypatch.setattr(aiter_calls, "function", Aiter(knows).function)
    monkeypatch.setattr(aiter_calls, "_states", {})
    write_table({str(Product(64, OUTPUTS, INPUTS, "bfloat16", True)): "preshuffled"})
    module, x = projection().bfloat16(), rows(64).bfloat16()
    for _ in range(2):
        torch.testing.assert_close(routed_linear(x, module), module(x), atol=0.02, rtol=0.0)
    assert gemm.counts() == {"preshuffled" if knows else "vendor": 2}
    assert backend.fallbacks() == ({} if knows else {("aiter.gemm", "differs"): 2})
