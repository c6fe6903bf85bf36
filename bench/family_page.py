"""docs/families.md and its chart, from the rows that `bench/families.py measure` left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from bar_chart import Bar, drawn

from rewrite.package.package_reasons import reasons

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]
README_BEGIN, README_END = "<!-- families: generated -->", "<!-- families: end -->"
DAY = "2026-11-25"
"""When the rows of bench/results/families-h100 were measured; new rows change it."""
README_CHART = "docs/speed.svg"
SIDES = {"original": "eager", "static": "static cache", "step": "compiled step", "ours": "rewritten"}
"""What README's chart shows beside the memory limit: the sides of a record of bench/decode.py."""
INTRODUCTION = """\
How fast the rewritten model generates, beside its original. Made by `python bench/families.py render` from rows that
`python bench/families.py measure` left on {day}: {device}, {versions}, hf-rewrite as it was on that day; what \
changed since is not in these figures. {tiny}

| measured | how |
|---|---|
| weights | random, bf16, at the published sizes; the layers of the largest are cut |
| call | greedy `generate()`, batch 1, about 512 tokens before (more where an image takes more, 64 \
where the original takes over 0.5 s to read them; 512 tokens in an encoder; 30 s of sound \
for Whisper, 10 s for Moonshine) |
| the two sides | share the weights and run in turn in one process; {kernels} |
| ms per token | the slope between a short and a long call, the median of the turns |

| column | is |
|---|---|
| limit | the bytes that a step has to move, over the bandwidth measured in the same process: the weights that one \
token reads (an embedding only where it is the head, experts by top-k, no encoder), keys and values of what was \
before, states read and written |
| share | the limit over the rewritten model's time |
| bf16 error | RMS error of the rewritten model's logits in bf16 against the original in fp32, as a multiple of the \
original's own |
| gap | how far below the best logit of the original in fp32 a generated token was at most: of the rewritten model's \
tokens, and in brackets of the original's |
"""
COLUMNS = (
    "family", "sizes of", "prompt", "GB a token", "limit ms", "original ms", "rewritten ms", "speed-up", "share",
    "bf16 error", "gap (own)",
)  # fmt: skip


def page(rows: Mapping[str, Row], chart: str | None) -> str:
    """Return the whole page."""
    timed = measured(rows)
    parts = ["# Families", INTRODUCTION.format(**_surroundings(list(timed.values()))), summary(timed)]
    if chart:
        parts.append(f"![share of the memory limit by family]({chart})")
    parts += ["\n".join([*_head(), *(_line(name, row) for name, row in timed.items())])]
    if slow := [f"- `{name}`: {_reason(row['reason'])}" for name, row in timed.items() if not row["graph"]]:
        parts += ["## Without the graph", "\n".join(slow)]
    if failed := [f"- `{name}`: {row['error']}" for name, row in rows.items() if "ours_ms" not in row]:
        parts += ["## Not measured", "\n".join(failed)]
    if noted := [f"- `{name}`: text only, {row['note']}" for name, row in timed.items() if row["note"]]:
        parts += ["## Notes", "\n".join(noted)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def measured(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows that have times, the largest share of the limit first."""
    timed = {name: row for name, row in rows.items() if "ours_ms" in row}
    return dict(sorted(timed.items(), key=lambda item: -(item[1]["share"] or 0.0)))


def summary(timed: Mapping[str, Row]) -> str:
    """Return the figures over all families."""
    rows = list(timed.values())
    if not rows:
        return "Nothing was measured."
    graphs, slower = sum(row["graph"] for row in rows), sum(row["speed_up"] < 1 for row in rows)
    speed = geometric_mean([row["speed_up"] for row in rows])
    parts = [f"{len(rows)} families, {graphs} with the graph", f"geometric mean speed-up {speed:.1f}×"]
    parts.append(f"{slower} slower than their original")
    shares = [row["share"] for row in rows if row["share"] is not None]
    if shares:
        parts.append(f"median share of the limit {median(shares):.0%}")
    ratios = [row["parity"]["ratio"] for row in rows if row.get("parity") and row["parity"]["ratio"] is not None]
    if ratios:
        parts.append(
            f"bf16 error {min(ratios):.2f} to {max(ratios):.2f} times the original's, median {median(ratios):.2f}"
        )
    return "; ".join(parts) + "."


def readme(rows: Mapping[str, Row], decode: Mapping[str, Any]) -> str:
    """Return what README shows: one model against what else there is, and the figures over all families."""
    timed = measured(rows)
    speed = geometric_mean([row["speed_up"] for row in timed.values()])
    slower = sum(row["speed_up"] < 1 for row in timed.values())
    graphs = sum(row["graph"] for row in timed.values())
    times = ", ".join(f"{name} {ms:.3g}" for name, ms in times_of(decode).items())
    versions = ", ".join(f"{name} {decode['versions'][name]}" for name in ("torch", "transformers"))
    return "\n".join([
        f"**How fast.** Llama-3.2-1B, ms per token, on an {decode['device']} (bf16, batch 1, {versions}):",
        "",
        f"[![{times}]({README_CHART})](docs/performance.md#decoding)",
        "",
        f"{len(timed)} families: {speed:.1f}× eager, the geometric mean; {graphs} decode in a captured graph, "
        f"{slower} are slower ([Families](docs/families.md)).",
    ])  # fmt: skip


def times_of(decode: Mapping[str, Any]) -> dict[str, float]:
    """Return ms per token of each side of the first cell of a record, and the memory limit."""
    cell = next(cell for cell in decode["cells"] if (cell["batch"], cell["context"]) == (1, 512))
    found = {said: cell["sides"][side]["decode_ms"] for side, said in SIDES.items()}
    return {**found, "memory limit": cell["limit"]["weights_ms"]}


def readme_chart(decode: Mapping[str, Any]) -> str:
    """Return README's picture, SVG."""
    colours = {"eager": "original", "rewritten": "ours", "memory limit": "limit"}
    times = times_of(decode)
    return drawn([Bar(name, [(colours.get(name, "other"), ms)], f"{ms:.3g} ms") for name, ms in times.items()], 120)


def _reason(reason: str) -> str:
    """Return in words why a call had no graph; the rows have the short name of some reasons."""
    said = reasons().get(reason, {})
    return said.get("generate", reason.removeprefix("no: "))


def _surroundings(rows: Sequence[Row]) -> dict[str, str]:
    kernels = sorted({name for row in rows for name in row["kernels"]})
    have = f"with {', '.join(kernels)}" if kernels else "without their optional kernels (no library of them installed)"
    return {
        "device": ", ".join(sorted({row["device"] for row in rows})),
        "versions": "; ".join(sorted({", ".join(f"{n} {v}" for n, v in row["versions"].items()) for row in rows})),
        "day": DAY,
        "tiny": "**Tiny sizes: these figures try the command and mean nothing.**"
        if any(r["tiny"] for r in rows)
        else "",
        "kernels": f"the originals of hybrids ran {have}",
    }


def _head() -> list[str]:
    return [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]


def _line(name: str, row: Row) -> str:
    sizes = f"{row['published']} ({row['cut']})" if row["cut"] else row["published"]
    parity = row.get("parity") or {}
    error = _number(parity.get("ratio"), ".2f")
    gap = f"{_number(parity.get('gap'), '.2g')} ({_number(parity.get('own_gap'), '.2g')})"
    share = _number(row["share"], ".0%") + ("" if row["graph"] else ", no graph")
    moved = f"{row['bytes']['total'] / 1e9:.2f}"
    cells = [f"`{name}`", sizes, f"{row['prompt']}, {row['tokens_before']}", moved, _number(row["limit_ms"], ".3f")]
    cells += [f"{row['eager_ms']:.2f}", f"{row['ours_ms']:.3f}", f"{row['speed_up']:.1f}×", share, error, gap]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def chart(rows: Mapping[str, Row]) -> str:
    """Return the share of the memory limit of every family, original and rewritten, SVG."""
    bars = []
    for name, row in measured(rows).items():
        if row["share"] is not None:
            own = 100 * row["limit_ms"] / row["eager_ms"]
            parts = [("original", own), ("ours", 100 * row["share"] - own)]
            bars.append(Bar(name, parts, f"{row['speed_up']:.1f}×" + ("" if row["graph"] else ", no graph")))
    return drawn(bars, 150, 100.0, {"original": "original, % of the memory limit", "ours": "rewritten"})
