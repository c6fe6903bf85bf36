"""A package without the guard that compares the installed transformers with the one that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import libcst as cst
import libcst.matchers as m

from rewrite.errors import SourceDoesNotParse
from rewrite.offers import VENDORED
from rewrite.package.assemble import INIT

_GUARD = m.With(items=[m.WithItem(item=m.Call(func=m.Attribute(attr=m.Name("made_from")) | m.Name("made_from")))])
_NAMES = {"made_from"}
_FOLDER = f"{VENDORED}/compat/"


def unguarded(files: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return the files of a package less those of the guard; its `__init__.py` imports what it imported under it.

    Raises:
        SourceDoesNotParse: if the `__init__.py` is not valid Python.
    """
    left = {name: data for name, data in files.items() if not name.startswith(_FOLDER)}
    if INIT in left:
        try:
            left[INIT] = cst.parse_module(left[INIT]).visit(_Unguarded()).bytes
        except cst.ParserSyntaxError as error:
            raise SourceDoesNotParse(folder / INIT, error.raw_line, error.message) from error
    return left


class _Unguarded(cst.CSTTransformer):
    def leave_With(
        self, original_node: cst.With, updated_node: cst.With
    ) -> cst.With | cst.FlattenSentinel[cst.BaseStatement]:
        if not m.matches(updated_node, _GUARD) or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        first, *others = updated_node.body.body
        lines = (*updated_node.leading_lines, *getattr(first, "leading_lines", ()))
        return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *others])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Take the guard's own names out of what is imported from this folder."""
        statement = updated_node.body[0]
        if (
            not isinstance(statement, cst.ImportFrom)
            or not statement.relative
            or isinstance(statement.names, cst.ImportStar)
        ):
            return updated_node
        names = [alias for alias in statement.names if not m.matches(alias.name, m.OneOf(*map(m.Name, _NAMES)))]
        if len(names) == len(statement.names):
            return updated_node
        if not names:
            return cst.RemoveFromParent()
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=[statement.with_changes(names=names), *updated_node.body[1:]])
