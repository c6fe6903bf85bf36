"""Reads a lock as if anyone could have written it: every value has the type, and every path the place, that it must.

A lock is a file in a repository: it may have been edited by hand, merged badly, or made to point somewhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

MOST_BYTES = 16 * 2**20
"""The largest lock of the 500 modeling files of transformers 5.23 has 60 KiB."""
LINE = 100
"""Characters of a line that holds a whole list or object of a lock."""
_MODELING = re.compile(r"modeling_\w+\.py")
_MODULE = re.compile(r"transformers(\.\w+)+")


class Malformed(ValueError):
    """The content of a lock is not what this tool writes; the message goes on from `its rewrite.lock`."""


class Table:
    """An object of the lock whose values are asked for by name and type."""

    def __init__(self, data: Any, where: str = ""):
        if not isinstance(data, dict):
            raise Malformed(f"cannot be read: {where.removesuffix('.') or 'the whole'} should be an object")
        self._data = data
        self._where = where

    def names(self) -> list[str]:
        """Return the names in the object."""
        return list(self._data)

    def table(self, name: str) -> Table:
        """Return the object `name`."""
        return Table(self._value(name), f"{self._where}{name}.")

    def text(self, name: str) -> str:
        """Return the string `name`."""
        return str(self._checked(name, str, "a string"))

    def number(self, name: str) -> int:
        """Return the whole number `name`."""
        return int(self._checked(name, int, "a number"))

    def flag(self, name: str) -> bool:
        """Return whether `name` is true."""
        return bool(self._checked(name, bool, "true or false"))

    def optional(self, name: str) -> str | None:
        """Return the string `name`, None where there is none or null."""
        return None if self._data.get(name) is None else self.text(name)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the list of strings `name`."""
        values = self._checked(name, list, "a list")
        if not all(isinstance(value, str) for value in values):
            raise Malformed(f"cannot be read: {self._where}{name} should hold strings")
        return tuple(values)

    def tables(self, name: str) -> list[Table]:
        """Return the list of objects `name`."""
        return [Table(value, f"{self._where}{name}[].") for value in self._checked(name, list, "a list")]

    def all_text(self) -> dict[str, str]:
        """Return the object as a mapping of strings."""
        return {name: self.text(name) for name in self._data}

    def without(self, name: str) -> Mapping[str, Any]:
        """Return the object less one name."""
        return {key: value for key, value in self._data.items() if key != name}

    def _value(self, name: str) -> Any:
        if name not in self._data:
            raise Malformed(f"cannot be read: {self._where}{name} is missing")
        return self._data[name]

    def _checked(self, name: str, kind: type, said: str) -> Any:
        value = self._value(name)
        if type(value) is not kind:
            raise Malformed(f"cannot be read: {self._where}{name} should be {said}")
        return value


def loads(path: Path) -> Table:
    """Read the lock at `path`.

    Raises:
        Malformed: if it is too large, no JSON, or nested without end.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Malformed(f"is larger than {MOST_BYTES >> 20} MiB, so no lock of ours")
        text = path.read_bytes().decode("utf-8")
        if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in text.splitlines()):
            raise Malformed("has conflict markers: take either side, then `rewrite sync`")
        return Table(json.loads(text))
    except Malformed:
        raise
    except OSError as error:
        raise Malformed(f"cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise Malformed("cannot be read (it is nested without end)") from error
    except ValueError as error:
        raise Malformed(f"cannot be read ({type(error).__name__}: {error})") from error


def dumps(data: Mapping[str, Any]) -> str:
    """Return the text of a lock: sorted, indented, one trailing newline.

    What fits on a line is one, and so is a tuple, however long: it changes as a whole.
    """
    return f"{_laid_out(data, '')}\n"


def _laid_out(value: Any, indent: str) -> str:
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or (len(indent) > 2 and len(indent) + len(flat) < LINE):
        return flat
    inner = f"{indent}  "
    if isinstance(value, list):
        items = [_laid_out(item, inner) for item in value]
    else:
        names = ((json.dumps(name, ensure_ascii=False), value[name]) for name in sorted(value))
        items = [f"{name}: {_laid_out(item, inner)}" for name, item in names]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def digest(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a lock's content, which shows an edit by hand."""
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"  # as earlier versions wrote locks
    return sha256(text.encode("utf-8", "surrogatepass"))


def sha256(data: bytes) -> str:
    """Return the hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def check_generated(names: Sequence[str], modeling: str) -> None:
    """Check that each name of a generated file is a path inside the package, and that one is the modeling file.

    Raises:
        Malformed: if not.
    """
    for name in names:
        path = PurePosixPath(name)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\\" in name
            or "\0" in name
            or str(path) != name
            or name == "."
        ):
            raise Malformed(f"names a file outside its folder: {name!r}")
    if modeling not in names or not _MODELING.fullmatch(modeling):
        raise Malformed(f"cannot be read: it should list the modeling file {modeling!r}")


def check_origin(target: str, path: str, module: str | None) -> None:
    """Check that the original is a Python file that a package can have been made from.

    Raises:
        Malformed: if it is not.
    """
    inside = PurePosixPath(path)
    if inside.is_absolute() or ".." in inside.parts or inside.suffix != ".py" or "\0" in f"{path}{target}":
        raise Malformed(f"names an original that it cannot have: {path!r}")
    if module is not None and not (_MODULE.fullmatch(module) and path == "/".join(module.split(".")[1:]) + ".py"):
        raise Malformed(f"names an original that it cannot have: {module!r}")
    if module is None and (PurePosixPath(target).is_absolute() or PurePosixPath(target).suffix != ".py"):
        raise Malformed(f"names an original that it cannot have: {target!r}")
