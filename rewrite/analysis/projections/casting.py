"""Subclasses of `nn.Linear` in the file that only cast their parameters, and the mark that says so at run time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.as_written import why_not_as_written
from rewrite.analysis.terms.computation import NotComputable, Pattern, body
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import expression
from rewrite.analysis.tree.proposal import Edit

_MARK = "casts_weight"
_LINEAR = ("torch.nn.Linear", "torch.nn.modules.linear.Linear")
_FORWARD = """
class Cast:
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype){})
"""


@cache
def _patterns() -> tuple[tuple[Pattern, bool], ...]:
    added = ", None if self.bias is None else self.bias.to(x.dtype)"
    return (Pattern(_FORWARD.format("")), False), (Pattern(_FORWARD.format(added)), True)


def adds_bias(name: str, module: Module) -> bool | None:
    """Return whether a class of the file that casts its weight adds its bias, None for a class that does otherwise."""
    info = effects_of(module).names.class_of(name)
    if info is None or len(info.bases) != 1 or info.bases[0] not in _LINEAR or "forward" not in info.methods:
        return None
    if why_not_as_written(info, info.methods["forward"], module):
        return None
    try:
        term = body(info.methods["forward"], module, info)
    except NotComputable:
        return None
    for pattern, adds in _patterns():
        bound = pattern.match(term)
        if bound is not None and all(bound[name].value == name for name in ("weight", "bias") if name in bound):
            return adds
    return None


def marked(names: Iterable[str], module: Module) -> list[Edit]:
    """Return the edits that mark those of the classes that cast their weight and are not marked yet."""
    edits = []
    for name in sorted(names):
        adds = adds_bias(name, module)
        if adds is None:
            continue
        node = module.classes[name].node
        if not any(_MARK in module.code(decorator) for decorator in node.decorators):
            mark = cst.Decorator(expression(f"{_MARK}(bias={adds})"))
            edits.append(Edit(node, (node.with_changes(decorators=[*node.decorators, mark]),)))
    return edits
