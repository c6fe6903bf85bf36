"""The tables of docs/verification.md from bench/results/mutants.json: `python bench/mutant_page.py`, or `--check`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results/mutants.json")
PAGE = Path("docs/verification.md")
START, END = "<!-- mutants: generated -->\n", "<!-- mutants: end -->"
COLUMNS = ("caught", "broke off", "survived", "equivalent")

SLOWER = "the same numbers"
"""In the review of a bug that costs time or memory."""

Row = dict[str, Any]


def text(record: dict[str, Any]) -> str:
    """Return what stands between the marks."""
    rows = record["rows"]
    counts = Counter(row["status"] for row in rows)
    others = len(rows) - counts["equivalent"]
    caught = others - counts["survived"]
    apart = Counter({kind: sum(one.get(kind, 0) for one in record["apart"].values()) for kind in record["kinds"]})
    slower = sum(row["status"] == "survived" and SLOWER in row.get("why", "") for row in rows)
    said = (
        f"Made by `python bench/mutants.py {' '.join(record['apart'])} --json {RESULTS}` (seed {record['seed']}; "
        f"{record['machine']}): {len(rows)} of {record['drawn']} mutants drawn. {others} are bugs, of which {caught} "
        f"are caught ({caught / others:.1%}). {slower} of the others compute the same numbers, and are slower; "
        f"of what computes others {caught / (others - slower):.1%} is caught. No part of the sample: "
        + ", ".join(f"{count} {kind}" for kind, count in apart.items())
        + " (the first two of all mutants, the others of those drawn)."
    )
    return "\n".join([
        *textwrap.wrap(said, 118, break_long_words=False, break_on_hyphens=False),
        "",
        *_counts("model", rows),
        "",
        *_counts("rule", rows),
        "",
        "| survived | change | what it would do | would be caught by |",
        "|---|---|---|---|",
        *_survivors(rows),
        "",
        "| equivalent | change | why |",
        "|---|---|---|",
        *_equivalents(rows),
        "",
    ])  # fmt: skip


def _counts(kind: str, rows: list[Row]) -> list[str]:
    lines = [f"| {kind} | tried | {' | '.join(COLUMNS)} | of the others caught |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name in [*sorted({row[kind] for row in rows}), "all"]:
        chosen = [row for row in rows if name in (row[kind], "all")]
        counts = Counter(row["status"] for row in chosen)
        others = len(chosen) - counts["equivalent"]
        share = f"{(others - counts['survived']) / others:.0%}" if others else "–"
        lines.append(f"| {name} | {len(chosen)} | {' | '.join(str(counts[one]) for one in COLUMNS)} | {share} |")
    return lines


def _survivors(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["status"] == "survived"]
    return [
        f"| {_place(row)} | {row['rule']}: {row['change']} | {row.get('why', 'not looked at')} "
        f"| {row.get('caught_by', '')} |"
        for row in sorted(found, key=_place)
    ]


def _equivalents(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["status"] == "equivalent"]
    return [f"| {_place(row)} | {row['rule']}: {row['change']} | {row['why']} |" for row in sorted(found, key=_place)]


def _place(row: Row) -> str:
    return f"{row['model']}: `{row['where']}`"


def main() -> None:
    """Write the page, or with `--check` fail if it is not what the results say."""
    before, rest = PAGE.read_text("utf-8").split(START)
    after = rest.partition(END)[2]
    page = before + START + "\n" + text(json.loads(RESULTS.read_text("utf-8"))) + END + after
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, "utf-8")
    elif PAGE.read_text("utf-8") != page:
        sys.exit(f"{PAGE} is not what {RESULTS} says")


if __name__ == "__main__":
    main()
