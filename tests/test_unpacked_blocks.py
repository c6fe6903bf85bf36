"""A layer that unpacks what a block returns, if that is a tuple, where the block is known to return a tensor."""

from __future__ import annotations

import pytest

from rewrite.analysis.decode.layer_methods import _unpacked
from rewrite.analysis.terms.spelling import Term, constant, make

HIDDEN = Term("parameter", (), "hidden_states")


def unpacked(attribute: str, kind: str) -> tuple[Term, Term]:
    """What a layer returns that unpacks `self.<attribute>(x)` if it is a <kind>, and what one that does not."""
    call = Term("call", (Term("attribute", (), attribute), HIDDEN))
    test = Term("isinstance", (call, Term("name", (), kind)))
    whole = Term("select", (test, Term("index", (call, constant(0))), call))
    return make("add", HIDDEN, whole), make("add", HIDDEN, call)


def test_a_block_returns_a_tensor() -> None:
    whole, plain = unpacked("mlp", "tuple")
    assert _unpacked(whole, {"mlp": ()}) == plain


@pytest.mark.parametrize(
    ("attribute", "kind", "blocks"),
    [
        ("mlp", "tuple", {}),
        ("mlp", "tuple", {"other": ()}),
        ("self_attn", "tuple", {"self_attn": ("position_embeddings", "past_key_values")}),
        ("mlp", "Tensor", {"mlp": ()}),
    ],
    ids=["no block", "of another block", "an attention", "another class"],
)
def test_anything_else_stays(attribute: str, kind: str, blocks: dict[str, tuple[str, ...]]) -> None:
    whole, _ = unpacked(attribute, kind)
    assert _unpacked(whole, blocks) == whole
