"""Weights in 8 bits leave no trace in what is saved, follow their parameters, and step aside where they must."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import Tensor, nn

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.device.e4m3 import quantize
from hf_rewrite_runtime.fp8 import fp8_weights
from hf_rewrite_runtime.fp8.fp8_generation import Fp8GraphGeneration
from hf_rewrite_runtime.fp8.fp8_linear import fp8_gated_linear, fp8_gated_product, fp8_linear, fp8_packed_linear
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.linear.packing import packed_linear


class Block(nn.Module):
    """An MLP as `fp8` leaves it, and its head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 96, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(96, 64, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fp8_packed_linear(x, self.gate, self.up)
        return fp8_gated_product(gate, up, nn.functional.silu, self.down)

    def plain(self, x: Tensor) -> Tensor:
        gate, up = packed_linear(x, self.gate, self.up)
        return self.down(nn.functional.silu(gate) * up)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    backend.reset_fallbacks()


def rounded(module: nn.Linear, dtype: torch.dtype = torch.float64) -> Tensor:
    return quantize(module.weight.detach(), torch.float8_e4m3fn).dequantized(dtype)


def test_what_is_saved_does_not_change() -> None:
    block = Block()
    before, first = io.BytesIO(), block.state_dict()
    keys = list(first)
    torch.save({name: tensor.clone() for name, tensor in first.items()}, before)
    with torch.no_grad():
        block(torch.randn(2, 5, 64, dtype=torch.bfloat16))
    after = io.BytesIO()
    torch.save({name: tensor.clone() for name, tensor in block.state_dict().items()}, after)
    assert list(block.state_dict()) == keys
    assert before.getvalue() == after.getvalue()


def test_copies_take_half_the_memory_and_are_told() -> None:
    block = Block()
    with torch.no_grad():
        block(torch.randn(1, 5, 64, dtype=torch.bfloat16))
    elements, rows = 64 * 96 * 3, 2 * 96 + 64
    assert fp8_weights.nbytes(block) == elements + 4 * rows
    assert "fp8: copies of 2 weights, 0.0 MiB" in str(explain(block))
    fp8_weights.forget(block)
    assert fp8_weights.nbytes(block) == 0


def test_copies_end_with_the_model() -> None:
    block = Block()
    with torch.no_grad():
        block(torch.randn(1, 5, 64, dtype=torch.bfloat16))
    kept = len(fp8_weights._copies)
    del block
    gc.collect()
    assert len(fp8_weights._copies) == kept - 2


@pytest.mark.parametrize("part", [1, 300, 64 * 7, 10**6])
def test_weights_are_quantised_in_parts(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_weights, "PART", part)
    layer = nn.Linear(64, 37)
    with torch.no_grad():
        found = fp8_weights.quantized("fp8_linear", torch.randn(1, 64), (layer,))
    assert found is not None
    values, scale = quantize(layer.weight.detach(), found[0].values.dtype)
    assert torch.equal(found[0].values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found[0].scale, scale)


@pytest.mark.parametrize("steps", [1, 5])
def test_products_are_those_of_the_rounded_weights(steps: int) -> None:
    """One token a sequence keeps its bits; more are quantised row by row."""
    module = nn.Linear(64, 96, dtype=torch.float64)
    x = torch.randn(3, steps, 64, dtype=torch.float64)
    with torch.no_grad():
        got = fp8_linear(x, module, residual=torch.ones(3, steps, 96))
    read = x if steps == 1 else quantize(x, torch.float8_e4m3fn).dequantized(torch.float64)
    wanted = nn.functional.linear(read, rounded(module), module.bias) + 1
    assert torch.equal(got, wanted)


def test_more_sequences_than_a_step_s_kernels_take_are_quantised() -> None:
    module = nn.Linear(64, 96, dtype=torch.float64)
    x = torch.randn(17, 1, 64, dtype=torch.float64)
    read = quantize(x, torch.float8_e4m3fn).dequantized(torch.float64)
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, module), nn.functional.linear(read, rounded(module), module.bias))


def copies(block: Block) -> list[Tensor]:
    return [fp8_weights._copies[module].weight.values for module in (block.gate, block.down)]


@pytest.mark.parametrize("refreshed", [False, True])
def test_copies_follow_changes_in_place_in_their_own_memory(refreshed: bool) -> None:
    """A graph that was captured before goes on reading there; `refresh` stands for the Python that a replay skips."""
    block, x = Block(), torch.randn(1, 5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        block(x)
        before = copies(block)
        for parameter in block.parameters():
            parameter.neg_()
        if refreshed:
            fp8_weights.refresh(block)
        else:
            block(x)
    for old, new, module in zip(before, copies(block), (block.gate, block.down), strict=True):
        assert old.data_ptr() == new.data_ptr()
        rows = module.weight.shape[0]
        assert torch.equal(new[:rows].float(), quantize(module.weight, torch.float8_e4m3fn).values.float())


def test_copies_follow_weights_that_were_replaced() -> None:
    block, x = Block(), torch.randn(1, 5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        block(x)
        block.load_state_dict({name: tensor * 2 for name, tensor in block.state_dict().items()})
        doubled = block(x)
        block.down.weight.data = block.down.weight.data * 0
        assert torch.equal(block(x), block.down.bias.expand_as(doubled))


def test_another_weight_at_the_same_address_is_another_weight() -> None:
    """An allocator gives the memory of a weight that was replaced to the next one."""
    memory = bytearray(4 * 64 * 96)
    module = nn.Linear(64, 96, bias=False)
    x = torch.randn(1, 1, 64)
    outputs = []
    with torch.no_grad():
        for number in (1.0, 2.0):
            weight = torch.frombuffer(memory, dtype=torch.float32).view(96, 64)
            weight.numpy().fill(number)  # which torch does not count
            module.weight.data = weight
            outputs.append(fp8_linear(x, module))
    assert torch.equal(outputs[1], 2 * outputs[0])


def hooked(block: Block) -> None:
    block.up.register_forward_hook(lambda module, arguments, output: None)
    block.down.register_forward_hook(lambda module, arguments, output: None)


class Adapter(nn.Module):
    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


def adapted(block: Block) -> None:
    block.up, block.down = Adapter(block.up), Adapter(block.down)  # type: ignore[assignment]


@pytest.mark.parametrize(("change", "reason"), [(hooked, "observed"), (adapted, "not_linear")])
def test_weights_are_read_as_they_are_where_something_watches(change, reason) -> None:
    block, x = Block(), torch.randn(1, 5, 64, dtype=torch.bfloat16)
    change(block)
    with torch.no_grad():
        assert torch.equal(block(x), block.plain(x))
    assert backend.fallbacks()["fp8_packed_linear", reason] == 1
    assert backend.fallbacks()["fp8_gated_product", reason] == 1
    assert not fp8_weights.nbytes(block)


def test_gradients_are_those_of_the_weights_themselves() -> None:
    block, x = Block(torch.float32), torch.randn(1, 5, 64)
    block(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    block.plain(x).square().sum().backward()
    for ours, parameter in zip(found, block.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
    assert backend.fallbacks()["fp8_packed_linear", "gradient"] == 1


def test_inputs_of_another_type_are_left_to_the_module() -> None:
    module = nn.Linear(64, 96, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        fp8_linear(torch.randn(1, 1, 64, dtype=torch.bfloat16), module)
    assert backend.fallbacks()["fp8_linear", "dtype"] == 1


def test_an_unknown_activation_is_called() -> None:
    block, x = Block(torch.float64), torch.randn(1, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        got = fp8_gated_linear(x, (block.gate, block.up), torch.tanh)
        gate, up = (nn.functional.linear(x, rounded(m)) for m in (block.gate, block.up))
        assert torch.equal(
            fp8_gated_product(gate, up, torch.tanh, block.down), fp8_linear(gate.tanh() * up, block.down)
        )
    torch.testing.assert_close(got, gate.tanh() * up, rtol=1e-12, atol=1e-12)


def test_compiles_in_one_graph() -> None:
    block, x = Block(torch.float32), torch.randn(2, 5, 64)
    with torch.no_grad():
        wanted = block(x)
        got = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, wanted)


def test_prompts_of_one_token_are_read_without_a_graph() -> None:
    """A graph reads them as the first of many tokens, which are quantised."""
    assert Fp8GraphGeneration.graph_policy.fewest_tokens == 2
    assert GraphGeneration.graph_policy.fewest_tokens == 1
