"""Attention inside segments, in few calls, gives what one call a segment gives."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tolerances import assert_as_exact_as, assert_same_gradient
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_rewrite_runtime.attention.grouped_query import native_gqa
from hf_rewrite_runtime.attention.segment_attention import segment_attention, segment_attention_weights
from hf_rewrite_runtime.core import backend

operator = importlib.import_module("hf_rewrite_runtime.attention.segment_attention")
States = list[Tensor]
HEADS, HEAD_DIM, VALUE_DIM = 4, 16, 24
LENGTHS = {
    "one": [7],
    "one token": [1],
    "equal": [5, 5, 5, 5],
    "single tokens": [1, 1, 1],
    "windows": [64, 64, 16, 64, 64, 16, 24, 24, 6],
    "all differ": [63, 1, 127, 2],
    "a thousand": [1000, 1, 1000],
}


class Attention(nn.Module):
    is_causal = False

    def __init__(self, groups: int = 1):
        super().__init__()
        self.num_key_value_groups = groups


class Counted:
    """What `sdpa_attention_forward` is called with, while it is called through this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[int] = []
        plain = nn.functional.scaled_dot_product_attention

        def counting(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.rows.append(query.shape[0])
            return plain(query, *args, **kwargs)

        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counting)


@pytest.fixture(autouse=True)
def _nothing_counted() -> Iterator[None]:
    backend.reset_fallbacks()
    yield
    backend.reset_fallbacks()


def inputs(
    length: int, dtype: torch.dtype = torch.float64, groups: int = 1, value_dim: int = HEAD_DIM
) -> list[Tensor]:
    """Queries, keys and values as views of `[S, 3, H, D]`, as vision towers make them, with an offset."""
    made = []
    for heads, dim in ((HEADS, HEAD_DIM), (HEADS // groups, HEAD_DIM), (HEADS // groups, value_dim)):
        whole = torch.randn(length + 2, 3, heads, dim, dtype=torch.float64).to(dtype)
        made.append(whole[1 : length + 1, 1].transpose(0, 1).unsqueeze(0))
    return made


def in_turn(attend: Any, module: nn.Module, states: list[Tensor], lengths: list[int], **kwargs: Any) -> Tensor:
    pieces = zip(*(torch.split(state, lengths, dim=2) for state in states), strict=True)
    return torch.cat([attend(module, *piece, **kwargs)[0] for piece in pieces], dim=1)


ARGUMENTS: dict[str, Any] = {"attention_mask": None, "scaling": 0.3, "dropout": 0.0, "is_causal": False}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_a_call_for_each(name: str, groups: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, module = LENGTHS[name], Attention(groups)
    states = inputs(sum(lengths), groups=groups)
    arguments = ARGUMENTS | {"is_causal": is_causal}
    expected = in_turn(sdpa_attention_forward, module, states, lengths, **arguments)
    calls = Counted(monkeypatch)
    for attend in (sdpa_attention_forward, native_gqa(sdpa_attention_forward)):
        calls.rows.clear()
        got = segment_attention(attend, module, *states, lengths, **arguments)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert got.stride() == expected.stride()
        assert len(calls.rows) == len(set(lengths))
        assert sum(calls.rows) == len(lengths)
    assert not backend.fallbacks()


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_further_from_fp64_than_a_call_for_each(name: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS[name]
    states = inputs(sum(lengths), dtype, value_dim=VALUE_DIM)
    exact = in_turn(sdpa_attention_forward, Attention(), [state.double() for state in states], lengths, **ARGUMENTS)
    own = in_turn(sdpa_attention_forward, Attention(), states, lengths, **ARGUMENTS)
    got = segment_attention(sdpa_attention_forward, Attention(), *states, lengths, **ARGUMENTS)
    assert_as_exact_as(own, got, exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", LENGTHS)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS[name]
    states = [state.clone().requires_grad_() for state in inputs(sum(lengths))]
    direction = torch.randn(1, sum(lengths), HEADS, HEAD_DIM, dtype=torch.float64)
    expected = torch.autograd.grad(
        in_turn(sdpa_attention_forward, Attention(), states, lengths, attention_mask=None), states, direction
    )
    calls = Counted(monkeypatch)
    got = torch.autograd.grad(
        segment_attention(sdpa_attention_forward, Attention(), *states, lengths, attention_mask=None),
        states,
        direction,
    )
    for one, other in zip(got, expected, strict=True):
        assert_same_gradient(other, one)
    assert calls.rows == [len(list(run)) for _, run in itertools.groupby(lengths)], "neighbours alone share a call"


def eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any):
    """What a file or a user brings: here its result depends on how many rows there are."""
    weights = (query @ key.mT).softmax(-1) / query.shape[0]
    return (weights @ value).transpose(1, 2), weights


REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "other_function": (eager, (), {}),
    "dropout": (sdpa_attention_forward, (), {"dropout": 0.5, "attention_mask": None}),
    "argument": (sdpa_attention_forward, (), {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.float64)}),
    "argument by position": (sdpa_attention_forward, (torch.zeros(1, 1, 1, 1, dtype=torch.float64),), {}),
    "a bias": (sdpa_attention_forward, (None,), {"position_bias": torch.ones(1, 1, 1, 1, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_call_for_each_segment_has_one(name: str) -> None:
    attend, args, kwargs = REFUSED[name]
    lengths, states, module = [4, 4, 2], inputs(10), Attention()
    torch.manual_seed(0)
    pieces = zip(*(torch.split(state, lengths, dim=2) for state in states), strict=True)
    expected = [attend(module, *piece, *args, **kwargs) for piece in pieces]
    drawn = torch.rand(1)
    torch.manual_seed(0)
    got, weights = segment_attention_weights(attend, module, *states, lengths, *args, **kwargs)
    assert torch.equal(got, torch.cat([output for output, _ in expected], dim=1))
    assert torch.equal(torch.rand(1), drawn)
    for one, (_, other) in zip(weights, expected, strict=True):
        assert one is other is None or torch.equal(one, other)
    reason = "argument" if name in ("argument by position", "a bias") else name
    assert backend.fallbacks() == {("segment_attention", reason): 1}
    assert backend.last_reasons(module) == {"": f"segment_attention: {reason}"}


def test_weights_that_nobody_computes() -> None:
    states = inputs(11)
    got, weights = segment_attention_weights(sdpa_attention_forward, Attention(), *states, [4, 4, 3], None)
    assert weights == [None, None, None]
    expected = in_turn(sdpa_attention_forward, Attention(), states, [4, 4, 3], attention_mask=None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4, 5, 100])
def test_sizes_as_one_number(size: int) -> None:
    states = inputs(10)
    pieces = zip(*(torch.split(state, size, dim=2) for state in states), strict=True)
    expected = torch.cat([sdpa_attention_forward(Attention(), *piece, None)[0] for piece in pieces], dim=1)
    got = segment_attention(sdpa_attention_forward, Attention(), *states, size, None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not backend.fallbacks()


@pytest.mark.parametrize("sizes", [[4, 4], [4, 4, 4], [-1, 11], [], 0, -3, None], ids=str)
def test_sizes_that_fit_nothing_fail_as_they_did(sizes: Any) -> None:
    states = inputs(10)
    with pytest.raises((RuntimeError, ZeroDivisionError, TypeError, AttributeError)) as wanted:
        in_turn(sdpa_attention_forward, Attention(), states, sizes, attention_mask=None)
    with pytest.raises(type(wanted.value), match=re.escape(str(wanted.value)[:40])):
        segment_attention(sdpa_attention_forward, Attention(), *states, sizes, attention_mask=None)


@pytest.mark.parametrize("lengths", [[5, 0, 5], [0, 4, 6], [0]])
def test_an_empty_segment_is_what_it_was(lengths: list[int]) -> None:
    """transformers 5.24 refuses it, earlier ones do not; a function that takes it gets it."""
    states, seen = inputs(sum(lengths)), []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None) -> tuple[Tensor, None]:
        seen.append(query.shape[2])
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    got = segment_attention(attend, Attention(), *states, lengths, None)
    assert got.shape == (1, sum(lengths), HEADS, HEAD_DIM)
    assert seen == lengths
    results = []
    for run in (in_turn, segment_attention):
        try:
            given = (*states, lengths) if run is segment_attention else (states, lengths)
            results.append(run(sdpa_attention_forward, Attention(), *given, attention_mask=None))  # type: ignore[operator]
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1] if isinstance(results[0], str) else torch.equal(results[0], results[1])


def test_several_rows_take_a_call_for_each_segment() -> None:
    states = [torch.cat([state, state + 1]) for state in inputs(9)]
    got = segment_attention(sdpa_attention_forward, Attention(), *states, [3, 3, 3], attention_mask=None)
    assert torch.equal(got, in_turn(sdpa_attention_forward, Attention(), states, [3, 3, 3], attention_mask=None))
    assert backend.fallbacks() == {("segment_attention", "shape"): 1}


def test_more_segments_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MOST_ROWS", 3)
    lengths = [2] * 7 + [3] * 2 + [2]
    states = inputs(sum(lengths))
    expected = in_turn(sdpa_attention_forward, Attention(), states, lengths, attention_mask=None)
    calls = Counted(monkeypatch)
    got = segment_attention(sdpa_attention_forward, Attention(), *states, lengths, attention_mask=None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert calls.rows == [3, 3, 2, 2]


def test_equal_segments_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    states, seen = inputs(12), []
    plain = nn.functional.scaled_dot_product_attention

    def looking(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query.untyped_storage().data_ptr())
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", looking)
    segment_attention(sdpa_attention_forward, Attention(), *states, [4, 4, 4], attention_mask=None)
    assert seen == [states[0].untyped_storage().data_ptr()]


def test_compiles_whole_as_the_loop_does() -> None:
    module, states = Attention(), inputs(10, torch.float32)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return segment_attention(sdpa_attention_forward, module, query, key, value, [4, 4, 2], **ARGUMENTS)

    got = torch.compile(packed, backend="eager", fullgraph=True)(*states)
    expected = in_turn(sdpa_attention_forward, module, states, [4, 4, 2], **ARGUMENTS)
    torch.testing.assert_close(got, expected)


def test_compiles_with_lengths_on_the_device() -> None:
    module, states = Attention(), inputs(10, torch.float32)

    def packed(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
        return segment_attention(sdpa_attention_forward, module, query, key, value, sizes.tolist(), **ARGUMENTS) + 1

    compiled = torch.compile(packed, backend="eager")
    for sizes in ([4, 4, 2], [5, 5], [1, 8, 1]):
        expected = in_turn(sdpa_attention_forward, module, states, sizes, **ARGUMENTS) + 1
        torch.testing.assert_close(compiled(*states, torch.tensor(sizes)), expected)


def swapped(attend: Any, tensors: Any, lengths: list[int]) -> Tensor:
    """The operator with two segments in each other's place."""
    out = BY_LENGTH(attend, tensors, lengths)
    first, second = lengths[0], lengths[1]
    return torch.cat([out[:, first : first + second], out[:, :first], out[:, first + second :]], dim=1)


def taken_for_equal(attend: Any, tensors: Any, lengths: list[int]) -> Tensor:
    """The operator where segments count as equally long."""
    whole = sum(lengths)
    fair = whole // len(lengths) if whole % len(lengths) == 0 else whole
    return BY_LENGTH(attend, tensors, [fair] * (whole // fair))


BY_LENGTH = operator._by_length


@pytest.mark.parametrize("bug", [swapped, taken_for_equal])
def test_a_planted_bug_is_seen(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = inputs(12)
    lengths = [5, 3, 4]
    expected = in_turn(sdpa_attention_forward, Attention(), states, lengths, attention_mask=None)
    monkeypatch.setattr(operator, "_by_length", bug)
    got = segment_attention(sdpa_attention_forward, Attention(), *states, lengths, attention_mask=None)
    assert not torch.allclose(got, expected)
