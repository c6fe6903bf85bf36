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


class CommandLine:
    """Runs `rewrite` in this process and returns what it printed."""

    def __init__(self, capfd: pytest.CaptureFixture[str]):
        self.capfd = capfd

    def __call__(self, *args: object) -> Outcome:
        self.capfd.readouterr()
        code = cli.run([str(arg) for arg in args])
        out, err = self.capfd.readouterr()
        return Outcome(code, out, err)
