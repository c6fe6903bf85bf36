"""The loop over the experts that were hit, taken apart as what it computes: its spelling does not count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import HEAP, Scope, effects_of
from rewrite.analysis.terms.computation import Bindings, NotComputable, Run, subterms
from rewrite.analysis.terms.spelling import Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, walk
from rewrite.analysis.tree.nodes import bound_names

_NO_GRAD = m.With(items=[m.WithItem(item=m.Call(func=m.Attribute(attr=m.Name("no_grad"))))])
_ZERO, _ONE = constant(0), constant(1)
_EXPERT = Term("expert")
_AS_TUPLE = Term("keyword", (Term("name", (), "True"),), "as_tuple")
_AS_ROWS = Term("keyword", (Term("name", (), "False"),), "as_tuple")
_LAST = (constant(-1), _ONE)


class NotALoop(Exception):
    """The loop is none of those that can be changed."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what


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


@dataclass
class _Reading(Run):
    """Runs the loop's own statements, and remembers what stands for a term besides the locals that go with them."""

    own: frozenset[str] = frozenset()
    written: dict[Term, cst.BaseExpression] = field(default_factory=dict)

    def expression(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        """Return the term of an expression."""
        term = super().expression(node, environment)
        if not names_in([node]) & self.own:
            self.written.setdefault(term, node)
        return term

    def source(self, term: Term) -> cst.BaseExpression:
        """Return an expression of a term that can stand in the loop's header."""
        if term not in self.written:
            raise NotALoop(f"`{term}` is written with locals of the search")
        return self.written[term]


@dataclass(frozen=True)
class _Opening:
    """What the beginning of the body binds and tests."""

    statements: tuple[cst.CSTNode, ...]
    locals: Bindings
    number: Term
    """The number of the expert whose tokens are found."""
    position: str
    token: str
    limit: Term | None
    """The number at which a turn is left, if there is a test."""


def expert_loop(node: cst.For, method: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> ExpertLoop:
    """Take the loop apart.

    Raises:
        NotALoop: if a part of it is not where these loops have it.
    """
    if not isinstance(node.target, cst.Name) or node.orelse is not None:
        raise NotALoop(module.code(node.iter))
    block = list(getattr(module.parent(node), "body", ()))
    place = next((i for i, s in enumerate(block) if s is node), 0)
    scope = effects_of(module).scope(method, owner)
    if scope.unknown or "torch" in scope.locals or not scope.names.means("torch"):
        raise NotALoop(scope.unknown or "`torch` may be bound to something else")
    search = block[place - 1] if place else None
    if not isinstance(search, cst.With) or not m.matches(search, _NO_GRAD):
        raise NotALoop("the search for the hit experts")
    for call in walk(search):
        if (
            isinstance(call, cst.Call)
            and module.code(call.func).endswith("one_hot")
            and not _is_torchs_one_hot(call.func, scope)
        ):
            raise NotALoop(f"`{module.code(call.func)}` may be bound to something else")
    own = frozenset({node.target.value, *bound_names(search)})
    reading = _Reading(module, owner, 0, own)
    outside = {name: Term("parameter", (), name) for name in _locals(method) if name != "self"}
    mask, found = _search(search, node.iter, outside, reading)
    opening = _opening(node, {**found, node.target.value: _EXPERT}, mask, reading)
    gone = {id(n) for top in (search, node.target, node.iter, *opening.statements) for n in walk(top)}
    kept = [n for n in walk(method.body) if id(n) not in gone]
    expert = _expert_name(node.target.value, opening, kept)
    bound = {name for statement in opening.statements for name in bound_names(statement)}
    others = {*own, *bound} - {expert, opening.position, opening.token}
    if used := sorted(others & {n.value for n in kept if isinstance(n, cst.Name)}):
        raise NotALoop(f"{used[0]} is used elsewhere")
    _check_turns([s for s in node.body.body if not any(s is done for done in opening.statements)], scope)
    if late := sorted(scope.of(node).binds & _read_after(node, method, module)):
        raise NotALoop(f"{late[0]} of the last turn is read after the loop")
    return ExpertLoop(
        node=node,
        search=(search,),
        opening=opening.statements,
        index=reading.source(mask.args[0].args[0]),
        num_experts=_count(mask.args[0].args[1], opening, node, reading),
        expert=expert,
        position=opening.position,
        token=opening.token,
        choices=_choices([n for n in walk(node.body) if id(n) not in gone], expert, module),
    )


def _check_turns(rest: Sequence[cst.CSTNode], scope: Scope) -> None:
    """What a turn does adds to its results only: weights and indices are the same in the next turn."""
    for statement in rest:
        effect = scope.of(statement)
        written = {name for name in effect.writes if not _is_own(name, scope)}
        if effect.stores or HEAP in scope.memory(written):
            raise NotALoop(scope.module.code(statement).strip().splitlines()[0])


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


def _read_after(node: cst.For, method: cst.FunctionDef, module: Module) -> set[str]:
    """Return the names that stand after the loop, or around it."""
    return {n.value for top in _after(node, method, module) for n in walk(top) if isinstance(n, cst.Name)}


def _is_torchs_one_hot(func: cst.BaseExpression, scope: Scope) -> bool:
    root = func
    while isinstance(root, cst.Attribute):
        root = root.value
    local = isinstance(root, cst.Name) and root.value in scope.locals
    return not local and scope.names.resolved(func) == "torch.nn.functional.one_hot"


def _search(block: cst.With, hit: cst.BaseExpression, outside: Bindings, reading: _Reading) -> tuple[Term, Bindings]:
    """Return the mask `[E, k, N]`, and the locals after the search."""
    environment = dict(outside)
    try:
        left = reading.block(block.body.body, environment) is not None
        term = reading.expression(hit, environment)
    except NotComputable as error:
        raise NotALoop(f"the search for the hit experts: {error.what}") from error
    mask = next((inner for inner in subterms(term) if _is_mask(inner)), None)
    if left or mask is None or not _is_hit(term, mask):
        raise NotALoop(f"the hit experts are `{term}`")
    bound = (environment[name] for name in bound_names(block) if name in environment)
    _only_parts(bound, [term], reading)
    return mask, environment


def _only_parts(values: Iterator[Term], wholes: Sequence[Term], reading: _Reading) -> None:
    """What goes with the search is a part of it: nothing else was computed on the way."""
    parts = {inner for whole in wholes for inner in subterms(whole)}
    for value in values:
        if value not in parts and value.args:
            raise NotALoop(f"`{value}` is no part of the search")


def _is_mask(term: Term) -> bool:
    """Whether a term is `one_hot(index, classes)` with its dimensions in the opposite order."""
    if term.op != "transpose" or len(term.args) != 3:
        return False
    made, *swapped = term.args
    ends = {place.value for place in swapped}
    return len(ends) == 2 and ends in ({"0", "2"}, {"0", "-1"}, {"-3", "2"}, {"-3", "-1"}) and _is_one_hot(made)


def _is_one_hot(term: Term) -> bool:
    return term.op == "nn.functional.one_hot" and len(term.args) == 2 and term.args[1].op != "keyword"


def _is_hit(term: Term, mask: Term) -> bool:
    """Whether a term is the experts that stand anywhere in the mask, `[n]` or `[n, 1]`, in order."""
    if term.op in ("squeeze", "flatten") and (not term.args[1:] or (term.op, term.args[1:]) in _SQUEEZED):
        term = term.args[0]
    elif term.op == "index" and term.args[1:] == (_ZERO,) and term.args[0].args[1:] == (_AS_TUPLE,):
        term = Term(term.args[0].op, term.args[0].args[:1])
    if term.op not in ("nonzero", "argwhere") or term.args[1:] not in ((), (_AS_ROWS,)):
        return False
    counts = term.args[0]
    if counts.op == "lt" and counts.args[0] == _ZERO:
        counts = counts.args[1]
    elif counts.op == "ne" and _ZERO in counts.args:
        counts = next(side for side in counts.args if side != _ZERO)
    if counts.op != "sum" or len(counts.args) != 2 or counts.args[0] != mask or counts.args[1].op != "tuple":
        return False
    dimensions = [dimension.value for dimension in counts.args[1].args]
    return len(dimensions) == 2 and {_BEHIND.get(dimension, 0) for dimension in dimensions} == {1, 2}


_SQUEEZED = tuple(("squeeze", (place,)) for place in _LAST)
_BEHIND = {"1": 1, "-2": 1, "2": 2, "-1": 2}
"""The dimensions of the mask behind the first."""


def _opening(node: cst.For, environment: Bindings, mask: Term, reading: _Reading) -> _Opening:
    """Read the body until the expert's tokens have names."""
    limit, before = None, dict(environment)
    for place, statement in enumerate(node.body.body):
        try:
            if isinstance(statement, cst.If):
                limit = _limit(statement, limit, environment, reading)
                continue
            if reading.block([statement], environment) is not None:
                break
        except NotComputable as error:
            raise NotALoop(f"{_first_line(statement, reading.module)}: {error.what}") from error
        if (names := _token_names(environment, mask)) is not None:
            statements = tuple(node.body.body[: place + 1])
            tests = [] if limit is None else [make("eq", _EXPERT, limit)]
            new = {name: value for name, value in environment.items() if before.get(name) != value}
            wholes = [*tests, *(environment[name] for name in names)]
            _only_parts((value for value in new.values() if not _is_test(value, limit)), wholes, reading)
            chosen = environment[names[0]].args[0].args[0].args[1]
            return _Opening(statements, environment, chosen, *names, limit)
    raise NotALoop(_first_line(node.body.body[0], reading.module))


def _limit(statement: cst.If, limit: Term | None, environment: Bindings, reading: _Reading) -> Term:
    """Return the number that `if expert == number: continue` names."""
    test = reading.expression(statement.test, environment)
    alone = m.matches(statement.body, m.IndentedBlock(body=[m.SimpleStatementLine(body=[m.Continue()])]))
    alone = alone or m.matches(statement.body, m.SimpleStatementSuite(body=[m.Continue()]))
    others = [side for side in test.args if not _is_number(side)]
    if limit is None and alone and statement.orelse is None and len(others) == 1 and _is_test(test, others[0]):
        return others[0]
    raise NotALoop(_first_line(statement, reading.module))


def _is_test(term: Term, limit: Term | None) -> bool:
    """Whether a term says that the expert's number is the limit."""
    return term.op == "eq" and limit in term.args and any(_is_number(side) for side in term.args)


def _is_number(term: Term) -> bool:
    """Whether a term is the number of the expert, in a tensor or not."""
    while (term.op in ("item", "int") and len(term.args) == 1) or (term.op == "index" and term.args[1:] == (_ZERO,)):
        term = term.args[0]
    return term == _EXPERT


def _token_names(environment: Bindings, mask: Term) -> tuple[str, str] | None:
    """Return the locals of position and token: what `torch.where(mask[expert])` returns."""
    for name, value in environment.items():
        if value.op == "index" and value.args[1:] == (_ZERO,) and _finds(value.args[0], mask):
            wanted = Term("index", (value.args[0], _ONE))
            token = next((other for other, given in environment.items() if given == wanted), None)
            return None if token is None else (name, token)
    return None


def _finds(term: Term, mask: Term) -> bool:
    """Whether a term is where the mask of one expert holds: positions and tokens."""
    called = (term.op == "where" and len(term.args) == 1) or (term.op == "nonzero" and term.args[1:] == (_AS_TUPLE,))
    chosen = term.args[0] if called else term
    return called and chosen.op == "index" and chosen.args[0] == mask and _is_number(chosen.args[-1])


def _expert_name(target: str, opening: _Opening, kept: Sequence[cst.CSTNode]) -> str:
    """Return the name of the expert's number in the rest of the body."""
    read = {n.value for n in kept if isinstance(n, cst.Name)}
    names = sorted(name for name, value in opening.locals.items() if name in read and _is_number(value))
    if len(names) > 1 or any(_plain(opening.locals[name]) != _plain(opening.number) for name in names):
        raise NotALoop(f"the expert's number is {' and '.join(names)}")
    return names[0] if names else target


def _plain(number: Term) -> Term:
    """Return a number without what takes it to the host."""
    return _plain(number.args[0]) if number.op in ("item", "int") else number


def _count(classes: Term, opening: _Opening, node: cst.For, reading: _Reading) -> cst.BaseExpression:
    """Return the number of experts: at that one a turn is left, or the mask has one class more for what is none."""
    count = opening.limit
    if count is None:
        less = [side for side in classes.args if side != _ONE] if classes.op == "add" else []
        count = less[0] if len(less) == 1 else classes
    elif classes not in (count, make("add", count, _ONE)):
        raise NotALoop(f"a mask of `{classes}` classes, and turns left at `{count}`")
    source = reading.source(count)
    if names_in([source]) & bound_names(node):
        raise NotALoop(f"{reading.module.code(source)} changes in the loop")
    return source


def _choices(rest: Sequence[cst.CSTNode], expert: str, module: Module) -> tuple[cst.Subscript, ...]:
    chosen = []
    for use in (n for n in rest if isinstance(n, cst.Name) and n.value == expert):
        index = module.parent(use)
        element = module.parent(index)
        subscript = module.parent(element)
        alone = isinstance(index, cst.Index) and isinstance(subscript, cst.Subscript) and len(subscript.slice) == 1
        if not alone or not isinstance(subscript, cst.Subscript):
            raise NotALoop(_first_line(module.statement(use), module))
        chosen.append(subscript)
    return tuple(chosen)


def _locals(method: cst.FunctionDef) -> set[str]:
    return {*(p.name.value for p in walk(method.params) if isinstance(p, cst.Param)), *bound_names(method.body)}


def _first_line(node: cst.CSTNode, module: Module) -> str:
    """Return the first line of what a node is written as."""
    return module.code(node).strip().splitlines()[0]
