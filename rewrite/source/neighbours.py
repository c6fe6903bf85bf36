"""The files beside a modeling file that it imports, `from .configuration_x import XConfig`: they go where it goes."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rewrite.errors import NeighbourMissing, RelativeImport, SourceDoesNotParse, SourceNotReadable
from rewrite.offers import VENDORED
from rewrite.source.statements import blocks

_TAKEN = ("__init__", VENDORED)
"""What a package has at its top: no neighbour may bear these names."""


@dataclass(frozen=True)
class Neighbour:
    """A file that a modeling file imports relatively, itself or through another one."""

    name: str
    """Path from the modeling file's folder, `/` between parts."""
    text: str
    data: bytes

    @property
    def sha256(self) -> str:
        """Of the bytes of the file."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Wanted:
    """What one relative import needs to be there."""

    places: tuple[str, ...]
    """Files, any of which will do, by their path from the modeling file's folder."""
    statement: str
    optional: bool
    """Whether the import stands in a `try` that catches its failure."""


def of(path: Path, text: str) -> tuple[Neighbour, ...]:
    """Return every file that the modeling file at `path`, whose text is `text`, needs beside it, sorted by name.

    Raises:
        NeighbourMissing: if one is not there.
        RelativeImport: if an import leads above the folder, or to a name that a package has for something else.
        SourceDoesNotParse, SourceNotReadable: if a neighbour is not Python in UTF-8.
    """
    found: dict[str, Neighbour] = {}
    waiting = [(path.name, text)]
    while waiting:
        name, content = waiting.pop()
        for wanted in imports(path.parent / name, name, content):
            place = next((place for place in wanted.places if (path.parent / place).is_file()), None)
            if place is None and not wanted.optional:
                raise NeighbourMissing(path.parent / name, wanted.statement, wanted.places[0])
            if place is None or place in found:
                continue
            if place == path.name:
                _check_name_stays(path, wanted.statement)
                continue
            found[place] = _read(path.parent, place)
            waiting.append((place, found[place].text))
    return tuple(found[name] for name in sorted(found))


def imports(path: Path, name: str, text: str) -> Iterator[Wanted]:
    """Yield what the relative imports of a file need.

    Args:
        path: where the file is, for messages.
        name: its path from the modeling file's folder.
        text: its text.

    Raises:
        RelativeImport: if an import leads above the folder, or to a name that a package has for something else.
        SourceDoesNotParse: if the text is not valid Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))
        raise SourceDoesNotParse(path, line, why) from error
    folders = PurePosixPath(name).parents
    for node, optional in relative(tree):
        statement = ast.unparse(node)
        if node.level > len(folders):
            raise RelativeImport(path, statement, "which lies above its folder")
        base = folders[node.level - 1]
        places = (
            [base.joinpath(*node.module.split("."))] if node.module else [base / alias.name for alias in node.names]
        )
        for place in places:
            if place.parts[:1] and place.parts[0] in _TAKEN:
                raise RelativeImport(path, statement, f"and a package has something else as '{place.parts[0]}'")
            yield Wanted((f"{place}.py", f"{place}/__init__.py"), statement, optional)


def relative(tree: ast.AST) -> Iterator[tuple[ast.ImportFrom, bool]]:
    """Yield every relative import in a tree of any depth, and whether it may fail.

    It may where a `try` catches that, and under `if TYPE_CHECKING`, which never runs.
    """
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, optional = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node, optional
        optional = optional or is_for_types(node)
        optional = optional or (isinstance(node, ast.Try) and any(map(_catches_missing, node.handlers)))
        waiting += [(inner, optional) for inner in reversed(blocks(node))]


def is_for_types(node: ast.AST) -> bool:
    """Return whether a statement is an `if TYPE_CHECKING`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    caught = ast.walk(handler.type) if handler.type is not None else ()
    names = {node.id for node in caught if isinstance(node, ast.Name)}
    return handler.type is None or bool(names & {"ImportError", "ModuleNotFoundError", "Exception"})


def _check_name_stays(path: Path, statement: str) -> None:
    """A neighbour may import the modeling file only where that keeps its name in a package."""
    if not (path.stem.startswith("modeling_") and path.stem.isidentifier()):
        raise RelativeImport(path, statement, f"and it will be modeling_{path.stem}.py in a package")


def _read(folder: Path, name: str) -> Neighbour:
    path = folder / name
    try:
        data = path.read_bytes()
        return Neighbour(name, data.decode("utf-8-sig"), data)
    except OSError as error:
        raise SourceNotReadable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise SourceNotReadable(path, f"byte {error.start} is not UTF-8; save it as UTF-8") from error
