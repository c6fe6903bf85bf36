"""An index that is out of range is found on a CPU, before the operator runs on a device where it ends the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rewrite.verify.judging.compare import NotRun
from rewrite.verify.models import indices, model_pair
from rewrite.verify.models.indices import ask, asked_first

aten = torch.ops.aten
TABLE, ROWS = torch.ones(4, 3), torch.tensor([0, 2])
BEYOND = torch.tensor([0, 9])
OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "embedding": lambda at: F.embedding(at, TABLE),
    "embedding, 16 bits": lambda at: F.embedding(at, TABLE.half()),
    "index": lambda at: TABLE[at],
    "index of the second axis": lambda at: TABLE.expand(12, 4, 3)[:, at],
    "index_select": lambda at: TABLE.index_select(0, at),
    "gather": lambda at: TABLE.gather(0, at[:, None]),
    "gather of integers": lambda at: ROWS.gather(0, at - at.clamp(max=1)),
    "index_put": lambda at: TABLE.clone().index_put_((at,), torch.tensor(1.0)),
    "index_copy": lambda at: TABLE.clone().index_copy_(0, at, torch.zeros(2, 3)),
    "index_add": lambda at: TABLE.clone().index_add_(0, at, torch.zeros(2, 3)),
    "scatter": lambda at: TABLE.clone().scatter_(0, at[:, None], 1.0),
    "cross_entropy": lambda at: F.cross_entropy(TABLE[:2], at),
    "cross_entropy, 16 bits": lambda at: F.cross_entropy(TABLE[:2].bfloat16(), at),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were asked on a CPU and refused there, while a CPU is taken for the device."""
    refused: list[str] = []

    def noted(func: Any, args: Any, kwargs: Any) -> None:
        try:
            ask(func, args, kwargs)
        except (IndexError, RuntimeError):
            refused.append(str(func))
            raise

    monkeypatch.setattr(indices, "ask", noted)
    return refused


@pytest.mark.parametrize("name", OPERATORS)
def test_beyond_the_range_is_refused_before_the_operator_runs(name: str, asked: list[str]) -> None:
    with asked_first("cpu"), pytest.raises((IndexError, RuntimeError)):
        OPERATORS[name](BEYOND)
    assert len(asked) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_within_the_range_nothing_changes(name: str, asked: list[str]) -> None:
    expected = OPERATORS[name](ROWS)
    with asked_first("cpu"):
        assert torch.equal(OPERATORS[name](ROWS), expected)
    assert not asked


def test_an_argument_changed_in_place_changes_once() -> None:
    table = torch.zeros(4)
    with asked_first("cpu"):
        table.index_add_(0, ROWS, torch.ones(2))
    assert table.tolist() == [1, 0, 1, 0]


def test_what_asserts_its_values_is_asked_with_them(asked: list[str]) -> None:
    torch.manual_seed(0)
    expected = torch.multinomial(torch.ones(8), 4)
    torch.manual_seed(0)
    with asked_first("cpu"):
        assert torch.equal(torch.multinomial(torch.ones(8), 4), expected)
        with pytest.raises(RuntimeError, match="nan"):
            torch.multinomial(torch.full((4,), float("nan")), 2)
    assert asked == ["aten.multinomial.default"]


def test_what_no_cpu_computes_is_left_to_the_device() -> None:
    with torch.library._scoped_library("there", "FRAGMENT") as library:
        library.define("alone(Tensor values, Tensor indices) -> Tensor")
        ask(torch.ops.there.alone.default, (TABLE, BEYOND), {})
        library.define("refused(Tensor values, Tensor indices) -> Tensor")
        library.impl("refused", lambda values, at: TABLE @ TABLE, "CPU")  # whatever the integers are
        ask(torch.ops.there.refused.default, (TABLE, BEYOND), {})


def test_in_backward_too(asked: list[str]) -> None:
    table = TABLE.clone().requires_grad_()
    with asked_first("cpu"):
        (gradient,) = torch.autograd.grad(F.embedding(ROWS, table).sum(), table)
    assert gradient.sum() == 6


def test_the_originals_side_is_asked_first(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    monkeypatch.setattr(model_pair, "asked_first", lambda: asked_first("cpu"))
    with pytest.raises(NotRun, match="IndexError"):
        model_pair.on_original(OPERATORS["embedding"], BEYOND)
    assert asked == ["aten.embedding.default"]


def test_on_a_cpu_nothing_is_asked(asked: list[str]) -> None:
    with asked_first(), pytest.raises(IndexError):
        OPERATORS["embedding"](BEYOND)
    assert not asked


def test_attention_refuses_what_it_refuses_unwatched() -> None:
    states, mask = torch.randn(2, 4, 12, 8, dtype=torch.float64), torch.zeros(1, 1, 1, 1, 12, 12, dtype=torch.float64)
    for context in (contextlib.nullcontext(), asked_first("cpu")):
        with context, pytest.raises(RuntimeError, match="broadcast"):
            F.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    expected = F.scaled_dot_product_attention(states, states, states, attn_mask=mask[0, 0])
    with asked_first("cpu"):
        assert torch.equal(F.scaled_dot_product_attention(states, states, states, attn_mask=mask[0, 0]), expected)
