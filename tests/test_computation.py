"""The canonical form of function bodies: what is the same computation, and what is not."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.terms.computation import NotComputable, Pattern, body
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import Module


def returned(text: str, prefix: str = "") -> Term:
    """Return the term of a function `f(x, y)` with the body `text`."""
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    module = Module(cst.parse_module(f"import torch\nfrom torch import nn\n{prefix}\ndef f(x, y):\n{lines}\n"))
    return body(module.functions["f"], module)


SAME = [
    ("x.float()", "x.to(torch.float32)"),
    ("x.float()", "x.to(dtype=torch.float)"),
    ("x.float()", "x.type(torch.float32)"),
    ("x.to(y.dtype)", "x.type_as(y)"),
    ("x.pow(2)", "x**2"),
    ("x.pow(2)", "x * x"),
    ("torch.square(x)", "torch.pow(x, 2.0)"),
    ("torch.rsqrt(x)", "x.rsqrt()"),
    ("torch.rsqrt(x)", "torch.pow(x, -0.5)"),
    ("x**-0.5", "1 / torch.sqrt(x)"),
    ("x.mean(-1, keepdim=True)", "torch.mean(x, dim=-1, keepdim=True)"),
    ("x.mean(-1, keepdim=True)", "x.mean(dim=[-1], keepdim=True)"),
    ("x + y", "y + x"),
    ("x - y", "-y + x"),
    ("x * -y", "-(y * x)"),
    ("x.shape[-1]", "x.size(-1)"),
    ("x.shape[-1]", "x.size()[-1]"),
    ("x[..., 0::2]", "x[..., ::2]"),
    ("x[:, None]", "x.unsqueeze(1)"),
    ("x[:, :, None, :]", "torch.unsqueeze(x, dim=2)"),
    ("torch.cat((x, y), dim=-1)", "torch.concat([x, y], -1)"),
    ("x.mean(axis=-1)", "x.mean(-1)"),
    ("x.float().float()", "x.float()"),
    ("x.to(x.dtype)", "x"),
    ("1.0 + x", "x + 1"),
    ("torch.add(x, y)", "x.add(other=y)"),
    ("x.transpose(1, 2)", "torch.swapaxes(x, axis0=2, axis1=1)"),
    ("x.transpose(1, 2)", "x.permute(0, 2, 1, 3)"),
    ("x.permute(2, 0, 1)", "torch.permute(x, (2, 0, 1))"),
    ("torch.nn.functional.softmax(x, dim=-1)", "x.softmax(-1)"),
    ("x if y is None else 1", "1 if y is not None else x"),
    ("x if not y == 2 else 1", "x if y != 2 else 1"),
    ("x if y > 3 else 1", "x if 3 < y else 1"),
    ("x if 'a' == y else 1", 'x if y == "a" else 1'),
    ("x if y not in (1, 2) else 3", "3 if y in (1, 2) else x"),
    ("x + y", "torch.add(x, y)"),
    ("x + y", "y.add(x)"),
    ("x + y", "torch.add(input=x, other=y)"),
    ("x + y * 2", "torch.add(x, y, alpha=2)"),
    ("x - y", "torch.sub(x, other=y, alpha=1)"),
    ("x * y", "torch.mul(x, other=y)"),
    ("x / y", "x.div(y)"),
    ("x / torch.sqrt(y)", "x * torch.rsqrt(y)"),
    ("x / y.sqrt()", "x * y**-0.5"),
    ("torch.reciprocal(y.sqrt())", "y.rsqrt()"),
    ("x.mean(-1).unsqueeze(-1)", "x.mean(-1, keepdim=True)"),
    ("x.mean(-1)[..., None]", "x.mean(-1, keepdim=True)"),
    ("x.var(-1, unbiased=False, keepdim=True)", "(x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)"),
    ("torch.var(x, -1, correction=0, keepdim=True)", "x.var(dim=-1, keepdim=True, unbiased=False)"),
    ("x if y is None else 1", "1 if y is not None else x"),
    ("x if y == 1 else 2", "2 if y != 1 else x"),
    ("x if not y else 2", "2 if y else x"),
    ("x if not (y is None) else 2", "x if y is not None else 2"),
    ("x if y < 1 else 2", "x if 1 > y else 2"),
    ("x if y >= 1 else 2", "x if 1 <= y else 2"),
    ("x if None is y else 2", "x if y is None else 2"),
    ("x if y else x", "x"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_same_computation(first: str, second: str) -> None:
    assert returned(f"return {first}") == returned(f"return {second}")


DIFFERENT = [
    ("x.select(0, 0)", "0"),
    ("torch.select(x, 1, 2)", "1 if x else 2"),
    ("x.index(y)", "x[y]"),
    ("x.cast(torch.float32)", "x.float()"),
    ("tuple(x.chunk(2))[0]", "x.chunk(2)"),
    ("y * x.to(y.dtype)", "(y * x).to(y.dtype)"),
    ("(1 + x).float()", "1 + x.float()"),
    ("x - y", "y - x"),
    ("x / y", "y / x"),
    ("(x + y) + 1", "x + (y + 1)"),
    ("torch.cat((x, -y), dim=-1)", "torch.cat((-x, y), dim=-1)"),
    ("x.mean(-1)", "x.mean(1)"),
    ("x.permute(1, 2, 0)", "x.permute(2, 0, 1)"),
    ("x if y < 3 else 1", "1 if y < 3 else x"),
    ("x if not y < 3 else 1", "x if y > 3 else 1"),
    ("torch.add(x, y)", "torch.add(x, y, alpha=2)"),
    ("x.mean(-1)", "x.mean(-1, keepdim=True)"),
    ("x[..., ::2]", "x[..., 1::2]"),
    ("x.float()", "x.half()"),
    ("x.to(y)", "x.to(y.dtype)"),
    ("(y * x.float()).to(x.dtype)", "y * x"),
    ("torch.add(x, y, alpha=2)", "x + y"),
    ("torch.add(x, y, out=x)", "x + y"),
    ("x.var(-1, keepdim=True)", "x.var(-1, unbiased=False, keepdim=True)"),
    ("x.mean(-1).unsqueeze(1)", "x.mean(-1, keepdim=True)"),
    ("x if y < 1 else 2", "2 if y > 1 else x"),
    ("x if y < 1 else 2", "2 if y >= 1 else x"),
    ("x if y < 1 else 2", "x if y <= 1 else 2"),
]


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_computation(first: str, second: str) -> None:
    assert returned(f"return {first}") != returned(f"return {second}")


BODIES = [
    "x = x + y\nx = x * y\nreturn x",
    '"""A docstring."""\ntotal: torch.Tensor = x + y\n# a comment\nreturn total * y',
    "a, b = x, y\na = b + a\nreturn (a * b)",
    "return helper(x, y) * y",
    "return helper(b=x, a=y) * y",
]


@pytest.mark.parametrize("text", BODIES)
def test_locals_and_helpers_are_inlined(text: str) -> None:
    assert returned(text, "def helper(a, b=0):\n    return a + b\n") == returned("return (x + y) * y")


def test_dtype_is_the_one_before_the_cast() -> None:
    text = "dtype = x.dtype\nx = x.float()\nreturn (x * y).to(dtype)"
    assert returned(text) == returned("return (x.float() * y).to(x.dtype)")
    assert returned(text) != returned("x = x.float()\nreturn (x * y).to(x.dtype)")


def test_a_conditional_assignment_is_a_conditional_expression() -> None:
    assert returned("if y:\n    x = x + 1\nreturn x") == returned("return x + 1 if y else x")


RETURNS = [
    "if y:\n    return x\nreturn x + 1",
    "if y:\n    return x\nelse:\n    return x + 1",
    "if not y:\n    return x + 1\nreturn x",
    "if not y:\n    x = x + 1\nreturn x",
    "if y: return x\nx = x + 1\nreturn x",
    "if y:\n    z = x\nelse:\n    return x + 1\nreturn z",
]


@pytest.mark.parametrize("text", RETURNS)
def test_an_early_return_is_a_conditional_expression(text: str) -> None:
    assert returned(text) == returned("return x if y else x + 1")


def test_what_follows_an_early_return_stands_under_its_negation() -> None:
    chain = "if y == 1:\n    return x\nelif y == 2:\n    x = x + 1\n    if x == 3:\n        return y\nreturn x"
    assert returned(chain) == returned("return x if y == 1 else ((y if x + 1 == 3 else x + 1) if y == 2 else x)")


REFUSED = [
    "x += y\nreturn x",
    "x[0] = y\nreturn x",
    "for _ in y:\n    x = x + 1\nreturn x",
    "if y:\n    return x",
    "if y:\n    return x\nx = y",
    "if y:\n    return x\nraise y",
    "x.add_(y)\nreturn x",
    "z = x.add_(y)\nreturn x * z",
    "return f(*x)",
    "return [a for a in x]",
    "assert y\nreturn x",
    "y = x",
]


EARLY = [
    "if y is None:\n    return x\nreturn y",
    "if y is not None:\n    return y\nelse:\n    return x",
    "if y is not None:\n    z = y\nelse:\n    return x\nreturn z",
    "if y is None:\n    if x is x:\n        return x\n    return x\nreturn y",
]


@pytest.mark.parametrize("text", EARLY)
def test_an_early_return_under_a_negated_test_is_one_too(text: str) -> None:
    assert returned(text) == returned("return x if y is None else y")


@pytest.mark.parametrize("text", REFUSED)
def test_side_effects_and_control_flow_have_no_canonical_form(text: str) -> None:
    with pytest.raises(NotComputable):
        returned(text)


def test_repeated_inlining_is_bounded() -> None:
    with pytest.raises(NotComputable):
        returned("\n".join(["x = x * y + x"] * 40) + "\nreturn x")


def test_pattern_names_what_it_finds() -> None:
    pattern = Pattern("def f(a, b, NUMBER):\n    return a.float() * b + NUMBER\n")
    found = pattern.match(returned("z = y.to(torch.float32)\nreturn 3 + x * z"))
    assert found is not None
    assert {name: term.value for name, term in found.items()} == {"a": "y", "b": "x", "NUMBER": "3"}


def test_one_parameter_is_not_two() -> None:
    assert Pattern("def f(a, b):\n    return a * b\n").match(returned("return x * x")) is None
    assert Pattern("def f(a, b):\n    return a + b * a\n").match(returned("return x + y * x")) is not None
    assert Pattern("def f(a, b):\n    return a + b * a\n").match(returned("return x + y * y")) is None
