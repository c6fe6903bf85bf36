"""The files of an output package, as bytes: modeling file, neighbours, `__init__.py`, the runtime it needs, lock.

Reading on: `rewrite/delivery/delivery.py`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rewrite
from rewrite import gc_paused
from rewrite.codemod.build import Build
from rewrite.codemod.imports import isort_key
from rewrite.codemod.relocate import shown_name
from rewrite.offers import DISTRIBUTION
from rewrite.package import definitions, snapshots, syntax, vendored_files
from rewrite.package.lock import Lock, Options, Origin, Runtime, engine_digest, rule_hashes, sha256
from rewrite.source.resolve import LOCK_NAME, Source
from rewrite.transform import Transform

KEPT = snapshots.FOLDER
"""Folder with the text as it was generated, the common ancestor of a later three-way merge, and the original's."""
WHOLE = f"{KEPT}/original"
"""Folder with the original of a model that brings its own code: it runs there, beside its neighbours."""
INIT = "__init__.py"
ATTRIBUTES = ".gitattributes"
"""Written once and not in the lock: it is the user's from then on."""
VERDICT_NAME = "verify.json"
_METHOD = re.compile(r"(?:\.|\bdef )(\w+)\(")
"""A method that is called or defined."""

_ATTRIBUTES = f"""\
# What nobody writes by hand is folded in a pull request, and counted in no statistics.
{LOCK_NAME} linguist-generated
{VERDICT_NAME} linguist-generated
{KEPT}/** linguist-generated -diff
"""

INIT_LOCK = "This folder is yours: rewrite.lock says what was changed."

_INIT = '''\
"""{title}.

{lock}
"""

from {runtime}.compat.guard import made_from

with made_from(__name__):
    from . import {modeling}
    from .{modeling} import {imported}

from {runtime}.core.explanation import explain
from {runtime}.loading import auto as _auto
from {runtime}.loading import selftest as _selftest


def selftest(checkpoint: str | None = None) -> object:
    """Compare this package with the installed original, on this machine, and return what was compared.

    It is hf-rewrite that compares; nothing else here needs it.

    Raises:
        SelfTestFailed: if it computes something else, or if a checkpoint does not arrive whole.
    """
    return _selftest.selftest({modeling}, {module}, checkpoint)


def register() -> list[str]:
    """Make the Auto classes of transformers build these classes in this process, and return what changed."""
    return _auto.register({modeling})


__all__ = [{exported}]
'''


@dataclass(frozen=True)
class Package:
    """Everything that an output folder holds, before it is written."""

    files: Mapping[str, bytes]
    """By path in the folder, `/` between parts; the lock included."""
    lock: Lock


@gc_paused.paused()
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
    text, original = build.rewritten.text, build.source.path.read_bytes()
    init = _init(build, name)
    if options.vendored:
        text, init = vendored_files.relative(text), vendored_files.relative(init)
    own = {INIT: init.encode("utf-8"), f"{name}.py": text.encode("utf-8")}
    files = {
        **own,
        snapshots.ARCHIVE: snapshots.archive({**own, f"{name}.py{snapshots.ORIGINAL}": original}),
        **{file.name: file.data for file in build.neighbours},
        **_kept_whole(build),
        **(vendored_files.files([text, init]) if options.vendored else {}),
    }
    called, imported = _taken(build)
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
        modeling=f"{name}.py",
        runtime=Runtime(*vendored_files.runtime()),
        called=called,
        imported=imported,
    )
    files |= {LOCK_NAME: lock.to_json().encode("utf-8"), ATTRIBUTES: _ATTRIBUTES.encode("utf-8")}
    return Package(files, lock)


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


def has_names(text: str) -> bool:
    """Return whether a file lists its public names in `__all__`."""
    return any(isinstance(s, ast.Assign) and _names(s.targets) == ["__all__"] for s in ast.parse(text).body)


def public_names(text: str) -> list[str]:
    """Return what `from module import *` would bind of the module's own: `__all__`, else its public definitions."""
    tree = ast.parse(text)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _names(statement.targets) == ["__all__"]:
            listed = (node for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
            return sorted({str(node.value) for node in listed}, key=isort_key)
    defined = (s.name for s in tree.body if isinstance(s, (ast.ClassDef, ast.FunctionDef)))
    return sorted({name for name in defined if not name.startswith("_")}, key=isort_key)


def _init(build: Build, modeling: str) -> str:
    source = build.source
    made_of = f"transformers {source.transformers_version}" if source.module else shown_name(source.path)
    names = public_names(build.rewritten.text)
    own = [f'"{name}"' for name in ("explain", "register", "selftest")]
    listed = [*(f'"{name}"' for name in names), *own]
    if has_names(build.rewritten.text):
        imported, exported = "*  # noqa: F403", f"*{modeling}.__all__, {', '.join(own)}"
    else:
        imported = _in_lines("({})", names, "    ")
        exported = _in_lines("{}", listed, "")
    return _INIT.format(
        lock=INIT_LOCK,
        title=f"{modeling.removeprefix('modeling_')}, rewritten from {made_of} by hf-rewrite {rewrite.__version__}",
        runtime=DISTRIBUTION,
        module=f'"{source.module}"' if source.module else None,
        modeling=modeling,
        imported=imported,
        exported=exported,
    )


def _in_lines(brackets: str, names: Sequence[str], indent: str) -> str:
    """Return names as a formatter lays out a list that is too long for a line."""
    inner = "\n" + "".join(f"{indent}    {name},\n" for name in names) + indent
    return brackets.format(inner)


def _taken(build: Build) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what the guard looks at: the functions of transformers that the package calls, with the keywords that it
    gives, and fingerprints of all that it imports from there."""
    root = build.source.transformers_root
    if root is None:
        return {}, {}
    texts = [build.rewritten.text, *(file.text for file in build.neighbours)]
    names = {name for text in texts for name in definitions.imported_names(text).values()}
    imported = definitions.of_names(root, names, set(_METHOD.findall("\n".join(texts))))
    given = definitions.calls(build.rewritten.text)
    return {name: given[name] for name in definitions.of_functions(root, given) if given[name]}, imported


def _origin(source: Source, folder: Path) -> Origin:
    if source.module is not None:
        target, path = source.module, "/".join(source.module.split(".")[1:]) + ".py"
    elif source.inside is not None:
        target, path = source.inside, source.path.name
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
