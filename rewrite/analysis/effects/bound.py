"""Which names a piece of code binds."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewrite.analysis.tree.module import imported_names, kept, parts
from rewrite.analysis.tree.nodes import parameters

_BINDS = (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.Del)
_OF_NAMES = frozenset(
    {*_BINDS, cst.FunctionDef, cst.ClassDef, cst.CompFor, cst.AsName, cst.MatchAs, cst.MatchStar, cst.Import}
    | {cst.ImportFrom}
)
_WITHOUT_NAMES = frozenset({cst.Lambda, cst.Name, cst.SimpleWhitespace, cst.ParenthesizedWhitespace, cst.EmptyLine})


def bound_by(node: cst.CSTNode) -> frozenset[str]:
    """Return the names that a statement binds, those of functions and comprehensions inside it left out."""
    return frozenset(bound(node, comprehensions=False, top=True))


@kept
def locals_of(function: cst.FunctionDef) -> frozenset[str]:
    """Return every name that a function binds, parameters included."""
    return frozenset(parameters(function)) | frozenset(bound(function.body))


def bound(node: cst.CSTNode, comprehensions: bool = True, top: bool = False) -> Iterator[str]:
    """Yield the names that a function's statements bind, those of functions inside it left out."""
    if top and isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        yield node.name.value
        return
    own = top and isinstance(node, (*_BINDS, cst.Import, cst.ImportFrom))
    for part in (node, *parts(node)) if own else parts(node):
        if type(part) not in _OF_NAMES:
            if part is not node and type(part) not in _WITHOUT_NAMES:
                yield from bound(part, comprehensions)
            continue
        if isinstance(part, (cst.FunctionDef, cst.ClassDef)):
            yield part.name.value
            continue
        if (isinstance(part, cst.CompFor) and comprehensions) or isinstance(part, _BINDS):
            yield from targets(part.target)
        elif isinstance(part, (cst.AsName, cst.MatchAs, cst.MatchStar)) and part.name is not None:
            yield from targets(part.name)
        elif isinstance(part, (cst.Import, cst.ImportFrom)):
            yield from (name for name, _ in imported_names(part))
        if part is not node and not isinstance(part, (cst.Lambda, cst.BaseParenthesizableWhitespace)):
            yield from bound(part, comprehensions)


def targets(target: cst.CSTNode) -> Iterator[str]:
    """Yield the names in what is assigned to, those inside tuples too."""
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from targets(element.value)
    elif isinstance(target, cst.StarredElement):
        yield from targets(target.value)
