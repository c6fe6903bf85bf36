"""What repeats the heads of a tensor, in which spelling, and what only looks like it."""

from __future__ import annotations

import textwrap

import libcst as cst
import pytest

from rewrite.analysis.patterns.expansion import HEADS_FIRST, HEADS_THIRD, NotAnExpansion, expansion
from rewrite.analysis.terms.computation import body
from rewrite.analysis.tree.module import Module

REPEATS = {
    "interleaved": "return x.repeat_interleave(n, dim=1)",
    "interleaved by a function": "return torch.repeat_interleave(input=x, repeats=n, dim=-3)",
    "expanded": "return x[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2)",
    "expanded at its place": """
        y = torch.unsqueeze(x, 2).expand(x.size(0), x.size(1), n, x.size(2), x.size(3))
        return y.reshape(x.shape[0], -1, x.shape[2], x.shape[3])
    """,
    "sizes in another order": """
        b, h, s, d = x.shape
        return x.unsqueeze(-3).expand(b, h, n, s, d).contiguous().view(b, n * h, s, d)
    """,
    "no copy of one": """
        b, h, s, d = x.size()
        if 1 != n:
            x = x[:, :, None, :, :].expand((b, h, n, s, d)).reshape((b, h * n, s, d))
        return x
    """,
    "nothing to do first": """
        if n == 1:
            return x
        else:
            return torch.stack([x] * n, dim=2).flatten(start_dim=1, end_dim=2)
    """,
    "tiled behind": """
        sizes = x.shape[0], x.shape[1] * n, x.shape[2], x.shape[3]
        return x.unsqueeze(2).repeat(1, 1, n, 1, 1).view(sizes)
    """,
    "turned on the way": "return x.transpose(1, 2).repeat_interleave(n, 2).permute(0, 2, 1, 3)",
}
OTHERS = {
    "heads n times over": ("return x.repeat(1, n, 1, 1)", "in a row"),
    "copies in front": ("return x[:, None].expand(-1, n, -1, -1, -1).flatten(1, 2)", "in a row"),
    "columns": ("return x.repeat_interleave(n, dim=3)", "dimension 3"),
    "two dimensions": ("return x.repeat_interleave(n, 1).repeat_interleave(2, 2)", "several"),
    "a part": ("return x[:, 1:].repeat_interleave(n, dim=1)", "part"),
    "scaled": ("return x.repeat_interleave(n, dim=1) * 2", "mul"),
    "nothing": ("return x.transpose(1, 2).transpose(2, 1)", "longer"),
    "by another test": ("return x if n == 2 else x.repeat_interleave(n, dim=1)", "choice"),
}


def source(text: str) -> str:
    return f"import torch\n\ndef f(x, n):\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\n"


@pytest.mark.parametrize("name", REPEATS)
def test_a_repetition_of_heads(name: str) -> None:
    module = Module(cst.parse_module(source(REPEATS[name])))
    found = expansion(body(module.functions["f"], module))
    assert (str(found.tensor), str(found.times), found.heads) == ("x", "n", HEADS_FIRST)


def test_heads_may_be_the_third_dimension() -> None:
    module = Module(cst.parse_module(source("return x.repeat_interleave(n, dim=2)")))
    assert expansion(body(module.functions["f"], module)).heads == HEADS_THIRD


@pytest.mark.parametrize("name", REPEATS)
def test_which_is_what_it_computes(name: str) -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(source(REPEATS[name]), names)
    for times in (1, 3):
        x = torch.randn(2, 3, 4, 5)
        assert names["f"](x, times).equal(x.repeat_interleave(times, dim=1))  # type: ignore[operator]


@pytest.mark.parametrize("name", OTHERS)
def test_something_else(name: str) -> None:
    text, missing = OTHERS[name]
    module = Module(cst.parse_module(source(text)))
    with pytest.raises(NotAnExpansion, match=missing):
        expansion(body(module.functions["f"], module))
