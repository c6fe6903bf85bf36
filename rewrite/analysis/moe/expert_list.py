"""The loop over experts that are a list of modules, read as what it adds to which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from rewrite.analysis.effects import Scope, between, effects_of, why_not_move
from rewrite.analysis.moe.expert_loop import (
    EXPERT,
    NotALoop,
    finds,
    first_line,
    is_mask,
    is_number,
    is_own,
    read_after,
)
from rewrite.analysis.step.source import source
from rewrite.analysis.step.terms import LINEAR, MAX_DEPTH, Step, computed_in_step, is_built_from, values_of
from rewrite.analysis.syntax.module import ClassInfo, Module, names_in, self_attribute, walk
from rewrite.analysis.syntax.nodes import bound_names, calls_in, parameters, single_argument
from rewrite.analysis.terms.computation import Bindings, NotComputable, subterms
from rewrite.analysis.terms.spelling import FLOAT32, NONE, Term, constant

_ZERO, _ONE, _REST = constant(0), constant(1), constant(-1)
_LISTS = ("torch.nn.ModuleList", "torch.nn.modules.container.ModuleList")
_DROPOUT = ("torch.nn.Dropout",)
_SHAPED = ("view", "reshape")
_LAST_DIM = (Term("keyword", (_REST,), "dim"),)
_AS_TUPLE = Term("keyword", (Term("name", (), "True"),), "as_tuple")


@dataclass(frozen=True)
class ListLoop:
    """`for number, expert in enumerate(self.experts):` that adds what each expert makes of its tokens."""

    output: str
    hidden_states: str
    experts: str
    """The attribute."""
    index: str
    weights: str
    count: str | None
    """What the loop, or the mask that it reads, takes for the number of experts; None for the length of the list."""
    strays: bool
    """Whether an index of no expert is passed over."""
    dense: bool
    """Whether the weights have one for every expert."""


def _lists(info: ClassInfo, module: Module) -> set[str]:
    """Return the attributes that may hold lists of modules."""
    built = (
        (attribute, value.func)
        for attribute, values in info.assigned.items()
        for value in values
        if isinstance(value, cst.Call)
    )
    return {attribute for attribute, func in built if module.qualified(func) in _LISTS}


def over_list(node: cst.For, info: ClassInfo, module: Module) -> bool:
    """Whether a loop calls the modules of a list one after the other, and writes rows that each turn looks for."""
    read = {self_attribute(inner) for part in (node.iter, node.body) for inner in walk(part)}
    if not read & _lists(info, module):
        return False
    lines = [line for line in walk(node.body) if isinstance(line, cst.Assign) and _looks(line.value)]
    found = {name for line in lines for name in bound_names(line)}
    rows = [row for inner in walk(node.body) for row in _written_rows(inner)]
    return any(isinstance(part, cst.Comparison) or names_in([part]) & found for part in rows)


def _looks(value: cst.BaseExpression) -> bool:
    """Whether a value may be rows that were looked for: made of tensors, and no key that a text is made into."""
    parts = list(walk(value))
    made = any(isinstance(part, (cst.Call, cst.Comparison, cst.Subscript)) for part in parts)
    return made and not any(isinstance(part, (cst.SimpleString, cst.FormattedString)) for part in parts)


def _written_rows(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return what names the rows that a node writes."""
    if isinstance(node, (cst.AugAssign, cst.AssignTarget)) and isinstance(node.target, cst.Subscript):
        return [e.slice.value for e in node.target.slice if isinstance(e.slice, cst.Index)]
    called = node.func.attr.value if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) else ""
    writes = called.startswith(("index_add", "scatter_", "index_put", "index_copy"))
    return [argument.value for argument in node.args[:2]] if writes and isinstance(node, cst.Call) else []


def list_loop(node: cst.For, method: cst.FunctionDef, owner: ClassInfo, module: Module) -> ListLoop:
    """Take the loop apart.

    Raises:
        NotALoop: if a turn does something else than to add an expert's weighted output to its tokens.
    """
    scope = effects_of(module).scope(method, owner)
    if scope.unknown or "torch" in scope.locals or not scope.names.means("torch"):
        raise NotALoop(scope.unknown or "`torch` may be bound to something else")
    try:
        return _Reader(node, scope, owner, module).read()
    except NotComputable as error:
        raise NotALoop(error.what) from error


@dataclass(frozen=True)
class _Chosen:
    """The tokens that chose the expert of a turn."""

    token: Term
    """Their rows: numbers, or where a condition holds."""
    index: str
    """The local that is the choice, `[…, K]`."""
    place: Term | None
    """Which of a token's experts it is; None where rows are a condition."""
    test: Term
    """The condition on the choice."""
    count: Term | None
    """The number of experts that the choice is among; None where it may be none of them."""
    searches: tuple[Term, ...]
    """What is empty where no token chose the expert."""

    @property
    def places(self) -> tuple[Term, ...]:
        """What chooses the weights of the tokens from all."""
        return (self.test,) if self.place is None else (self.token, self.place)


@dataclass
class _Reader:
    """Reads one loop."""

    node: cst.For
    scope: Scope
    owner: ClassInfo
    module: Module
    over: str = ""
    """The list whose length is the number of turns, where that is how it is written."""
    guards: list[Term] = field(default_factory=list)
    """What is asked whether an expert has any tokens: the search for them, or its condition."""

    def read(self) -> ListLoop:
        run = Step(self.module, self.owner, MAX_DEPTH)
        run.scope = self.scope
        environment: Bindings = {name: Term("parameter", (), name) for name in self.scope.locals if name != "self"}
        counts = self._header(environment, run)
        mask = self._masks(environment, run)
        output, token, value, adds = self._body(list(self.node.body.body), environment, run)
        chosen = self._chosen(_flat(token), mask)
        call = self._call(value)
        factors = _uncast(value).args
        weights, dense, sums = self._weights(
            _uncast(factors[factors[0] is call or _uncast(factors[0]) == call]), chosen
        )
        if [done.term for done in run.calls if done.term.op == "call" or not done.is_quiet] != [call]:
            raise NotALoop("something else is called in a turn")
        if any(_flat(guard) not in chosen.searches for guard in self.guards):
            raise NotALoop("a turn is left out where others than its own tokens are missing")
        self._check(output, value)
        once = sums if chosen.place is None else adds
        if not once and not self._is_distinct(chosen.index):
            raise NotALoop("a token may choose an expert twice, of which one is added")
        counts += [] if chosen.count is None else [chosen.count]
        if len(set(counts)) > 1:
            raise NotALoop("the loop has another number of turns than the mask has experts")
        count = source(counts[0], self.module) if counts else None
        states = self._states(call.args[1], chosen)
        experts = self._list(call.args[0].args[0])
        return ListLoop(output, states, experts, chosen.index, weights, count, chosen.count is None, dense)

    def _header(self, environment: Bindings, run: Step) -> list[Term]:
        """Bind what the loop binds; return the number of its turns where that is not the length of the list."""
        call, target = self.node.iter, self.node.target
        name = call.func.value if isinstance(call, cst.Call) and isinstance(call.func, cst.Name) else ""
        plain = isinstance(call, cst.Call) and single_argument(call) is not None
        if self.node.orelse is not None or not plain or self.scope.names.is_bound(name) or name in self.scope.locals:
            raise NotALoop(f"a loop over `{self.module.code(call)}`")
        assert isinstance(call, cst.Call)
        given = call.args[0].value
        if name == "enumerate" and isinstance(target, cst.Tuple) and len(target.elements) == 2:
            number, expert = (element.value for element in target.elements)
            held = self_attribute(given)
            if held is not None and isinstance(number, cst.Name) and isinstance(expert, cst.Name):
                environment[number.value] = EXPERT
                environment[expert.value] = Term("index", (Term("attribute", (), held), EXPERT))
                self.over = held
                return []
        if name == "range" and isinstance(target, cst.Name):
            environment[target.value] = EXPERT
            count = run.expression(given, environment)
            if count.op == "len" and len(count.args) == 1 and count.args[0].op == "attribute":
                self.over = count.args[0].value
                return []
            if count.op in ("attribute", "constant"):
                return [count]
        raise NotALoop(f"a loop over `{self.module.code(call)}`")

    def _masks(self, environment: Bindings, run: Step) -> Term | None:
        """Bind the local that is the mask `[E, K, N]` of a choice, made before the loop; return the mask."""
        read = {n.value for n in walk(self.node.body) if isinstance(n, cst.Name)}
        for name in sorted(read & {*self.scope.single}):
            value = self.scope.single[name]
            if not any(self.module.code(call.func).endswith("one_hot") for call in calls_in(value)):
                continue
            mask = run.expression(value, environment)
            if is_mask(mask) and self._is_same_here(value):
                environment[name] = mask
                return mask
        return None

    def _is_same_here(self, value: cst.BaseExpression) -> bool:
        """Whether an expression of an earlier statement computes the same right before the loop."""
        past = between(self.scope, self.module.statement(value), self.node.iter)
        return past is not None and why_not_move(self.scope, self.scope.of(value), past) is None

    def _body(
        self, statements: Sequence[cst.CSTNode], environment: Bindings, run: Step
    ) -> tuple[str, Term, Term, bool]:
        """Return what a turn adds to: its name, its rows, what is added, and whether a row may stand twice."""
        for place, statement in enumerate(statements):
            rest = statements[place + 1 :]
            if isinstance(statement, cst.If) and statement.orelse is None:
                test = run.expression(statement.test, environment)
                if self._asks(_is_empty(test)) and _continues(statement):
                    continue
                if self._asks(_is_some(test)) and not rest:
                    return self._body(list(statement.body.body), environment, run)
                raise NotALoop(first_line(statement, self.module))
            if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 and not rest:
                if (added := self._added(statement.body[0], environment, run)) is not None:
                    return added
            if run.block([statement], environment) is not None:
                break
        raise NotALoop(first_line(statements[-1], self.module))

    def _asks(self, about: Term | None) -> bool:
        """Whether a test asks for the tokens of an expert; that they are those of the search is looked at later."""
        self.guards += [] if about is None else [about]
        return about is not None

    def _added(
        self, small: cst.BaseSmallStatement, environment: Bindings, run: Step
    ) -> tuple[str, Term, Term, bool] | None:
        """Read `output[token] += value` or `output.index_add_(0, token, value)`."""
        if isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign):
            target = small.target
            if isinstance(target, cst.Subscript) and isinstance(target.value, cst.Name) and len(target.slice) == 1:
                token = run.slice(target.slice[0].slice, environment)
                return target.value.value, token, run.expression(small.value, environment), False
        call = small.value if isinstance(small, cst.Expr) else None
        if (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and isinstance(call.func.value, cst.Name)
        ):
            words = dict(zip(("dim", "index", "source"), (a.value for a in call.args if not a.keyword), strict=False))
            words |= {a.keyword.value: a.value for a in call.args if a.keyword}
            starred = any(argument.star for argument in call.args)
            if call.func.attr.value == "index_add_" and [*words] == ["dim", "index", "source"] and not starred:
                dim, token, value = (run.expression(part, environment) for part in words.values())
                if dim == _ZERO and len(call.args) == 3:
                    return call.func.value.value, token, value, True
        return None

    def _states(self, given: Term, chosen: _Chosen) -> str:
        """Return the local whose rows an expert is given."""
        if given.op in (*_SHAPED, "squeeze") and given.args[0].op == "index":
            inner, *shape = given.args
            if inner.args[1:] == (NONE, chosen.token):
                if shape == [_ZERO] if given.op == "squeeze" else len(shape) == 2 and shape[0] == _REST:
                    given = Term("index", (inner.args[0], chosen.token))
        if given.op == "index_select" and given.args[1:] == (_ZERO, chosen.token):
            given = Term("index", (given.args[0], chosen.token))
        if given.op != "index" or [*map(_flat, given.args[1:])] != [chosen.token] or given.args[0].op != "parameter":
            raise NotALoop(f"the experts are given `{given}`")
        return given.args[0].value

    def _list(self, held: Term) -> str:
        if held.op != "attribute" or not is_built_from(held.value, _LISTS, self.owner, self.module):
            raise NotALoop(f"{held} may be something else than a list of modules")
        if self.over not in ("", held.value):
            raise NotALoop("the modules of one list are called as often as another one has some")
        return held.value

    def _weights(self, column: Term, chosen: _Chosen) -> tuple[str, bool, bool]:
        """Return the local of the weights, whether it has one for every expert, and whether a token's are added up.

        As it is read: `weights[token, place]`, `weights[index == expert]`, `weights[token, expert]`, or the sum of
        `weights * (index == expert)` at the tokens; each as a column.
        """
        held, *places = _of_column(column)
        places = [_flat(place) for place in places]
        if held.op == "parameter" and places == [chosen.token, EXPERT]:
            return held.value, True, False
        if held.op == "parameter" and places == [*chosen.places]:
            return held.value, False, False
        added = held.op == "sum" and held.args[1:] in ((_REST,), _LAST_DIM) and chosen.place is None
        if added and places == [chosen.token]:
            factors = held.args[0].args if held.args[0].op == "mul" else ()
            others = [side for side in factors if side != chosen.test]
            if len(factors) == 2 and len(others) == 1 and others[0].op == "parameter":
                return others[0].value, False, True
        raise NotALoop(f"the weights are `{column}`")

    def _call(self, value: Term) -> Term:
        """Return the call of an expert among the factors of what is added."""
        for side in map(_uncast, _uncast(value).args):
            called = side.args[0] if side.op == "call" and len(side.args) == 2 else side
            if called is not side and called.op == "index" and called.args[1:] == (EXPERT,):
                return side
        raise NotALoop("what is added is no expert's output times a weight")

    def _chosen(self, token: Term, mask: Term | None) -> _Chosen:
        """Say what the rows of a turn are: what a search finds, or a condition."""
        found = token.args[0]
        if token.op == "any" and token.args[1:] in ((_REST,), _LAST_DIM):
            if (index := _compared(found)) is not None:
                return _Chosen(token, index, None, found, None, (token, found))
        if token.op == "index" and mask is not None and finds(found, mask) and token.args[1:] == (_ONE,):
            local, count = mask.args[0].args
            if local.op == "parameter":
                place = Term("index", (found, _ZERO))
                return _Chosen(token, local.value, place, found.args[0], count, (found, found.args[0]))
        if token.op == "index" and token.args[1:] == (_ZERO,) and found.op in ("where", "nonzero"):
            plain = found.args[1:] == (() if found.op == "where" else (_AS_TUPLE,))
            if plain and (index := _compared(found.args[0])) is not None:
                place = Term("index", (found, _ONE))
                return _Chosen(token, index, place, found.args[0], None, (found, found.args[0]))
        raise NotALoop("the tokens of an expert are found in another way")

    def _check(self, output: str, value: Term) -> None:
        """Nothing that a turn reads changes in the loop, and nobody reads what it binds afterwards."""
        scope = self.scope
        binds = scope.of(self.node).binds
        if output in binds or not is_own(output, scope) or not self._is_alone(output):
            raise NotALoop(f"`{output}` may share memory with what a turn reads")
        carried = {leaf.value for leaf in subterms(value) if leaf.op == "parameter"} & binds
        if carried:
            raise NotALoop(f"{min(carried)} of one turn is read in the next")
        if late := sorted(binds & read_after(self.node, scope.function, self.module)):
            raise NotALoop(f"{late[0]} of the last turn is read after the loop")

    def _is_alone(self, output: str) -> bool:
        """Whether nothing but its making and what adds to it names the output until the loop has ended."""
        if any(isinstance(above, (cst.For, cst.While)) for above in self.module.ancestors(self.node)):
            return False
        nodes = list(walk(self.scope.function))
        inside = {id(node) for node in walk(self.node)}
        last = max(place for place, node in enumerate(nodes) if id(node) in inside)
        return sum(isinstance(node, cst.Name) and node.value == output for node in nodes[: last + 1]) == 2

    def _is_distinct(self, index: str) -> bool:
        """Whether a local is the places of the largest of some scores, unchanged."""
        scope = self.scope
        lines = [line for line in walk(scope.function.body) if isinstance(line, cst.Assign)]
        if scope.times[index] != 1 or scope.root(index) in scope.memory(scope.of(scope.function.body).writes):
            return False
        for target, value in ((t.target, line.value) for line in lines for t in line.targets):
            if isinstance(target, cst.Tuple) and len(target.elements) == 2 and isinstance(value, cst.Call):
                second = target.elements[1].value
                if isinstance(second, cst.Name) and second.value == index:
                    return self._takes_largest(value)
        return False

    def _takes_largest(self, call: cst.Call) -> bool:
        """Whether a call is `topk` along the last dimension."""
        method = isinstance(call.func, cst.Attribute) and call.func.attr.value == "topk"
        function = self.scope.names.resolved(call.func) == "torch.topk"
        words = {a.keyword.value: self.module.code(a.value) for a in call.args if a.keyword}
        plain = [self.module.code(a.value) for a in call.args if not a.keyword][1 if function else 0 :]
        last = words.get("dim", plain[1] if len(plain) > 1 else "-1") == "-1"
        return (method or function) and last and not any(a.star for a in call.args)


def _of_column(column: Term) -> tuple[Term, ...]:
    """Return what a column is an index of, and the items; or what it is a column of."""
    if (column.op == "unsqueeze" and column.args[1] in (_ONE, _REST)) or (
        column.op in _SHAPED and column.args[1:] == (_REST, _ONE)
    ):
        column = column.args[0]
    elif column.op == "index" and len(column.args) > 2 and column.args[-1] == NONE:
        column = Term("index", column.args[:-1])
    else:
        raise NotALoop("the weights are no column")
    return column.args if column.op == "index" else (column,)


def _compared(test: Term) -> str | None:
    """Return the local `[…, K]` that a test compares with the number of the turn."""
    others = [side for side in test.args if not is_number(side)] if test.op == "eq" else []
    return others[0].value if len(others) == 1 and others[0].op == "parameter" else None


def _flat(term: Term) -> Term:
    """Return a condition of rows without what makes one dimension of several."""
    shaped = term.op in _SHAPED and term.args[1:] == (_REST,)
    return _flat(term.args[0]) if shaped or (term.op == "flatten" and len(term.args) == 1) else term


def _is_empty(test: Term) -> Term | None:
    """Return what a test asks whether there is none of it."""
    if test.op == "not":
        return _some_of(test.args[0])
    return _counted(test) if test.op == "eq" and _ZERO in test.args else None


def _is_some(test: Term) -> Term | None:
    """Return what a test asks whether there is some of it."""
    if (test.op == "lt" and test.args[0] == _ZERO) or (test.op == "ne" and _ZERO in test.args):
        return _counted(test)
    return _some_of(test)


def _counted(test: Term) -> Term | None:
    return next((about for about in map(_rows_of, test.args) if about is not None), None)


def _some_of(test: Term) -> Term | None:
    """Return the search that a number of rows counts, or the condition of which any holds."""
    return test.args[0] if test.op == "any" and len(test.args) == 1 else _rows_of(test)


def _rows_of(term: Term) -> Term | None:
    """Return the search of which a term counts what was found."""
    rows = None
    if term.op == "sum" and len(term.args) == 1:
        return term.args[0]
    if term.op in ("numel", "len") and len(term.args) == 1:
        rows = term.args[0]
    elif term.op == "index" and term.args[0].op == "shape" and term.args[1:] == (_ZERO,):
        rows = term.args[0].args[0]
    return (
        rows.args[0] if rows is not None and rows.op == "index" and rows.args[0].op in ("where", "nonzero") else None
    )


def _continues(statement: cst.If) -> bool:
    body = list(walk(statement.body))
    lines = [node for node in body if isinstance(node, cst.BaseSmallStatement)]
    return len(lines) == 1 and isinstance(lines[0], cst.Continue)


def _uncast(term: Term) -> Term:
    while term.op == "cast" and (term.args[1] == FLOAT32 or term.args[1].op == "dtype"):
        term = term.args[0]
    return term


def expert_classes(attribute: str, info: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes of the file that a list of modules is built of, as far as the file shows them."""
    values = values_of(attribute, info, module)
    appends = [c for method in info.methods.values() for c in calls_in(method.body) if _fills(c, attribute)]
    named = (module.qualified(call.func) for value in (*values, *appends) for call in calls_in(value))
    return [module.classes[name] for name in dict.fromkeys(named) if name in module.classes]


def _fills(call: cst.Call, attribute: str) -> bool:
    return isinstance(call.func, cst.Attribute) and self_attribute(call.func.value) == attribute


def expert_parts(info: ClassInfo, module: Module) -> tuple[str, ...]:
    """Return gate, up and down projection and the activation of a class of experts, as source.

    Raises:
        NotComputable: if it computes something else than `down(act(gate(x)) * up(x))`, in training too.
    """
    forward = info.methods.get("forward")
    if forward is None or len(parameters(forward)) != 2:
        raise NotComputable(f"{info.name} takes more than the hidden states")
    for node in walk(forward.body):
        if self_attribute(node) == "training":
            raise NotComputable(f"{info.name} computes something else in training")
    called = [self_attribute(call.func) for call in calls_in(forward.body)]
    if any(name is not None and is_built_from(name, _DROPOUT, info, module) for name in called):
        raise NotComputable(f"{info.name} computes something else in training")
    hidden = Term("parameter", (), parameters(forward)[1])
    term = computed_in_step(forward, module, info)
    if term.op != "call" or len(term.args) != 2:
        raise NotComputable(f"{info.name} computes something else than down(act(gate(x)) * up(x))")
    for gate, up, activation in _gates(term.args[1]):
        products = [(term.args[0], *term.args[1:]), *(side.args for side in (gate, up) if side.op == "call")]
        linear = [args[0] for args in products if is_built_from(args[0].value, LINEAR, info, module)]
        if len(linear) == 3 and gate.args[1:] == up.args[1:] == (hidden,):
            return tuple(source(part, module) for part in (gate.args[0], up.args[0], term.args[0], activation))
    raise NotComputable(f"{info.name} computes something else than down(act(gate(x)) * up(x))")


def _gates(term: Term) -> Iterator[tuple[Term, Term, Term]]:
    """Yield gate, up and activation of a gated product, as the file has it or as the rewriter has put it."""
    if term.op == "gated_activation" and len(term.args) == 3:
        yield term.args[0], term.args[1], term.args[2]
    for activated, up in (term.args, term.args[::-1]) if term.op == "mul" and len(term.args) == 2 else ():
        if activated.op == "call" and len(activated.args) == 2 and activated.args[0].op == "attribute":
            yield activated.args[1], up, activated.args[0]
        elif activated.op == "nn.functional.silu" and len(activated.args) == 1:
            yield activated.args[0], up, Term("name", (), "torch.nn.functional.silu")
