"""Compares what a rewritten package takes from transformers with the installed transformers, when it is imported.

A package keeps working when upstream edits a modeling file that it no longer uses. What can break it is what it
imports: that is fingerprinted. A change is said once; what cannot work raises, with the way out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import transformers

from .. import __version__
from ..core.package_lock import read_lock
from ..launching import card_tables
from . import fingerprints

ENVIRONMENT_VARIABLE = "REWRITE_GUARD"
WARN, STRICT, OFF = "warn", "strict", "off"
"""What the variable may say: warn of a change (the default), raise, or look at nothing."""
_MOST_NAMES = 5
_COMPLAINT = "[ERROR] Config not found for "


class TransformersMoved(ImportError):
    """The installed transformers is not one that the package works with."""

    def __init__(self, package: str, version: str, what: str, command: str):
        made = f" (it was made from {version})" if version else ""
        pinned = f", or pip install transformers=={version}" if version else ""
        super().__init__(
            f"{package} does not fit the installed transformers {transformers.__version__}{made}: {what}. "
            f"Make it anew: {command}{pinned}"
        )


class TransformersChanged(UserWarning):
    """What the package takes from transformers is not as it was when the package was made."""


class RuntimeMoved(UserWarning):
    """The installed runtime is of another minor version than the one that the package was made with."""


@contextlib.contextmanager
def made_from(package: str) -> Iterator[None]:
    """Turn a failing import inside the block into one clear error, then compare what is imported with what it was.

    What the package was made from stands in the `rewrite.lock` beside it; one without is not looked at.

    Args:
        package: name of the rewritten package.

    Raises:
        TransformersMoved: if a name imported in the block is gone, or a function no longer takes what it is given;
            with `REWRITE_GUARD=strict` also for any other change.
        ImportError: with `REWRITE_GUARD=strict`, if the installed runtime is of another minor version.
        ValueError: if `REWRITE_GUARD` is nothing that it may be.
    """
    mode = _mode()
    folder = Path(str(sys.modules[package].__file__)).parent
    command = f"rewrite sync {folder.name}"
    lock = read_lock(folder)
    source, taken, made_with = lock.get("source", {}), lock.get("guard", {}), lock.get("runtime", {})
    version = source.get("transformers") or ""
    try:
        with _without_complaints(package):
            yield
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        raise TransformersMoved(package, version, str(error), command) from error
    card_tables.ship(folder)
    if mode == OFF:
        return
    _compare_runtime(package, made_with.get("version"), command, mode)
    if not _may_differ(version):
        return
    imported, called = taken.get("imported", {}), taken.get("called", {})
    files = fingerprints.Files(Path(transformers.__file__).parent)
    for problem in fingerprints.misfits(files, imported, called):
        raise TransformersMoved(package, version, problem, command)
    if changed := fingerprints.changes(files, imported, _moved):
        what = _said(changed)
        if mode == STRICT:
            raise TransformersMoved(package, version, what, command)
        warnings.warn(
            f"{package} was made from transformers {version}, and what it imports has changed in the installed "
            f"{transformers.__version__}: {what}. To compare it with the original: {package}.selftest(). To make it "
            f"anew: {command}. ({ENVIRONMENT_VARIABLE}={STRICT} makes this an error, {OFF} says nothing.)",
            TransformersChanged,
            stacklevel=4,  # the line that imports the package
        )


def _compare_runtime(package: str, version: str | None, command: str, mode: str) -> None:
    if version is None or version.split(".")[:2] == __version__.split(".")[:2]:
        return
    said = (
        f"{package} was made with hf-rewrite-runtime {version}, and {__version__} is installed: {command} makes it "
        f"anew, pip install 'hf-rewrite-runtime~={version}' goes back"
    )
    if mode == STRICT:
        raise ImportError(said)
    warnings.warn(said, RuntimeMoved, stacklevel=5)


class _Sieve:
    """What is printed, without the lines in which transformers' `auto_docstring` complains of a folder's name."""

    def __init__(self, target: TextIO):
        self._target, self._drops = target, False

    def write(self, text: str) -> int:
        """Write a text, unless it is a complaint, or the end of its line."""
        ends, self._drops = self._drops and text == "\n", text.startswith(_COMPLAINT)
        return len(text) if ends or self._drops else self._target.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@contextlib.contextmanager
def _without_complaints(package: str) -> Iterator[None]:
    """Let nobody complain that a package in a folder `models` is named as no model of transformers."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if not file or Path(file).parent.parent.name != "models" or sys.stdout is None:
        yield
        return
    before = sys.stdout
    sys.stdout = cast("TextIO", _Sieve(before))
    try:
        yield
    finally:
        sys.stdout = before


def _mode() -> str:
    mode = os.environ.get(ENVIRONMENT_VARIABLE) or WARN
    if mode not in (WARN, STRICT, OFF):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {mode!r}: it may be {WARN}, {STRICT} or {OFF}")
    return mode


def _may_differ(version: str) -> bool:
    """Return whether the installed transformers may have other code than the one of that version."""
    return transformers.__version__ != version or "dev" in version


def _moved(files: fingerprints.Files, name: str) -> str | None:
    """Return the text of a definition that is imported from where it was, and stands in another file."""
    dotted, _, inner = name.partition(":")
    try:
        found = getattr(importlib.import_module(f"transformers.{dotted}".rstrip(".")), inner, None)
    except ImportError:
        return None
    if not str(home := getattr(found, "__module__", "")).startswith("transformers."):
        return None
    own = home.split(".")[1:]
    paths = ("/".join(own) + ".py", "/".join([*own, "__init__.py"]))
    return next((text for path in paths if (text := files.definition(path, inner)) is not None), None)


def _said(changed: Mapping[str, str]) -> str:
    """Return changes in words, those of one kind together."""
    by_kind: dict[str, list[str]] = {}
    for name, kind in changed.items():
        by_kind.setdefault(kind, []).append(name.partition(":")[2])
    parts = []
    for kind, names in sorted(by_kind.items()):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        parts.append(f"{kind} {', '.join(names[:_MOST_NAMES])}{more}")
    return "; ".join(parts)
