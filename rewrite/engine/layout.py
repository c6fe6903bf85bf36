"""A generated file is laid out as its original is: where that passes transformers' formatter, so does the result."""

from __future__ import annotations

import subprocess
from functools import cache

from rewrite.analysis.syntax.nodes import LINE_LENGTH
from rewrite.errors import MissingLibrary

_SETTINGS = ("--isolated", "--no-cache", "--quiet", "--line-length", str(LINE_LENGTH), "--target-version", "py310")
_FORMAT = ("format", *_SETTINGS)
_IMPORTS = (
    "check", *_SETTINGS, "--select", "I",
    "--config", 'lint.isort.known-first-party = ["transformers"]', "--config", "lint.isort.lines-after-imports = 2",
)  # fmt: skip
"""Formatter and import order of transformers' own pyproject."""


def laid_out(text: str, original: str) -> str:
    """Return `text` formatted and with sorted imports, where `original` is; else `text` as it is.

    Raises:
        MissingLibrary: if ruff is not installed.
    """
    if not _passes(original):
        return text
    return _ruff((*_FORMAT, "-"), _ruff((*_IMPORTS, "--fix-only", "-"), text))


def _passes(text: str) -> bool:
    return _ruff((*_FORMAT, "-"), text) == text and _ruff((*_IMPORTS, "--fix-only", "-"), text) == text


def _ruff(arguments: tuple[str, ...], text: str) -> str:
    """Return what ruff makes of `text`; a text that it cannot read stays as it is."""
    done = subprocess.run([_program(), *arguments], input=text.encode("utf-8"), capture_output=True)
    return done.stdout.decode("utf-8") if done.returncode == 0 else text


@cache
def _program() -> str:
    try:
        from ruff.__main__ import find_ruff_bin
    except ImportError as error:
        raise MissingLibrary("ruff", "laying out what is generated") from error
    return str(find_ruff_bin())
