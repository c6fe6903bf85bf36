"""Finds linear projections that read the same input, and merges their calls into one.

Used by `fuse_qkv` and `fuse_gate_up`, which differ only in which groups are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.syntax.module import ClassInfo, Module, names_in, walk
from rewrite.analysis.syntax.nodes import (
    block_of,
    bound_names,
    called_attribute,
    calls_in,
    fresh_name,
    local_names,
    mutated_names,
    replace_nodes,
    single_argument,
    single_assignments,
    written_names,
)
from rewrite.analysis.syntax.proposal import Candidate, Edit, Found, Skip
from rewrite.analysis.syntax.replacement import call_statement, name_is_free

REASONS: Mapping[str, str] = {
    "not_linear": "a projection is not built as a plain nn.Linear",
    "different_blocks": "the calls stand in different blocks, so not all of them run each time",
    "conditional_call": "a call stands inside a conditional expression, a lambda or a comprehension",
    "called_twice": "one projection is called more than once with this argument",
    "computed_argument": "the argument is itself computed at each call",
    "argument_changes": "the argument is written between the calls",
    "name_taken": "the file has a name `packed_linear` of its own",
}

_PLAIN_LINEAR = ("torch.nn.Linear", "torch.nn.modules.linear.Linear")
_SUFFIXES = ("_proj", "_projection", "_lin", "_linear", "_layer")


@dataclass(frozen=True)
class Call:
    """One call `self.<attribute>(<argument>)` of a projection."""

    attribute: str
    node: cst.Call
    statement: cst.BaseStatement


@dataclass(frozen=True)
class Group:
    """Calls in one method that pass the same argument, in source order."""

    owner: ClassInfo
    method: cst.FunctionDef
    argument: str
    calls: tuple[Call, ...]

    def candidate(self) -> Candidate:
        """Return the candidate that stands for this group."""
        label = ", ".join(dict.fromkeys(call.attribute for call in self.calls))
        return Candidate(self.calls[0].node, f"{self.owner.name}.{self.method.name.value}", label)


def projection_groups(module: Module) -> Iterator[Group]:
    """Yield every group of two or more projections of one argument, in source order."""
    for owner, _, method in module.methods():
        by_argument: dict[tuple[str, str], list[Call]] = {}
        for node in calls_in(method.body):
            attribute, value = called_attribute(node), single_argument(node)
            kind = _kind(module, owner, attribute) if attribute is not None else None
            if attribute is not None and value is not None and kind is not None:
                call = Call(attribute, node, module.statement(node))
                by_argument.setdefault((module.code(value), kind), []).append(call)
        for (argument, _), calls in by_argument.items():
            yield from _groups(module, owner, method, argument, calls)


def is_gated_product(group: Group, module: Module) -> bool:
    """Return whether one projection passes through an activation and is multiplied with another: `act(a) * b`."""
    values = single_assignments(group.method)

    def resolved(node: cst.BaseExpression) -> cst.BaseExpression:
        return values.get(node.value, node) if isinstance(node, cst.Name) else node

    nodes = {id(call.node) for call in group.calls}
    for product in walk(group.method.body):
        if not isinstance(product, cst.BinaryOperation) or not isinstance(product.operator, cst.Multiply):
            continue
        for first, second in ((product.left, product.right), (product.right, product.left)):
            activated, plain = resolved(first), resolved(second)
            inner = single_argument(activated) if isinstance(activated, cst.Call) else None
            if inner is not None and id(plain) in nodes and id(resolved(inner)) in nodes - {id(plain)}:
                return True
    return False


def merge(group: Group, module: Module) -> Found | Skip:
    """Return the edits that make one `packed_linear` of the group's calls, or why that would not be safe."""
    if (skip := _unsafe(group, module)) is not None:
        return skip
    if not name_is_free("packed_linear", module, group.method):
        return Skip("name_taken")
    taken = local_names(group.method, module)
    first = group.calls[0].statement
    hoisted = {id(call.statement): name for call in group.calls if (name := _hoistable(call, group, module))}
    names = [hoisted.get(id(call.statement)) or fresh_name(_stem(call.attribute), taken) for call in group.calls]
    packed = call_statement(
        f"{', '.join(names)} = ",
        "packed_linear",
        [group.argument, *(f"self.{call.attribute}" for call in group.calls)],
        module,
        indent=module.indentation(first),
    ).with_changes(leading_lines=getattr(first, "leading_lines", ()))
    return Found(tuple(_edits(group, names, hoisted, packed)), ("products.packed_linear",))


def _edits(
    group: Group, names: list[str], hoisted: Mapping[int, str], packed: cst.SimpleStatementLine
) -> Iterator[Edit]:
    first = group.calls[0].statement
    inline: dict[int, tuple[cst.CSTNode, ...]] = {}
    for call, name in zip(group.calls, names, strict=True):
        if call.statement is first:
            inline[id(call.node)] = (cst.Name(name),)
        elif id(call.statement) in hoisted:
            yield Edit(call.statement, ())
        else:
            yield Edit(call.node, (cst.Name(name),))
    rest = replace_nodes(first.with_changes(leading_lines=[]), inline)
    yield Edit(first, (packed,) if id(first) in hoisted else (packed, rest))


def _groups(
    module: Module, owner: ClassInfo, method: cst.FunctionDef, argument: str, calls: list[Call]
) -> Iterator[Group]:
    if len({call.attribute for call in calls}) < 2:
        return
    blocks: dict[int, list[Call]] = {}
    for call in calls:
        blocks.setdefault(id(module.parent(call.statement)), []).append(call)
    same = [part for block in blocks.values() for part in _same_value(block, module)]
    together = [part for part in same if len({call.attribute for call in part}) > 1]
    apart = [calls] if len(same) == len(blocks) > 1 else []
    for part in together or apart:
        yield Group(owner, method, argument, tuple(part))


def _same_value(calls: list[Call], module: Module) -> Iterator[list[Call]]:
    """Split calls of one block where a plain assignment gives the argument's name another value."""
    read = names_in([calls[0].node.args[0].value])
    part: list[Call] = []
    for call in calls:
        if part and read & _reassigned(part[-1].statement, call.statement, module):
            yield part
            part = []
        part.append(call)
    yield part


def _reassigned(first: cst.BaseStatement, last: cst.BaseStatement, module: Module) -> set[str]:
    block = list(block_of(first, module))
    start, end = (next(i for i, s in enumerate(block) if s is line) for line in (first, last))
    lines = [line for line in block[start:end] if isinstance(line, cst.SimpleStatementLine)]
    assigns = [small for line in lines for small in line.body if isinstance(small, cst.Assign)]
    return {t.target.value for a in assigns for t in a.targets if isinstance(t.target, cst.Name)}


def _kind(module: Module, owner: ClassInfo, attribute: str) -> str | None:
    """Return what any value assigned to the attribute builds, something called linear or a convolution that sees one
    place at a time; None for anything else. Broad, for candidates.
    """
    values = module.assignments(owner, attribute)
    if any(_is_called(call, ("linear", "conv1d"), module) for value in values for call in calls_in(value)):
        return "linear"
    convolutions = (value for value in values if isinstance(value, cst.Call) and _is_called(value, "conv2d", module))
    return "convolution" if any(_sees_one_place(value) for value in convolutions) else None


def _is_called(call: cst.Call, ending: str | tuple[str, ...], module: Module) -> bool:
    return module.qualified(call.func).rsplit(".", 1)[-1].lower().endswith(ending)


def _sees_one_place(convolution: cst.Call) -> bool:
    by_name = {argument.keyword.value: argument.value for argument in convolution.args if argument.keyword is not None}
    third = convolution.args[2].value if len(convolution.args) > 2 else None
    size = by_name.get("kernel_size", third)
    return isinstance(size, cst.Integer) and size.value == "1"


def _is_linear(module: Module, owner: ClassInfo, attribute: str) -> bool:
    values = module.assignments(owner, attribute)
    return all(isinstance(v, cst.Call) and module.qualified(v.func) in _PLAIN_LINEAR for v in values)


def _unsafe(group: Group, module: Module) -> Skip | None:
    attributes = [call.attribute for call in group.calls]
    if (odd := next((a for a in attributes if not _is_linear(module, group.owner, a)), None)) is not None:
        return Skip("not_linear", odd)
    if len(set(attributes)) < len(attributes):
        return Skip("called_twice", group.argument)
    if len({id(module.parent(call.statement)) for call in group.calls}) > 1:
        return Skip("different_blocks", group.argument)
    if (call := next((c for c in group.calls if _is_conditional(c, module)), None)) is not None:
        return Skip("conditional_call", call.attribute)
    argument = single_argument(group.calls[0].node)
    if argument is None or any(isinstance(node, (cst.Call, cst.Await, cst.NamedExpr)) for node in walk(argument)):
        return Skip("computed_argument", group.argument)
    read = names_in([argument])
    between = _between(group, module)
    if read & set().union(*(bound_names(node) for node in between[:-1])) or read & written_names(between[-1]):
        return Skip("argument_changes", group.argument)
    if written := _mutated(group, between) - _fresh(group, between):
        return Skip("argument_changes", f"{group.argument}, which {', '.join(sorted(written))} may alias")
    return None


def _mutated(group: Group, between: list[cst.CSTNode]) -> set[str]:
    """Return the names that are written in place from the first call to the last."""
    values: list[cst.CSTNode] = [node.value for node in walk(between[-1]) if isinstance(node, cst.Assign)]
    return set().union(*(mutated_names(node) for node in (*between[:-1], *(values or between[-1:]))))


def _fresh(group: Group, between: list[cst.CSTNode]) -> set[str]:
    """Return the names that, from the first call to the last, mean nothing but the result of a call of the group."""
    calls = {id(call.node) for call in group.calls}
    made, other = set[str](), set[str]()
    for line in between:
        for node in walk(line):
            if isinstance(node, (cst.Assign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.With)):
                own = isinstance(node, cst.Assign) and any(id(inner) in calls for inner in walk(node.value))
                (made if own else other).update(bound_names(node))
    return made - other


def _between(group: Group, module: Module) -> list[cst.CSTNode]:
    """Return the statements from the first call's to the last call's."""
    block = list(block_of(group.calls[0].node, module))
    places = [next(i for i, s in enumerate(block) if s is call.statement) for call in group.calls]
    return block[min(places) : max(places) + 1]


def _is_conditional(call: Call, module: Module) -> bool:
    conditional = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp, cst.Comparison)
    for above in module.ancestors(call.node):
        if above is call.statement:
            return not isinstance(call.statement, cst.SimpleStatementLine)
        if isinstance(above, conditional):
            return True
    return False


def _hoistable(call: Call, group: Group, module: Module) -> str | None:
    """Return `x` if the call's statement is just `x = self.projection(argument)` and may move up to the first call."""
    line = call.statement
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return None
    small = line.body[0]
    if not isinstance(small, cst.Assign) or small.value is not call.node or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    first = call.statement is group.calls[0].statement
    if not isinstance(target, cst.Name) or (not first and any(e.comment for e in line.leading_lines)):
        return None
    if line.trailing_whitespace.comment is not None:
        return None
    before = _between(group, module)
    before = before[: next(i for i, s in enumerate(before) if s is line)]
    # A target that is also the argument would change it for the calls that follow; that was refused before.
    return None if target.value in names_in(before) else target.value


def _stem(attribute: str) -> str:
    suffix = next((s for s in _SUFFIXES if attribute.endswith(s) and attribute != s), "")
    return attribute.removesuffix(suffix)
