"""The files of an output package, as bytes: modeling file, neighbours, `__init__.py`, the runtime it needs, lock."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import rewrite
from rewrite import collector
from rewrite.analysis.syntax.nodes import LINE_LENGTH
from rewrite.engine.build import Build
from rewrite.engine.imports import isort_key
from rewrite.engine.relocate import shown_name
from rewrite.package import definitions, features, kept, runtime_files, shared, syntax
from rewrite.package.lock import Lock, Options, Origin, engine_digest, rule_hashes, sha256
from rewrite.package.shared import Shared
from rewrite.transform import Transform
from rewrite.upstream.source import LOCK_NAME, Source

KEPT = kept.FOLDER
"""Folder with the text as it was generated, the common ancestor of a later three-way merge, and the original's."""
WHOLE = f"{KEPT}/original"
"""Folder with the original of a model that brings its own code: it runs there, beside its neighbours."""
INIT = "__init__.py"
ATTRIBUTES = ".gitattributes"
"""Written once and not in the lock: it is the user's from then on."""
UPSTREAM = "runtime/upstream.py"
RUNTIME_INIT = "runtime/__init__.py"
VERDICT_NAME = "verify.json"
_TAKEN = re.compile(r"^ *from transformers\b[\w.]* import (?:\([^)]*\)|.*$)", re.MULTILINE)
_METHOD = re.compile(r"(?:\.|\bdef )(\w+)\(")
"""A method that is called or defined."""

_UPSTREAM = '''\
"""What this package takes from transformers, as it was when the package was made. Generated: the guard reads it."""
# ruff: noqa: E501

CALLED = {called}
"""The functions that the modeling file calls, with the keywords that it gives."""

IMPORTED = {imported}
"""Each function and class that this folder imports: its file and name there, digests of its text, its parameters and
its code, and the methods that are used."""
'''

_ATTRIBUTES = f"""\
# What nobody writes by hand is folded in a pull request, and counted in no statistics.
runtime/** linguist-generated
{LOCK_NAME} linguist-generated
{VERDICT_NAME} linguist-generated
{KEPT}/** linguist-generated -diff
"""

INIT_LOCK = "This folder is yours: rewrite.lock says what was changed."

_INIT = '''\
"""{title}.

{lock}
"""

from .runtime import upstream
from .runtime.origin import made_from

with made_from(
    package=__name__,
    version="{version}",
    command={command},
    called=upstream.CALLED,
    imported=upstream.IMPORTED,
):
    from . import {modeling}
    from .{modeling} import (
{imported}
    )

from .runtime import package as _package
from .runtime.core import explain

_package.save_flat({modeling})


def selftest(checkpoint: str | None = None) -> object:
    """Compare this package with the installed original, on this machine, and return what was compared.

    It is hf-rewrite that compares; nothing else here needs it.

    Raises:
        SelfTestFailed: if it computes something else, or if a checkpoint does not arrive whole.
    """
    return _package.selftest({modeling}, {module}, checkpoint)


def register() -> list[str]:
    """Make the Auto classes of transformers build these classes in this process, and return what changed."""
    return _package.register({modeling})


__all__ = [
{exported}
]
'''


@dataclass(frozen=True)
class Package:
    """Everything that an output folder holds, before it is written."""

    files: Mapping[str, bytes]
    """By path in the folder, `/` between parts; the lock included."""
    lock: Lock
    shared: Shared | None = None
    """The runtime that it shares, as it is to be; it is put in place with the package."""
    rooms: Mapping[str, bytes] = field(default_factory=dict)
    """Files of a shared runtime, by the path that they would have in the package: a package that is checked before it
    is put in place has them itself."""


@collector.paused()
def assemble(
    build: Build, transforms: Sequence[Transform], options: Options, folder: Path, previous: Lock | None = None
) -> Package:
    """Return the package that holds `build`, made for the output folder `folder` (whose name is in its texts).

    A package that is made anew keeps the name of the modeling file of its `previous` lock, and where the original is
    if it is still there.
    """
    origin = _origin(build.source, folder)
    if previous is not None and origin.path == previous.source.path:
        origin = replace(origin, target=previous.source.target)
    name = modeling_name(build.source) if previous is None else previous.modeling.removesuffix(".py")
    text, original = build.rewritten.text.encode("utf-8"), build.source.path.read_bytes()
    uses = (*build.rewritten.runtime, *features.forms_of(build.rewritten.text))
    closure = runtime_files.closure_of(uses, options.target, options.without)
    runtime = runtime_files.files(closure)
    upstream = _upstream(build, runtime).encode("utf-8")
    together: Shared | None = None
    rooms: dict[str, bytes] = {}
    if options.runtime is not None:
        together = shared.for_package(folder, options.runtime, uses, options.target, options.without)
        rooms = {f"{runtime_files.FOLDER}{name}": d for name, d in together.rooms.items() if name != INIT}
        runtime = {RUNTIME_INIT: runtime_files.init(closure.rooms, options.runtime).encode("utf-8")}
    init = _init(build, name, folder).encode("utf-8")
    files = {
        INIT: init,
        f"{name}.py": text,
        kept.ARCHIVE: kept.archive({INIT: init, f"{name}.py": text, f"{name}.py{kept.ORIGINAL}": original}),
        **{file.name: file.data for file in build.neighbours},
        **_kept_whole(build),
        **runtime,
        UPSTREAM: upstream,
    }
    lock = Lock(
        tool=rewrite.__version__,
        source=origin,
        options=options,
        rules=rule_hashes(transforms),
        transforms=build.rewritten.transforms,
        decode_loops=build.rewritten.decode_loops,
        upstream={origin.path: build.source.sha256, **{file.name: file.sha256 for file in build.neighbours}},
        engine=engine_digest(),
        files={path: sha256(data) for path, data in sorted(files.items())},
        syntax=syntax.digests(files),
        named=f"{name}.py",
    )
    files |= {LOCK_NAME: lock.to_json().encode("utf-8"), ATTRIBUTES: _ATTRIBUTES.encode("utf-8")}
    return Package(files, lock, together, rooms)


def _kept_whole(build: Build) -> dict[str, bytes]:
    """Return the original under its own name, with the files that it imports; nothing where it needs none of that."""
    source = build.source
    if source.origin is None and not build.neighbours:
        return {}
    files = {source.path.name: source.path.read_bytes(), **{file.name: file.data for file in build.neighbours}}
    return {f"{WHOLE}/{name}": data for name, data in files.items()}


def modeling_name(source: Source) -> str:
    """Return the module name of the modeling file, always `modeling_<name>`."""
    stem = re.sub(r"\W", "_", source.path.stem)
    return stem if stem.startswith("modeling_") else f"modeling_{stem}"


def command_for(folder: Path) -> str:
    """Return the command that makes the package anew and keeps the user's edits; paths in it are relative."""
    return f"rewrite sync {_argument(folder.name)}"


def public_names(text: str) -> list[str]:
    """Return what `from module import *` would bind of the module's own: `__all__`, else its public definitions."""
    tree = ast.parse(text)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _names(statement.targets) == ["__all__"]:
            listed = (node for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
            return sorted({str(node.value) for node in listed}, key=isort_key)
    defined = (s.name for s in tree.body if isinstance(s, (ast.ClassDef, ast.FunctionDef)))
    return sorted({name for name in defined if not name.startswith("_")}, key=isort_key)


def _init(build: Build, modeling: str, folder: Path) -> str:
    source = build.source
    made_of = f"transformers {source.transformers_version}" if source.module else shown_name(source.path)
    names = public_names(build.rewritten.text)
    exported = sorted([*names, "explain", "register", "selftest"], key=isort_key)
    return _INIT.format(
        lock=INIT_LOCK,
        title=f"{modeling.removeprefix('modeling_')}, rewritten from {made_of} by hf-rewrite {rewrite.__version__}",
        module=f'"{source.module}"' if source.module else None,
        version=source.transformers_version or "",
        command=quoted(command_for(folder)),
        modeling=modeling,
        imported=textwrap.indent("\n".join(f"{name}," for name in names), " " * 8),
        exported=textwrap.indent("\n".join(f'"{name}",' for name in exported), " " * 4),
    )


def _upstream(build: Build, runtime: Mapping[str, bytes]) -> str:
    """Return the text of the file that tells the guard what to look at."""
    root = build.source.transformers_root
    called: dict[str, list[str]] = {}
    imported: dict[str, str] = {}
    if root is not None:
        own = [build.rewritten.text, *(file.text for file in build.neighbours)]
        texts = [*own, *(text.decode("utf-8") for text in runtime.values())]
        # Reading a tree takes its time: of the runtime, which is laid out by ourselves, its imports are enough.
        taken = "\n".join(textwrap.dedent(found[0]) for text in texts[len(own) :] for found in _TAKEN.finditer(text))
        names = {name for text in (*own, taken) for name in definitions.imported_names(text).values()}
        imported = definitions.of_names(root, names, set(_METHOD.findall("\n".join(texts))))
        given = definitions.calls(build.rewritten.text)
        called = {name: given[name] for name in definitions.of_functions(root, given) if given[name]}
    return _UPSTREAM.format(called=_table(called), imported=_table(imported))


def _table(values: Mapping[str, object]) -> str:
    """Return a dict as a formatter would write it, one line an entry; of one that is too long and a list, an item."""
    lines = []
    for name, value in values.items():
        line = f"    {quoted(name)}: {json.dumps(value)},"
        if len(line) > LINE_LENGTH and isinstance(value, list):
            line = "\n".join([f"    {quoted(name)}: [", *(f"        {quoted(item)}," for item in value), "    ],"])
        lines.append(line)
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def quoted(text: str) -> str:
    """Return a string literal in double quotes where that needs no escapes, as formatters write it."""
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else ascii(text)


def _argument(text: str) -> str:
    """Return `text` as one word of a shell's line."""
    if not re.fullmatch(r"[\w./ -]+", text):
        return shlex.quote(text)
    return f'"{text}"' if " " in text else text


def _origin(source: Source, folder: Path) -> Origin:
    if source.module is not None:
        target, path = source.module, "/".join(source.module.split(".")[1:]) + ".py"
    elif source.origin is not None:
        target, path = source.origin, source.path.name
    else:
        target, path = _relative_target(source.path, folder), source.path.name
    version = source.transformers_version if source.module is not None else None
    model_type = source.model_type if source.module is None or _is_plain_model_type(source) else None
    return Origin(target, path, source.sha256, source.module, model_type, version)


def _relative_target(path: Path, folder: Path) -> str:
    """Return the way from the output folder to a file of the same tree, else its name: no machine path is recorded."""
    here = Path.cwd().resolve()
    inside = [place.resolve().is_relative_to(here) for place in (path, folder)]
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix() if all(inside) else path.name


def _is_plain_model_type(source: Source) -> bool:
    """Return whether the model type alone leads to this file, whichever way the user named it."""
    return source.model_type is not None and modeling_name(source) == f"modeling_{source.model_type.replace('-', '_')}"


def _names(targets: Sequence[ast.expr]) -> list[str]:
    return [target.id for target in targets if isinstance(target, ast.Name)]
