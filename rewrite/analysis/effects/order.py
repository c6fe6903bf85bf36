"""Whether an expression may be evaluated earlier, before other code that now runs before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from rewrite.analysis.effects.effect import HEAP, Effect, union
from rewrite.analysis.effects.scope import Scope
from rewrite.analysis.tree.module import parts


def why_not_move(scope: Scope, moved: Effect, past: Effect) -> str | None:
    """Return None if code that does `moved` may run before code that does `past`, else what could not be proven."""
    if moved.anything or past.anything:
        return moved.anything or past.anything
    if past.leaves:
        return f"`{'`, `'.join(sorted(past.leaves))}` stands before it"
    if moved.leaves or moved.binds:
        return "it binds a name or leaves the block"
    if bound := past.binds & moved.reads:
        return f"`{min(bound)}` is bound anew before it"
    if stored := past.stores & moved.attributes:
        return f"`.{min(stored)}` is set before it"
    if moved.stores & (past.attributes | past.stores):
        return f"it sets `.{min(moved.stores)}`, which is read before it"
    if moved.draws and past.draws:
        return f"{moved.draws}, and so does what stands before it: {past.draws}"
    return _memory(scope, moved, past)


def _memory(scope: Scope, moved: Effect, past: Effect) -> str | None:
    """Compare what one writes in place with what the other reads."""
    written = past.writes
    if shared := scope.memory(written) & _read(scope, moved):
        return f"{_called(written)} is written in place before it, and {_may_share(scope, moved, shared)}"
    if scope.memory(moved.writes) & (_read(scope, past) | scope.memory(past.writes)):
        return f"it writes {_called(moved.writes)} in place, which is read before it"
    return None


def _read(scope: Scope, effect: Effect) -> frozenset[str]:
    return scope.memory(effect.reads) | (frozenset({HEAP}) if effect.attributes else frozenset())


def _called(roots: frozenset[str]) -> str:
    named = sorted(root for root in roots if not root.startswith("<"))
    return f"`{named[0]}`" if named else "something that others can reach"


def _may_share(scope: Scope, moved: Effect, shared: frozenset[str]) -> str:
    names = sorted(name for name in moved.reads if scope.root(name) in shared and name != "self")
    return f"`{names[0]}` may share its memory" if names else "what it reads of `self` may share its memory"


def between(scope: Scope, first: cst.CSTNode, last: cst.CSTNode) -> Effect | None:
    """Return what runs from the start of `first` until `last`, an expression in it or after it; None if elsewhere."""
    block = list(_statements(scope, first))
    above = {id(node) for node in scope.module.ancestors(last)}
    start = next(i for i, statement in enumerate(block) if statement is first)
    end = next((i for i, statement in enumerate(block) if id(statement) in above), None)
    if end is None or end < start or _is_inside(scope, last, block[end]):
        return None
    whole = union(scope.of(statement) for statement in block[start:end])
    return whole | union(scope.of(node) for node in before(scope, last, block[end]))


def before(scope: Scope, node: cst.CSTNode, statement: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the parts of a statement that are evaluated before the expression `node` in it, more where in doubt."""
    while node is not statement:
        above = scope.module.parent(node)
        doubtful = isinstance(above, (cst.IfExp, cst.BaseComp, cst.AnnAssign, cst.AugAssign, cst.CompFor, cst.While))
        for part in parts(above) if not isinstance(above, cst.Assign) else ():  # which binds after its value
            if part is node and not doubtful:
                break
            if part is not node:
                yield part
        node = above


def _statements(scope: Scope, line: cst.CSTNode) -> Sequence[cst.CSTNode]:
    body = getattr(scope.module.parent(line), "body", ())
    return body if isinstance(body, Sequence) else ()


def _is_inside(scope: Scope, node: cst.CSTNode, statement: cst.CSTNode) -> bool:
    """Whether `node` stands in the body of a compound statement, or in code that runs later or not always."""
    for above in scope.module.ancestors(node):
        if above is statement:
            return False
        if isinstance(above, (cst.BaseSuite, cst.Lambda, cst.BaseComp)):
            return True
    return True
