"""What was found: a table for people, `tuned.json` for the runtime, a literal for `runtime/launching/tiles.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hf_rewrite_runtime.launching.card_tables import TUNED
from rewrite.benchmark.benchmark_tables import plain_rows

from .candidates import Entry
from .search import Change
from .write import write as write_entries

HEADINGS = ("kind, shape", "n", "before", "after", "step, ms", "gain us")


def rows(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """A row of text for each name: calls in a step, entries, ms of the whole step, microseconds that a call gained.

    A kernel's own time is not shown: kernels overlap, and one that starts early seems to take longer.
    """
    return [
        (
            change.name,
            str(change.calls),
            shown(change.before),
            "=" if change.after == change.before else shown(change.after),
            f"{change.step_before:.4g}" + (f" {change.step_after:.4g}" if change.after != change.before else ""),
            f"{change.saved:.2f}" if change.after != change.before else "",
        )
        for change in changes
    ]


def shown(entry: Entry) -> str:
    """`4/2048/8`, or `plain`."""
    return "plain" if entry is None else "/".join(str(int(part)) for part in entry)


def text(title: str, changes: Sequence[Change]) -> str:
    """The table, at most 80 columns wide."""
    return "\n".join([title, *plain_rows(HEADINGS, rows(changes), gap=" ")])


def write(folder: Path, chip: str, changes: Sequence[Change]) -> Path:
    """Put what was found into `tuned.json` of a folder; what it says of other names and chips stays."""
    found = {change.name: plain(change.after) for change in changes}
    return write_entries(folder, TUNED, chip, lambda entries: dict(sorted({**entries, **found}.items())))


def literal(chip: str, entries: Mapping[str, Entry]) -> str:
    """The entry of `tiles.MEASURED` for a chip, as Python source."""
    lines = [f"        {json.dumps(name)}: {plain(entry)!r}," for name, entry in sorted(entries.items())]
    return "\n".join([f"    {json.dumps(chip)}: {{", *lines, "    },"])


def plain(entry: Entry) -> Entry:
    """The entry as a tuple of plain numbers."""
    return None if entry is None else tuple(int(part) for part in entry)


def entries(found: Iterable[Sequence[Change]]) -> dict[str, Entry]:
    """Return the entry of every name, of several searches the last one's."""
    return {change.name: change.after for changes in found for change in changes}
