"""The kernels of experts that are transposed, biased, interleaved or bounded, against fp64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from mixture import Every
from tolerances import assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.moe.form import Gating

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
every_expert = importlib.import_module("hf_rewrite_runtime.moe.every_expert")
transposed = importlib.import_module("hf_rewrite_runtime.moe.experts_in_out")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

FORMS: dict[str, tuple[Gating, bool]] = {
    "transposed": (Gating(transposed=True, scaling=2.5), False),
    "interleaved, biased, bounded": (Gating("swish", 1.7, 0.9, 1.0, interleaved=True, transposed=True), True),
    "side by side, biased, bounded": (Gating("swish", 1.7, 0.9, 1.0, transposed=True), True),
    "interleaved": (Gating("gelu", interleaved=True, transposed=True), False),
    "packed, bounded": (Gating("silu", limit=0.7, scaling=2.5), False),
    "packed, bounded, of its own": (Gating("swish", 1.3, 0.8, 1.0), False),
}
# tokens, experts, experts a token, hidden size, intermediate size
SHAPES = [(1, 8, 2, 64, 64), (2, 5, 3, 72, 40), (1, 1, 1, 1, 1)]
LARGE = (1, 2, 1, 72, 700)


def mixture(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], form: str) -> tuple[Any, ...]:
    """Return hidden states, index, weights, weights of the experts, residual, how, biases."""
    tokens, count, top_k, hidden_size, size = shape
    how, biased = FORMS[form]
    gate_up = torch.randn(count, 2 * size, hidden_size, device=device) / hidden_size**0.5
    down = torch.randn(count, hidden_size, size, device=device) / size**0.5
    if how.transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    biases = [torch.randn(count, width, device=device) if biased else None for width in (2 * size, hidden_size)]
    index = torch.rand(tokens, count, device=device).topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, device=device).softmax(-1)
    x, residual = torch.randn(2, tokens, hidden_size, device=device)
    floats = [None if t is None else t.to(dtype) for t in (x, weights, gate_up, down, residual, *biases)]
    x, weights, gate_up, down, residual, *biases = floats
    return x, index, weights, gate_up, down, residual, how, biases


def exactly(x: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    """Compute one expert after the other in fp64, from the definitions."""
    gate_up, down, residual, how, biases = rest
    out = residual.double().clone()
    for token, slot in torch.cartesian_prod(*(torch.arange(size) for size in index.shape)).view(-1, 2).tolist():
        expert, share = index[token, slot], weights[token, slot].double()
        turn = (lambda matrix: matrix.T) if how.transposed else (lambda matrix: matrix)
        both = turn(gate_up[expert].double()) @ x[token].double()
        both = both if biases[0] is None else both + biases[0][expert].double()
        gate, up = (both[0::2], both[1::2]) if how.interleaved else both.tensor_split(2)
        if how.limit is not None:
            gate, up = torch.minimum(gate, gate.new_tensor(how.limit)), up.clip(-how.limit, how.limit)
        kinds: dict[str, Callable[[Tensor], Tensor]] = {
            "swish": lambda g: g / (1 + torch.exp(-how.alpha * g)),
            "silu": lambda g: g / (1 + torch.exp(-g)),
            "gelu": lambda g: 0.5 * g * (1 + torch.erf(g / 2**0.5)),
        }
        left = turn(down[expert].double()) @ (kinds[how.activation](gate) * (up + how.shift))
        left = left if biases[1] is None else left + biases[1][expert].double()
        out[token] += how.scaling * share * left
    return out


def check(inputs: tuple[Any, ...], kernel: Callable[..., Tensor] = experts._op) -> None:
    x, index, weights, gate_up, down, residual, how, biases = inputs
    got = kernel(x, index, weights, gate_up, down, residual, *how, *biases)
    assert not backend.fallbacks(), "the kernel did not run"
    with backend.use_backend("reference"):
        reference = experts._op(x, index, weights, gate_up, down, residual, *how, *biases)
    # A limit of 0.9 is another number in fp16: its error, times the weights, is in both.
    assert_as_exact_as(reference, got, exactly(*inputs), torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(device: torch.device, poisoned: None, form: str, dtype: torch.dtype) -> None:
    for shape in SHAPES if dtype == torch.float32 else SHAPES[:2]:
        check(mixture(device, dtype, shape, form))


def test_rows_are_shared_out_and_counters_are_left_at_zero(device: torch.device, poisoned: None) -> None:
    inputs = mixture(device, torch.float32, LARGE, "interleaved, biased, bounded")
    _, parts, _ = transposed._split(LARGE[0], LARGE[2], LARGE[3], LARGE[4])
    assert parts == 2
    check(inputs)
    check(inputs)


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden_size", "size"),
    [(1, 4, 2880, 2880), (1, 1, 5120, 8192), (8, 4, 2880, 2880), (1, 1, 64, 70)],
)
def test_every_part_has_a_row(tokens: int, top_k: int, hidden_size: int, size: int) -> None:
    tiles, parts, block = transposed._split(tokens, top_k, hidden_size, size)
    share = -(-size // (parts * transposed.ROWS)) * transposed.ROWS
    assert (parts - 1) * share < size <= parts * share
    assert top_k * parts <= block < 2 * top_k * parts
    assert tiles * parts * top_k * tokens >= min(transposed.PROGRAMS, tiles * top_k * tokens)


def without(field: str) -> Callable[..., Tensor]:
    """Return the operator with one thing forgotten."""
    place = Gating._fields.index(field)

    def run(*inputs: Any) -> Tensor:
        changed = list(inputs)
        changed[6 + place] = Gating._field_defaults[field]
        return experts._op(*changed)

    return run


def wrong_bias(*inputs: Any) -> Tensor:
    return experts._op(*inputs[:-2], *(bias.roll(1, dims=0) for bias in inputs[-2:]))


def wrong_expert(*inputs: Any) -> Tensor:
    return experts._op(inputs[0], (inputs[1] + 1) % inputs[3].shape[0], *inputs[2:])


@pytest.mark.parametrize(
    "bug", [*map(without, ("alpha", "limit", "shift", "interleaved")), wrong_bias, wrong_expert],
    ids=["alpha", "limit", "shift", "interleaved", "bias", "expert"],
)  # fmt: skip
def test_a_planted_bug_is_seen(device: torch.device, bug: Callable[..., Tensor]) -> None:
    inputs = mixture(device, torch.float32, SHAPES[1], "interleaved, biased, bounded")
    with pytest.raises(AssertionError):
        check(inputs, bug)


def check_chosen(device: torch.device, tokens: int, top_k: int, run: Callable[..., Tensor]) -> None:
    """Compare what is computed of the chosen rows with what the module makes of all."""
    count, hidden_size, size = 6, 40, 24
    gate_up, down = torch.randn(count, hidden_size, 2 * size), torch.randn(count, size, hidden_size)
    module = Every(gate_up.to(device) / hidden_size**0.5, down.to(device) / size**0.5)
    logits = torch.randn(tokens, count, device=device)
    best = logits.topk(top_k, dim=-1)
    scores = torch.zeros_like(logits).scatter(1, best.indices, best.values.sigmoid())
    inputs = torch.randn(tokens, hidden_size, device=device).repeat(count, 1) * scores.T.reshape(-1, 1)
    backend.reset_fallbacks()
    got = run(inputs, module, scores, top_k)
    assert not backend.fallbacks()
    torch.testing.assert_close(got, module(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (3, 1), (2, 2)])
def test_rows_that_are_zero_are_not_computed(device: torch.device, poisoned: None, tokens: int, top_k: int) -> None:
    check_chosen(device, tokens, top_k, every_expert.chosen_experts)


def test_rows_of_another_token_are_seen(device: torch.device) -> None:
    def turned(inputs: Tensor, module: Every, scores: Tensor, top_k: int) -> Tensor:
        return every_expert.chosen_experts(inputs, module, scores.flip(0), top_k)

    with pytest.raises(AssertionError):
        check_chosen(device, 3, 1, turned)


def test_an_expert_too_few_is_seen(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        check_chosen(device, 2, 2, lambda *given: every_expert.chosen_experts(*given[:3], 1))
