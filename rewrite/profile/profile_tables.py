"""A profile as tables: for the terminal, and as Markdown for pull requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewrite.benchmark.benchmark_tables import NONE, Table, narrow, ratio_text
from rewrite.measure import categories

from .accounts import HOST, WAITS

NAMES = {"original": "original", "ours": "rewritten"}
KINDS = {
    "decode": "one token",
    "prompt": "a prompt",
    "forward": "one call",
    "train": "forward and backward",
    "trace": "a trace",
}
TOP = 12
"""Rows of a table on the terminal."""
LARGE = 0.03
"""Share of a step from which a row is worth a word."""


def conditions(record: Mapping[str, Any]) -> str:
    """Under which conditions the figures are, in one line."""
    if record["kind"] == "trace":
        return f"{record['file']}, by {record['source']}" + (f" · {record['device']}" if record["device"] else "")
    lengths = {"decode": f"{record['tokens']} tokens before", "prompt": f"{record['tokens']} tokens"}
    length = lengths.get(record["kind"], f"{record['tokens']} tokens a row")
    versions = " · ".join(f"{name} {value}" for name, value in record["versions"].items() if name != "python")
    shape = f"{record['shape']}, {record['layers']} layers, {record['weights']} weights"
    what = f"{record['model']}, {shape}, {record['dtype']}, batch {record['batch']}, {length}"
    return f"{what} · {record['device']} · {versions}"


def summary(record: Mapping[str, Any]) -> str:
    """One sentence: how long a step is on both sides, and what it mostly is."""
    sides = record["sides"]
    if record["kind"] == "trace":
        one = sides["original"]
        return f"{_time(one['sum_us'])} of {one['activities']:.0f} activities, most of it {_largest(record, one)}."
    theirs, ours = sides["original"], sides["ours"]
    ratio = record["ratio"]
    return (
        f"{KINDS[record['kind']].capitalize()} takes {_time(theirs['wall_us'])} in the original, most of it "
        f"{_largest(record, theirs)}, and {_time(ours['wall_us'])} rewritten, most of it {_largest(record, ours)}: "
        f"{ratio_text(ratio)}."
    )


def headline(record: Mapping[str, Any]) -> str:
    """The sentence that a report begins with; on a CPU first that no gain is to be expected there."""
    nothing = "On a CPU no gain is to be expected. " if str(record["device"]).startswith("CPU") else ""
    return nothing + summary(record)


def titles(record: Mapping[str, Any]) -> dict[str, str]:
    """What the parts of a step are called: a CPU waits for no host, it is one."""
    on_host = {HOST: "Python, dispatching"} if str(record["device"]).startswith("CPU") else {}
    return categories.TITLES | WAITS | on_host


def _largest(record: Mapping[str, Any], side: Mapping[str, Any]) -> str:
    named = titles(record)
    parts = {named[kind]: values["us"] for kind, values in side["categories"].items()}
    parts |= {named[kind]: us for kind, us in side["waits"].items()}
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({parts[name] / side['sum_us']:.0%})"


def _time(us: float) -> str:
    return f"{narrow(us / 1e3)} ms" if us >= 1000 else f"{narrow(us, 1)} µs"


def shares(record: Mapping[str, Any]) -> Table:
    """What a step is made of, both sides beside each other."""
    sides = record["sides"]
    kinds = [kind for kind in categories.CATEGORIES if any(kind in side["categories"] for side in sides.values())]
    waits = [kind for kind in WAITS if any(kind in side["waits"] for side in sides.values())]
    rows = []
    for kind in kinds:
        cells = [categories.TITLES[kind]]
        for side in sides.values():
            cells += _cells(side["categories"].get(kind), side["sum_us"])
        rows.append(tuple(cells))
    for kind in waits:
        cells = [titles(record)[kind]]
        for side in sides.values():
            us = side["waits"].get(kind)
            cells += _cells(None if us is None else {"us": us}, side["sum_us"])
        rows.append(tuple(cells))
    rows.append(("sum", *(cell for side in sides.values() for cell in (f"{side['sum_us']:.0f}", "", ""))))
    if record["kind"] != "trace":
        rows.append(("wall clock", *(cell for side in sides.values() for cell in (f"{side['wall_us']:.0f}", "", ""))))
    names = [NAMES[name] for name in sides] if record["kind"] != "trace" else ["µs"]
    headings = ("", *(heading for name in names for heading in (f"{name}, µs" if name != "µs" else "µs", "%", "n")))
    return Table(f"{KINDS[record['kind']]}, by category", headings, tuple(rows), tuple(_notes(record)))


def _cells(values: Mapping[str, float] | None, total: float) -> list[str]:
    if values is None:
        return [NONE, "", ""]
    count = often(values["count"]) if "count" in values else ""
    return [f"{values['us']:.0f}", f"{values['us'] / total:.1%}" if total else "", count]


def _notes(record: Mapping[str, Any]) -> list[str]:
    found = []
    for name, side in record["sides"].items():
        if record["kind"] == "trace":
            found += side["notes"]
            continue
        found.append(f"{NAMES[name]}: {side['said']}")
        graph = "; what runs in a graph has none" if side.get("replayed") else ""
        if side["captured"]:
            graph = "; its kernels run in a graph and have the lines of the same step without one"
        found.append(f"{NAMES[name]}: {side['placed']:.0%} of the time has a line{graph}")
    return found


def rows(side: Mapping[str, Any], title: str, most: int = TOP) -> Table:
    """The largest rows of a side, each with its distance to its own limit."""
    found = []
    for row in side["rows"][:most]:
        limit = f"{row['limit_us']:.1f}" if row.get("limit_us") else NONE
        where = row["line"] or row["module"] or NONE
        share = max(row.get("bandwidth") or 0.0, row.get("arithmetic") or 0.0)
        bound = f"{share:.0%} of {row['bound']}" if share else NONE
        found.append((_cut(row["name"], 34), _cut(where, 30), often(row["count"]), f"{row['us']:.1f}", limit, bound))
    return Table(title, ("", "line", "n", "µs", "limit", "reaches"), tuple(found))


def often(count: float) -> str:
    """How often a step has something: what not every step has is a fraction."""
    return f"{count:.0f}" if count >= 0.995 or not count else f"{count:.2f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def markdown(record: Mapping[str, Any]) -> str:
    """The whole profile as GitHub's Markdown."""
    parts = [f"### Profile: {KINDS[record['kind']]}", "", headline(record), "", f"<sub>{conditions(record)}</sub>", ""]
    for each in record.get("advice", []):
        parts += [] if "- " in parts[-1] else ["**What would change it**", ""]
        parts.append(f"- {each['text']}")
    findings = record.get("needless", {}).get("findings", [])
    if findings:
        parts += ["", "**Compute that need not happen**", "", *(f"- {each['text']}" for each in findings)]
    parts += ["", *_markdown(shares(record))]
    for name, side in record["sides"].items():
        made = rows(side, NAMES[name] if record["kind"] != "trace" else "kernels", 20)
        parts += [
            "",
            f"<details><summary>{made.title}: the largest rows</summary>",
            "",
            *_markdown(made),
            "",
            "</details>",
        ]
    return "\n".join(parts) + "\n"


def _markdown(table: Table) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(table.headings) + " |", "|---" + "|--:" * (len(table.headings) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in escaped]
    return [*lines, *(line for note in table.notes for line in ("", note))]


def other_share(side: Mapping[str, Any]) -> float:
    """The part of what ran that no rule knows."""
    ran = sum(values["us"] for values in side["categories"].values())
    return side["categories"].get(categories.OTHER, {"us": 0.0})["us"] / ran if ran else 0.0


def unknown(side: Mapping[str, Any]) -> Sequence[str]:
    """The names that no rule knows."""
    return [row["name"] for row in side["rows"] if row["category"] == categories.OTHER]
