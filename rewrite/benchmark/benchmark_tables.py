"""Puts results into tables: plain text at most 80 columns wide, and markdown for the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .benchmark_plan import OURS, TITLES

PREFILL_TITLES = {
    "original": "original, eager",
    "compiled": "original, torch.compile",
    "forward": "rewritten, its forward",
    OURS: "rewritten",
}
NONE = "–"


@dataclass(frozen=True)
class Table:
    """A title, column headings and rows of text; the first column is left-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def head(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labelled lines: what was measured, where, and the memory limit."""
    versions = " · ".join(f"{name} {value}" for name, value in record["versions"].items())
    size = f"{record['parameters'] / 1e9:.2f} G parameters" if "parameters" in record else ""
    what = [record["model"], record["shape"] or "checkpoint", record["dtype"], f"{record['weights']} weights", size]
    lines = [("model", " · ".join(filter(None, what))), ("on", record["device"]), ("", versions)]
    if "bandwidth" in record:
        band = record["bandwidth"]
        lines.append(("memory", f"reads {band['read'] / 1e12:.2f} TB/s, copies {band['copy'] / 1e12:.2f} TB/s"))
    return lines


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Every table of a result that has rows."""
    for cell in record["cells"]:
        yield decode(cell, record)
    for table in (prefill(record), cold(record)):
        if table.rows:
            yield table


def decode(cell: Mapping[str, Any], record: Mapping[str, Any]) -> Table:
    """Decoding at one batch shape: a row for each side, slowest first."""
    sides = {name: figures for name, figures in cell["sides"].items() if "decode_ms" in figures}
    order = sorted(sides, key=lambda name: (name == OURS, -sides[name]["decode_ms"]))
    rows = [_decode_row(name, sides[name], cell) for name in order]
    notes = [f"{TITLES[name]}: {f['error']}" for name, f in cell["sides"].items() if "error" in f]
    if "parity" in cell:
        outcome = "agree" if cell["parity"]["passed"] else "DO NOT AGREE"
        notes.append(f"tokens {outcome}: {cell['parity']['summary']}")
    if "loop" in cell:
        loop = cell["loop"]
        added = f"{loop['overhead']:+.1%} ({loop['overhead_low']:+.1%} to {loop['overhead_high']:+.1%})"
        notes.append(f"loop: a bare replay of the graph takes {loop['replay_ms']:.3f} ms, generate() adds {added}")
    if "ms" in cell["limit"]:
        limit = cell["limit"]
        gigabytes = f"{limit['weight_bytes'] / 1e9:.2f} GB of weights"
        notes.append(f"limit: {gigabytes} in {limit['weights_ms']:.3g} ms, with the cache {limit['ms']:.3g} ms")
    generated = f"{record['new_tokens']} tokens"
    headings = ("", "ms/token", "of limit", "kernels", generated, "rewritten is")
    return Table(
        f"decode, batch {cell['batch']}, {cell['context']} tokens before", headings, tuple(rows), tuple(notes)
    )


def _decode_row(name: str, figures: Mapping[str, Any], cell: Mapping[str, Any]) -> tuple[str, ...]:
    limit = cell["limit"].get("weights_ms")
    share = f"{limit / figures['decode_ms']:.0%}" if limit else NONE
    profile = figures.get("profile") or {}
    kernels = f"{profile['kernels_per_token']:.0f}" if profile else NONE
    whole = f"{figures['generate_ms']:.4g} ms"
    return (TITLES[name], narrow(figures["decode_ms"]), share, kernels, whole, said(figures))


def said(figures: Mapping[str, Any]) -> str:
    """How ours compares: a ratio with its interval only where it may be claimed."""
    if "ours" not in figures:
        return ""
    ratio, text = figures["ours"], figures.get("claim", "")
    value = ratio_text(ratio)
    if text.startswith("not claimed:"):
        return "tokens differ"
    return value if text in ("faster", "slower", "") else f"{value} ?"


def ratio_text(ratio: Mapping[str, float]) -> str:
    """A ratio with its interval."""
    value, low, high = (narrow(ratio[name], 2) for name in ("value", "low", "high"))
    return f"{value}× ({low}–{high})"


def narrow(value: float, decimals: int = 3) -> str:
    """Decimals where they say something: a large number takes no more room than a small one."""
    if value >= 100:
        decimals = 0
    elif value >= 10:
        decimals -= 1
    return f"{value:.{decimals}f}"


def prefill(record: Mapping[str, Any]) -> Table:
    """A row for each prompt length and side."""
    rows = []
    for entry in record["prefill"]:
        for name, title in PREFILL_TITLES.items():
            figures = entry["sides"].get(name, {})
            if "ms" in figures:
                ratio = figures.get("ours")
                text = ratio_text(ratio) if ratio else ""
                doubt = " ?" if ratio and ratio["low"] <= 1.0 <= ratio["high"] else ""
                rows.append((title, str(entry["tokens"]), f"{figures['ms']:.2f}", text + doubt))
            elif "error" in figures:
                rows.append((title, str(entry["tokens"]), "failed", figures["error"][:30]))
    return Table("prefill, batch 1", ("", "tokens", "ms", "rewritten is"), tuple(rows))


def cold(record: Mapping[str, Any]) -> Table:
    """Time to the first tokens in a new process, and the memory each side took there."""
    rows, notes = [], []
    for name, figures in record["cold"].items():
        if "error" in figures:
            notes.append(f"{TITLES[name]}: {figures['error']}")
            continue
        memory = [_gib(figures.get(key)) for key in ("weights_bytes", "peak_bytes", "reserved_bytes")]
        times = [f"{figures[key]:.2f}" for key in ("first_token_s", "second_token_s")]
        rows.append((TITLES[name], *times, *memory))
    headings = ("", "1st token s", "2nd token s", "weights GiB", "peak GiB", "reserved")
    return Table("new process, model in memory, nothing compiled", headings, tuple(rows), tuple(notes))


def _gib(size: float | None) -> str:
    return NONE if size is None else f"{size / 2**30:.2f}"


def text(record: Mapping[str, Any]) -> str:
    """Everything as plain text."""
    lines = [line for label, value in head(record) for line in _wrapped(value, f"{label:<11}", " " * 11)]
    for table in tables(record):
        lines += ["", table.title, *plain_rows(table.headings, table.rows)]
        lines += [line for note in table.notes for line in _wrapped(note)]
    return "\n".join(lines)


def plain_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    lines = []
    for row in (headings, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append(gap.join([f"{row[0]:<{widths[0]}}", *cells[1:]]).rstrip())
    return lines


def _wrapped(note: str, first: str = "  ", rest: str = "    ") -> list[str]:
    return textwrap.wrap(note, 80, initial_indent=first, subsequent_indent=rest)


def exit_code(record: Mapping[str, Any]) -> int:
    """0, or 1 where tokens differ, ours failed, or ours is slower than the original as it is."""
    for cell in record["cells"]:
        ours = cell["sides"].get(OURS, {})
        slower = cell["sides"].get("original", {}).get("claim") == "slower"
        if "error" in ours or slower or not cell.get("parity", {}).get("passed", False):
            return 1
    return 0
