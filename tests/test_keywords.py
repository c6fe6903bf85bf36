"""Every reader of torch's functions takes every keyword of torch's own signatures, or says that it does not."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import pytest
import torch

from rewrite.analysis.patterns import axes
from rewrite.analysis.terms import spelling
from rewrite.analysis.terms.computation import NotComputable, body
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import Module
from rewrite.codemod.passes import rewrite_text
from rewrite.transforms import select

FUNCTIONS = sorted(
    name
    for name in {*spelling.ARGUMENTS, *spelling.ALIASES, *spelling._RULES, *axes._RULES}
    if hasattr(torch.ops.aten, name.rpartition(".")[2])
)
WHERE_IT_LIES = {"memory_format", "non_blocking", "copy", "device", "layout", "pin_memory"}
"""Keywords that change no number and no dimension."""
AXES = tuple((Term("size", (), name),) for name in ("B", "H", "S", "D"))


def calls(function: str) -> Iterator[tuple[str, str, str]]:
    """Yield a call of `function` with nothing but what it needs, the same with one keyword more, and that one's name.

    They are functions and methods of `x`, by the signatures of torch; what is given stands in the parameters `y`, `z`
    and `p`; where there is a `dim`, also along the second dimension.
    """
    name = function.rpartition(".")[2]
    overloads = getattr(torch.ops.aten, name)
    for overload in overloads.overloads():
        first, *rest = getattr(overloads, overload)._schema.arguments
        needed = [argument for argument in rest if argument.default_value is None and _is_needed(argument)]
        given = dict(zip((argument.name for argument in needed), "yzuvw", strict=False))
        optional = [argument.name for argument in rest if argument not in needed and argument.name != "out"]
        tensor = "x" if str(first.type) == "Tensor" else "(x, x)"
        for keyword in optional:
            named = ", ".join(f"{key}={value}" for key, value in given.items())
            placed = ", ".join(given.values())
            along = [
                ", ".join(filter(None, (inside, "dim=1")))
                for inside in (named, placed)
                if "dim" in optional and keyword != "dim"
            ]
            for inside in dict.fromkeys((named, placed, *along)):
                few = ", ".join(filter(None, (tensor, inside)))
                yield f"torch.{function}({few})", f"torch.{function}({few}, {keyword}=p)", keyword
                if tensor == "x" and function == name:
                    more = ", ".join(filter(None, (inside, f"{keyword}=p")))
                    yield f"x.{name}({inside})", f"x.{name}({more})", keyword


def _is_needed(argument: torch._C.Argument) -> bool:
    return not (str(argument.type).startswith("Optional") or argument.kwarg_only or argument.has_default_value())


def read(text: str) -> Term | None:
    """Return what a call computes, None where that is not understood."""
    module = Module(cst.parse_module(f"import torch\ndef f(x, y, z, u, v, w, p):\n    return {text}\n"))
    try:
        return body(module.functions["f"], module)
    except NotComputable:
        return None


def moved(term: Term) -> axes.Axes | None:
    """Return the dimensions of a result, None where they are not understood."""
    try:
        return axes.axes_of(term, Term("parameter", (), "x"), AXES)
    except axes.NotRegrouped:
        return None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_keyword_is_passed_over(function: str) -> None:
    for plain, with_keyword, keyword in calls(function):
        one, other = read(plain), read(with_keyword)
        assert other is None or one != other or keyword in WHERE_IT_LIES, with_keyword
        if other is not None and keyword not in WHERE_IT_LIES and (dimensions := moved(other)) is not None:
            assert dimensions != moved(one) if one is not None else True, with_keyword


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_keyword_ends_a_rewriting(function: str) -> None:
    methods = [
        f"""
    def m{number}(self, q, x, y, z, u, v, w, p):
        x = {text}
        return F.scaled_dot_product_attention(q, x, x) + torch.matmul(q, {text})
"""
        for number, text in enumerate(dict.fromkeys(call for _, call, _ in calls(function)))
    ]
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Subject(nn.Module):\n"
    rewrite_text(head + "".join(methods or ["    pass\n"]), select())


def test_every_signature_was_read() -> None:
    assert {"repeat_interleave", "softmax", "cat", "mean"} <= {*FUNCTIONS}
    assert {keyword for _, _, keyword in calls("repeat_interleave")} >= {"dim", "output_size"}
