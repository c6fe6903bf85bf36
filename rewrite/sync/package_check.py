"""What is wrong with a package that is checked: found by reading, nothing is written and nothing imported."""

from __future__ import annotations

import ast
import concurrent.futures
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import (
    MissingTransformers,
    NotAPackage,
    NothingToRewrite,
    RewriteError,
    TransformError,
)
from rewrite.package import snapshots, vendored_files
from rewrite.package.assemble import KEPT, VERDICT_NAME
from rewrite.package.lock import Lock, Runtime, read_lock, sha256
from rewrite.source import pins
from rewrite.source.installed import Installed
from rewrite.source.resolve import LOCK_NAME, Source
from rewrite.sync import edits, lines, merge, rebuild, runtime_names, second_forms
from rewrite.sync.rebuild import Renewal
from rewrite.sync.site_changes import RuleChange
from rewrite.typed import typed

CANNOT_TELL = "original-not-found"
KINDS = {
    CANNOT_TELL: "There is no transformers to compare with: neither up to date nor out of date.",
    "transformers-moved": "The original is not the one that the package was made from.",
    "runtime-moved": "Another hf-rewrite-runtime is installed than the one that the package was made with.",
    "tool-moved": "Another version of hf-rewrite makes another package.",
    "edited-runtime": "A generated file other than the modeling file was edited; a sync would not merge that.",
    "edited-import": "An edit imports of the runtime what is not there, or will not be after a sync.",
    "lost-match": "A rule no longer rewrites a place that is still there.",
    "broken-edit": "A file that was edited is no Python any more, or names what is not there.",
    "edited-alone": "One of two methods that have to compute the same was edited, and that was not verified.",
    "conflict": "A merge was not finished.",
    "stale-verification": "The package is not as it was when it was verified, or the verification failed.",
    "not-readable": "The lock cannot be read, or a file that a sync merges is missing.",
    "not-reproducible": "The package is not what its lock says.",
    "other-pin": "The project pins another transformers than the package was made from.",
}
MOST_PLACES = 10
"""GitHub shows ten annotations a step."""


@dataclass(frozen=True)
class Place:
    """Lines of a file; numbers from 1."""

    path: str
    line: int = 1
    end: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in words, and where."""

    kind: str
    message: str
    places: tuple[Place, ...]


def of_all(folders: Sequence[Path], library: Installed | None, full: bool = False) -> dict[str, list[Finding]]:
    """Return the findings of several packages, which are read by several processes where there are several cores.

    Raises:
        NotAPackage: if a folder has no lock.
    """
    workers = min(len(folders), os.cpu_count() or 1)
    if workers < 2:
        return {str(folder): findings(folder, library, full) for folder in folders}
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        results = list(pool.map(findings, folders, itertools.repeat(library), itertools.repeat(full)))
    return {str(folder): found for folder, found in zip(folders, results, strict=True)}


def findings(folder: Path, library: Installed | None, full: bool = False) -> list[Finding]:
    """Return what is wrong with the package in `folder`.

    Args:
        folder: the package.
        library: the transformers to compare with; None is the installed one.
        full: rewrite the original anew even where rules, engine and original are those of the lock.

    Raises:
        NotAPackage: if the folder has no lock.
    """
    try:
        lock = read_lock(folder)
    except NotAPackage as error:
        if not (folder / LOCK_NAME).is_file():
            raise
        out = "take the lock from version control, or make the package anew: rewrite MODEL --out DIR --force"
        return [_finding("not-readable", f"{error} ({out})", folder / LOCK_NAME)]
    return list(_findings(folder, lock, library, full))


def _findings(folder: Path, lock: Lock, library: Installed | None, full: bool) -> Iterator[Finding]:
    conflicts = list(_conflicts(folder, lock))
    yield from conflicts
    yield from _files(folder, lock)
    yield from _runtime(folder, lock, library)
    yield from _imports(folder, lock)
    try:
        source = rebuild.source_of(folder, lock, library=library)
        moved = rebuild.moved(lock, source)
    except MissingTransformers as error:
        yield _finding(CANNOT_TELL, str(error), folder / LOCK_NAME)
        source = None
    except RewriteError as error:  # gone, unreadable, or no original at all: in words, and the other packages go on
        yield _finding("transformers-moved", str(error), folder / LOCK_NAME)
        source = None
    if source is not None:
        if moved:
            yield Finding("transformers-moved", _said(lock, source, moved), _lines(folder, lock, source))
        if full or not rebuild.is_current(folder, lock, source):
            yield from _anew(folder, lock, source, bool(moved))
        yield from _pin(folder, lock, source)
    if any(finding.kind == "broken-edit" for finding in conflicts):
        return  # which nothing could verify
    for name in () if conflicts else edits.merged_names(lock):
        for line, said in edits.reads_nothing(folder, lock, name):
            yield _finding(
                "broken-edit", f"{name}:{line} {said}: mend it, or {typed('undo', folder)}", folder / name, line
            )
    stale = rebuild.stale_verdict(folder, lock)
    if stale is not None:
        yield _finding("stale-verification", stale, folder / VERDICT_NAME)
    if not conflicts and (stale is not None or not rebuild.is_verified(folder)):
        yield from _edited_alone(folder, lock)


def _edited_alone(folder: Path, lock: Lock) -> Iterator[Finding]:
    path, generated = folder / lock.modeling, snapshots.text(folder, lock.modeling)
    if path.is_file() and generated is not None:
        for one in second_forms.edited_alone(generated.decode("utf-8"), path.read_text("utf-8-sig")):
            message = f"{path.name}:{one.line} {one}: edit both, then {typed('verify', folder)}"
            yield _finding("edited-alone", message, path, one.line)


def _conflicts(folder: Path, lock: Lock) -> Iterator[Finding]:
    broken = edits.broken(folder, lock)
    for name in edits.merged_names(lock):
        copy = folder / f"{name}.conflict"
        if copy.is_file():
            message = f"{copy.name} waits to be resolved: {typed('sync', folder, '--resolved', copy)}"
            yield _finding("conflict", message, folder / name)
        path = folder / name
        line = merge.marked_line(path.read_text("utf-8", "replace")) if path.is_file() else None
        if line is not None:
            yield _finding("conflict", f"{name} has conflict markers in line {line}", path, line)
        elif name in broken:
            number, said = broken[name]
            message = f"{name}:{number} {said}: mend it, or {typed('undo', folder)}"
            yield _finding("broken-edit", message, path, number)


def _files(folder: Path, lock: Lock) -> Iterator[Finding]:
    """Compare the generated files with the lock; the modeling file and `__init__.py` are the user's to edit."""
    if not lock.intact:
        yield _finding("not-reproducible", f"{LOCK_NAME} was edited by hand", folder / LOCK_NAME)
    for name, digest in sorted(lock.files.items()):
        path = folder / name
        if path.is_symlink() or any((folder / above).is_symlink() for above in list(Path(name).parents)[:-1]):
            yield _finding("not-reproducible", f"{name} is a link", folder / LOCK_NAME)
        elif not path.is_file() and name in edits.merged_names(lock):
            message = f"{name} is missing: {typed('undo', folder)} puts it back"
            yield _finding("not-readable", message, folder / LOCK_NAME)
        elif not path.is_file():
            yield _finding("not-reproducible", f"{name} is missing", folder / LOCK_NAME)
        elif name not in edits.merged_names(lock) and not lock.as_generated(folder, name):
            if name.startswith(f"{KEPT}/"):
                yield _finding("not-reproducible", f"{name} was edited: it keeps what was generated", path)
            else:
                own = rebuild.own_runtime(lock).get(name, b"")
                text = own.decode("utf-8") if sha256(own) == digest else None
                drop = typed("sync", folder, "--replace", name)
                message = f"{name} was edited; a sync does not merge that, and drops it by: {drop}"
                yield Finding("edited-runtime", message, _changed_places(path, text))


def _imports(folder: Path, lock: Lock) -> Iterator[Finding]:
    """Look at what edits import of the runtime: it has to be there, and to stay when the package is made anew."""
    for name in edits.merged_names(lock):
        path = folder / name
        generated = snapshots.text(folder, name)
        if not path.is_file() or path.read_bytes() == generated:
            continue
        text = path.read_text("utf-8-sig", "replace")
        try:
            found = runtime_names.lacking(text)
            ours = Counter(one.said for one in runtime_names.lacking((generated or b"").decode("utf-8")))
        except (SyntaxError, ValueError):  # a conflict
            continue
        for one in found:
            if ours[one.said]:  # as generated by an older version: a sync renews it
                ours[one.said] -= 1
                continue
            yield _finding("edited-import", f"{name}, line {one.line}, {one.said}", path, one.line)


def _runtime(folder: Path, lock: Lock, library: Installed | None) -> Iterator[Finding]:
    """Compare the runtime that the package was made with and the one that this tool is of.

    What mends it keeps the transformers that the package was made from: another is another question.
    """
    version, digest = vendored_files.runtime()
    if lock.options.vendored or lock.runtime in (Runtime("", ""), Runtime(version, digest)):
        return
    now = version if version != lock.runtime.version else f"another {version}"
    made = lock.source.transformers if lock.source.module is not None else None
    same = ("--transformers", made) if made is not None and library is not None and library.version != made else ()
    message = f"made with hf-rewrite-runtime {lock.runtime.version}, now {now}: {typed('sync', folder, *same)}"
    yield _finding("runtime-moved", message, folder / LOCK_NAME)


def _said(lock: Lock, source: Source, moved: Sequence[str]) -> str:
    versions = (lock.source.transformers, source.transformers_version)
    if lock.source.module is not None and versions[0] != versions[1]:
        return f"transformers {versions[0]} → {versions[1]}, upstream {lock.source.path}: changed"
    return f"upstream {', '.join(moved)}: changed"


def _anew(folder: Path, lock: Lock, source: Source, moved: bool) -> Iterator[Finding]:
    """Rewrite the original and compare; what follows from an original that `moved` is said with that alone."""
    try:
        if moved:
            _, rules = rebuild.rebuilt(folder, lock, source)
            yield from _lost(folder, lock, rules)
        else:
            renewed = rebuild.renewed(folder, lock, source)
            yield from _lost(folder, lock, renewed.rules)
            yield from _otherwise(folder, lock, renewed)
    except TransformError:
        raise  # a bug of ours
    except NothingToRewrite as error:
        yield _finding("lost-match", str(error), folder / lock.modeling)
    except RewriteError as error:
        yield _finding("not-reproducible", str(error), folder / LOCK_NAME)


def _lost(folder: Path, lock: Lock, rules: Sequence[RuleChange]) -> Iterator[Finding]:
    modeling = folder / lock.modeling
    for change in rules:
        for lost in change.lost:
            message = f"{change.rule} lost {' '.join(lost.site.split())}: {lost.why}"
            yield Finding("lost-match", message, (_definition(modeling, lost.site.partition(": ")[0]),))


def _otherwise(folder: Path, lock: Lock, renewed: Renewal) -> Iterator[Finding]:
    """Compare a package that was made anew from the same original with the lock."""
    if reasons := rebuild.differences(lock, renewed.package):
        same_tool = lock.tool == renewed.package.lock.tool and lock.engine == renewed.package.lock.engine
        same_tool &= dict(lock.rules) == dict(renewed.package.lock.rules)
        text = renewed.package.files[lock.modeling].decode("utf-8")
        said = "; ".join(reasons[:4]) + ("; …" if len(reasons) > 4 else "")
        kind = "not-reproducible" if same_tool else "tool-moved"
        if same_tool and lock.source.transformers != renewed.package.lock.source.transformers:
            kind = "transformers-moved"  # the original is the same, what the package takes of other files is not
        yield Finding(kind, said, _new_places(folder, lock, text))


def _pin(folder: Path, lock: Lock, source: Source) -> Iterator[Finding]:
    """Compare what the project pins, where that is neither what was looked at nor what the package was made from."""
    if lock.source.module is None:
        return
    pin = pins.transformers_pin(folder.resolve())
    if pin is not None and pin.version not in (source.transformers_version, lock.source.transformers):
        message = (
            f"{pin.path.name} pins transformers {pin.version}, the package was made from "
            f"{lock.source.transformers}: {typed('sync', folder, '--transformers', pin.version)}"
        )
        yield _finding("other-pin", message, pin.path, pin.line)


def _lines(folder: Path, lock: Lock, source: Source) -> tuple[Place, ...]:
    """Return the lines of the user's file that stand for what changed in the original."""
    modeling = folder / lock.modeling
    before = rebuild.kept_original(folder, lock)
    if before is None or not modeling.is_file():
        return (Place(str(modeling)),)
    yours = modeling.read_text("utf-8", "replace")
    return _places(modeling, lines.carried(before, yours, lines.changed(before, source.text)))


def _new_places(folder: Path, lock: Lock, text: str) -> tuple[Place, ...]:
    modeling, base = folder / lock.modeling, snapshots.text(folder, lock.modeling)
    if base is None or not modeling.is_file():
        return (Place(str(modeling)),)
    yours = modeling.read_text("utf-8", "replace")
    before = base.decode("utf-8", "replace")
    return _places(modeling, lines.carried(before, yours, lines.changed(before, text)))


def _changed_places(path: Path, text: str | None) -> tuple[Place, ...]:
    """Return the lines of a file that are not as in `text`."""
    if text is None:
        return (Place(str(path)),)
    return _places(path, lines.changed(path.read_text("utf-8", "replace"), text))


def _places(path: Path, blocks: Iterable[tuple[int, int]]) -> tuple[Place, ...]:
    distinct = list(dict.fromkeys(blocks))[:MOST_PLACES]
    return tuple(Place(str(path), first, last) for first, last in distinct) or (Place(str(path)),)


def _definition(path: Path, owner: str) -> Place:
    """Return where a class, method or function is defined; the top of the file where it is not."""
    try:
        body: list[ast.stmt] = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return Place(str(path))
    line = 1
    for part in owner.split("."):
        found = next((n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part), None)
        if found is None:
            break
        line, body = found.lineno, found.body
    return Place(str(path), line, line)


def _finding(kind: str, message: str, path: Path, line: int = 1) -> Finding:
    return Finding(kind, message, (Place(str(path), line, line),))
