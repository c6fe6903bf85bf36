"""Reads a lock as if anyone could have written it: every value has the type, and every path the place, that it must.

A lock is a file in a repository: it may have been edited by hand, merged badly, or made to point somewhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args, get_origin, get_type_hints

MOST_BYTES = 16 * 2**20
"""The largest lock of the 500 modeling files of transformers 5.23 has 60 KiB."""
LINE = 100
"""Characters of a line that holds a whole list or object of a lock."""
_MODELING = re.compile(r"modeling_\w+\.py")
_MODULE = re.compile(r"transformers(\.\w+)+")


_SAID = {str: "a string", int: "a number", bool: "true or false", list: "a list", dict: "an object"}


class Malformed(ValueError):
    """The content of a lock is not what this tool writes; the message goes on from `its rewrite.lock`."""


def part(kind: Any, data: Any, name: str, where: str = "") -> Any:
    """Return the value `name` of an object as `read` does; a field of a type without a default has to be there."""
    table = read(dict, data, where)
    if name not in table:
        raise Malformed(f"cannot be read: {where}{'.' if where else ''}{name} is missing")
    return read(kind, table[name], f"{where}.{name}".lstrip("."))


def read(kind: Any, data: Any, where: str = "") -> Any:
    """Return JSON as `kind` says: a dataclass, a plain type, `X | None`, `tuple[X, ...]` or `Mapping[str, X]`.

    Raises:
        Malformed: if something is missing or of another type. What a dataclass does not name is left aside.
    """
    inner = get_args(kind)
    if type(None) in inner:
        return None if data is None else read(inner[0], data, where)
    if is_dataclass(kind):
        table, hints = read(dict, data, where), get_type_hints(kind)
        wanted = [one.name for one in fields(kind) if one.name in table or one.default is MISSING]
        return cast(Any, kind)(**{name: part(hints[name], table, name, where) for name in wanted})
    if get_origin(kind) is tuple:
        return tuple(read(inner[0], one, f"{where}[]") for one in read(list, data, where))
    if inner:
        return {name: read(inner[1], value, f"{where}.{name}") for name, value in read(dict, data, where).items()}
    if type(data) is not kind:
        raise Malformed(f"cannot be read: {where or 'the whole'} should be {_SAID[kind]}")
    return data


def loads(path: Path) -> dict[str, Any]:
    """Read the object in the lock at `path`.

    Raises:
        Malformed: if it is too large, no JSON, or nested without end.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Malformed(f"is larger than {MOST_BYTES >> 20} MiB, so no lock of ours")
        text = path.read_bytes().decode("utf-8")
        if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in text.splitlines()):
            raise Malformed("has conflict markers: take either side, then `rewrite sync`")
        found: dict[str, Any] = read(dict, json.loads(text))
        return found
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


def is_module_name(target: str) -> bool:
    """Return whether what a lock names is a module of an installed package, and no file."""
    return not target.endswith(".py") and all(part.isidentifier() for part in target.split("."))


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
    named = is_module_name(target) and path == f"{target.rpartition('.')[2]}.py"
    if module is None and not named and (PurePosixPath(target).is_absolute() or not target.endswith(".py")):
        raise Malformed(f"names an original that it cannot have: {target!r}")
