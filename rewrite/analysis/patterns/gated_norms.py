"""The gated norms of mixers that the runtime computes, recognised by what a class's `forward` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import libcst as cst

from rewrite.analysis.patterns.as_written import why_no_parameter, why_not_as_written
from rewrite.analysis.patterns.norm_patterns import NotProven
from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, Run, unify
from rewrite.analysis.terms.spelling import Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.nodes import parameters

_NORM = """
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

class Norm:
    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.EPS)

    def in_groups(self, x):
        *rows, columns = x.shape
        count = columns // self.SIZE
        return self.norm(x.view(*rows, count, self.SIZE)).view(*rows, count * self.SIZE)

    def gated(self, x, gate):
        if gate is not None:
            x = x * F.silu(gate.float())
        return x

    def forward(self, x, gate):
        return {}
"""
_PATTERNS: Mapping[str, Mapping[str, str]] = {
    "self.WEIGHT * self.in_groups(self.gated(x.float(), gate)).to(x.dtype)": {"gate_first": "True"},
    "(self.WEIGHT * self.norm(x.float()).to(x.dtype) * ACT2FN[self.ACT](gate.float())).to(x.dtype)": {},
    "(self.WEIGHT.float() * self.norm(x.float()) * ACT2FN[self.ACT](gate.float())).to(x.dtype)": {
        "weight_in_fp32": "True"
    },
}
"""What is returned, and the keywords of `gated_norm`."""


def gated_norm_call(info: ClassInfo, module: Module) -> list[str] | NotProven | None:
    """Return the arguments of the `gated_norm` that a class's `forward` computes, None if it computes another thing.

    Raises:
        NotComputable: if it does something that has no canonical form.
    """
    forward = info.methods["forward"]
    term = _computed(forward, info, module)
    for pattern, keywords in _patterns():
        if (bound := next(unify(pattern, term, {}), None)) is not None:
            why = why_not_as_written(info, forward, module) or why_no_parameter(bound["WEIGHT"].value, info, module)
            return NotProven(why) if why else _arguments(bound, keywords)
    return None


def _arguments(bound: Bindings, keywords: Mapping[str, str]) -> list[str]:
    own = {
        name: term.value if term.op == "constant" else f"self.{term.value}"
        for name, term in bound.items()
        if name.isupper()
    }
    given = [bound["x"].value, bound["gate"].value, own["WEIGHT"], own["EPS"], own.get("ACT", '"silu"')]
    given += [own["SIZE"]] if "SIZE" in own else []
    return [*given, *(f"{name}={value}" for name, value in keywords.items())]


@cache
def _patterns() -> list[tuple[Term, Mapping[str, str]]]:
    found = []
    for returned, keywords in _PATTERNS.items():
        module = Module(cst.parse_module(_NORM.format(returned)))
        found.append((_computed(module.classes["Norm"].methods["forward"], module.classes["Norm"], module), keywords))
    return found


def _computed(function: cst.FunctionDef, info: ClassInfo, module: Module) -> Term:
    environment = {name: Term("parameter", (), name) for name in parameters(function) if name != "self"}
    return _Shaped(module, info, MAX_DEPTH).function(function, environment)


@dataclass
class _Shaped(Run):
    """One symbolic execution that takes shapes apart, the leading dimensions together."""

    def bind(self, target: cst.BaseExpression, value: Term, environment: Bindings) -> None:
        """Give the targets of an assignment their values; `*rows, columns = shape` from its end."""
        elements = target.elements if isinstance(target, (cst.Tuple, cst.List)) else ()
        if not elements or not isinstance(elements[0], cst.StarredElement):
            super().bind(target, value, environment)
            return
        rest = elements[1:]
        none = Term("name", (), "None")
        self.bind(
            elements[0].value, make("index", value, make("slice", none, constant(-len(rest)), none)), environment
        )
        for place, element in enumerate(rest):
            self.bind(element.value, make("index", value, constant(place - len(rest))), environment)

    def element(self, node: cst.Arg | cst.BaseElement, environment: Bindings) -> Term:
        """Return the term of an argument or element, `star` of one that stands for several."""
        if isinstance(node, cst.StarredElement) or (isinstance(node, cst.Arg) and node.star == "*"):
            return Term("star", (self.expression(node.value, environment),))
        return super().element(node, environment)
