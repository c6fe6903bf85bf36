"""The user's edits: merged into a package that is made anew, and checked to still make sense there."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rewrite.console import differences
from rewrite.delivery import precheck
from rewrite.errors import BaseLost, EditsBroken, SourceDoesNotParse, SourceNotReadable, UsageError
from rewrite.package import definitions, original, snapshots
from rewrite.package.assemble import INIT, Package
from rewrite.package.lock import Lock, sha256
from rewrite.package.syntax import digest
from rewrite.sync import merge, runtime_names
from rewrite.sync.styles import GENERATED, Marks, Style, plain, style_of
from rewrite.typed import typed

MODELING = "modeling"
_IMPLICIT = {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__class__", "__path__", "__qualname__"}
_TOP = "the module"
"""Where code is that an import of it runs."""


@dataclass(frozen=True)
class WithEdits:
    """A package with the user's edits in it."""

    package: Package
    conflicts: Mapping[str, str]
    """Text with markers, by the name of the file; a file in conflict is not in `package` with its edits."""


def merged_names(lock: Lock) -> tuple[str, ...]:
    """Return the files of a package whose edits are merged."""
    return (lock.modeling, INIT)


def with_edits(folder: Path, lock: Lock, package: Package, resolved: Mapping[str, Path]) -> WithEdits:
    """Merge the edits in `folder` into `package`, which is made anew.

    Args:
        folder: the package that is there.
        lock: its lock.
        package: as it is generated now.
        resolved: files whose text is to be taken as it is, by `MODELING` or `INIT`.

    Raises:
        SourceNotReadable: if a file that takes part in the merge is missing.
        UsageError: if a file still has markers.
        SourceDoesNotParse: if the user's file is not valid Python.
    """
    files, conflicts = dict(package.files), {}
    style = Style()
    for name in merged_names(lock):
        if (given := resolved.get(INIT if name == INIT else MODELING)) is not None:
            files[name] = _checked(given).encode("utf-8")
            continue
        base = _base(folder, lock, name, package)
        if not (folder / name).is_file():
            raise SourceNotReadable(folder / name, f"it is not there (`{typed('undo', folder)}` puts it back)")
        yours = _checked(folder / name)
        found = style_of(base, plain(yours), folder / name, sha256(base.encode("utf-8")) == lock.files[name])
        merged = _merged(base, yours, files[name].decode("utf-8"), found)
        style = found if name == lock.modeling else style
        if merged.conflicts:
            conflicts[name] = merged.text
        else:
            files[name] = merged.text.encode("utf-8")
    files |= dict(_in_your_layout(folder, lock, files, style))
    return WithEdits(replace(package, files=files), conflicts)


def generated_like_yours(folder: Path, lock: Lock, name: str) -> str:
    """Return the text of a merged file as it was generated last, in the layout that the user's file has.

    Raises:
        SourceNotReadable: if a file is missing.
    """
    base, yours = plain(kept_text(folder, name)), original.text_of(folder / name)
    if digest(name, base.encode("utf-8")) == digest(name, yours.encode("utf-8")):
        return yours  # a layout that no formatter makes
    marks = Marks.of(yours)
    return marks.put(style_of(base, plain(yours), folder / name).of(base))


def of_init(folder: Path, lock: Lock) -> tuple[str, str, str] | None:
    """Return the text of `__init__.py` as generated and as edited, and its name; None where it was not edited."""
    if not (folder / INIT).is_file() or lock.as_generated(folder, INIT):
        return None
    return generated_like_yours(folder, lock, INIT), original.text_of(folder / INIT), INIT


def kept_text(folder: Path, name: str) -> str:
    """Return the text of a merged file as it was generated last.

    Raises:
        SourceNotReadable: if the package does not keep it.
    """
    data = snapshots.text(folder, name)
    if data is None:
        raise SourceNotReadable(folder / snapshots.ARCHIVE, f"it does not keep {name} as it was generated")
    return data.decode("utf-8", "replace")


def problems(folder: Path, package: Package, root: Path | None) -> dict[str, list[str]]:
    """Return in words, by file, what of the merged texts cannot work, and did before.

    Args:
        folder: the package that is there.
        package: with the edits merged.
        root: package folder of the transformers that it will run with, None where that is not known.
    """
    found: dict[str, list[str]] = {}
    for name in (package.lock.modeling, INIT):
        text, generated = (data.decode("utf-8") for data in (package.files[name], _generated(package, name)))
        yours = original.text_of(folder / name)
        said = problems_of(text, (generated, yours), root) if text not in (generated, yours) else []
        if text != generated:
            said += [f"line {one.line} {one.said}" for one in runtime_names.lacking(text)]
        if said:
            found[name] = said
    if not found:
        texts = {name: package.files[name].decode("utf-8") for name in package.files if name.endswith(".py")}
        ours = {name: _generated(package, name).decode("utf-8") for name in merged_names(package.lock)}
        known = {why for _, _, why in _broken_names(folder, {**texts, **ours})}
        for name, line, why in _broken_names(folder, texts):
            if why not in known:
                found.setdefault(name, []).append(f"line {line} {why}")
    return found


def broken(folder: Path, lock: Lock) -> dict[str, tuple[int, str]]:
    """Return which of the user's files keep the package from being imported, by name, with the line and why."""
    found: dict[str, tuple[int, str]] = {}
    texts: dict[str, str] = {}
    for name in merged_names(lock):
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        try:
            texts[name] = data.decode("utf-8-sig")
            ast.parse(texts[name])
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            found[name] = (line, f"does not parse (byte {error.start} is not UTF-8)")
        except (SyntaxError, ValueError) as error:  # a null byte is either, by the version of Python
            line, said = getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))
            found[name] = (line, f"does not parse ({said})")
    for name, line, said in _broken_names(folder, texts) if not found else ():
        found.setdefault(name, (line, said))
    return found


def reads_nothing(folder: Path, lock: Lock, name: str) -> list[tuple[int, str]]:
    """Return lines of a file where a function reads what an edit took away, and what it reads."""
    path, generated = folder / name, snapshots.text(folder, name)
    if generated is None or not path.is_file() or lock.as_generated(folder, name):
        return []
    text = path.read_text("utf-8-sig")
    if "*" in precheck.bound(ast.parse(text)):
        return []
    fresh = set(_undefined(text)) - set(_undefined(generated.decode("utf-8")))
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    lines = {what: min(node.lineno for node in names if node.id == what) for where, what in fresh if where != _TOP}
    return sorted((line, f"reads {what}, which nothing defines any more") for what, line in lines.items())


def edited_places(folder: Path, lock: Lock) -> list[str]:
    """Return the classes and functions that the user edited, and the files but for the modeling file."""
    places: list[str] = []
    for name in merged_names(lock):
        if (folder / name).is_file() and not lock.as_generated(folder, name):
            changes = differences.statistics(generated_like_yours(folder, lock, name), original.text_of(folder / name))
            places += [change.where for change in changes] if name == lock.modeling else [name][: len(changes)]
    return places


def check_importable(folder: Path, lock: Lock) -> None:
    """Check that the user's files do not keep the package from being imported.

    Raises:
        EditsBroken: if one does.
    """
    for name, (line, said) in broken(folder, lock).items():
        raise EditsBroken(folder, name, [f"line {line} {said}"])


def _broken_names(folder: Path, texts: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Return (file, line, what is wrong) of names that an import of the package reads and does not find, by line."""
    trees = {folder / name: ast.parse(text.removeprefix("\ufeff")) for name, text in texts.items()}
    found = [(path.name, line, said) for path, line, said in precheck.broken_names(trees)]
    for (path, tree), text in zip(trees.items(), texts.values(), strict=True):
        read = {what for where, what in _undefined(text) if where == _TOP}
        if read and path.parent == folder and "*" not in precheck.bound(tree):
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in read]
            first = min(names, key=lambda node: node.lineno)
            found.append((path.name, first.lineno, f"reads {first.id}, which nothing defines"))
    return sorted(found, key=lambda one: one[:2])


def problems_of(text: str, known: Sequence[str], root: Path | None) -> list[str]:
    """Return in words what `text` reads and nothing defines, or imports and is gone.

    What one of the texts `known` reads undefined too is left out: a name that only an annotation has, and what the
    user's file lacked before.
    """
    try:
        ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno} does not parse ({error.msg})"]
    fresh = set(_undefined(text)).difference(*(_undefined(other) for other in known))
    said = [
        f"{where} reads {what}, which nothing defines any more{_in_its_place(where, what, known)}"
        for where, what in sorted(fresh)
    ]
    if root is not None:
        gone = set(definitions.missing(root, text)) - set(definitions.missing(root, known[0]))
        said += [f"it takes from transformers what is not there: {what}" for what in sorted(gone)]
    return said


def _in_its_place(where: str, what: str, known: Sequence[str]) -> str:
    """Return in words which argument now stands where `what` did in the function that reads it; empty if none does."""
    now, before = (_arguments(text, where) for text in known) if len(known) == 2 else ((), ())
    place = before.index(what) if what in before and what not in now else len(now)
    given = now[place] if place < len(now) else what
    return "" if given in (what, *before) else f" (the argument is called {given} now)"


def _arguments(text: str, where: str) -> tuple[str, ...]:
    """Return the arguments of a function or method by its dotted name; none if the text has none of that name."""
    body: Sequence[ast.stmt] = ast.parse(text.removeprefix("\ufeff")).body
    found: ast.stmt | None = None
    for name in where.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        body = found.body if isinstance(found, kinds) else ()
    if not isinstance(found, ast.FunctionDef):
        return ()
    return tuple(one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs))


def _base(folder: Path, lock: Lock, name: str, package: Package) -> str:
    """Return the text of a file as it was generated last, from any place that has it.

    A merge with another text would take the user's edits for ours, and drop them.

    Raises:
        BaseLost: if it is nowhere.
    """
    there = snapshots.text(folder, name), (folder / name).read_bytes() if (folder / name).is_file() else None
    candidates = [data for data in (*there, _generated(package, name)) if data is not None]
    for data in candidates:
        if sha256(data) == lock.files[name]:
            return data.decode("utf-8")
    for data in candidates:  # formatted since
        if digest(name, data) == lock.syntax.get(name):
            return plain(data.decode("utf-8"))
    raise BaseLost(folder, snapshots.ARCHIVE)


def _generated(package: Package, name: str) -> bytes:
    """Return a file of a package that is made anew, without the user's edits."""
    return snapshots.of_archive(package.files[snapshots.ARCHIVE], name) or b""


def _merged(base: str, yours: str, generated: str, style: Style) -> merge.Merged:
    """Merge three texts that are laid out alike, and give the result the user's layout where the text is theirs."""
    marks, texts = Marks.of(yours), [plain(text) for text in (base, yours, generated)]
    before, mine, now = (style.of(text) for text in texts)
    merged = merge.three_way(before, mine, now)
    if merged.conflicts and not style.commands:
        before, mine, now = (GENERATED.of(text) for text in texts)
        formatted = merge.three_way(before, mine, now)
        merged = formatted if formatted.conflicts < merged.conflicts else merged
    if merged.conflicts:
        return replace(merged, text=marks.put(merged.text))
    laid_out = merge.three_way(mine, texts[1], merged.text, "--theirs").text
    same = digest(INIT, laid_out.encode("utf-8")) == digest(INIT, merged.text.encode("utf-8"))
    return merge.Merged(marks.put(laid_out if same else merged.text))


def _in_your_layout(folder: Path, lock: Lock, files: Mapping[str, bytes], style: Style) -> Iterator[tuple[str, bytes]]:
    """Yield the other files that have another layout than they were generated in, in that layout."""
    for name in sorted(lock.files.keys() & files.keys() - {*merged_names(lock)}):
        if not lock.as_generated(folder, name) or sha256(old := (folder / name).read_bytes()) == lock.files[name]:
            continue
        if digest(name, old) == digest(name, files[name]):
            yield name, old
        elif name.endswith(".py"):
            yield name, style.of(files[name].decode("utf-8")).encode("utf-8")


def _checked(path: Path) -> str:
    text = original.text_of(path)
    if merge.has_markers(text):
        raise UsageError(f"{path} still has conflict markers: resolve them first.")
    try:
        ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError) as error:
        raise SourceDoesNotParse(
            path, getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))
        ) from error
    return text


def _undefined(text: str) -> Iterator[tuple[str, str]]:
    """Yield (function, name) for every name that a function reads from the module and that is not there."""
    top = symtable.symtable(text.removeprefix("\ufeff"), "<merged>", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    defined |= {child.get_name() for child in top.get_children()} | set(dir(builtins)) | _IMPLICIT
    waiting = [(child.get_name(), child) for child in top.get_children()]
    while waiting:
        where, table = waiting.pop()
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced() and symbol.get_name() not in defined:
                yield where, symbol.get_name()
        waiting += [(f"{where}.{child.get_name()}", child) for child in table.get_children()]
    for symbol in top.get_symbols():
        if symbol.is_referenced() and symbol.get_name() not in defined:
            yield _TOP, symbol.get_name()
