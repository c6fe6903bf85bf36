"""Rotations whose block does something first: it tests its arguments, or gathers, cuts or reshapes its tables.

The statements that say nothing of what is turned stay as they are, and what they bind is read as if it were given. One
that asks for the shape of something made from what is turned asks a view of that shape. What is left is compared with
the operator's forms.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import libcst as cst

from rewrite.analysis.effects.scope import Scope
from rewrite.analysis.patterns.halves import PAIRS, in_chunks
from rewrite.analysis.patterns.rope import Choice, Rotation, Turning, turning
from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import expression, names_bound_by, parameters, replace_nodes
from rewrite.analysis.tree.replacement import is_docstring

_ASKED = frozenset({"shape", "dtype", "device", "ndim", "dim", "size", "is_cuda"})
"""Attributes and methods that say something about a tensor and read none of its numbers."""
_MOST_NAMES = 8


@dataclass(frozen=True)
class Prepared:
    """A rotation behind statements that stay."""

    kept: list[tuple[cst.BaseStatement, cst.BaseStatement]]
    """Statements that stay, and how they read."""
    turning: Turning


@dataclass(frozen=True)
class Block:
    """Statements of a function of which the last one returns."""

    node: cst.IndentedBlock
    function: cst.FunctionDef
    owner: ClassInfo | None
    module: Module

    @property
    def statements(self) -> list[cst.BaseStatement]:
        """Without a docstring."""
        found = [s for s in self.node.body if isinstance(s, cst.BaseStatement)]
        return found[1:] if found and is_docstring(found[0]) else found

    @property
    def given(self) -> list[str]:
        """The names that hold something when the block begins, those of the functions around it among them."""
        inside = {id(node) for node in walk(self.node)}
        around = [n for n in self.module.ancestors(self.node) if isinstance(n, cst.FunctionDef)]
        names = {name for function in around for name in parameters(function)}
        outside = (node for node in walk(around[-1].body) if id(node) not in inside)
        return sorted(names.union(*(names_bound_by(node) for node in outside)) - {"self"})


def blocks_of(function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> Iterator[Block]:
    """Yield the blocks of a function that end with a `return`, the outermost first."""
    for node in walk(function):
        if isinstance(node, cst.IndentedBlock) and node.body and _is_return(node.body[-1]):
            inside = next(above for above in module.ancestors(node) if isinstance(above, cst.FunctionDef))
            if inside is function:
                yield Block(node, function, owner, module)


def prepared(block: Block, scope: Scope) -> Prepared | None:
    """Return the rotation that a block ends with, None where no part of it can stay in front of one."""
    statements = block.statements
    read = {name for statement in statements for name in _names(statement)}
    own = [name for name in block.given if name in read]
    if len(own) > _MOST_NAMES:
        return None
    for turned in (*combinations(own, 2), *combinations(own, 1)):
        split = _Split(block, frozenset(turned), scope)
        try:
            found = split.found(statements)
        except NotComputable:
            continue
        if found is not None and {rotation.tensor for rotation in _each(found)} == set(turned):
            return Prepared(split.staying(statements), found)
    return None


def _each(found: Turning) -> list[Rotation]:
    return found.rotations if isinstance(found, Choice) else found


class _Split:
    """Which statements say something of what is turned, and which stay in front."""

    def __init__(self, block: Block, turned: frozenset[str], scope: Scope):
        self.block = block
        self.module = block.module
        self.scope = scope
        self.made = set(turned)
        self.kept: dict[int, cst.BaseStatement] = {}
        """What stays, by the `id` of what stood there, and how it reads."""
        self.sizes: list[tuple[cst.BaseStatement, cst.BaseStatement | None]] = []
        """What is replaced and may stay, too, and how it reads then: sizes that either side may read."""
        self.environment: Bindings = {name: Term("parameter", (), name) for name in block.given}

    def found(self, statements: Sequence[cst.BaseStatement]) -> Turning | None:
        """Return what the last of some statements turns, where those that stay may stand in front."""
        run = Run(self.module, self.block.owner, MAX_DEPTH)
        for statement in statements[:-1]:
            places = list(_places(statement, self.made, self.module))
            asked = [node for node in places if _is_asked(node, self.block)]
            reads = len(asked) < len(places)
            if _is_guard(statement):
                if any(not self._is_given(node.value) for node in places if node not in asked):
                    return None
                self.kept[id(statement)] = self._reading(statement, asked)
            elif reads or (asked and _is_simple(statement) and not self._makes_a_table(statement)):
                if not reads:
                    self.sizes.append((statement, self._if_readable(statement, asked)))
                run.block([statement], self.environment)
                self.made |= _bound(statement) if reads else set()
            elif _assigns(statement) and not _bound(statement) & self.made:
                self.kept[id(statement)] = self._reading(statement, asked)
                self.environment |= self._bound_by(statement, run)
            else:
                return None
        if not self._keep_needed() or not self._may_come_first(statements):
            return None
        term = run.block([statements[-1]], self.environment)
        return turning(term) if term is not None else None

    def staying(self, statements: Sequence[cst.BaseStatement]) -> list[tuple[cst.BaseStatement, cst.BaseStatement]]:
        """Return the statements that stay, and how they read then, in their order."""
        return [(statement, self.kept[id(statement)]) for statement in statements if id(statement) in self.kept]

    def _reading(self, statement: cst.BaseStatement, asked: Sequence[cst.Name]) -> cst.BaseStatement:
        """Return how a statement reads in front: what it asks of something that is made, it asks a view of that shape.

        Raises:
            NotComputable: where nothing has that shape, or more than that is asked.
        """
        views: dict[int, tuple[cst.CSTNode, ...]] = {}
        for node in asked:
            if not self._is_given(node.value):
                held = self.environment.get(node.value)
                view = None if held is None or _asks_dtype(node, self.module) else _view(in_chunks(held))
                if view is None:
                    raise NotComputable(f"`{node.value}` is asked")
                views[id(node)] = (expression(view),)
        kept = replace_nodes(statement, views) if views else statement
        assert isinstance(kept, cst.BaseStatement)
        return kept

    def _bound_by(self, statement: cst.BaseStatement, run: Run) -> Bindings:
        """Return what is known of the names that a statement binds which stays: which sizes of what is turned."""
        after = dict(self.environment)
        with suppress(NotComputable):
            run.block([statement], after)
        held = {name: after.get(name, NONE) for name in _bound(statement)}
        return {name: term if _is_size(term) else Term("parameter", (), name) for name, term in held.items()}

    def _if_readable(self, statement: cst.BaseStatement, asked: Sequence[cst.Name]) -> cst.BaseStatement | None:
        try:
            return self._reading(statement, asked)
        except NotComputable:
            return None

    def _is_given(self, name: str) -> bool:
        return self.environment.get(name) == Term("parameter", (), name)

    def _makes_a_table(self, statement: cst.BaseStatement) -> bool:
        """Whether a statement that asks for sizes reads something of what is given besides."""
        given = {name for name, held in self.environment.items() if held == Term("parameter", (), name)}
        return any(True for _ in _places(statement, given - self.made, self.module))

    def _keep_needed(self) -> bool:
        """Keep the sizes, too, that statements read which stay; return whether that is possible."""
        needed = set[str]().union(*(_names(statement) for statement in self.kept.values()))
        for statement, reading in reversed(self.sizes):
            if _bound(statement) & needed:
                if reading is None:
                    return False
                self.kept[id(statement)] = reading
                needed |= _names(reading)
        return True

    def _may_come_first(self, statements: Sequence[cst.BaseStatement]) -> bool:
        """Whether the statements that stay compute the same in front of those that are replaced."""
        earlier = set[str]()
        for statement in statements[:-1]:
            if id(statement) not in self.kept:
                earlier |= _names(statement)
                continue
            effect = self.scope.of(statement)
            if effect.writes or effect.stores or effect.draws or effect.anything or earlier & _bound(statement):
                return False
        return True


def _is_size(term: Term) -> bool:
    """Whether a term is a size of something, or made from some."""
    if term.op == "shape":
        return True
    return term.op in ("index", "floordiv", "mul", "add") and all(a.op == "constant" or _is_size(a) for a in term.args)


def _places(statement: cst.CSTNode, names: Container[str], module: Module) -> Iterator[cst.Name]:
    """Yield where a statement reads or binds one of some names."""
    for node in walk(statement):
        if isinstance(node, cst.Name) and node.value in names:
            above = module.parent(node)
            attribute = isinstance(above, cst.Attribute) and above.attr is node
            if not attribute and not (isinstance(above, cst.Arg) and above.keyword is node):
                yield node


def _is_asked(node: cst.Name, block: Block, depth: int = 2) -> bool:
    """Whether nothing but the shape, dtype or device of a tensor is asked for, maybe by a function of the file."""
    module = block.module
    above = module.parent(node)
    if isinstance(above, cst.Attribute) and above.value is node:
        return above.attr.value in _ASKED
    call = module.parent(above) if isinstance(above, cst.Arg) and not above.star else None
    if not isinstance(call, cst.Call) or not depth:
        return False
    name = self_attribute(call.func)
    helper = module.method(block.owner, name) if block.owner is not None and name is not None else None
    if isinstance(call.func, cst.Name) and call.func.value not in block.given:
        helper = module.functions.get(call.func.value)
    taken = _parameter(call, above, helper) if helper is not None and isinstance(above, cst.Arg) else None
    if helper is None or taken is None:
        return False
    inside = Block(block.node, helper, block.owner if name is not None else None, module)
    return all(_is_asked(place, inside, depth - 1) for place in _places(helper.body, {taken}, module))


def _parameter(call: cst.Call, argument: cst.Arg, helper: cst.FunctionDef) -> str | None:
    """Return the parameter that takes an argument."""
    if argument.keyword is not None:
        return argument.keyword.value
    names = [param.name.value for param in (*helper.params.posonly_params, *helper.params.params)]
    names = names[1:] if isinstance(call.func, cst.Attribute) and names[:1] == ["self"] else names
    place = next(number for number, given in enumerate(call.args) if given is argument)
    starred = any(given.star for given in call.args[:place])
    return names[place] if place < len(names) and not starred else None


def _asks_dtype(node: cst.Name, module: Module) -> bool:
    """Whether more than a shape may be asked for: the view has another dtype."""
    above = module.parent(node)
    return isinstance(above, cst.Attribute) and above.attr.value == "dtype"


def _view(term: Term) -> str | None:
    """Return the source of something that has the shape of `term`, and computes nothing."""
    if term.op == "parameter":
        return term.value
    inner = _view(term.args[0]) if term.args else None
    if inner is None or term.op in ("cast", "neg", "contiguous"):
        return inner
    if term.op == "unflatten" and term.args[1:] == PAIRS:
        return inner + _PARTED
    pairs = term.op == "view_as_complex" and len(term.args) == 1 and term.args[0].op == "unflatten"
    return f"{inner.removesuffix(_PARTED)}[..., ::2]" if pairs and inner.endswith(_PARTED) else None


_PARTED = ".unflatten(-1, (-1, 2))"


def _names(statement: cst.BaseStatement) -> set[str]:
    """Return the names that stand in a statement, attributes and keywords left out."""
    nodes = list(walk(statement))
    other = {id(node.attr) for node in nodes if isinstance(node, cst.Attribute)}
    other |= {id(node.keyword) for node in nodes if isinstance(node, cst.Arg) and node.keyword is not None}
    return {node.value for node in nodes if isinstance(node, cst.Name) and id(node) not in other}


def _bound(statement: cst.BaseStatement) -> set[str]:
    return {name for node in walk(statement) for name in names_bound_by(node)}


def _is_simple(statement: cst.BaseStatement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine)


def _is_guard(statement: cst.CSTNode | None) -> bool:
    """Whether a statement does nothing, or raises."""
    if isinstance(statement, cst.If):
        ways = [statement.body, statement.orelse.body if isinstance(statement.orelse, cst.Else) else statement.orelse]
        return all(way is None or _is_guard(way) for way in ways)
    if isinstance(statement, cst.IndentedBlock):
        return all(_is_guard(inner) for inner in statement.body)
    lines = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
    return all(isinstance(small, (cst.Assert, cst.Raise)) for small in lines)


def _assigns(statement: cst.CSTNode) -> bool:
    """Whether a statement does nothing but assign: a definition or an import may stand for a name that is called."""
    if isinstance(statement, cst.If):
        behind = statement.orelse.body if isinstance(statement.orelse, cst.Else) else statement.orelse
        return all(_assigns(inner) for inner in statement.body.body) and (behind is None or _assigns(behind))
    if isinstance(statement, cst.IndentedBlock):
        return all(_assigns(inner) for inner in statement.body)
    kinds = (cst.Assign, cst.AnnAssign, cst.AugAssign)
    return isinstance(statement, cst.SimpleStatementLine) and all(isinstance(s, kinds) for s in statement.body)


def _is_return(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    return isinstance(statement.body[0], cst.Return)
