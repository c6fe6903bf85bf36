"""Projections that a comprehension calls: `q, k, v = (p(x) for p in (self.wq, self.wk, self.wv))`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.projections.projections import Group, merge, projection_groups
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, self_attribute, walk
from rewrite.analysis.tree.nodes import replace_nodes
from rewrite.analysis.tree.proposal import Candidate, Edit, Found, Skip

_LATER = (cst.Lambda, cst.BaseComp, cst.NamedExpr, cst.Await, cst.Yield)


@dataclass(frozen=True)
class Comprehended:
    """A statement that unpacks a comprehension over attributes."""

    owner: ClassInfo
    method: cst.FunctionDef
    line: cst.SimpleStatementLine
    attributes: tuple[str, ...]
    unrolled: tuple[cst.SimpleStatementLine, ...]
    """The same, each element written out."""

    def candidate(self) -> Candidate:
        """Return the candidate that stands for it."""
        return Candidate(self.line, f"{self.owner.name}.{self.method.name.value}", ", ".join(self.attributes))


def comprehended(module: Module) -> Iterator[Comprehended]:
    """Yield every comprehension that calls attributes, each once, in source order."""
    for owner, _, method in module.methods():
        for node in walk(method.body):
            if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
                small = node.body[0]
                if isinstance(small, cst.Assign) and (found := _written_out(small)) is not None:
                    attributes, elements = found
                    if all(module.assignments(owner, attribute) for attribute in attributes):
                        yield Comprehended(owner, method, node, attributes, _lines(node, small, elements))


def merge_comprehended(found: Comprehended, module: Module) -> Found | Skip:
    """Return the edit that writes the elements out and makes one product of their calls, or why there is none.

    Each element is written out as it stands, so that what holds of calls one after the other holds of them.
    """
    trial = Module(_with(module.tree, {id(found.line): found.unrolled}))
    groups = [group for group in projection_groups(trial) if _is_of(group, found)]
    if len(groups) != 1:
        return Skip("not_linear", module.code(found.line))
    merged = merge(groups[0], trial)
    if isinstance(merged, Skip):
        return merged
    done = Module(_with(trial.tree, {id(edit.old): edit.new for edit in merged.edits}))
    method = done.classes[found.owner.name].methods[found.method.name.value]
    return Found((Edit(found.method, (method,)),), merged.uses)


def _with(tree: cst.Module, new: dict[int, tuple[cst.CSTNode, ...]]) -> cst.Module:
    replaced = replace_nodes(tree, {old: tuple(node.deep_clone() for node in nodes) for old, nodes in new.items()})
    if not isinstance(replaced, cst.Module):
        raise TypeError("not a module")
    return replaced


def _is_of(group: Group, found: Comprehended) -> bool:
    named = (group.owner.name, group.method.name.value, tuple(group.attributes))
    return named == (found.owner.name, found.method.name.value, found.attributes)


def _lines(
    line: cst.SimpleStatementLine, small: cst.Assign, elements: list[cst.BaseExpression]
) -> tuple[cst.SimpleStatementLine, ...]:
    """Return a statement for each element; one for all where an element reads what is bound."""
    target = cst.ensure_type(small.targets[0].target, cst.Tuple)
    names = [cst.ensure_type(element.value, cst.Name) for element in target.elements]
    if names_in(elements) & names_in(names):
        value = cst.Tuple([cst.Element(element) for element in elements], lpar=[], rpar=[])
        return (line.with_changes(body=[small.with_changes(value=value)]),)
    plain = cst.SimpleStatementLine([])
    last = len(names) - 1
    return tuple(
        plain.with_changes(
            body=[cst.Assign([cst.AssignTarget(name)], element)],
            leading_lines=() if place else line.leading_lines,
            trailing_whitespace=line.trailing_whitespace if place == last else plain.trailing_whitespace,
        )
        for place, (name, element) in enumerate(zip(names, elements, strict=True))
    )


def _written_out(small: cst.Assign) -> tuple[tuple[str, ...], list[cst.BaseExpression]] | None:
    """Return the attributes that a comprehension runs over, and its elements; None for any other one."""
    made = small.value
    if not isinstance(made, (cst.GeneratorExp, cst.ListComp)) or len(small.targets) != 1:
        return None
    over, target = made.for_in, small.targets[0].target
    plain = not over.ifs and over.inner_for_in is None and over.asynchronous is None
    if not plain or not isinstance(over.target, cst.Name) or not isinstance(over.iter, (cst.Tuple, cst.List)):
        return None
    name, held = over.target.value, [self_attribute(element.value) for element in over.iter.elements]
    starred = any(isinstance(element, cst.StarredElement) for element in over.iter.elements)
    if starred or None in held or len({*held}) < 2 or name == "self":
        return None
    if not isinstance(target, cst.Tuple) or len(target.elements) != len(held):
        return None
    if not all(isinstance(e, cst.Element) and isinstance(e.value, cst.Name) for e in target.elements):
        return None
    reads = [node for node in walk(made.elt) if isinstance(node, cst.Name) and node.value == name]
    calls = [node.func for node in walk(made.elt) if isinstance(node, cst.Call)]
    if any(isinstance(node, _LATER) for node in walk(made.elt)) or len(reads) != 1:
        return None
    if not any(func is reads[0] for func in calls):
        return None
    attributes = tuple(attribute for attribute in held if attribute is not None)
    return attributes, [_of(made.elt, reads[0], attribute) for attribute in attributes]


def _of(element: cst.BaseExpression, name: cst.Name, attribute: str) -> cst.BaseExpression:
    """Return an element of the comprehension for one of the attributes."""
    own = cst.Attribute(cst.Name("self"), cst.Name(attribute))
    written = replace_nodes(element, {id(name): (own,)})
    if not isinstance(written, cst.BaseExpression):
        raise TypeError("not an expression")
    return written
