"""The layout that a team's formatter gives a file, found by comparing it with the text that was generated.

Nothing of the team's tools is run or need be installed: black, ruff and isort lay out alike enough that our own
formatter, with the right line length and quotes, comes within a few lines of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewrite.codemod.text_layout import ruff

_LENGTHS = (88, 79, 80, 99, 100, 110, 120)
_REFINED = (
    tuple(f'format.quote-style = "{quotes}"' for quotes in ("double", "single", "preserve")),
    ("format.skip-magic-trailing-comma = true",),
)
_QUIET = ("--no-cache", "--quiet")
_BOM = "\ufeff"


@dataclass(frozen=True)
class Style:
    """Commands of the formatter, in the order in which they run; none leaves a text as it is."""

    commands: tuple[tuple[str, ...], ...] = ()

    def of(self, text: str) -> str:
        """Return `text` in this style; one that the formatter cannot read stays as it is."""
        for command in self.commands:
            done = ruff(command, text)
            text = text if done is None else done
        return text


GENERATED = Style((("format", *_QUIET, "--isolated", "--line-length", "120", "--target-version", "py310"),))


@dataclass(frozen=True)
class Marks:
    """What an editor or git puts on a file besides its lines."""

    bom: bool
    crlf: bool

    @classmethod
    def of(cls, text: str) -> Marks:
        """Return the marks of a text."""
        return cls(text.startswith(_BOM), text.count("\r\n") * 2 > text.count("\n"))

    def put(self, text: str) -> str:
        """Return a text with these marks instead of its own."""
        text = plain(text)
        return _BOM * self.bom + (text.replace("\n", "\r\n") if self.crlf else text)


def plain(text: str) -> str:
    """Return a text without the marks that editors and git put on it."""
    return text.removeprefix(_BOM).replace("\r\n", "\n").replace("\r", "\n")


def style_of(base: str, yours: str, path: Path, as_generated: bool = True) -> Style:
    """Return the style in which `base` is most like `yours`, which holds edits besides.

    Args:
        base: the text that was generated, in any layout.
        yours: the user's file.
        path: where that file is: the settings of the project that it lies in are tried.
        as_generated: whether `base` is in the layout in which texts are generated. Where it is not, every style lays
            out anew, so that it brings texts of any layout to the same.
    """
    styles = _Closest(base, Counter(yours.split("\n")))
    sorts = (("--stdin-filename", str(path)), ("--isolated",))
    orders = [("check", *_QUIET, "--fix-only", "--select", "I", *settings) for settings in sorts]
    if as_generated:
        styles.try_all([Style()])
    else:  # it would be as generated if GENERATED were all that was done to it
        styles.try_all(Style((order, *GENERATED.commands)) for order in orders)
    if GENERATED.of(yours) != yours:
        styles.try_all(Style((("format", *_QUIET, *settings),)) for settings in _settings(path))
    for settings in _REFINED if styles.best.commands else ():
        *before, layout = styles.best.commands
        styles.try_all(Style((*before, (*layout, "--config", setting))) for setting in settings)
    styles.try_all([Style((order, *styles.best.commands)) for order in orders])
    return styles.best


class _Closest:
    """The style tried so far that left the fewest lines otherwise; of equals the first."""

    def __init__(self, base: str, given: Counter[str]):
        self._base, self._given = base, given
        self._fewest: int | None = None
        self.best = Style()

    def try_all(self, styles: Sequence[Style] | Iterator[Style]) -> None:
        for style in styles:
            if self._fewest == 0:
                return
            lines = Counter(style.of(self._base).split("\n"))
            other = ((lines - self._given) + (self._given - lines)).total()
            if self._fewest is None or other < self._fewest:
                self._fewest, self.best = other, style


def _settings(path: Path) -> Iterator[tuple[str, ...]]:
    yield ("--stdin-filename", str(path))
    yield from (("--isolated", "--line-length", str(length)) for length in _LENGTHS)
