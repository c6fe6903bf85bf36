"""The command line as a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rewrite import cli, program


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines of stderr, less those that show progress, which a slow machine gets more of."""
        return [line for line in self.err.splitlines() if "…" not in line]


captured: pytest.CaptureFixture[str] = None  # type: ignore[assignment]
"""What the test at hand prints: its conftest sets it."""


def rewrite(*args: object) -> Outcome:
    """Run `rewrite` in this process, and return what it printed."""
    return _captured(lambda: cli.run([str(arg) for arg in args]))


def tool(name: str, *args: object) -> Outcome:
    """Run `python -m rewrite.NAME` in this process, and return what it printed."""
    command = getattr(importlib.import_module(f"rewrite.{name}.__main__"), name)
    return _captured(lambda: program.run(command, f"python -m rewrite.{name}", [str(arg) for arg in args]))


def _captured(work: Callable[[], int]) -> Outcome:
    captured.readouterr()
    code = work()
    out, err = captured.readouterr()
    return Outcome(code, out, err)
