"""The report: one HTML file with everything in it, and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.benchmark.benchmark_tables import NONE
from rewrite.errors import MissingLibrary
from rewrite.measure import categories

from . import plots, profile_tables

MOST_ROWS = 60
"""Rows of a table; what is beyond is one row."""


def require_libraries() -> None:
    """Check that a report can be made, before measuring.

    Raises:
        MissingLibrary: if jinja2 or matplotlib is not installed.
    """
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise MissingLibrary(name, "a report")


@dataclass(frozen=True)
class Shown:
    """A table of the report.

    `texts` and `codes` are the numbers of columns that are no figures, `signs` that of a difference's signs.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: frozenset[int] = frozenset()
    codes: frozenset[int] = frozenset()
    open: bool = False
    signs: int | None = None


def html(record: Mapping[str, Any]) -> str:
    """The report as one page that needs nothing else."""
    require_libraries()
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    shares = profile_tables.shares(record)
    trace = record["kind"] == "trace"
    name = record["file"] if trace else record["model"]
    named = profile_tables.titles(record)
    kinds = [kind for kind in named if any(_has(side, kind) for side in record["sides"].values())]
    return template.render(
        title=f"Profile of {name}: {profile_tables.KINDS[record['kind']]}",
        summary=profile_tables.headline(record),
        conditions=profile_tables.conditions(record),
        light=plots.LIGHT,
        dark=plots.DARK,
        legend=[(kind, named[kind]) for kind in kinds],
        plots=_plots(record, trace),
        lists=[] if trace else _lists(record),
        notes=shares.notes,
    )


def _has(side: Mapping[str, Any], kind: str) -> bool:
    return kind in side["categories"] or kind in side["waits"]


def _plots(record: Mapping[str, Any], trace: bool) -> list[dict[str, Any]]:
    shares, conditions = profile_tables.shares(record), profile_tables.conditions(record)
    found = [
        {
            "name": "bars",
            "heading": "What a step is made of",
            "svg": plots.svg(plots.bars, record, "bars", "Stacked bars of the time of a step by category"),
            "caption": f"Time of one step by category. {conditions}",
            "legend": True,
            "tables": [Shown("The same as a table", shares.headings, shares.rows, open=True)],
            "notes": [],
        }
    ]
    if not trace and plots.points(record):
        found.append(_roofline(record, conditions))
    if any(side["timeline"] for side in record["sides"].values()):
        found.append(
            {
                "name": "timeline",
                "heading": "One step, from begin to end",
                "svg": plots.svg(plots.timeline, record, "timeline", "Activities of one step over time"),
                "caption": f"A step of median length; gaps are waiting. {conditions}",
                "legend": True,
                "tables": [_longest(side, _title(record, name)) for name, side in record["sides"].items()],
                "notes": [],
            }
        )
    made = [_rows(side, _title(record, name)) for name, side in record["sides"].items()]
    found.append(_tables("rows", "Every row", made))
    if not trace:
        made = [_lines(side, _title(record, name)) for name, side in record["sides"].items()]
        made += [_modules(side, _title(record, name)) for name, side in record["sides"].items()]
        found.append(_tables("lines", "By line and by module", made))
        found += [_change(record["change"])] if record.get("change") else []
    return found


def _change(hunks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The difference of the files, a table for each hunk; open are those on which time is spent."""
    made = []
    for hunk in hunks:
        rows = [
            (
                str(line["now"] or line["before"]),
                _us(line["before_us"]),
                _us(line["now_us"]),
                line["sign"],
                line["code"],
            )
            for line in hunk
        ]
        before, now = (sum(line[side] or 0.0 for line in hunk) for side in ("before_us", "now_us"))
        first, last = (str(hunk[place]["now"] or hunk[place]["before"]) for place in (0, -1))
        title = f"lines {first} to {last}: {_us(before) or 0} µs before, {_us(now) or 0} µs now"
        headings = ("line", "before, µs", "now, µs", "", "code")
        made.append(Shown(title, headings, rows, frozenset({4}), frozenset({4}), bool(before or now), signs=3))
    return _tables("change", "The change, with the time of each line", made)


def _us(value: float | None) -> str:
    return f"{value:.1f}" if value else ""


def _tables(name: str, heading: str, made: Sequence[Shown]) -> dict[str, Any]:
    return {"name": name, "heading": heading, "svg": "", "caption": "", "legend": False, "tables": made, "notes": []}


def _title(record: Mapping[str, Any], name: str) -> str:
    return "the trace" if record["kind"] == "trace" else profile_tables.NAMES[name]


def _roofline(record: Mapping[str, Any], conditions: str) -> dict[str, Any]:
    rows = [
        (
            f"{profile_tables.NAMES[point['side']]}: {point['name']}",
            categories.TITLES[point["category"]],
            f"{point['intensity']:.2f}",
            f"{point['rate'] / 1e9:.1f}",
            f"{point['us']:.1f}",
            _reaches(point),
        )
        for point in sorted(plots.points(record), key=lambda point: -float(point["us"]))[:MOST_ROWS]
    ]
    headings = ("row", "category", "operations a byte", "GFLOP/s", "µs", "reaches")
    return {
        "name": "roofline",
        "heading": "How far each row is from its own limit",
        "svg": plots.svg(plots.roofline, record, "roofline", "Operations a second against operations a byte"),
        "caption": "Rows that move bytes and take operations; the lines are what the device did in this run. "
        f"Filled: rewritten, open: original; larger: a larger part of the step. {conditions}",
        "legend": True,
        "tables": [Shown("The same as a table", headings, rows, frozenset({0, 1}))],
        "notes": [],
    }


def _reaches(row: Mapping[str, Any]) -> str:
    share = max(row.get("bandwidth") or 0.0, row.get("arithmetic") or 0.0)
    return f"{share:.0%} of {row['bound']}" if share else NONE


def _rows(side: Mapping[str, Any], title: str) -> Shown:
    rows = []
    for row in side["rows"][:MOST_ROWS]:
        limit = f"{row['limit_us']:.2f}" if row.get("limit_us") else NONE
        moved = f"{row['bytes'] / 1e6:.3g}" if row["bytes"] else NONE
        where = " · ".join(filter(None, (row["line"], row["module"])))
        rows.append(
            (
                row["name"],
                categories.TITLES[row["category"]],
                where or NONE,
                profile_tables.often(row["count"]),
                f"{row['us']:.2f}",
                f"{row['us'] / side['sum_us']:.1%}",
                moved,
                limit,
                _reaches(row),
            )
        )
    rest = side["rows"][MOST_ROWS:]
    if rest:
        us, count = sum(row["us"] for row in rest), sum(row["count"] for row in rest)
        share = f"{us / side['sum_us']:.1%}"
        rows.append((f"{len(rest)} more rows", "", "", profile_tables.often(count), f"{us:.2f}", share, "", "", ""))
    headings = ("kernel or operator", "category", "where", "n", "µs", "of the step", "MB", "limit, µs", "reaches")
    return Shown(f"{title}: {len(side['rows'])} rows", headings, rows, frozenset({0, 1, 2}))


def _longest(side: Mapping[str, Any], title: str) -> Shown:
    longest = sorted(side["timeline"], key=lambda span: -float(span[1]))[:20]
    rows = [(name, categories.TITLES[kind], f"{start:.1f}", f"{us:.2f}") for start, us, kind, name in longest]
    return Shown(
        f"{title}: the longest activities", ("activity", "category", "begins, µs", "µs"), rows, frozenset({0, 1})
    )


def _lines(side: Mapping[str, Any], title: str) -> Shown:
    rows = [
        (
            each["line"] or "outside the modeling file",
            each.get("text") or "",
            profile_tables.often(each["count"]),
            f"{each['us']:.2f}",
        )
        for each in side["lines"][:MOST_ROWS]
    ]
    return Shown(f"{title}: by line", ("line", "code", "n", "µs"), rows, frozenset({0, 1}), frozenset({1}))


def _modules(side: Mapping[str, Any], title: str) -> Shown:
    rows = [
        (
            _module(each["module"]),
            profile_tables.often(each["count"]),
            f"{each['us']:.2f}",
            f"{each['us'] / side['sum_us']:.1%}",
        )
        for each in side["modules"][:MOST_ROWS]
    ]
    return Shown(f"{title}: by module", ("module", "n", "µs", "of the step"), rows, frozenset({0}))


def _module(name: str | None) -> str:
    return "outside the model" if name is None else name or "the model itself"


def _lists(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = [
        {
            "heading": "What would change it",
            "entries": [{"text": each["text"], "proof": each.get("why", "")} for each in record.get("advice", [])],
            "none": "Nothing large is left that a transform, an option or a setting would change.",
        }
    ]
    needless = record.get("needless")
    if needless is not None:
        items = [{"text": each["text"], "proof": each["proof"]} for each in needless["findings"]]
        none = f"Nothing was found in {needless['calls']} calls of {needless['operators']} operators."
        found.append({"heading": "Compute that need not happen", "entries": items, "none": none})
    return found


def png(record: Mapping[str, Any], path: Path) -> None:
    """A picture of the bars."""
    require_libraries()
    plots.png(record, path)
