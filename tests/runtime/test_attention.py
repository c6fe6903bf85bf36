"""Grouped attention without expanded keys gives what transformers' function gives."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from hf_rewrite_runtime.attention.attend_step import attend_step
from hf_rewrite_runtime.attention.decode_attention import decode_attention
from hf_rewrite_runtime.attention.grouped_query import grouped_attention, grouped_matmul, native_gqa
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend

KV_HEADS, HEADS, HEAD_DIM = 2, 6, 16


class Attention(nn.Module):
    num_key_value_groups = HEADS // KV_HEADS
    is_causal = True


def inputs(batch: int, length: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Queries as a view of `[B, S, H, D]`, keys and values as a slice of a longer static cache."""
    query = torch.randn(batch, length, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, KV_HEADS, keys + 3, HEAD_DIM, dtype=dtype)[:, :, :, :keys]
    return query, key, value


def mask(kind: str, batch: int, length: int, keys: int) -> torch.Tensor | None:
    visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length).expand(batch, 1, length, keys).clone()
    visible[0, :, :, 0] = keys == 1
    return {
        "none": None,
        "bool": visible,
        "one for all sequences": visible[:1],
        "float": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e30),
        "per head": torch.randn(batch, HEADS, length, keys, dtype=torch.float64),
    }[kind]


@pytest.mark.parametrize("kind", ["none", "bool", "one for all sequences", "float", "per head"])
@pytest.mark.parametrize(
    ("batch", "length", "keys"), [(1, 1, 7), (3, 1, 7), (1, 5, 7), (3, 5, 7), (1, 70, 70), (3, 70, 72), (3, 5, 5)]
)
def test_equals_transformers(batch: int, length: int, keys: int, kind: str) -> None:
    states, attention_mask = inputs(batch, length, keys), mask(kind, batch, length, keys)
    wanted, _ = sdpa_attention_forward(Attention(), *states, attention_mask, scaling=0.3)
    got, weights = native_gqa(sdpa_attention_forward)(Attention(), *states, attention_mask, scaling=0.3)
    assert weights is None
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    copied = batch > 1 and length > 64 and kind != "none"
    assert backend.fallbacks() == ({("native_gqa", "copying_is_faster"): 1} if copied else {})


@pytest.mark.parametrize("is_causal", [None, False])
def test_head_dims_that_differ(is_causal: bool | None) -> None:
    query, key, value = inputs(2, 5, 9)
    value = torch.randn(2, KV_HEADS, 9, 24, dtype=torch.float64)
    for q, mask_ in ((query, None), (query[:, :, :1], None)):
        wanted, _ = sdpa_attention_forward(Attention(), q, key, value, mask_, is_causal=is_causal)
        got, _ = native_gqa(sdpa_attention_forward)(Attention(), q, key, value, mask_, is_causal=is_causal)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.5}, "dropout"),
        ({"position_bias": torch.zeros(1, HEADS, 5, 7, dtype=torch.float64)}, "position_bias"),
    ],
)
def test_delegated_with_a_reason(options: dict[str, object], reason: str) -> None:
    states, attention_mask = inputs(2, 5, 7), mask("bool", 2, 5, 7)
    torch.manual_seed(1)
    wanted, _ = sdpa_attention_forward(Attention(), *states, attention_mask, **options)
    torch.manual_seed(1)
    got, _ = native_gqa(sdpa_attention_forward)(Attention(), *states, attention_mask, **options)
    assert torch.equal(got, wanted)
    assert backend.fallbacks() == {("native_gqa", reason): 1}


def test_other_interfaces_are_left_alone() -> None:
    def eager_attention_forward() -> None:
        raise AssertionError

    assert native_gqa(eager_attention_forward) is eager_attention_forward  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 1), (1, 5), (2, 5)])
@pytest.mark.parametrize("recorded", [False, True])
def test_compiles_in_one_graph(batch: int, length: int, recorded: bool) -> None:
    interface = native_gqa(sdpa_attention_forward)
    module = Attention()

    def attend(*states: torch.Tensor) -> torch.Tensor:
        return interface(module, *states, mask("bool", batch, length, 7), scaling=0.3)[0]

    states = tuple(x.requires_grad_(recorded) for x in inputs(batch, length, 7))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*states), attend(*states), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("named", ["auto", "triton"])
def test_a_compiler_sees_torchs_own_attention(named: str) -> None:
    """An operator that asks its questions at each call cost Llama 0.05 ms a layer; who names a backend gets it."""
    seen: set[str] = set()

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.update(str(node.target).split(".")[0] for node in module.graph.nodes if node.op == "call_function")
        return module

    states, module, interface = inputs(2, 5, 7), Attention(), native_gqa(sdpa_attention_forward)

    def attend(*states: torch.Tensor) -> torch.Tensor:
        return interface(module, *states, mask("bool", 2, 5, 7))[0]

    def group(*states: torch.Tensor) -> torch.Tensor:
        return grouped_attention(*states, mask("bool", 2, 5, 7), key_groups=GROUPS, value_groups=GROUPS)

    for function in (attend, group):
        torch.compiler.reset()
        seen.clear()
        with torch.no_grad(), backend.use_backend(named), contextlib.suppress(backend.BackendUnavailable):
            torch.compile(function, fullgraph=True, backend=note)(*states)
        assert (backend.NAMESPACE in seen) == (named == "triton")


def test_a_compiler_sees_the_products_of_the_original() -> None:
    """Folded heads cost Gemma 2, compiled, 4% of 512 tokens (H100): the compiler takes the copy into the product."""
    shapes = list[tuple[int, ...]]()

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        products = (node for node in module.graph.nodes if "matmul" in str(node.target))
        shapes.extend(tuple(node.args[0].meta["example_value"].shape) for node in products)
        return module

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(grouped_matmul(query, key.transpose(2, 3), GROUPS), value, GROUPS)

    states = inputs(2, 5, 7)
    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend=note)(*states)
    torch.testing.assert_close(compiled, attend(*states), rtol=1e-12, atol=1e-12)
    assert [shape[:3] for shape in shapes] == [(2, HEADS, 5), (2, HEADS, 5)]


def test_gradients_equal_those_of_transformers() -> None:
    gradients = []
    for interface in (sdpa_attention_forward, native_gqa(sdpa_attention_forward)):
        torch.manual_seed(0)
        states = tuple(x.requires_grad_() for x in inputs(2, 5, 7))
        interface(Attention(), *states, mask("bool", 2, 5, 7))[0].sin().sum().backward()
        gradients.append([x.grad for x in states])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_grouped_matmul(length: int, kv_heads: int) -> None:
    query = torch.randn(2, length, HEADS, HEAD_DIM).transpose(1, 2).requires_grad_()
    key = torch.randn(2, kv_heads, 7, HEAD_DIM, requires_grad=True)
    wanted = query @ repeat_kv(key, HEADS // kv_heads).transpose(2, 3)
    got = grouped_matmul(query, key.transpose(2, 3), HEADS // kv_heads)
    torch.testing.assert_close(got, wanted)
    for theirs, ours in zip(
        torch.autograd.grad(wanted.sin().sum(), (query, key)),
        torch.autograd.grad(got.sin().sum(), (query, key)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("query", [(2, 1, 3, 5), (1, 4, 3, 5), (3, 5), (5,), (6, 2, 4, 3, 5)], ids=str)
def test_grouped_matmul_broadcasts_as_torch_does(query: tuple[int, ...]) -> None:
    left, key = torch.randn(query), torch.randn(2, 2, 7, 5)
    backend.reset_fallbacks()
    got = grouped_matmul(left, key.transpose(2, 3), 2)
    torch.testing.assert_close(got, left @ repeat_kv(key, 2).transpose(2, 3))
    assert backend.fallbacks() == {("grouped_matmul", "shape"): 1}


GROUPS = HEADS // KV_HEADS


def expanded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: object) -> torch.Tensor:
    """What `grouped_attention` stands for."""
    return F.scaled_dot_product_attention(query, repeat_kv(key, GROUPS), repeat_kv(value, GROUPS), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["none", "bool", "one for all sequences", "float", "per head"])
@pytest.mark.parametrize(
    ("batch", "length", "keys"), [(1, 1, 7), (3, 1, 7), (1, 5, 7), (3, 5, 7), (3, 70, 72), (3, 7, 5), (2, 0, 5)]
)
def test_grouped_attention(batch: int, length: int, keys: int, kind: str) -> None:
    states, attention_mask = inputs(batch, length, keys), mask(kind, batch, length, keys)
    wanted = expanded(*states, attn_mask=attention_mask, scale=0.3)
    got = grouped_attention(*states, attention_mask, scale=0.3, key_groups=GROUPS, value_groups=GROUPS)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not [reason for (name, reason) in backend.fallbacks() if name == "grouped_attention"]


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (2, 1, 1, 7), (1, HEADS, 1, 7)], ids=str)
def test_grouped_attention_takes_every_mask_that_torch_takes(shape: tuple[int, ...]) -> None:
    states, attn_mask = inputs(2, 5, 7), torch.randn(shape, dtype=torch.float64)
    got = grouped_attention(*states, attn_mask, key_groups=GROUPS, value_groups=GROUPS)
    torch.testing.assert_close(got, expanded(*states, attn_mask=attn_mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (5, 7), (7, 5), (1, 7)])
def test_grouped_attention_is_causal_as_torchs(length: int, keys: int) -> None:
    """A query sees the keys from the first to its own number; where there is one query, that is one key."""
    states = inputs(2, length, keys)
    got = grouped_attention(*states, is_causal=True, key_groups=GROUPS, value_groups=GROUPS)
    torch.testing.assert_close(got, expanded(*states, is_causal=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dropout_p": 0.5}, "dropout"),
        ({"is_causal": True}, "is_causal"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.float64)}, "shape"),
    ],
    ids=["dropout", "causal and one query", "mask of two dimensions"],
)
def test_grouped_attention_repeats_heads_with_a_reason(given: dict[str, object], reason: str) -> None:
    states = inputs(2, 1 if reason == "is_causal" else 5, 7)
    torch.manual_seed(1)
    wanted = expanded(*states, **given)
    torch.manual_seed(1)
    got = grouped_attention(*states, **given, key_groups=GROUPS, value_groups=GROUPS)  # type: ignore[arg-type]
    assert torch.equal(got, wanted)
    assert backend.fallbacks() == {("grouped_attention", reason): 1}


def test_grouped_attention_of_values_of_every_head() -> None:
    query, key, _ = inputs(2, 5, 7)
    value = torch.randn(2, HEADS, 7, 8, dtype=torch.float64)
    got = grouped_attention(query, key, value, key_groups=GROUPS)
    wanted = F.scaled_dot_product_attention(query, repeat_kv(key, GROUPS), value)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert backend.fallbacks() == {("grouped_attention", "groups"): 1}


@pytest.mark.parametrize("recorded", [False, True])
def test_grouped_attention_compiles_in_one_graph(recorded: bool) -> None:
    def attend(*states: torch.Tensor) -> torch.Tensor:
        return grouped_attention(*states, mask("bool", 2, 5, 7), key_groups=GROUPS, value_groups=GROUPS)

    states = tuple(x.requires_grad_(recorded) for x in inputs(2, 5, 7))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*states), attend(*states), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 2}, {"softcap": 3.0}, {"sinks": torch.arange(4.0)}])
def test_heads_are_those_of_the_steps_attention(value_dim: int, rule: dict[str, object]) -> None:
    torch.manual_seed(0)
    cache = PreallocatedCache(1, 2, 6, "cpu")
    cache.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, value_dim), 0)
    query = torch.randn(2, 4, 1, 8)
    cache.position.fill_(3)
    with cache.step():
        cache.update(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, value_dim), 0)
        heads = attend_step(query, cache, 0, scaling=0.5, **rule)  # type: ignore[arg-type]
        whole = decode_attention(query, cache, 0, scaling=0.5, **rule)  # type: ignore[arg-type]
    assert heads.shape == (2, 1, 4, value_dim)
    assert torch.equal(heads.flatten(2), whole)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (cache.layers[0].keys, cache.layers[0].values))
    if not rule:
        weights = (query @ keys[:, :, :4].transpose(2, 3) * 0.5).softmax(-1)
        torch.testing.assert_close(heads, (weights @ values[:, :, :4]).transpose(1, 2))
