"""Which other files hold the layers that a modeling file is made of: they are rewritten by themselves."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rewrite.source import importable
from rewrite.source.resolve import Source

_KNOWN = ("torch", "transformers")


def layer_files(source: Source) -> list[str]:
    """Return the files of classes that a file builds, as the command line takes them, in the order of its imports.

    Files of torch and transformers are left out, and classes whose definition is not where they are imported from.
    """
    try:
        tree = ast.parse(source.text)
    except SyntaxError:
        return []
    made = {call.func.id for call in ast.walk(tree) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in _KNOWN:
            place = next(_places(source, node), None)
            classes = [alias.name for alias in node.names if (alias.asname or alias.name) in made]
            if place is not None and any(_is_layer(name, place) for name in classes):
                found[importable.name_of(place) or os.path.relpath(place)] = None
    return list(found)


def _places(source: Source, node: ast.ImportFrom) -> Iterator[Path]:
    """Yield the files that an import may be from: a neighbour's, or that of an importable module."""
    parts = (node.module or "").split(".")
    if node.level:
        yield from _file(source.path.parents[node.level - 1].joinpath(*parts))
        return
    found = importable.file_of(".".join(parts), [os.getcwd(), *sys.path])
    if found is not None:
        yield found
    for folder in source.path.resolve().parents:  # a package that nothing installs
        if folder.name == parts[0]:
            yield from _file(folder.joinpath(*parts[1:]))


def _file(place: Path) -> Iterator[Path]:
    if place.with_suffix(".py").is_file():
        yield place.with_suffix(".py").resolve()


def _is_layer(name: str, place: Path) -> bool:
    """Whether a file defines a class of that name with a `forward`."""
    text = place.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"^class {name}\(", text, re.MULTILINE) is not None and "def forward(" in text
