"""A generated file is laid out as its original is: formatted, and with imports in order, where that is."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Sequence
from functools import cache

from rewrite.analysis.tree.nodes import LINE_LENGTH
from rewrite.errors import MissingLibrary

_SETTINGS = ("--isolated", "--no-cache", "--quiet", "--line-length", str(LINE_LENGTH), "--target-version", "py310")
_FORMAT = ("format", *_SETTINGS)
_SORT = (
    "check", *_SETTINGS, "--fix-only", "--select", "I",
    "--config", 'lint.isort.known-first-party = ["transformers"]', "--config", "lint.isort.lines-after-imports = 2",
)  # fmt: skip
"""Formatter and import order of transformers' own pyproject."""


def laid_out(text: str, original: str) -> str:
    """Return `text` with sorted imports where the original's are, and formatted where the original is.

    Raises:
        MissingLibrary: if ruff is not installed.
    """
    for arguments in (_SORT, _FORMAT):
        if ruff(arguments, original) == original:
            result = ruff(arguments, text)
            assert result is not None, "ruff cannot read what was generated"
            text = result
    return text


def formatter() -> str:
    """Return the formatter's name and version, which decide the generated text too.

    Raises:
        MissingLibrary: if ruff is not installed.
    """
    try:
        return f"ruff {importlib.metadata.version('ruff')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingLibrary("ruff", "laying out what is generated") from error


def ruff(arguments: Sequence[str], text: str) -> str | None:
    """Return what ruff makes of `text`, None where it cannot read it.

    Raises:
        MissingLibrary: if it is not installed.
    """
    done = subprocess.run([_program(), *arguments, "-"], input=text.encode("utf-8"), capture_output=True)
    return done.stdout.decode("utf-8") if done.returncode == 0 else None


@cache
def _program() -> str:
    try:
        from ruff.__main__ import find_ruff_bin
    except ImportError as error:
        raise MissingLibrary("ruff", "laying out what is generated") from error
    return str(find_ruff_bin())
