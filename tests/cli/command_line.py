"""The command line as a function."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rewrite import cli


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
    captured.readouterr()
    code = cli.run([str(arg) for arg in args])
    out, err = captured.readouterr()
    return Outcome(code, out, err)
