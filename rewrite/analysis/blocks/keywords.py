"""Keywords that reach a call through a mapping: `**kwargs`, or a dictionary that the method itself makes.

What the caller of the model gave besides what the step decides is passed on by a method's own `**kwargs`, and left out
of the terms. Any other mapping is taken apart into the keywords that it holds, or what is called with it has no term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import effects_of
from rewrite.analysis.terms.computation import GATHERED, Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import walk

_ADDING = ("setdefault", "update", "__setitem__")
_TAKING = ("pop", "popitem", "clear")


@dataclass
class Gathering(Run):
    """A symbolic execution that sees which keywords a `**` argument passes."""

    passed_on: set[str] = field(default_factory=set)
    """The parameters that hold what the caller of the model gave besides: `**kwargs` of the outermost method."""

    def function(self, function: cst.FunctionDef, environment: Bindings) -> Term:
        """Return what the function returns where its parameters are bound as in `environment`."""
        starred = function.params.star_kwarg
        if isinstance(starred, cst.Param):
            name = starred.name.value
            if environment.setdefault(name, Term("parameter", (), name)).op == "parameter":
                self.passed_on.add(name)
        return super().function(function, environment)

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute one simple statement; a dictionary that a call is given as keywords is read item by item."""
        if isinstance(small, cst.Assign) and len(small.targets) == 1 and _is_display(small.value):
            target = small.targets[0].target
            if isinstance(target, cst.Name) and target.value in self._unpacked(small):
                environment[target.value] = self.mapping(small.value, environment)
                return
        super().small(small, environment)

    def _unpacked(self, small: cst.Assign) -> set[str]:
        """Return the names that stand behind `**` in the function that a statement is part of."""
        inside = next(n for n in self.module.ancestors(small) if isinstance(n, (cst.FunctionDef, cst.Module)))
        return {name for node in walk(inside) for name in _starred(node)}

    def starred_keywords(self, node: cst.Call, environment: Bindings) -> Bindings:
        """Return the keywords that the `**` arguments of a call are seen to stand for."""
        found: Bindings = {}
        for argument in (argument for argument in node.args if argument.star == "**"):
            found |= self.items(argument.value, environment)
        return found

    def items(self, node: cst.BaseExpression, environment: Bindings) -> Bindings:
        """Return the items of a mapping.

        Raises:
            NotComputable: if they are not seen.
        """
        given = self.mapping(node, environment)
        if given.op != GATHERED:
            raise NotComputable(f"what `**{self.module.code(node)}` holds is not seen")
        return {keyword.value: keyword.args[0] for keyword in given.args}

    def mapping(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        """Return the term of a mapping, its items as keywords where they are seen."""
        found: Bindings = {}
        if isinstance(node, cst.Dict):
            for element in node.elements:
                if isinstance(element, cst.StarredDictElement):
                    found |= self.items(element.value, environment)
                    continue
                key = cst.ensure_type(element, cst.DictElement).key
                if not isinstance(key, cst.SimpleString):
                    raise NotComputable(f"a keyword `{self.module.code(key)}`")
                found[str(key.evaluated_value)] = self.expression(element.value, environment)
        elif _is_display(node) and not effects_of(self.module).names.is_bound("dict"):
            for argument in cst.ensure_type(node, cst.Call).args:
                if argument.keyword is not None:
                    found[argument.keyword.value] = self.expression(argument.value, environment)
                else:
                    found |= self.items(argument.value, environment)
        else:
            given = self.expression(node, environment)
            return Term(GATHERED) if given.op == "parameter" and given.value in self.passed_on else given
        return Term(GATHERED, tuple(Term("keyword", (value,), name) for name, value in found.items()))

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call; one that changes a mapping has none."""
        held = node.func.value if isinstance(node.func, cst.Attribute) else None
        if isinstance(held, cst.Name) and held.value in environment:
            given, name = environment[held.value], cst.ensure_type(node.func, cst.Attribute).attr.value
            changes = name in _ADDING or (name in _TAKING and given.op == GATHERED)
            if changes and (given.op == GATHERED or (given.op == "parameter" and given.value in self.passed_on)):
                raise NotComputable(f"a mapping changes: {self.module.code(node.func)}")
        return super().call(node, environment)


def _is_display(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Dict) or m.matches(node, m.Call(func=m.Name("dict")))


def _starred(node: cst.CSTNode) -> Iterator[str]:
    starred = isinstance(node, cst.StarredDictElement) or (isinstance(node, cst.Arg) and node.star == "**")
    if starred and isinstance(node.value, cst.Name):  # type: ignore[attr-defined]
        yield node.value.value  # type: ignore[attr-defined]
