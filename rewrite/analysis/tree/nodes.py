"""Small questions that transforms ask about expressions and statements, and the code they build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import libcst as cst

from rewrite.analysis.tree.module import Module, kept, names_in, self_attribute, walk

LINE_LENGTH = 119
"""transformers' own line length: generated statements wrap where its formatter would wrap them."""


def expression(text: str) -> cst.BaseExpression:
    """Parse an expression."""
    return cst.parse_expression(text)


def called_attribute(node: cst.CSTNode) -> str | None:
    """Return `x` of the call `self.x(...)`, else None."""
    return self_attribute(node.func) if isinstance(node, cst.Call) else None


def calls_in(node: cst.CSTNode) -> Iterator[cst.Call]:
    """Yield every call below `node`, in source order."""
    return (inner for inner in walk(node) if type(inner) is cst.Call)


def single_argument(call: cst.Call) -> cst.BaseExpression | None:
    """Return the argument of a call with exactly one plain positional argument, else None."""
    if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
        return None
    return call.args[0].value


def fresh_name(wanted: str, taken: set[str]) -> str:
    """Return `wanted`, or the first of `wanted_1`, `wanted_2`, … that is not in `taken`; adds it to `taken`."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def parameters(function: cst.FunctionDef) -> list[str]:
    """Return the names of all parameters, `self` included."""
    params = function.params
    named = [*params.posonly_params, *params.params, *params.kwonly_params]
    starred = [p for p in (params.star_arg, params.star_kwarg) if isinstance(p, cst.Param)]
    return [param.name.value for param in (*named, *starred)]


def bound_names(node: cst.CSTNode) -> set[str]:
    """Return the local names that `node` may bind or write through: targets, `x[...] =`, `x += `, `x.op_(...)`."""
    bound: set[str] = set()
    for inner in walk(node):
        kind = type(inner)
        if kind not in _MAY_BIND:
            continue
        if isinstance(inner, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.CompFor)):
            bound |= _target_names(inner.target)
        elif isinstance(inner, cst.Del):
            bound |= names_in([inner])
        elif isinstance(inner, cst.AsName):
            bound |= names_in([inner.name])
        elif isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
            if inner.func.attr.value.endswith("_") and not inner.func.attr.value.endswith("__"):
                bound |= names_in([inner.func.value])
    return bound


_MAY_BIND = frozenset(
    {
        cst.AssignTarget,
        cst.AugAssign,
        cst.AnnAssign,
        cst.For,
        cst.NamedExpr,
        cst.CompFor,
        cst.Del,
        cst.AsName,
        cst.Call,
    }
)


def names_bound_by(node: cst.CSTNode) -> set[str]:
    """Return the names that a node itself binds: as a target of an assignment or loop, `with … as`, `del`."""
    held: cst.CSTNode | None = None
    if type(node) not in _MAY_BIND:
        return set()
    if isinstance(
        node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del, cst.For, cst.CompFor, cst.NamedExpr)
    ):
        held = node.target
    elif isinstance(node, cst.AsName):
        held = node.name
    return set() if held is None or isinstance(held, (cst.Attribute, cst.Subscript)) else _target_names(held)


@kept
def assigned_once(function: cst.FunctionDef) -> dict[str, cst.BaseExpression]:
    """Return the value of every local that one statement of the function binds, `name = value` or `a, b = x, y`.

    The statement may stand in a loop: what reads the local in the same turn reads the value of that turn.
    """
    values: dict[str, cst.BaseExpression] = {}
    times: dict[str, int] = dict.fromkeys(parameters(function), 1)
    for node in walk(function.body):
        for name in names_bound_by(node):
            times[name] = times.get(name, 0) + 1
        values |= given_names(node)
    return {name: value for name, value in values.items() if times[name] == 1}


def given(line: cst.Assign) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield what an assignment binds, each with its value: `a, b = x, y` as `a = x` and `b = y`."""
    for target in line.targets:
        yield from _pairs(target.target, line.value)


def _pairs(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    if isinstance(target, (cst.Tuple, cst.List)) and isinstance(value, (cst.Tuple, cst.List)):
        starred = any(isinstance(element, cst.StarredElement) for element in (*target.elements, *value.elements))
        if len(target.elements) == len(value.elements) and not starred:
            for own, of in zip(target.elements, value.elements, strict=True):
                yield from _pairs(own.value, of.value)
            return
    yield target, value


def given_names(node: cst.CSTNode) -> dict[str, cst.BaseExpression]:
    """Return the value of every name that a statement gives one, `name = value` or `name, … = value, …`."""
    pairs = given(node) if isinstance(node, cst.Assign) else ()
    return {target.value: value for target, value in pairs if isinstance(target, cst.Name)}


def mutated_names(node: cst.CSTNode) -> set[str]:
    """Return the names whose value `node` may change in place: `x += `, `x[...] =`, `x.op_()`, `f(x, out=...)`.

    Another name may mean the same tensor, so a value is safe only where this set is empty or known to be fresh.
    """
    mutated: set[str] = set()
    for inner in walk(node):
        if isinstance(inner, cst.AugAssign):
            mutated |= _target_names(inner.target)
        elif isinstance(inner, cst.AssignTarget) and isinstance(inner.target, (cst.Subscript, cst.Attribute)):
            mutated |= _target_names(inner.target) - {"self"}
        elif isinstance(inner, cst.Call):
            mutated |= _mutated_by_call(inner)
    return mutated


def _mutated_by_call(call: cst.Call) -> set[str]:
    named = {argument.keyword.value for argument in call.args if argument.keyword is not None}
    mutated = names_in(call.args) - named if named & {"out", "inplace"} else set()
    if isinstance(call.func, cst.Attribute):
        name = call.func.attr.value
        if name.endswith("_") and not name.endswith("__"):
            mutated |= names_in([call.func.value])
    return mutated


def local_names(function: cst.FunctionDef, module: Module) -> set[str]:
    """Return every name that stands in a function as a name of its own, not as an attribute or a keyword."""
    names = set(parameters(function))
    for node in walk(function.body):
        if type(node) is cst.Name:
            parent = module.parent(node)
            attribute = isinstance(parent, cst.Attribute) and parent.attr is node
            keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            if not attribute and not keyword:
                names.add(node.value)
    return names


_COUNTED = frozenset({cst.Assign, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.With})


@kept
def single_assignments(function: cst.FunctionDef) -> dict[str, cst.BaseExpression]:
    """Return the value of every local that is assigned once, alone or as `a, b = x, y`, and is no parameter."""
    values: dict[str, cst.BaseExpression] = {}
    times: dict[str, int] = dict.fromkeys(parameters(function), 1)
    for node in walk(function.body):
        if type(node) not in _COUNTED:
            continue
        if isinstance(node, (cst.Assign, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.With)):
            for name in bound_names(node) if not isinstance(node, (cst.For, cst.With)) else names_in([node]):
                times[name] = times.get(name, 0) + 1
        values |= given_names(node)
    return {name: value for name, value in values.items() if times[name] == 1}


def block_of(node: cst.CSTNode, module: Module) -> Sequence[cst.CSTNode]:
    """Return the statements of the block that `node`'s statement stands in."""
    parent = module.parent(module.statement(node))
    body = getattr(parent, "body", ())
    return body if isinstance(body, Sequence) else ()


def _target_names(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, (cst.Tuple, cst.List)):
        return {name for element in target.elements for name in _target_names(element.value)}
    if isinstance(target, cst.StarredElement):
        return _target_names(target.value)
    if isinstance(target, (cst.Subscript, cst.Attribute)):
        return _target_names(target.value)
    return set()


def replace_nodes(
    top: cst.CSTNode, new: Mapping[int, tuple[cst.CSTNode, ...]], around: Set[int] | None = None
) -> cst.CSTNode:
    """Return `top` with every node whose `id` is in `new` replaced; none, or several, only for a statement.

    `around`, where known, holds the ids of all nodes above those: nothing else is visited, and what is not visited
    stays the same object (a pass over a 4,300-line file took 1.0 s and takes 0.1 s).
    """
    replaced = top.visit(_Replace(new, around))
    if not isinstance(replaced, cst.CSTNode):
        raise TypeError("the node itself was replaced")
    return replaced


class _Replace(cst.CSTTransformer):
    def __init__(self, new: Mapping[int, tuple[cst.CSTNode, ...]], around: Set[int] | None):
        super().__init__()
        self.new = new
        self.around = around

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) not in self.new and (self.around is None or id(node) in self.around)

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        new = self.new.get(id(original_node))
        if new is None:
            if isinstance(original_node, cst.IndentedBlock) and isinstance(updated_node, cst.IndentedBlock):
                return self._without_gap(original_node, updated_node)
            return updated_node
        return new[0] if len(new) == 1 else cst.FlattenSentinel(new)

    def _without_gap(self, original: cst.IndentedBlock, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        """Drop the blank lines that a block would begin with because its first statements were removed."""
        if self.new.get(id(original.body[0])) != () or not updated.body:
            return updated
        first = updated.body[0]
        lines = list(getattr(first, "leading_lines", ()))
        while lines and lines[0].comment is None:
            lines.pop(0)
        return updated.with_changes(body=[first.with_changes(leading_lines=lines), *updated.body[1:]])
