"""What the user sees: labelled lines, progress of anything over a second, diffs that fit the terminal.

On a terminal rich colours and wraps; anywhere else lines are plain and unwrapped. Where a patch goes to a pipe it is
alone on standard output, and everything said about it goes to standard error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rewrite.console import differences, progress
from rewrite.console.progress_steps import Step

Item = TypeVar("Item")
LABEL_WIDTH = 11
SIDE_BY_SIDE_WIDTH = 100
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


class Screen:
    """Where one command writes to. Created late, so that the streams of the moment are used.

    Args:
        patch: a difference is what is asked for: in a pipe standard output holds that alone.
        json: where a report goes; `-` is standard output, which then holds that alone.
        quiet: say nothing but problems, and those to standard error.
    """

    def __init__(self, patch: bool = False, json: Path | None = None, quiet: bool = False):
        self.output = Console(file=sys.stdout, highlight=False)
        self.errors = Console(file=sys.stderr, highlight=False)
        self.quiet = quiet
        self.taken = str(json) == "-"
        """Whether standard output is for a report."""
        aside = self.taken or (patch and not self.output.is_terminal)
        self.said = self.errors if aside else self.output

    def line(self, label: str, text: str, style: str = "") -> None:
        """Print a labelled line; on a terminal the text wraps beside its label."""
        if not self.quiet:
            self._line(self.said, label, text, style)

    def problem(self, label: str, text: str) -> None:
        """Print a labelled line of something that failed, however quiet it should be."""
        self._line(self.errors if self.quiet else self.said, label, text, "red")

    def text(self, text: str) -> None:
        """Print lines as they are."""
        if not self.quiet:
            self.said.print(text, markup=False, soft_wrap=True)

    def payload(self, text: str) -> None:
        """Print what was asked for, as it is, unless standard output is for a report."""
        if not self.taken:
            self.output.file.write(text)

    def _line(self, console: Console, label: str, text: str, style: str) -> None:
        if not console.is_terminal:
            self._plain(console, f"{label:<{LABEL_WIDTH}}{text}")
            return
        grid = Table.grid(padding=0)
        grid.add_column(width=LABEL_WIDTH, style="bold")
        grid.add_column(overflow="fold")
        grid.add_row(label, Text(text, style=style))
        console.print(grid)

    def warn(self, text: str) -> None:
        """Print a warning to standard error."""
        self.errors.print(Text(f"warning: {text}", style="yellow"), soft_wrap=not self.errors.is_terminal)

    def tracked(self, items: Iterable[Item], total: int, label: str, name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield `items` while it is shown how many of them there were, and the name of the last."""
        with self.working(label) as said:
            for number, item in enumerate(items, 1):
                said(Step(name(item), number, total))
                yield item

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; in a pipe the columns are separated by tabs and there is no heading, nor if `quiet`."""
        if self.taken:
            return
        if self.quiet:
            for row in rows:
                self._plain(self.output, row[0])
            return
        if not self.output.is_terminal:
            for row in rows:
                self._plain(self.output, "\t".join(row).replace("\n", " · "))
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, heading in enumerate(headings):
            table.add_column(heading, overflow="fold", no_wrap=number == 0)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.output.print(table)

    def figures(
        self,
        title: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        notes: Sequence[str],
        gap: int = 2,
    ) -> None:
        """Print a table of measurements, its first column to the left and the others to the right, and notes below."""
        if self.quiet:
            return
        if not self.said.is_terminal:
            widths = [max(cell_len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
            self._plain(self.said, f"\n{title}")
            for row in (headings, *rows):
                cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
                self._plain(self.said, (" " * gap).join([f"{row[0]:<{widths[0]}}", *cells]).rstrip())
            for note in notes:
                self._plain(self.said, f"  {note}")
            return
        table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", title=title, title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell, style="bold" if row[0] == "rewritten" else "") for cell in row))
        self.said.print()
        self.said.print(table)
        for note in notes:
            self.said.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))

    def show_diff(self, before: str, after: str, path: str, style: str) -> None:
        """Print the difference in one of `diff.STYLES`."""
        if style == "none" or self.taken:
            return
        if style == "stat":
            self._stat(differences.statistics(before, after), path)
        elif style == "side-by-side" and self._side_by_side_fits():
            self._side_by_side(before, after)
        elif self.output.is_terminal:
            self._coloured(differences.unified(before, after, path))
        else:
            self.output.file.flush()
            sys.stdout.buffer.write(differences.unified(before, after, path).encode("utf-8"))
            sys.stdout.buffer.flush()

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something goes on; yields a function that says how far it is, by messages or `Step`s."""
        work = progress.Work(what)
        if self.quiet:
            yield work
        elif self.errors.is_terminal:
            with progress.on_terminal(self.errors, work):
                yield work
        else:
            with progress.in_pipe(lambda line: self._plain(self.errors, line), work) as said:
                yield said

    def _side_by_side_fits(self) -> bool:
        return self.output.width >= SIDE_BY_SIDE_WIDTH

    def _plain(self, console: Console, text: str) -> None:
        console.file.write(f"{text}\n")
        console.file.flush()

    def _coloured(self, patch: str) -> None:
        for number, line in enumerate(patch.split("\n")[:-1]):
            style = "bold" if number < 2 else _COLOURS.get(line[:1], "")
            for piece in folded(line.removesuffix("\r").expandtabs(4), self.output.width):
                self.output.print(Text(piece, style=style, no_wrap=True), crop=False)

    def _side_by_side(self, before: str, after: str) -> None:
        for number, hunk in enumerate(differences.rows(before, after)):
            if number:
                self.output.rule(style="dim")
            grid = Table.grid(expand=True, padding=(0, 1))
            for _ in range(2):
                grid.add_column(justify="right", style="dim", no_wrap=True, width=5)
                grid.add_column(ratio=1, overflow="fold")
            for row in hunk:
                grid.add_row(*_half(row.left, row.changed, "red"), *_half(row.right, row.changed, "green"))
            self.output.print(grid)

    def _stat(self, changes: Sequence[differences.Change], path: str) -> None:
        width = self.output.width if self.output.is_terminal else 80
        names = min(max((cell_len(change.where) for change in changes), default=0), width // 2)
        most = max((change.added + change.removed for change in changes), default=0)
        room = max(width - names - 12, 10)
        for change in changes:
            total = change.added + change.removed
            scale = min(1.0, room / most)
            where = change.where if len(change.where) <= names else f"…{change.where[-names + 1 :]}"
            line = Text(f" {where:<{names}} | {total:>4} ")
            line.append("+" * _bar(change.added, scale), "green").append("-" * _bar(change.removed, scale), "red")
            self.output.print(line, no_wrap=True, crop=False)
        self.output.print(Text(f" {differences.total(changes, path)}"), soft_wrap=True)


def folded(line: str, width: int) -> list[str]:
    """Break a diff line at spaces where it passes `width`; the rest is indented deeper than the line itself."""
    if cell_len(line) <= width:
        return [line]
    code = line[1:]
    indent = " " * min(len(code) - len(code.lstrip()) + 8, width // 2)
    pieces = []
    while cell_len(line) > width:
        cut = line.rfind(" ", len(indent) + 2, width)
        cut = cut if cut > 0 else width
        pieces.append(line[:cut])
        line = f" {indent}{line[cut:].lstrip()}"
    return [*pieces, line]


def _half(side: tuple[int, str] | None, changed: bool, colour: str) -> tuple[str, Text]:
    if side is None:
        return "", Text("")
    number, line = side
    return str(number), Text(line.removesuffix("\r").expandtabs(4), style=colour if changed else "")


def _bar(count: int, scale: float) -> int:
    return max(1, round(count * scale)) if count else 0
