"""Rotations whose function does something first: it tests its arguments, or gathers, cuts or reshapes its tables.

The statements that say nothing of what is turned stay as they are, and what they bind is read as if it were given.
What is left is compared with the operator's forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.rope import Rotation, rotations
from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import names_bound_by, parameters
from rewrite.analysis.tree.replacement import is_docstring

_ASKED = frozenset({"shape", "dtype", "device", "ndim", "dim", "size", "is_cuda"})
"""Attributes and methods that say something about a tensor and read none of its numbers."""
_MOST_PARAMETERS = 8


@dataclass(frozen=True)
class Prepared:
    """A rotation behind statements that stay."""

    kept: tuple[cst.BaseStatement, ...]
    rotations: list[Rotation]


def prepared(function: cst.FunctionDef, module: Module, owner: ClassInfo | None) -> Prepared | None:
    """Return the rotation that a function ends with, None where no part of it can stay in front of one."""
    block = function.body
    if not isinstance(block, cst.IndentedBlock):
        return None
    statements = [s for s in block.body if isinstance(s, cst.BaseStatement)]
    statements = statements[1:] if statements and is_docstring(statements[0]) else statements
    own = [name for name in parameters(function) if not (name == "self" and owner is not None)]
    if not statements or not _is_return(statements[-1]) or len(own) > _MOST_PARAMETERS:
        return None
    for turned in (*combinations(own, 2), *combinations(own, 1)):
        split = _Split(module, frozenset(turned))
        if not split.of(statements[:-1]) or not _may_come_first(split, statements, function, module, owner):
            continue
        given = {*own, *split.bound}
        environment: Bindings = {name: Term("parameter", (), name) for name in sorted(given)}
        try:
            term = Run(module, owner, MAX_DEPTH).block([*split.left, statements[-1]], environment)
        except NotComputable:
            continue
        found = rotations(term) if term is not None else None
        if found is not None and {rotation.tensor for rotation in found} == set(turned):
            return Prepared(tuple(split.kept), found)
    return None


class _Split:
    """Which statements say something of what is turned, and which stay in front."""

    def __init__(self, module: Module, turned: frozenset[str]):
        self.module = module
        self.made = set(turned)
        self.kept: list[cst.BaseStatement] = []
        self.left: list[cst.BaseStatement] = []
        """What is compared with the operator's forms, and sizes that either side may read."""
        self.bound = set[str]()
        """What the ones that stay bind."""

    def of(self, statements: Sequence[cst.BaseStatement]) -> bool:
        """Split statements; return whether some stay and each name is bound on one side only."""
        sizes: list[cst.BaseStatement] = []
        for statement in statements:
            if _is_guard(statement):
                self.kept.append(statement)
            elif set(self._read(statement)) & self.made:
                self.left.append(statement)
                self.made |= _bound(statement)
            elif _names(statement) & self.made and isinstance(statement, cst.SimpleStatementLine):
                self.left.append(statement)
                sizes.append(statement)
            elif _assigns(statement):
                self.kept.append(statement)
                self.bound |= _bound(statement)
            else:
                return False
        if not self.kept or self.bound & self.made:
            return False
        self._keep_needed(sizes, statements)
        return True

    def _keep_needed(self, sizes: Sequence[cst.BaseStatement], statements: Sequence[cst.BaseStatement]) -> None:
        """Keep the sizes, too, that statements read which stay."""
        kept = {id(statement) for statement in self.kept}
        needed = set[str]().union(*(_names(statement) for statement in self.kept))
        for statement in reversed(sizes):
            if _bound(statement) & needed:
                kept.add(id(statement))
                needed |= _names(statement)
        self.kept = [statement for statement in statements if id(statement) in kept]

    def _read(self, statement: cst.BaseStatement) -> Iterator[str]:
        """Yield the names whose values a statement reads, not only what they are."""
        for node in walk(statement):
            if isinstance(node, cst.Name):
                above = self.module.parent(node)
                asked = isinstance(above, cst.Attribute) and above.value is node and above.attr.value in _ASKED
                if not asked and not (isinstance(above, cst.Attribute) and above.attr is node):
                    yield node.value


def _names(statement: cst.BaseStatement) -> set[str]:
    return {node.value for node in walk(statement) if isinstance(node, cst.Name)}


def _bound(statement: cst.BaseStatement) -> set[str]:
    return {name for node in walk(statement) for name in names_bound_by(node)}


def _may_come_first(
    split: _Split,
    statements: Sequence[cst.BaseStatement],
    function: cst.FunctionDef,
    module: Module,
    owner: ClassInfo | None,
) -> bool:
    """Whether the statements that stay compute the same in front of those that are replaced."""
    stays = {id(statement) for statement in split.kept}
    bound_by_left = set[str]().union(*(_bound(s) for s in split.left if id(s) not in stays))
    scope = effects_of(module, plain_containers=True).scope(function, owner)
    earlier = set[str]()
    for statement in statements[:-1]:
        if id(statement) not in stays:
            earlier |= _names(statement)
            continue
        effect = scope.of(statement)
        if effect.writes or effect.stores or effect.draws or effect.anything:
            return False
        if _names(statement) & bound_by_left or earlier & _bound(statement):
            return False
    return True


def _is_guard(statement: cst.BaseStatement) -> bool:
    """Whether a statement does nothing, or raises."""
    if isinstance(statement, cst.If):
        return statement.orelse is None and all(_raises(inner) for inner in statement.body.body)
    return isinstance(statement, cst.SimpleStatementLine) and all(isinstance(s, cst.Assert) for s in statement.body)


def _assigns(statement: cst.CSTNode) -> bool:
    """Whether a statement does nothing but assign: a definition or an import may stand for a name that is called."""
    if isinstance(statement, cst.If):
        behind = statement.orelse.body if isinstance(statement.orelse, cst.Else) else statement.orelse
        return all(_assigns(inner) for inner in statement.body.body) and (behind is None or _assigns(behind))
    if isinstance(statement, cst.IndentedBlock):
        return all(_assigns(inner) for inner in statement.body)
    kinds = (cst.Assign, cst.AnnAssign, cst.AugAssign)
    return isinstance(statement, cst.SimpleStatementLine) and all(isinstance(s, kinds) for s in statement.body)


def _raises(statement: cst.CSTNode) -> bool:
    inside = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
    return all(isinstance(small, cst.Raise) for small in inside)


def _is_return(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    return isinstance(statement.body[0], cst.Return)
