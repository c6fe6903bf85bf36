"""The kernels of a sparse mixture of experts against fp64, with the reference's own error as the yardstick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import exact
import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from layouts import LAYOUTS
from mixture import EPS, Gate, Norm
from tolerances import assert_as_exact_as
from torch import Tensor
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device import split_k_semaphores
from hf_rewrite_runtime.moe.batched_experts import are_joined

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
router = importlib.import_module("hf_rewrite_runtime.moe.router")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())

RULES: dict[str, dict[str, Any]] = {
    "softmax": {"normalize": False},
    "softmax, normalised": {"normalize": True},
    "softmax, with a bias": {"normalize": True, "bias": True},
    "softmax, weights in fp32": {"normalize": True, "weights_in_fp32": True},
    "sigmoid": {"scores": "sigmoid", "normalize": False, "scaling": 2.5},
    "sigmoid, corrected": {
        "scores": "sigmoid",
        "normalize": True,
        "eps": 1e-20,
        "scaling": 2.5,
        "correction_bias": True,
        "logits_in_fp32": True,
        "weights_in_fp32": True,
    },
}
GROUPS = {"scores": "sigmoid", "eps": 1e-20, "correction_bias": True, "logits_in_fp32": True, "num_group": 4}
RULES |= {
    "softmax, corrected, a least sum": {"correction_bias": True, "least_sum": 0.9, "logits_in_fp32": True},
    "sigmoid, in groups": {**GROUPS, "topk_group": 2, "scaling": 2.5},
    "softmax, in groups by their best": {
        "normalize": False, "num_group": 4, "topk_group": 2, "group_best": 1, "left_out": 0.0, "logits_in_fp32": True,
    },
}  # fmt: skip
# tokens, experts, experts a token, hidden size
ROUTERS = [(1, 128, 8, 64), (3, 8, 2, 33), (1, 1, 1, 16), (5, 60, 4, 127), (2, 257, 9, 128), (0, 8, 2, 32)]
# tokens, experts, experts a token, hidden size, intermediate size
EXPERTS = [
    (1, 8, 2, 256, 256), (3, 5, 3, 72, 40), (1, 1, 1, 1, 1), (3, 4, 2, 63, 60), (2, 16, 8, 130, 32),
    (1, 3, 1, 64, 1100), (1, 4, 2, 16, 600), (1, 9, 5, 4, 700),
]  # fmt: skip
LARGE = EXPERTS[-3:]


def spread(x: Tensor) -> Tensor:
    """Return logits' inputs whose choice does not hang on the last bit."""
    return 4.0 * x / x.shape[-1] ** 0.5


def check_router(x: Tensor, gate: Gate, norm: Norm | None) -> None:
    before = x.clone()
    normed, weights, index = router.router(x, gate, norm=norm)
    assert not backend.fallbacks(), "the kernel did not run"
    with backend.use_backend("reference"):
        normed_there, weights_there, index_there = router.router(x, gate, norm=norm)
    eps = torch.finfo(x.dtype).eps
    if norm is None:
        assert normed is x
    else:
        assert_as_exact_as(normed_there, normed, exact.rms_norm(x, norm.weight, EPS), eps)
    rule = gate.rule()
    assert weights.dtype == weights_there.dtype
    assert index.dtype == torch.int64
    if x.numel():
        tokens = normed.reshape(-1, x.shape[-1])
        logits = exact.router(
            tokens, rule.weight, torch.arange(rule.weight.shape[0], device=x.device).expand(tokens.shape[0], -1),
            scores=rule.scores, normalize=False, bias=rule.bias,
        )  # fmt: skip
        keys = logits if rule.correction_bias is None else logits + rule.correction_bias.double()
        if rule.num_group > 1:
            keys = exact.in_groups(keys, rule.num_group, rule.topk_group, rule.group_best, rule.left_out)
        worst = keys.gather(-1, index).amin(-1)
        ahead = worst - keys.scatter(-1, index, -torch.inf).amax(-1)
        unclear = 16 * eps * keys.masked_fill(keys.isinf(), 0.0).abs().amax(-1)
        assert (ahead >= -unclear).all(), "another expert's score is larger"
        assert (weights.diff(dim=-1) <= 0).all() or rule.correction_bias is not None, "not in descending order"
        (index, order), (index_there, order_there) = index.sort(-1), index_there.sort(-1)
        same = (index == index_there).all(-1)
        assert (same | (ahead <= unclear)).all()
        form = {
            "scores": rule.scores,
            "normalize": rule.normalize,
            "eps": rule.eps,
            "scaling": rule.scaling,
            "least_sum": rule.least_sum,
        }
        wanted = exact.router(tokens, rule.weight, index, bias=rule.bias, **form)
        weights, weights_there = weights.gather(-1, order), weights_there.gather(-1, order_there)
        # A softmax turns a rounding of a logit into an error of its weight that is larger by the logit.
        largest = (tokens.double() @ rule.weight.double().T).abs().max().item()
        assert_as_exact_as(weights_there[same], weights[same], wanted[same], eps * max(1.0, largest))
    assert torch.equal(x, before)


@dtypes
@pytest.mark.parametrize("shape", ROUTERS, ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no_norm"])
def test_router_shapes(
    device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype, normed: bool
) -> None:
    tokens, count, top_k, hidden_size = shape
    gate = Gate(spread(torch.randn(count, hidden_size, device=device)).to(dtype), top_k)
    x = torch.randn(tokens, 1, hidden_size, device=device).to(dtype)
    check_router(x, gate, Norm(torch.rand(hidden_size, device=device).to(dtype) + 0.5) if normed else None)


@dtypes
@pytest.mark.parametrize("rule", RULES)
def test_router_rules(device: torch.device, poisoned: None, rule: str, dtype: torch.dtype) -> None:
    gate = Gate(spread(torch.randn(32, 96, device=device)).to(dtype), 4, **RULES[rule])
    check_router(torch.randn(5, 96, device=device).to(dtype), gate, Norm(torch.ones(96, device=device).to(dtype)))


@layouts
def test_router_layouts(device: torch.device, layout: Callable[[Tensor], Tensor]) -> None:
    gate = Gate(spread(torch.randn(16, 48, device=device)), 3)
    check_router(layout(torch.randn(3, 2, 48, device=device)), gate, Norm(torch.ones(48, device=device)))


def test_equal_scores_go_to_the_lower_number(device: torch.device) -> None:
    gate = Gate(torch.ones(16, 32, device=device), 3)
    _, weights, index = router.router(torch.ones(2, 32, device=device), gate)
    assert not backend.fallbacks()
    assert index.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_what_is_not_finite_stays_inside_the_weights(device: torch.device) -> None:
    gate = Gate(torch.randn(16, 32, device=device), 3)
    x = torch.full((1, 32), torch.nan, device=device)
    _, weights, index = router.router(x, gate)
    weight = torch.randn(16, 8, 32, device=device)
    out = experts._op(x, index, weights, weight, torch.randn(16, 32, 4, device=device), None, "silu")
    assert out.isnan().all()


def mixture(
    device: torch.device, dtype: torch.dtype, tokens: int, count: int, top_k: int, hidden_size: int, size: int
) -> tuple[Tensor, ...]:
    """Return inputs of the operator: hidden states, index, weights, gate_up_proj, down_proj, residual."""
    gate_up = torch.randn(count, 2 * size, hidden_size, device=device) / hidden_size**0.5
    down = torch.randn(count, hidden_size, size, device=device) / size**0.5
    index = torch.rand(tokens, count, device=device).topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, device=device).softmax(-1)
    x, residual = torch.randn(2, tokens, hidden_size, device=device).to(dtype)
    return x, index, weights.to(dtype), gate_up.to(dtype), down.to(dtype), residual


def check_experts(inputs: tuple[Any, ...], kind: str = "silu", kernel: Callable[..., Tensor] | None = None) -> None:
    x, index, weights, gate_up, down, residual = inputs
    got = (kernel or experts._op)(*inputs, kind)
    assert not backend.fallbacks(), "the kernel did not run"
    with backend.use_backend("reference"):
        reference = experts._op(*inputs, kind)
    flat = x.reshape(-1, x.shape[-1])
    wanted = exact.experts(flat, index, weights, gate_up, down, kind).view(x.shape)
    if residual is not None:
        wanted = wanted + residual.double()
    assert_as_exact_as(reference, got, wanted, torch.finfo(x.dtype).eps)


@dtypes
@pytest.mark.parametrize("shape", EXPERTS, ids=str)
def test_experts_shapes(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if INTERPRETED and dtype != torch.float32 and shape in LARGE:
        pytest.skip("interpreted, a large shape is checked in fp32 alone: each takes ten seconds")
    inputs = mixture(device, dtype, *shape)
    check_experts(inputs)
    check_experts((*inputs[:5], None))


@dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_experts_activations_and_fp32_weights(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    x, index, weights, *others = mixture(device, dtype, 2, 6, 3, 64, 48)
    check_experts((x, index, weights.float(), *others), kind)


# tokens, experts, experts a token, hidden size, intermediate size: several tokens take the same experts
JOINED = [(8, 5, 3, 72, 40), (17, 6, 2, 63, 60), (32, 8, 8, 64, 100), (2, 1, 1, 136, 129)]
HALVES = [dtype for dtype in KERNEL_DTYPES if dtype.itemsize == 2]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", JOINED, ids=str)
def test_experts_that_tokens_share_are_read_once(
    device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*given: Any) -> None:
        raise AssertionError("a program for each pair")

    monkeypatch.setattr(experts, "_launch_packed", forbidden)
    inputs = mixture(device, dtype, *shape)
    for _ in range(2):  # the second finds the counters as the first left them
        check_experts(inputs)
    check_experts((*inputs[:5], None), "gelu")
    assert not any(counters.any() for counters in split_k_semaphores._by_stream.get((inputs[0].get_device(), 0), []))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_computes_its_own_shared_experts(device: torch.device, poisoned: None, ranks: int) -> None:
    check_parts(mixture(device, torch.float16, 9, 8, 3, 72, 40), ranks, PLAIN, None, None)


def test_a_token_that_names_an_expert_twice(device: torch.device, poisoned: None) -> None:
    x, index, *others = mixture(device, torch.float16, 6, 4, 3, 64, 48)
    index[::2, 2] = index[::2, 0]
    check_experts((x, index, *others))


def test_a_number_that_is_no_expert_adds_nothing(device: torch.device, poisoned: None) -> None:
    x, index, weights, *others = mixture(device, torch.float16, 6, 4, 3, 64, 48)
    index[1, 2], index[4, 0] = 4, -1
    got = experts._op(x, index, weights, *others, "silu")
    known = (index >= 0) & (index < 4)
    with_none = (x, index.clamp(0, 3), torch.where(known, weights, 0), *others)
    torch.testing.assert_close(got, experts._op(*with_none, "silu"))


def test_bits_of_shared_experts_do_not_change(device: torch.device) -> None:
    inputs = mixture(device, torch.float16, 8, 5, 3, 72, 40)
    first = experts._op(*inputs, "silu")
    assert all(torch.equal(first, experts._op(*inputs, "silu")) for _ in range(2))


@pytest.mark.parametrize(
    ("shape", "top_k", "joined", "apart"),
    [((128, 2048, 768), 8, (8, 16, 32), (1, 2, 4)), ((8, 64, 64), 2, (2, 32), ())],
)
def test_experts_are_shared_where_it_was_measured_to_pay(
    shape: tuple[int, ...], top_k: int, joined: tuple[int, ...], apart: tuple[int, ...]
) -> None:
    assert all(are_joined(tokens, top_k, shape[0], torch.bfloat16) for tokens in joined)
    assert not any(are_joined(tokens, top_k, shape[0], torch.bfloat16) for tokens in (*apart, 33))
    assert not any(are_joined(tokens, top_k, shape[0], torch.float32) for tokens in joined)


@layouts
def test_experts_layouts(device: torch.device, poisoned: None, layout: Callable[[Tensor], Tensor]) -> None:
    _, _, _, gate_up, down, _ = mixture(device, torch.float32, 6, 4, 2, 48, 32)
    x, residual = torch.randn(2, 3, 2, 48, device=device)
    index = layout(torch.randint(4, (6, 2), device=device).float()).long()
    check_experts((layout(x), index, layout(torch.rand(6, 2, device=device)), gate_up, down, layout(residual)))


def check_parts(inputs: tuple[Any, ...], ranks: int, how: tuple[Any, ...], *biases: Tensor | None) -> None:
    """What the ranks' experts add makes up what all of them do, and each kernel is as exact as its reference."""
    x, index, weights, gate_up, down, _ = inputs
    count, eps = gate_up.shape[0] // ranks, torch.finfo(x.dtype).eps
    parts = []
    for first in range(0, gate_up.shape[0], count):
        here = slice(first, first + count)
        own = [None if bias is None else bias[here] for bias in biases]
        given = (x, index, weights, gate_up[here], down[here], None, *how, *own, first)
        got = experts._op(*given)
        assert not backend.fallbacks(), "the kernel did not run"
        with backend.use_backend("reference"):
            reference, wanted = experts._op(*given), experts._op(*map(in_double, given))
        assert_as_exact_as(reference, got, wanted, eps)
        parts.append((reference, got, wanted))
    with backend.use_backend("reference"):
        whole = experts._op(*map(in_double, (*inputs[:5], None, *how, *biases)))
    assert_as_exact_as(sum(part[0] for part in parts), sum(part[1] for part in parts), whole, ranks * eps)


def in_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


PLAIN = ("silu", 1.0, None, 0.0, False, False, 1.5)
TURNED = ("swish", 1.7, 7.0, 1.0, True, True, 1.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [(3, 8, 2, 72, 40), (1, 8, 5, 64, 128), (2, 4, 3, 63, 60)], ids=str)
def test_a_rank_computes_its_own_experts(
    device: torch.device, poisoned: None, shape: tuple[int, ...], ranks: int
) -> None:
    check_parts(mixture(device, torch.float32, *shape), ranks, PLAIN, None, None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_computes_its_own_transposed_experts(device: torch.device, poisoned: None, ranks: int) -> None:
    x, index, weights, gate_up, down, _ = mixture(device, torch.float32, 3, 8, 3, 72, 40)
    turned = (gate_up.mT.contiguous(), down.mT.contiguous())
    biases = torch.randn(8, 80, device=device), torch.randn(8, 72, device=device)
    check_parts((x, index, weights, *turned, None), ranks, TURNED, *biases)


def test_a_rank_that_takes_its_own_experts_for_the_first_is_caught(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = experts._launch
    monkeypatch.setattr(experts, "_launch", lambda *given: right(*given[:-1], min(given[-1], 0)))
    with pytest.raises(AssertionError):
        check_parts(mixture(device, torch.float32, 3, 8, 3, 72, 40), 2, PLAIN, None, None)


def test_no_tokens(device: torch.device) -> None:
    x, index, weights, *others, residual = mixture(device, torch.float32, 2, 4, 2, 48, 32)
    assert experts._op(x[:0], index[:0], weights[:0], *others, residual[:0], "silu").shape == (0, 48)


def swap_halves(*inputs: Any) -> Tensor:
    x, index, weights, gate_up, *others = inputs
    return experts._op(x, index, weights, gate_up.roll(gate_up.shape[1] // 2, dims=1), *others)


def last_expert_left_out(*inputs: Any) -> Tensor:
    x, index, weights, *others = inputs
    return experts._op(x, index, torch.cat((weights[:, :-1], 0 * weights[:, -1:]), dim=-1), *others)


def neighbour(*inputs: Any) -> Tensor:
    x, index, *others = inputs
    return experts._op(x, index.flip(-1), *others)


@pytest.mark.parametrize("bug", [swap_halves, last_expert_left_out, neighbour])
def test_planted_bug_is_caught(device: torch.device, bug: Callable[..., Tensor]) -> None:
    inputs = mixture(device, KERNEL_DTYPES[-1], 2, 6, 3, 64, 48)
    check_experts(inputs)
    with pytest.raises(AssertionError):
        check_experts(inputs, kernel=bug)


@pytest.mark.skipif(INTERPRETED, reason="needs a device")
def test_inside_a_cuda_graph(device: torch.device) -> None:
    x, _, _, gate_up, down, residual = mixture(device, torch.bfloat16, 2, 16, 4, 256, 128)
    gate = Gate(spread(torch.randn(16, 256, device=device)).bfloat16(), 4)
    norm = Norm(torch.ones(256, device=device, dtype=torch.bfloat16))

    def block() -> Tensor:
        normed, weights, index = router.router(x, gate, norm=norm)
        return experts._op(normed, index, weights, gate_up, down, residual, "silu")

    block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, block())
    assert not backend.fallbacks()


@pytest.mark.skipif(INTERPRETED, reason="needs a device")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("tokens", [1, 48, 100])
def test_experts_of_transformers_inside_a_graph(device: torch.device, implementation: str, tokens: int) -> None:
    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)
    config._experts_implementation = implementation
    with device:
        module = Qwen3MoeExperts(config).bfloat16().requires_grad_(False)
    x, index, weights, gate_up, down, residual = mixture(device, torch.bfloat16, tokens, 16, 4, 256, 128)
    module.gate_up_proj.copy_(gate_up)
    module.down_proj.copy_(down)

    def block() -> Tensor:
        return experts.fused_experts(x, module, index, weights, residual=residual)

    block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block()
    x.normal_()
    graph.replay()
    reference = residual + module(x, index, weights)
    wanted = residual.double() + exact.experts(x, index, weights, gate_up, down, "silu")
    assert_as_exact_as(reference, out, wanted, torch.finfo(torch.bfloat16).eps)
