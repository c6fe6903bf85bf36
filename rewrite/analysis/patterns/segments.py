"""Loops over the pieces that tensors were split into, and the attention that each turn calls.

    splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in (query, key, value)]
    outputs = [attend(self, q, k, v, scaling=self.scaling)[0] for q, k, v in zip(*splits)]
    output = torch.cat(outputs, dim=1)

The same is read where the splits have names of their own or none, where the loop is a statement that appends to lists,
and where the weights that the calls return are kept too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import Scope, before, union
from rewrite.analysis.patterns.lookups import is_lookup
from rewrite.analysis.tree.module import Module, names_in, walk
from rewrite.analysis.tree.nodes import calls_in, given_names, names_bound_by

Loop = cst.For | cst.ListComp | cst.GeneratorExp
SEQUENCE, JOINED = 2, 1
"""Where the sequence lies in what attention functions take, and in what they return."""
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")
_JOINS = ("torch.cat", "torch.concat", "torch.concatenate")
_APPENDS = m.Expr(
    m.Call(
        m.Attribute(m.SaveMatchedNode(m.Name(), "list"), m.Name("append")),
        [m.Arg(m.SaveMatchedNode(m.DoNotCare(), "what"), keyword=None, star="")],
    )
)


class NotSegments(Exception):
    """A loop is not one call of attention a turn."""

    def __init__(self, detail: str):
        super().__init__(detail)
        self.detail = detail


@dataclass(frozen=True)
class Split:
    """A tensor that is split along the sequence, `torch.split(tensor, sizes, dim=2)`."""

    tensor: str
    sizes: cst.BaseExpression


@dataclass(frozen=True)
class Turn:
    """What one turn of a loop does: a call, whose first result goes into one list and whose second into another."""

    call: cst.Call
    outputs: str = ""
    weights: str = ""
    names: tuple[str, ...] = ()
    """The locals that a turn binds."""


@dataclass(frozen=True)
class Segments:
    """Attention inside each of the pieces of queries, keys and values."""

    call: cst.Call
    splits: tuple[Split, Split, Split]
    join: cst.Call
    """What concatenates the results."""
    line: cst.SimpleStatementLine
    """The statement of `join`."""
    weights: str
    """The list that holds what else the calls return, if one does."""
    gone: tuple[cst.CSTNode, ...]
    """The statements that nothing needs any more, in source order."""


def loops_over_pieces(function: cst.FunctionDef, scope: Scope) -> Iterator[Loop]:
    """Yield every loop over pieces of tensors that calls something in its turns, other than a piece's own methods."""
    for node in walk(function.body):
        if not isinstance(node, (cst.For, cst.ListComp, cst.GeneratorExp)):
            continue
        iterated, turn = (node.iter, node.body) if isinstance(node, cst.For) else (node.for_in.iter, node.elt)
        if not any(_called(call) in _SPLITS for call in _made_of(iterated, scope)):
            continue
        target = node.target if isinstance(node, cst.For) else node.for_in.target
        pieces = {name.value for name in walk(target) if isinstance(name, cst.Name)}
        if any(_object_of(call) not in pieces for call in calls_in(turn)):
            yield node


def _object_of(call: cst.Call) -> str:
    """Return the name of what a method is called of, through the methods before it: `z` of `z.view(n).mT.clone()`."""
    value: cst.BaseExpression = call.func
    while isinstance(value, (cst.Attribute, cst.Call)):
        value = value.value if isinstance(value, cst.Attribute) else value.func
    return value.value if isinstance(value, cst.Name) and value is not call.func else ""


def _made_of(iterated: cst.BaseExpression, scope: Scope) -> Iterator[cst.Call]:
    """Yield the calls that give what is iterated over: by a name, in a list, in a `zip`."""
    if isinstance(iterated, cst.Name) and iterated.value in scope.single:
        yield from _made_of(scope.single[iterated.value], scope)
    elif isinstance(iterated, cst.Call):
        yield iterated
        for argument in iterated.args if _called(iterated) in ("zip", "enumerate") else ():
            yield from _made_of(argument.value, scope)
    elif isinstance(iterated, (cst.List, cst.Tuple)):
        for element in iterated.elements:
            yield from _made_of(element.value, scope)
    elif isinstance(iterated, (cst.ListComp, cst.GeneratorExp)):
        yield from _made_of(iterated.elt, scope)


def _called(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""


def segments(loop: Loop, scope: Scope) -> Segments:
    """Return what a loop over pieces computes.

    Raises:
        NotSegments: if that is not the attention inside each of them.
    """
    if scope.unknown:
        raise NotSegments(scope.unknown)
    reader = _Reader(loop, scope)
    turn = reader.turn()
    pieces = reader.pieces()
    splits = reader.given(turn.call, pieces)
    join = reader.join(turn)
    return reader.checked(turn, splits, join)


@dataclass
class _Reader:
    """Reads one loop, and finds the statements that go with it."""

    loop: Loop
    scope: Scope
    gone: list[cst.CSTNode] = field(default_factory=list)
    followed: set[str] = field(default_factory=set)
    """The locals that nothing reads but what goes."""

    def refuse(self, node: cst.CSTNode) -> NotSegments:
        return NotSegments(" ".join(self.scope.module.code(node).split())[:80])

    # What a turn does

    def turn(self) -> Turn:
        """Return the call of attention that is all that a turn does."""
        loop = self.loop
        if isinstance(loop, cst.For):
            turn = self._appended(loop) if loop.orelse is None and loop.asynchronous is None else None
        else:
            call = _first_of(loop.elt)
            turn = Turn(call) if call is not None and _is_plain(loop.for_in) else None
        if turn is None or not self._is_attention(turn.call.func):
            raise self.refuse(loop.body if isinstance(loop, cst.For) else loop.elt)
        return turn

    def _appended(self, loop: cst.For) -> Turn | None:
        """Return a turn that appends what a call returns to one list, or to two."""
        lines = [_small(line) for line in loop.body.body]
        call, names = _bound_call(lines[0])
        appended = [m.extract(line, _APPENDS) if line is not None else None for line in lines[bool(names) :]]
        lists: dict[str, str] = {}
        for found in appended:
            if found is None:
                return None
            to, what = found["list"], found["what"]
            if not names and len(appended) == 1 and isinstance(what, cst.BaseExpression):
                call = _first_of(what)
                lists[""] = cst.ensure_type(to, cst.Name).value
            elif isinstance(what, cst.Name) and what.value in names and what.value not in lists:
                lists[what.value] = cst.ensure_type(to, cst.Name).value
            else:
                return None
        if call is None or len(set(lists.values())) != len(lists) or len(set(names)) != len(names):
            return None
        outputs = lists.get(names[0] if names else "")
        return Turn(call, outputs, lists.get(names[1], "") if len(names) > 1 else "", names) if outputs else None

    def _is_attention(self, func: cst.BaseExpression) -> bool:
        """Whether what is called was looked up among the attention functions."""
        values: list[cst.BaseExpression] = [func]
        if isinstance(func, cst.Name):
            lines = (node for node in walk(self.scope.function.body) if isinstance(node, cst.BaseStatement))
            smalls = (_small(line) for line in lines if func.value in _names_of(line))
            values = [s.value for s in smalls if isinstance(s, (cst.Assign, cst.AnnAssign)) and s.value is not None]
        return any(is_lookup(value, self.scope.module) for value in values)

    # What it runs over

    def pieces(self) -> Mapping[str, Split]:
        """Return the split that each name of the loop is a piece of."""
        header = self.loop if isinstance(self.loop, cst.For) else self.loop.for_in
        zipped = self._value(header.iter)
        elements = header.target.elements if isinstance(header.target, (cst.Tuple, cst.List)) else ()
        names = [element.value.value for element in elements if isinstance(element.value, cst.Name)]
        if not isinstance(zipped, cst.Call) or self._resolved(zipped.func) != "zip":
            raise self.refuse(zipped)
        arguments = zipped.args
        if len(arguments) == 1 and arguments[0].star == "*":
            splits = self._listed(self._value(arguments[0].value))
        elif not any(argument.star or argument.keyword for argument in arguments):
            splits = [self._split(self._value(argument.value)) for argument in arguments]
        else:
            raise self.refuse(zipped)
        if not len(set(names)) == len(elements) == len(splits):
            raise self.refuse(header.target)
        sizes = splits[0].sizes
        if not all(split.sizes.deep_equals(sizes) for split in splits) or not self.scope.of(sizes).is_pure:
            raise self.refuse(sizes)
        return dict(zip(names, splits, strict=True))

    def _listed(self, value: cst.BaseExpression) -> list[Split]:
        """Return the splits that a list of them holds, written out or made in a loop over tensors."""
        if isinstance(value, (cst.List, cst.Tuple)):
            return [self._split(self._value(element.value)) for element in value.elements]
        if isinstance(value, (cst.ListComp, cst.GeneratorExp)) and _is_plain(value.for_in):
            split, tensors = self._split(value.elt), value.for_in.iter
            elements = tensors.elements if isinstance(tensors, (cst.List, cst.Tuple)) else ()
            names = [
                e.value.value for e in elements if isinstance(e.value, cst.Name) and e.value.value in self.scope.locals
            ]
            own = m.matches(value.for_in.target, m.Name(split.tensor)) and split.tensor not in names_in([split.sizes])
            if own and elements and len(names) == len(elements):
                return [Split(name, split.sizes) for name in names]
        raise self.refuse(value)

    def _split(self, value: cst.BaseExpression) -> Split:
        """Read `torch.split(tensor, sizes, dim=2)` or `tensor.split(sizes, dim=2)`."""
        args: Sequence[cst.Arg] = ()
        if isinstance(value, cst.Call) and self._resolved(value.func) == "torch.split":
            args = value.args
        elif isinstance(value, cst.Call) and m.matches(value.func, m.Attribute(m.Name(), m.Name("split"))):
            args = (cst.Arg(cst.ensure_type(value.func, cst.Attribute).value), *value.args)
        given = _given(args, ("tensor", "split_size_or_sections", "dim"), ("split_size", "split_size_or_sections"))
        if len(given) == 3 and _is_number(given["dim"], SEQUENCE) and isinstance(given["tensor"], cst.Name):
            if given["tensor"].value in self.scope.locals:
                return Split(given["tensor"].value, given["split_size_or_sections"])
        raise self.refuse(value)

    def given(self, call: cst.Call, pieces: Mapping[str, Split]) -> tuple[Split, Split, Split]:
        """Return what queries, keys and values are pieces of; nothing else that the call reads depends on the turn."""
        first = call.args[1:4]
        names = [a.value.value for a in first if isinstance(a.value, cst.Name) and a.keyword is None and not a.star]
        if len(names) != 3 or not all(name in pieces for name in names):
            raise self.refuse(call)
        for other in (cst.Arg(call.func), call.args[0], *call.args[4:]):
            if other.star == "*" or names_in([other.value]) & set(pieces) or not self.scope.of(other.value).is_pure:
                raise self.refuse(other.value)
        query, key, value = (pieces[name] for name in names)
        return query, key, value

    # Who reads the results

    def join(self, turn: Turn) -> cst.Call:
        """Return the call that concatenates the results, and is all that reads them."""
        module, loop = self.scope.module, self.loop
        own, above = module.statement(loop), module.parent(loop)
        if isinstance(loop, cst.ListComp) and isinstance(above, cst.Arg):
            return self._checked_join(above)
        results = turn.outputs
        if isinstance(loop, cst.ListComp):
            results = next((name for name, value in self.scope.single.items() if value is loop), "")
        if not results:
            raise self.refuse(above)
        self.gone.append(own)
        self.followed.add(results)
        for name in filter(None, (turn.outputs, turn.weights)):
            self._starts_empty(name)
        readers = [use for use in self._uses(results) if not self._is_inside(use)]
        if len(readers) != 1:
            raise NotSegments(f"`{results}` is read {len(readers)} times")
        return self._checked_join(module.parent(readers[0]))

    def _starts_empty(self, name: str) -> None:
        """Check that the last statement before the loop that binds a list makes it empty."""
        own = self.scope.module.statement(self.loop)
        for line in reversed(_block(own, self.scope.module)[: _place(own, self.scope.module)]):
            if name in _names_of(line):
                small = _small(line)
                value = (
                    given_names(small).get(name) if isinstance(small, cst.Assign) else getattr(small, "value", None)
                )
                if value is not None and m.matches(value, m.List(elements=[])):
                    return self._goes(line)
                break
        raise NotSegments(f"`{name}` holds something before the loop")

    def _checked_join(self, argument: cst.CSTNode) -> cst.Call:
        call = self.scope.module.parent(argument)
        if isinstance(argument, cst.Arg) and isinstance(call, cst.Call) and self._resolved(call.func) in _JOINS:
            given = _given(call.args, ("tensors", "dim"), ("axis", "dim"))
            if len(given) == 2 and given["tensors"] is argument.value and _is_number(given["dim"], JOINED):
                return call
        raise self.refuse(call)

    def checked(self, turn: Turn, splits: tuple[Split, Split, Split], join: cst.Call) -> Segments:
        """Return what was found, if it may all be computed where the results are concatenated."""
        module = self.scope.module
        line = module.statement(join)
        around = [above for above in module.ancestors(join) if above is not line]
        around = around[: next(i for i, above in enumerate([*around, line]) if isinstance(above, cst.BaseStatement))]
        value = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
        if value is None or any(isinstance(above, _LAZY) for above in around):
            raise self.refuse(line)
        given = _names_of(line) if isinstance(value, cst.Assign) and value.value is join else set()
        if turn.weights and len(given) != 1:
            raise self.refuse(line)
        self._check_names(turn, given)
        self._check_order(line, join)
        block = list(_block(line, module))
        gone = tuple(statement for statement in block if any(statement is other for other in self.gone))
        assert isinstance(line, cst.SimpleStatementLine)
        return Segments(turn.call, splits, join, line, turn.weights, gone)

    def _check_names(self, turn: Turn, given: set[str]) -> None:
        """Check that what no longer has a value is read by nothing that stays; `given` are bound right afterwards."""
        loop = self.loop
        if isinstance(loop, cst.For):
            for name in sorted({*names_bound_by(loop), *turn.names} - given):
                if any(not self._is_inside(use) for use in self._uses(name)):
                    raise NotSegments(f"`{name}` is read outside the loop")
        for statement in self.gone:
            if statement is not loop and (left := _names_of(statement) - self.followed - {turn.weights}):
                raise NotSegments(f"`{min(left)}` is bound beside what the loop reads")

    def _check_order(self, line: cst.BaseStatement, join: cst.Call) -> None:
        """Check that what stands between the first and the last of the statements changes nothing that they read."""
        scope = self.scope
        block = list(_block(line, scope.module))
        place = {id(statement): i for i, statement in enumerate(block)}
        own = scope.module.statement(self.loop)
        parts = [*self.gone, line]
        if not all(id(part) in place for part in parts):
            raise NotSegments("the pieces, the loop and the results stand in several blocks")
        if own is not line and place[id(line)] != place[id(own)] + 1:
            raise NotSegments("the results are not concatenated right after the loop")
        first = min(place[id(part)] for part in parts)
        between = [s for s in block[first : place[id(line)]] if not any(s is part for part in parts)]
        effect = union(scope.of(statement) for statement in between)
        made = frozenset[str]().union(*map(_names_of, self.gone))
        kept = (made | union(map(scope.of, self.gone)).reads) & effect.binds | made & effect.reads
        if replace(effect, binds=kept).is_pure and union(map(scope.of, self._before(join))).is_pure:
            if not any(isinstance(above, (cst.Try, cst.TryStar)) for above in scope.module.ancestors(line)):
                return
            raise NotSegments("`try` around it would see other locals where a call fails")
        raise NotSegments(effect.anything or "what stands between them may change what they read")

    def _before(self, join: cst.Call) -> Iterator[cst.CSTNode]:
        """Yield what the statement of a call evaluates before it."""
        line = self.scope.module.statement(join)
        return (part for part in before(self.scope, join, line) if isinstance(part, cst.BaseExpression))

    # Locals

    def _value(self, expression: cst.BaseExpression) -> cst.BaseExpression:
        """Return the value of a local that is bound once and read here alone; its statement is no longer needed."""
        if not isinstance(expression, cst.Name) or expression.value not in self.scope.single:
            return expression
        value = self.scope.single[expression.value]
        if len(self._uses(expression.value)) != 1:
            raise NotSegments(f"`{expression.value}` is read elsewhere")
        self.followed.add(expression.value)
        self._goes(self.scope.module.statement(value))
        return self._value(value)

    def _goes(self, statement: cst.CSTNode) -> None:
        if not any(statement is known for known in self.gone):
            self.gone.append(statement)

    def _uses(self, name: str) -> list[cst.Name]:
        """Return every place of the function where a local stands other than to be bound."""
        found, parent = [], self.scope.module.parent
        for node in walk(self.scope.function.body):
            if type(node) is cst.Name and node.value == name:
                above = parent(node)
                is_attribute = isinstance(above, cst.Attribute) and above.attr is node
                is_keyword = isinstance(above, cst.Arg) and above.keyword is node
                if not is_attribute and not is_keyword and not _is_bound(node, self.scope):
                    found.append(node)
        return found

    def _is_inside(self, node: cst.CSTNode) -> bool:
        return any(above is self.loop for above in self.scope.module.ancestors(node))

    def _resolved(self, func: cst.BaseExpression) -> str:
        """Return the dotted name of a function that comes from elsewhere, `""` where a name may be the file's own."""
        root = func
        while isinstance(root, cst.Attribute):
            root = root.value
        names = self.scope.names
        if not isinstance(root, cst.Name) or root.value in self.scope.locals or not names.is_free(root.value):
            return ""
        return names.resolved(func)


_NAMED = m.Element(value=m.Name())
_LAZY = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp)


def _first_of(value: cst.BaseExpression) -> cst.Call | None:
    """Return the call of `call(…)[0]`."""
    first = m.Subscript(m.Call(), [m.SubscriptElement(m.Index(m.Integer("0"), star=None))])
    return cst.ensure_type(cst.ensure_type(value, cst.Subscript).value, cst.Call) if m.matches(value, first) else None


def _bound_call(line: cst.CSTNode | None) -> tuple[cst.Call | None, tuple[str, ...]]:
    """Return the call of `name = call(…)[0]` or `name, other = call(…)`, and these names."""
    if not isinstance(line, cst.Assign) or len(line.targets) != 1:
        return None, ()
    target = line.targets[0].target
    if isinstance(target, cst.Name):
        return _first_of(line.value), (target.value,)
    if m.matches(target, m.Tuple([_NAMED, _NAMED])) and isinstance(line.value, cst.Call):
        first, second = cst.ensure_type(target, cst.Tuple).elements
        return line.value, (
            cst.ensure_type(first.value, cst.Name).value,
            cst.ensure_type(second.value, cst.Name).value,
        )
    return None, ()


def _small(line: cst.CSTNode) -> cst.CSTNode | None:
    """Return the statement that is all of its line."""
    return line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None


def _names_of(line: cst.CSTNode) -> set[str]:
    """Return the names that a statement binds to values."""
    small = _small(line)
    if isinstance(small, cst.Assign):
        return set().union(*(names_bound_by(target) for target in small.targets))
    return names_bound_by(small) if isinstance(small, cst.AnnAssign) else set()


def _is_bound(name: cst.Name, scope: Scope) -> bool:
    """Whether a name stands in the target of an assignment or a loop, by itself or in a tuple."""
    node: cst.CSTNode = name
    above = scope.module.parent(node)
    while isinstance(above, (cst.Tuple, cst.List, cst.Element, cst.StarredElement)):
        node, above = above, scope.module.parent(above)
    return isinstance(above, (cst.AssignTarget, cst.AnnAssign, cst.For, cst.CompFor)) and above.target is node


def _is_plain(loop: cst.CompFor) -> bool:
    return not loop.ifs and loop.inner_for_in is None and loop.asynchronous is None


def _is_number(node: cst.BaseExpression, number: int) -> bool:
    return isinstance(node, cst.Integer) and node.value == str(number)


def _given(args: Sequence[cst.Arg], names: Sequence[str], other: tuple[str, str]) -> dict[str, cst.BaseExpression]:
    """Return arguments by their names, nothing where one is unpacked or unknown; `other` is another name of one."""
    found: dict[str, cst.BaseExpression] = {}
    for place, argument in enumerate(args):
        name = argument.keyword.value if argument.keyword is not None else names[place] if place < len(names) else ""
        name = other[1] if name == other[0] else name
        if argument.star or name not in names or name in found:
            return {}
        found[name] = argument.value
    return found


def _place(line: cst.CSTNode, module: Module) -> int:
    """Return which statement of its block a statement is."""
    return next(place for place, statement in enumerate(_block(line, module)) if statement is line)


def _block(line: cst.CSTNode, module: Module) -> Sequence[cst.CSTNode]:
    body = getattr(module.parent(line), "body", ())
    return body if isinstance(body, Sequence) else ()
