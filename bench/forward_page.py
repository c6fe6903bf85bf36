"""docs/forwards.md, from the rows that `bench/forwards.py measure` left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "bench" / "results" / "forwards.json"
PAGE = ROOT / "docs" / "forwards.md"
BEGIN, END = "<!-- forwards: generated -->", "<!-- forwards: end -->"
COLUMNS = (
    "model", "batch", "original", "compiled", "rewritten", "× original", "× compiled", "without graphs",
    "rewritten, compiled", "error",
)  # fmt: skip


def told(row: Row) -> str:
    """Return a row as lines of text."""
    if row.get("error"):
        return f"{row['name']}: {row['error']}"
    lines = []
    for cell in row["cells"]:
        times = ", ".join(f"{name} {found['ms']:.3f}" for name, found in cell["sides"].items())
        errors = ", ".join(f"{name} {value:.2e}" for name, value in cell["parity"].items())
        called, captured = cell["first_calls_s"]
        lines.append(
            f"{row['name']} batch {cell['batch']}: {times} ms; agrees {cell['agrees']} ({errors}); "
            f"first call {called:.2f} s, the one that captures {captured:.2f} s {cell['errors'] or ''}"
        )
    return "\n".join([*lines, f"  {row['explain']}".replace("\n", "\n  ")])


def write() -> None:
    """Put the table into the page."""
    rows = json.loads(ROWS.read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", "utf-8")


def table(rows: Sequence[Row]) -> str:
    """Return a table for each run, with its surroundings."""
    timed = [row for row in rows if not row["error"]]
    parts = []
    for where in dict.fromkeys(map(_where, timed)):
        head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        of_run = [row for row in timed if _where(row) == where]
        parts += [
            f"{where}.",
            "\n".join([*head, *(f"| {_line(row, cell)} |" for row in of_run for cell in row["cells"])]),
        ]
    failed = [f"- `{row['name']}`: {row['error']}" for row in rows if row["error"]]
    return "\n\n".join([*parts, *failed])


def _where(row: Row) -> str:
    """Return on what a row was measured, and when."""
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    commit = f", commit {row['commit']}" if "commit" in row else ""
    return f"{row['device']}, {versions}, {row['date']}{commit}"


def _line(row: Row, cell: Mapping[str, Any]) -> str:
    sides = cell["sides"]
    ours, own = sides["ours"]["ms"], cell["parity"]["original"]
    cells = [row["published"], str(cell["batch"])]
    cells += [_ms(sides, "original"), _ms(sides, "compiled"), f"**{ours:.2f}**"]
    cells += [f"{sides[name]['ms'] / ours:.2f}×" if name in sides else "–" for name in ("original", "compiled")]
    cells += [
        _ms(sides, "ours_plain"),
        _ms(sides, "ours_compiled"),
        f"{cell['parity']['ours'] / own:.2f}" if own else "0",
    ]
    return " | ".join(cells)


def _ms(sides: Mapping[str, Any], name: str) -> str:
    return f"{sides[name]['ms']:.2f}" if name in sides else "–"
