"""The runtime of an output package: what of it a modeling file needs, and the files that this makes.

A modeling file says `from .runtime.norms import rms_norm`. In a package a room is one file, with the definitions that
are needed and no declarations; `closure.py` says which these are, `bundle.py` writes them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache

from rewrite.analysis.syntax.nodes import LINE_LENGTH
from rewrite.engine.imports import from_line, isort_key
from rewrite.errors import UnknownOperator
from rewrite.operators import offered, own_text, without_declarations
from rewrite.package import bundle
from rewrite.package.closure import Closure, closure
from rewrite.package.features import FORMS, left_out
from rewrite.package.parts import Own
from rewrite.package.targets import ROCM

FOLDER = "runtime/"
_ROOM = re.compile(r"runtime\.(\w+)")

_ALWAYS = {
    "core/backend": ("fallbacks", "get_backend", "reset_fallbacks", "set_backend", "use_backend"),
    "core/explain": ("explain",),
    "origin/guard": ("made_from",),
    "package/auto": ("register",),
    "package/selftest": ("selftest",),
    "package/upload": ("save_flat",),
}
"""What every package has: it is called by the package's `__init__.py` or by its user."""

_EXPORTS = {
    "core": ("explain", "get_backend", "set_backend", "use_backend"),
    "decode": ("DecodeGraph", "get_cache_format", "release_graphs", "set_cache_format"),
    "forward": (
        "release_forwards",
        "set_forward_graphs",
        "set_ragged_batches",
        "use_forward_graphs",
        "use_ragged_batches",
    ),
    "loss": ("use_chunked_loss",),
}
"""What users call of the runtime, by room; of a room that a package does not have, nothing."""

_INIT = '''\
"""What the modeling file beside this folder calls. Generated with it: edit the modeling file instead."""

{imports}

__all__ = [{exported}]
'''

_SHARED = '''\
"""What the modeling file beside this folder calls, from a folder that packages of this repository share.

Generated with it: edit the modeling file instead.
"""
# ruff: noqa: E402

from pathlib import Path

SHARED = (Path(__file__).resolve().parent / "../{way}").resolve()
__path__.append(str(SHARED))

try:
    {core}
except ModuleNotFoundError as error:
    if error.name != f"{{__name__}}.core":
        raise
    said = f"the runtime that this package shares is not in {{SHARED}}: rewrite sync PACKAGE --runtime DIR"
    raise ImportError(said) from error
{imports}
__all__ = [{exported}]
'''
"""A room that lies in the folder itself, as in a copy of the package, goes before a shared one."""


def closure_of(uses: Collection[str], target: str, without: Collection[str] = ()) -> Closure:
    """Return what a package for a target needs whose modeling file imports `uses` (as `Found.uses`).

    Args:
        uses: with what `features.forms_of` finds in the file.
        target: GPUs that it is for.
        without: what the user leaves out, keys of `FEATURES`.

    Raises:
        UnknownOperator: if the runtime offers no such thing.
    """
    roots = [own_of(use) for use in uses if use not in FORMS]
    roots += [Own(file, name) for file, names in _ALWAYS.items() for name in names]
    if target == ROCM:
        roots += [Own("rocm/settings", name) for name in ("configure", "tunable_op")]
    return closure(roots, left_out(target, uses, without))


def files(taken: Closure) -> dict[str, bytes]:
    """Return the files of a package's runtime by their path in it, one a room."""
    rooms = {f"{FOLDER}{room}.py": text for room, text in bundle.rooms(taken).items()}
    made = {f"{FOLDER}__init__.py": init(taken.rooms), **rooms}
    return {path: text.encode("utf-8") for path, text in made.items()}


def own_of(use: str) -> Own:
    """Return the definition of what a modeling file imports as `norms.rms_norm`.

    Raises:
        UnknownOperator: if the runtime offers no such thing: a rule of the user's own asked for it.
    """
    room, _, function = use.partition(".")
    try:
        return Own(f"{room}/{offered(room)[function]}", function)
    except KeyError as error:
        raise UnknownOperator(use) from error


def is_offered(use: str) -> bool:
    """Return whether the runtime offers what a modeling file imports as `norms.rms_norm`."""
    room, _, function = use.partition(".")
    return use in FORMS or function in offered(room)


def uses_of(text: str) -> list[str]:
    """Return what a modeling file imports of its runtime, as `norms.rms_norm`."""
    imports = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) and node.level == 1)
    rooms = ((node, (node.module or "").split(".")) for node in imports)
    return [
        f"{path[1]}.{alias.name}" for node, path in rooms if path[0] == "runtime" for alias in node.names if path[1:]
    ]


def init(rooms: Collection[str], way: str | None = None) -> str:
    """Return the text of the `__init__.py` of a package's runtime.

    Args:
        rooms: what the package needs, `norms`.
        way: the way from the package to the folder that has them, None if they are its own.
    """
    exports = {room: names for room, names in _EXPORTS.items() if room in rooms}
    exported = sorted((name for names in exports.values() for name in names), key=isort_key)
    lines = [from_line(f".{room}", sorted(names, key=isort_key)) for room, names in exports.items()]
    listed = _listed(exported)
    if way is None:
        return _INIT.format(imports="\n".join(lines), exported=listed)
    others = "".join(f"\n{line}\n" for line in lines[1:])
    return _SHARED.format(way=way, core=lines[0], imports=others, exported=listed)


def _listed(names: list[str]) -> str:
    """Return names between the brackets of a list, as a formatter lays it out."""
    line = ", ".join(f'"{name}"' for name in names)
    if len(f"__all__ = [{line}]") <= LINE_LENGTH:
        return line
    return "\n" + "".join(f'    "{name}",\n' for name in names)


@cache
def file_of_old(path: str) -> bytes:
    """Return this version's text of a runtime file by its path in a package of the time when a room was a folder.

    Raises:
        FileNotFoundError: if this version has none of that name.
    """
    return without_declarations(own_text(path.removeprefix(FOLDER).removesuffix(".py"))).encode("utf-8")
