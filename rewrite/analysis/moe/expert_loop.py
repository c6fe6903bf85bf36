"""The loop over the experts that were hit, as the modeling files spell it, taken apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import HEAP, Scope, effects_of
from rewrite.analysis.syntax.module import ClassInfo, Module, walk

_NO_GRAD = m.With(items=[m.WithItem(item=m.Call(func=m.Attribute(attr=m.Name("no_grad"))))])


class NotALoop(Exception):
    """The loop is none of those that can be changed."""

    def __init__(self, what: str, other_use: bool = False):
        super().__init__(what)
        self.what, self.other_use = what, other_use


@dataclass(frozen=True)
class ExpertLoop:
    """`for expert in hit:` with `position, token = torch.where(mask[expert])` at its beginning."""

    node: cst.For
    search: tuple[cst.CSTNode, ...]
    """Statements before the loop that find the hit experts."""
    opening: tuple[cst.CSTNode, ...]
    """Statements at the beginning of the body that find an expert's tokens."""
    index: cst.BaseExpression
    """The experts of each token, `[N, k]`."""
    num_experts: cst.BaseExpression
    expert: str
    position: str
    token: str
    choices: tuple[cst.Subscript, ...]
    """The weights that the body chooses, `weight[expert]`."""


def expert_loop(node: cst.For, method: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> ExpertLoop:
    """Take the loop apart.

    Raises:
        NotALoop: if a part of it is not where these loops have it.
    """
    if not isinstance(node.target, cst.Name) or not isinstance(node.iter, cst.Name) or node.orelse is not None:
        raise NotALoop(module.code(node.iter))
    expert, hit = node.target.value, node.iter.value
    block = [s for s in getattr(module.parent(node), "body", ()) if isinstance(s, cst.BaseStatement)]
    place = next((i for i, s in enumerate(block) if s is node), 0)
    scope = effects_of(module).scope(method, owner)
    if scope.unknown or "torch" in scope.locals or not scope.names.means("torch"):
        raise NotALoop(scope.unknown or "`torch` may be bound to something else")
    search = block[place - 1] if place else None
    if not isinstance(search, cst.With) or not m.matches(search, _NO_GRAD):
        raise NotALoop("the search for the hit experts")
    mask, index, classes = _search(search, hit, scope)
    opening, position, token, limit = _opening(node.body.body, expert, mask, module)
    rest = [s for s in node.body.body if not any(s is done for done in opening)]
    others = [s for s in method.body.body if s is not node and s is not search]
    if any(_uses([*rest, *others], name) for name in (mask, hit)):
        raise NotALoop(f"{mask} or {hit} is used elsewhere")
    _check_turns(rest, scope)
    if late := sorted(scope.of(node).binds & _read(_after(node, method, module))):
        raise NotALoop(f"{late[0]} of the last turn is read after the loop", other_use=True)
    return ExpertLoop(
        node=node,
        search=(search,),
        opening=tuple(opening),
        index=index,
        num_experts=limit or classes,
        expert=expert,
        position=position,
        token=token,
        choices=_choices(rest, expert, module),
    )


def _check_turns(rest: Sequence[cst.CSTNode], scope: Scope) -> None:
    """What a turn does adds to its results only: weights and indices are the same in the next turn."""
    for statement in rest:
        effect = scope.of(statement)
        written = {name for name in effect.writes if not _is_own(name, scope)}
        if effect.stores or HEAP in scope.memory(written):
            raise NotALoop(scope.module.code(statement).strip().splitlines()[0], other_use=True)


def _is_own(name: str, scope: Scope) -> bool:
    """Whether a local is nothing but a tensor that the method has made, which weights and indices are no views of."""
    value = scope.single.get(name)
    return value is not None and not scope.value(value).roots


def _after(node: cst.For, method: cst.FunctionDef, module: Module) -> list[cst.CSTNode]:
    """Return the statements of the method that stand after the loop, around it or in its block."""
    lines = [line for line in walk(method.body) if isinstance(line, cst.BaseStatement)]
    inside = {id(line) for line in walk(node)}
    place = next(i for i, line in enumerate(lines) if line is node)
    return [line for line in lines[place:] if id(line) not in inside]


def _read(nodes: Sequence[cst.CSTNode]) -> set[str]:
    return {n.value for top in nodes for n in walk(top) if isinstance(n, cst.Name)}


def _search(block: cst.With, hit: str, scope: Scope) -> tuple[str, cst.BaseExpression, cst.BaseExpression]:
    """Return the mask's name, the experts of each token and the number of classes."""
    module = scope.module
    lines = [_plain(line, module) for line in block.body.body]
    one_hot = next(
        (n for n in walk(block) if isinstance(n, cst.Call) and module.code(n.func).endswith("one_hot")), None
    )
    if one_hot is not None and not _is_one_hot(one_hot.func, scope):
        raise NotALoop(f"`{module.code(one_hot.func)}` may be bound to something else")
    first = block.body.body[0]
    small = first.body[0] if isinstance(first, cst.SimpleStatementLine) else None
    if one_hot is None or not isinstance(small, cst.Assign) or len(one_hot.args) != 2:
        raise NotALoop(lines[0])
    mask = module.code(small.targets[0].target)
    made = _plain(one_hot, module)
    turned = ([f"{mask}={made}", f"{mask}={mask}.permute(2,1,0)"], [f"{mask}={made}.permute(2,1,0)"])
    found = f"{hit}=torch.greater({mask}.sum(dim=(-1,-2)),0).nonzero()"
    if lines[:-1] not in turned or lines[-1] not in (found, f"{found}.squeeze(-1)"):
        raise NotALoop(lines[-1])
    classes = one_hot.args[1].value
    if isinstance(classes, cst.BinaryOperation) and isinstance(classes.operator, cst.Add):
        classes = classes.left
    return mask, one_hot.args[0].value, classes


def _is_one_hot(func: cst.BaseExpression, scope: Scope) -> bool:
    root = func
    while isinstance(root, cst.Attribute):
        root = root.value
    local = isinstance(root, cst.Name) and root.value in scope.locals
    return not local and scope.names.resolved(func) == "torch.nn.functional.one_hot"


def _opening(
    body: Sequence[cst.CSTNode], expert: str, mask: str, module: Module
) -> tuple[list[cst.CSTNode], str, str, cst.BaseExpression | None]:
    """Return the statements that name an expert's tokens, these names, and the number of experts if it is tested."""
    opening, limit = [], None
    for statement in body:
        opening.append(statement)
        code = _plain(statement, module)
        if code in (f"{expert}={expert}[0]", f"{expert}={expert}.item()"):
            continue
        if isinstance(statement, cst.If) and code.startswith(f"if{expert}==") and code.endswith(":continue"):
            if isinstance(statement.test, cst.Comparison):
                limit = statement.test.comparisons[0].comparator
            continue
        names, _, value = code.partition("=")
        if value == f"torch.where({mask}[{expert}])" and names.count(",") == 1:
            position, token = names.split(",")
            return opening, position, token, limit
        break
    raise NotALoop(_plain(opening[-1], module))


def _choices(rest: Sequence[cst.CSTNode], expert: str, module: Module) -> tuple[cst.Subscript, ...]:
    chosen = []
    for use in (n for s in rest for n in walk(s) if isinstance(n, cst.Name) and n.value == expert):
        index = module.parent(use)
        element = module.parent(index)
        subscript = module.parent(element)
        alone = isinstance(index, cst.Index) and isinstance(subscript, cst.Subscript) and len(subscript.slice) == 1
        if not alone or not isinstance(subscript, cst.Subscript):
            raise NotALoop(module.code(module.statement(use)).splitlines()[0], other_use=True)
        chosen.append(subscript)
    return tuple(chosen)


def _uses(nodes: Sequence[cst.CSTNode], name: str) -> bool:
    return any(isinstance(n, cst.Name) and n.value == name for top in nodes for n in walk(top))


def _plain(node: cst.CSTNode, module: Module) -> str:
    """Return the code of a node without comments and spaces: for comparing, not for printing."""
    return "".join("".join(re.sub("#.*", "", line).split()) for line in module.code(node).splitlines())
