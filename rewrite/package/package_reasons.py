"""The reasons that `explain(model)` of a package names, in words: packages have the names alone."""

from __future__ import annotations

import ast
from functools import cache

from rewrite.operators import files, own_text

TABLE = "REASONS"
"""How a file of the runtime calls what it counts, each with its words."""


@cache
def reasons() -> dict[str, dict[str, str]]:
    """Return what each reason says, by the room of the runtime that counts it."""
    found: dict[str, dict[str, str]] = {}
    for file in files():
        if f"\n{TABLE} = " in (text := own_text(file)):
            for reason, said in _table(text).items():
                found.setdefault(reason, {}).setdefault(file.split("/")[0], said)
    return found


def _table(text: str) -> dict[str, str]:
    """Return what a file says itself; what it takes from the table of another file stands there."""
    assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    table = next(node.value for node in assigned if ast.unparse(node.targets[0]) == TABLE)
    assert isinstance(table, ast.Dict)
    own = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(key): ast.literal_eval(said) for key, said in own if key is not None}
