"""What a method computes in a decode step, on small classes."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.blocks.term_source import NotWritable, source
from rewrite.analysis.blocks.terms import computed_in_step
from rewrite.analysis.decode.layer_methods import _unpacked
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import Term, constant, make
from rewrite.analysis.tree.module import Module

CLASS = """
import torch
from torch import nn


class Counter(nn.Module):
    def forward(self, x):
        self.seen = self.seen + 1
        return x


def rebound(x):
    return x


rebound = torch.compile(rebound)


class Block(nn.Module):
    def __init__(self, config):
        self.proj = nn.Linear(8, 8)
        self.drop = nn.Dropout(config.dropout)
        self.scale = config.scale
        self.melt = nn.ReLU(inplace=True)
        self.counter = Counter()

    def forward(self, x, y=None, past_key_values=None, use_cache=False):
{body}
"""


def computed(body):
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    module = Module(cst.parse_module(CLASS.format(body=lines)))
    info = module.classes["Block"]
    return computed_in_step(info.methods["forward"], module, info), module


def written(body):
    term, module = computed(body)
    return source(term, module)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return self.drop(self.proj(x))", "self.proj(x)"),
        ("return nn.functional.dropout(x, p=0.1, training=self.training)", "x"),
        ("if past_key_values is not None:\n    x = self.proj(x)\nreturn x", "self.proj(x)"),
        ("if past_key_values is None or not use_cache:\n    return x\nreturn self.proj(x)", "self.proj(x)"),
        ("if self.training:\n    x = y\nelse:\n    x = self.proj(x)\nreturn x", "self.proj(x)"),
        ("if y is None:\n    raise ValueError()\nreturn x", "x"),
        ("x = self.proj(x)\nx *= self.scale\nreturn x", "self.proj(x) * self.scale"),
        ("return (x + y) * self.scale", "(x + y) * self.scale"),
        ("return x + y * self.scale", "x + y * self.scale"),
        ("return x if self.a is None or self.b and not self.c else y",) * 2,
        ("return x if (self.a or self.b) and self.c else y",) * 2,
        ("return x - (y - x)", "x + -(y + -x)"),
        ("return self.melt(self.proj(x))", "self.melt(self.proj(x))"),
        ("return nn.functional.dropout(x, 0.0)", "x"),
        ("return self.proj(input=x)", "self.proj(x)"),
        ("if self.scale > 1:\n    return x\nreturn y", "x if 1 < self.scale else y"),
        ("if past_key_values is None:\n    return x\nelse:\n    return self.proj(x)", "self.proj(x)"),
    ],
)  # fmt: skip
def test_what_is_written(body, expected):
    assert written(body) == expected.removeprefix("return ")


@pytest.mark.parametrize(
    "body",
    [
        "residual = self.proj(x)\nh = residual\nh += y\nreturn residual + h",
        "h = self.proj(x)\npart = h[..., :4]\nh *= 2\nreturn part + h",
        "x += y\nreturn x",
        "x[0] = 1\nreturn x",
        "x.mul_(2)\nreturn x",
        "if self.scale > 1:\n    return x",
        "for layer in self.layers:\n    x = layer(x)\nreturn x",
        "return [part for part in x]",
        "_ = self.counter(x)\nreturn x",
        "return self.counter(x) + self.counter(x)",
        "h = self.proj(x)\nreturn h + self.melt(h)",
        "return self.melt(x)",
        "return rebound(x)",
        "return nn.functional.dropout(x, 0.1)",
        "return nn.functional.dropout(x, 0.1, True)",
        "self = y\nreturn self.proj(x)",
        "if self.counter(x) is None:\n    return x\nreturn (yield x)",
    ],
)
def test_what_has_no_canonical_form(body):
    with pytest.raises(NotComputable):
        computed(body)


def test_a_local_of_the_caller_has_no_source():
    with pytest.raises(NotWritable):
        written("return torch.relu(x).sum(-1)")


NEW = "h = x.new_empty(*x.shape[:-1], 8)\n"


def test_a_new_tensor_that_is_written_in_two_parts():
    term, _ = computed(f"{NEW}h[..., :3].copy_(x)\nh[..., 3:].copy_(y)\nreturn self.proj(h)")
    assert str(term).startswith("call(self.proj, joined(x, y, new_empty(x, star(index(shape(x)")


@pytest.mark.parametrize(
    "body",
    [
        "h[..., :3].copy_(x)\nreturn h",
        f"{NEW}h[..., 3:].copy_(y)\nh[..., :3].copy_(x)\nreturn h",
        f"{NEW}h[..., :3].copy_(x)\nh[..., 4:].copy_(y)\nreturn h",
        f"{NEW}h[..., :3].copy_(x)\nh[..., 3:].copy_(y)\nh[..., :3].copy_(y)\nreturn h",
        f"{NEW}h[..., :3, :].copy_(x)\nh[..., 3:, :].copy_(y)\nreturn h",
        f"{NEW}part = h[..., :2]\nh[..., :3].copy_(x)\nh[..., 3:].copy_(y)\nreturn h + part",
        f"{NEW}other = h\nh[..., :3].copy_(x)\nh[..., 3:].copy_(y)\nreturn other",
        f"{NEW}h[..., :3].copy_(x, non_blocking=True)\nh[..., 3:].copy_(y)\nreturn h",
        "h = self.proj(x)\nh[..., :3].copy_(x)\nh[..., 3:].copy_(y)\nreturn h",
    ],
)
def test_tensors_that_are_written_otherwise(body):
    with pytest.raises(NotComputable):
        computed(body)


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
