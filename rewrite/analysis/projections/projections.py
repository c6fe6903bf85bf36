"""Finds linear projections that read the same input, and merges their calls into one.

Used by `fuse_qkv` and `fuse_gate_up`, which differ only in which groups are theirs.

Reading on: `rewrite/analysis/terms/computation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from rewrite.analysis.effects import Effect, Scope, attribute, between, effects_of, why_not_move
from rewrite.analysis.effects.identity import Identity, with_argument
from rewrite.analysis.projections.casting import adds_bias, marked
from rewrite.analysis.projections.elementwise_products import products_in, resolved
from rewrite.analysis.projections.linear_calls import LinearCall, linear_call, linear_kind
from rewrite.analysis.projections.strides import Reads, relied_on
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, walk
from rewrite.analysis.tree.nodes import (
    block_of,
    calls_in,
    expression,
    fresh_name,
    local_names,
    replace_nodes,
    single_assignments,
)
from rewrite.analysis.tree.proposal import Candidate, Edit, Found, Skip
from rewrite.analysis.tree.replacement import call_statement

REASONS: Mapping[str, str] = {
    "not_linear": "a projection is not certainly a plain nn.Linear, called with its input alone",
    "different_blocks": "the calls stand in different blocks, or in a condition: not all of them run each time",
    "called_twice": "one projection is called more than once with this argument",
    "argument_changes": "the argument is written between the calls, or computed at each",
    "not_proven": "what stands between the calls may write what they read, or leave the block",
}

_PLAIN_LINEAR = ("torch.nn.Linear", "torch.nn.modules.linear.Linear")
_SUFFIXES = ("_proj", "_projection", "_lin", "_linear", "_layer")


@dataclass(frozen=True)
class Group:
    """Calls in one method that pass the same argument, in source order."""

    owner: ClassInfo
    method: cst.FunctionDef
    calls: tuple[LinearCall, ...]

    @property
    def first(self) -> LinearCall:
        """The call whose place the product takes."""
        return self.calls[0]

    @property
    def attributes(self) -> list[str]:
        """The names of the projections."""
        return [call.attribute for call in self.calls]

    def candidate(self) -> Candidate:
        """Return the candidate that stands for this group."""
        label = ", ".join(dict.fromkeys(self.attributes))
        return Candidate(self.first.node, f"{self.owner.name}.{self.method.name.value}", label)


def projection_groups(module: Module) -> tuple[Group, ...]:
    """Return every group of two or more projections of one argument, in source order."""
    found = module.remembered.get("projection_groups")
    if not isinstance(found, tuple):
        found = module.remembered["projection_groups"] = tuple(_found(module))
    return found


def _found(module: Module) -> Iterator[Group]:
    for owner, _, method in module.methods():
        calls = [call for node in calls_in(method.body) if (call := linear_call(node, owner, method, module))]
        if len({call.attribute for call in calls}) < 2:
            continue
        identity = Identity(effects_of(module).scope(method, owner))
        by_argument: dict[tuple[Term, str], list[LinearCall]] = {}
        for call in calls:
            key = (identity.loose_term(call.argument), linear_kind(call.attribute, owner, module))
            by_argument.setdefault(key, []).append(call)
        for same in by_argument.values():
            for group in _groups(module, owner, method, same):
                yield from _provable_parts(group, identity, module) or [group]


def _provable_parts(whole: Group, identity: Identity, module: Module) -> list[Group]:
    """Split a group by what its arguments certainly are, and where something between keeps later calls from moving."""
    same: dict[Term, list[LinearCall]] = {}
    for call in whole.calls:
        same.setdefault(identity.term(call.argument), []).append(call)
    groups = [replace(whole, calls=tuple(calls)) for calls in same.values() if len({c.attribute for c in calls}) > 1]
    return [part for group in groups for part in _orderable_parts(group, module) or [group]]


def _orderable_parts(group: Group, module: Module) -> list[Group]:
    """Split a group where something between its calls keeps the later ones from moving; empty if no part is left."""
    if _cannot_be_ordered(group, module) is not None:
        return []
    scope, parts, rest = effects_of(module).scope(group.method, group.owner), list[Group](), list(group.calls)
    while rest:
        part = rest[:1]
        for call in rest[1:]:
            if _unordered(replace(group, calls=(*part, call)), scope) is not None:
                break
            part.append(call)
        rest = rest[len(part) :]
        if len(part) > 1:
            parts.append(replace(group, calls=tuple(part)))
    return parts


def is_gated_product(group: Group, module: Module) -> bool:
    """Return whether one projection passes through an activation and is multiplied with another: `act(a) * b`."""
    values = single_assignments(group.method)
    nodes = {id(call.node) for call in group.calls}
    for product in products_in(group.method.body, module):
        for first, second in ((product.left, product.right), (product.right, product.left)):
            activated, plain = resolved(first, values), resolved(second, values)
            inner = _first_argument(activated)
            if inner is not None and id(plain) in nodes and id(resolved(inner, values)) in nodes - {id(plain)}:
                return True
    return False


def _first_argument(node: cst.BaseExpression) -> cst.BaseExpression | None:
    if not isinstance(node, cst.Call) or not node.args or node.args[0].star:
        return None
    return node.args[0].value


def merge(group: Group, module: Module) -> Found | Skip:
    """Return the edits that make one `packed_linear` of the group's calls, or why that would not be safe."""
    if (skip := _unsafe(group, module)) is not None:
        return skip
    scope = effects_of(module).scope(group.method, group.owner)
    reads = relied_on(scope, group.calls)
    operator = "packed_linear"
    if reads.problem:  # what is contiguous reads as `nn.Linear`'s own
        operator, reads = "packed_linear_dense", Reads()
    taken = local_names(group.method, module)
    first = group.first.statement
    copied = reads.leaving
    hoisted = {
        id(call.statement): name
        for call in group.calls
        if id(call.node) not in copied and (name := _hoistable(call, group, module))
    }
    names = [hoisted.get(id(call.statement)) or fresh_name(_stem(call.attribute), taken) for call in group.calls]
    packed = call_statement(
        f"{', '.join(names)} = ",
        operator,
        [module.code(group.first.argument), *(f"self.{attribute}" for attribute in group.attributes)],
        module,
        indent=module.indentation(first),
    ).with_changes(leading_lines=getattr(first, "leading_lines", ()))
    results = {
        id(call.node): expression(f"{name}.contiguous()" if id(call.node) in copied else name)
        for call, name in zip(group.calls, names, strict=True)
    }
    marks = marked({module.qualified(call.func) for call in _makers(group, module)}, module)
    uses = (operator, "casts_weight") if marks else (operator,)
    return Found((*_edits(group, results, hoisted, packed, reads.reshapes), *marks), uses)


def _makers(group: Group, module: Module) -> list[cst.Call]:
    values = (v for name in group.attributes for v in attribute(group.owner, name, effects_of(module).names).values)
    return [value for value in values if isinstance(value, cst.Call)]


def _edits(
    group: Group,
    results: Mapping[int, cst.BaseExpression],
    hoisted: Mapping[int, str],
    packed: cst.SimpleStatementLine,
    reshapes: Sequence[cst.Name],
) -> Iterator[Edit]:
    first = group.first.statement
    inside = {id(node) for node in walk(first)}
    inline: dict[int, tuple[cst.CSTNode, ...]] = {}
    for view in reshapes:
        if id(view) in inside:
            inline[id(view)] = (cst.Name("reshape"),)
        else:
            yield Edit(view, (cst.Name("reshape"),))
    for call in group.calls:
        result = results[id(call.node)]
        if call.statement is first:
            inline[id(call.node)] = (result,)
        elif id(call.statement) in hoisted:
            yield Edit(call.statement, ())
        else:
            yield Edit(call.node, (result,))
    rest = replace_nodes(first.with_changes(leading_lines=[]), inline)
    yield Edit(first, (packed,) if id(first) in hoisted else (packed, rest))


def _groups(module: Module, owner: ClassInfo, method: cst.FunctionDef, calls: list[LinearCall]) -> Iterator[Group]:
    """Split calls of one argument into those of each block, or keep them together where no block has two."""
    if len({call.attribute for call in calls}) < 2:
        return
    blocks: dict[int, list[LinearCall]] = {}
    for call in calls:
        blocks.setdefault(id(module.parent(call.statement)), []).append(call)
    together = [part for part in blocks.values() if len({call.attribute for call in part}) > 1]
    for part in together or [calls]:
        yield Group(owner, method, tuple(part))


def _unsafe(group: Group, module: Module) -> Skip | None:
    if (skip := _cannot_be_ordered(group, module)) is not None:
        return skip
    scope = effects_of(module).scope(group.method, group.owner)
    if len({Identity(scope).term(call.argument) for call in group.calls}) > 1:
        return Skip("argument_changes", f"{module.code(group.first.argument)} may be bound anew")
    return _unordered(group, scope)


def _cannot_be_ordered(group: Group, module: Module) -> Skip | None:
    """Return what rules the group out whatever stands between its calls."""
    if (skip := _odd_projection(group, module)) is not None:
        return skip
    argument = group.first.argument
    text = module.code(argument)
    if len(set(group.attributes)) < len(group.attributes):
        return Skip("called_twice", text)
    if len({id(module.parent(call.statement)) for call in group.calls}) > 1:
        return Skip("different_blocks", text)
    if (call := next((c for c in group.calls if _is_conditional(c, module)), None)) is not None:
        return Skip("different_blocks", call.attribute)
    if any(isinstance(node, (cst.Call, cst.Await, cst.NamedExpr)) for c in group.calls for node in walk(c.argument)):
        return Skip("argument_changes", text)
    return None


def _odd_projection(group: Group, module: Module) -> Skip | None:
    for call in group.calls:
        if not call.plain:
            return Skip("not_linear", module.code(call.node))
        found = attribute(group.owner, call.attribute, effects_of(module).names)
        if odd := next((v for v in found.values if not _builds_linear(v, module)), None):
            return Skip("not_linear", f"self.{call.attribute} may be {module.code(odd)}")
        if not found.values or call.attribute in effects_of(module).names.tampered:
            return Skip("not_linear", f"self.{call.attribute}: {found.unknown}")
    return None


def _builds_linear(value: cst.BaseExpression, module: Module) -> bool:
    if not isinstance(value, cst.Call):
        return False
    name = effects_of(module).names.resolved(value.func)
    return name in _PLAIN_LINEAR or adds_bias(name, module) is not None


def _unordered(group: Group, scope: Scope) -> Skip | None:
    """Return why the calls may not all take place before the first one's statement, None if they may.

    A projection that something may have replaced is looked at when it runs, and then all are called one after the
    other: that is the same as long as nothing but values is computed between them.
    """
    found = {call.attribute: attribute(group.owner, call.attribute, scope.names) for call in group.calls}
    replaced = next((f"self.{name}: {is_.unknown}" for name, is_ in found.items() if is_.unknown), "")
    scope = scope.trusting([call.node for call in group.calls]) if replaced else scope
    asked = scope.of(group.first.argument)
    for call in group.calls:
        past = between(scope, group.first.statement, call.node)
        if past is None:
            return Skip("different_blocks", call.attribute)
        moved = with_argument(scope.of(call.node), scope.of(call.argument), asked)
        if (why := why_not_move(scope, moved, past)) is not None:
            return Skip(_kind_of_conflict(moved, past), f"self.{call.attribute}: {why}")
        if replaced and (past.writes or past.stores or past.draws):
            return Skip("not_proven", replaced)
    return None


def _kind_of_conflict(moved: Effect, past: Effect) -> str:
    return "not_proven" if moved.anything or past.anything or past.leaves else "argument_changes"


def _between(group: Group, module: Module) -> list[cst.CSTNode]:
    """Return the statements from the first call's to the last call's."""
    block = list(block_of(group.first.node, module))
    places = [next(i for i, s in enumerate(block) if s is call.statement) for call in group.calls]
    return block[min(places) : max(places) + 1]


def _is_conditional(call: LinearCall, module: Module) -> bool:
    conditional = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp, cst.Comparison)
    for above in module.ancestors(call.node):
        if above is call.statement:
            return not isinstance(call.statement, cst.SimpleStatementLine)
        if isinstance(above, conditional):
            return True
    return False


def _hoistable(call: LinearCall, group: Group, module: Module) -> str | None:
    """Return `x` if the call's statement is just `x = self.projection(argument)` and may move up to the first call."""
    line = call.statement
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return None
    small = line.body[0]
    if not isinstance(small, cst.Assign) or small.value is not call.node or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    first = call.statement is group.first.statement
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
