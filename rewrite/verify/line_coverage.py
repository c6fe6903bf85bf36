"""Which lines of the rewritten side ran while it was verified: what no check ran is not verified."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.errors import MissingLibrary

from .judging.verdict import Reached
from .models.counting import counted
from .models.loaded_sides import Source

if TYPE_CHECKING:
    from coverage import Coverage


Arcs = Mapping[str, list[tuple[int, int]]]
"""Which line followed which, by file."""


@dataclass
class Reach:
    """Counts the lines and branches of one side that run, of its modeling file and of what it brings along."""

    files: tuple[Path, ...]
    counter: Coverage | None = field(default=None, repr=False)

    @classmethod
    def of(cls, source: Source, wanted: bool) -> Reach:
        """Return what counts for a side: nothing unless it is wanted, or where a debugger or another counter traces.

        transformers' own files are never counted: a side that is one of them brings nothing along.

        Raises:
            MissingLibrary: if coverage is not installed.
        """
        if not wanted or sys.gettrace() is not None or (source.package and source.package.name == "transformers"):
            return cls(())
        files = tuple(sorted(_imported(source.package))) if source.package else (source.path,)
        try:
            from coverage import Coverage
        except ImportError as error:
            raise MissingLibrary("coverage", "counting the lines that a verification runs") from error
        names = [re.sub(r"[][*?]", "?", str(file)) for file in files]  # patterns, which know no other escape
        counter = Coverage(data_file=None, branch=True, include=names, config_file=False, messages=False)
        counter.set_option("run:disable_warnings", ["no-data-collected"])  # the verdict says so
        return cls(files, counter)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what runs in here."""
        if self.counter is None:
            yield
            return
        with counted(self.counter):
            yield

    def arcs(self) -> Arcs:
        """What was counted so far."""
        if self.counter is None:
            return {}
        data = self.counter.get_data()
        return {file: data.arcs(file) or [] for file in data.measured_files()}

    def add(self, arcs: Arcs) -> None:
        """Add what another process counted."""
        if self.counter is not None and arcs:
            self.counter.get_data().add_arcs(arcs)

    def reached(self, source: Source) -> tuple[Reached, ...]:
        """Return what ran of each file that is Python, the modeling file first; nothing if nothing was counted."""
        if self.counter is None or not self.counter.get_data().measured_files():
            return ()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "reached.json"
            self.counter.json_report(morfs=[str(file) for file in self.files], outfile=str(report), ignore_errors=True)
            counts = json.loads(report.read_text("utf-8"))["files"]
        found = {Path(name).resolve(): count for name, count in counts.items()}
        first = sorted(self.files, key=lambda file: (file != source.path, file))
        top = source.package or source.path.parent
        return tuple(_reached(file.relative_to(top), found[file]) for file in first if file in found)


def _imported(package: Path) -> Iterator[Path]:
    """Yield the files of a package that Python can import; what stands in hidden folders is kept for upgrades."""
    for file in package.rglob("*.py"):
        if not any(part.startswith(".") for part in file.relative_to(package).parts):
            yield file


def _reached(file: Path, counts: Mapping[str, Any]) -> Reached:
    summary = counts["summary"]
    return Reached(
        file.as_posix(),
        summary["num_statements"],
        summary["missing_lines"],
        summary["num_branches"],
        summary["missing_branches"],
        ", ".join(_ranges(counts["missing_lines"])),
    )


def _ranges(lines: Iterable[int]) -> Iterator[str]:
    """Yield `3` or `5-9` for every run of lines without a gap."""
    first = last = None
    for line in (*sorted(lines), None):
        if last is not None and line != last + 1:
            yield f"{first}" if first == last else f"{first}-{last}"
            first = None
        first = line if first is None else first
        last = line
