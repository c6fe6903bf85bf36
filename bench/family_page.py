"""docs/families.md and its chart, from the rows that `bench/families.py measure` left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from rewrite.package.package_reasons import reasons

Row = Mapping[str, Any]
GRAPH, NO_GRAPH, ORIGINAL = "#d1495b", "#e8a598", "#9aa5b1"
ROOT = Path(__file__).resolve().parents[1]
README_BEGIN, README_END = "<!-- families: generated -->", "<!-- families: end -->"
DAY = "2026-11-25"
"""When the rows of bench/results/families-h100 were measured; new rows change it."""
README_CHART = "docs/families-speed-up.png"
README_FAMILIES = ("llama", "mistral", "gemma3_image", "qwen3_moe", "whisper")
"""What README's table shows, of several kinds; the page has the others."""
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


def readme(rows: Mapping[str, Row]) -> str:
    """Return what README shows: the figures over all families, and some of them."""
    timed = measured(rows)
    around = _surroundings(list(timed.values()))
    speed = geometric_mean([row["speed_up"] for row in timed.values()])
    slower = sum(row["speed_up"] < 1 for row in timed.values())
    graphs = sum(row["graph"] for row in timed.values())
    lines = [
        f"**How fast.** {speed:.1f} times as fast as eager transformers, the geometric mean of {len(timed)} families.",
        f"{graphs} of them decode in a captured graph, {slower} are slower than their original ({around['device']},",
        "random bf16 weights, batch 1, 512 tokens before):",
        "",
        f"[![how many times as fast as the original each family is]({README_CHART})](docs/families.md)",
        "",
        "| ms per token | original | rewritten | | memory limit |",
        "|---|---|---|---|---|",
    ]
    for name in README_FAMILIES:
        row = timed[name]
        sizes = f"{row['published']}, {row['cut']}" if row["cut"] else row["published"]
        times = f"{row['eager_ms']:.1f} | **{row['ours_ms']:.2f}** | {row['speed_up']:.1f}×"
        lines.append(f"| {sizes} | {times} | {row['limit_ms']:.2f} |")
    limit = "The memory limit is the time that reading weights and cache once takes."
    kernels = around["kernels"].replace("the originals", "The originals", 1)
    lines += ["", f"Measured on {DAY}: {around['versions']}. {limit}", f"{kernels}."]
    return "\n".join(lines)


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


def draw(rows: Mapping[str, Row], path: Path) -> None:
    """Draw the share of the memory limit of every family, original and rewritten, and write a PNG.

    Raises:
        MatplotlibMissing: if matplotlib is not installed.
    """
    from rewrite.benchmark.chart import require_matplotlib

    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = {name: row for name, row in measured(rows).items() if row["share"] is not None}
    names = list(reversed(timed))
    shares = [100 * timed[name]["share"] for name in names]
    own = [100 * timed[name]["limit_ms"] / timed[name]["eager_ms"] for name in names]
    figure = Figure(figsize=(8, 1.2 + 0.21 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(names)), shares, color=[GRAPH if timed[n]["graph"] else NO_GRAPH for n in names], height=0.72)
    axes.barh(range(len(names)), own, color=ORIGINAL, height=0.36)
    for place, name in enumerate(names):
        axes.text(shares[place] + 1, place, f"{timed[name]['speed_up']:.1f}×", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.axvline(100, color="#222222", linestyle="--", linewidth=1)
    axes.set_xlim(0, 110)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("% of the memory limit: rewritten in red (paler without a graph), original in grey")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)


def draw_speed_up(rows: Mapping[str, Row], path: Path) -> None:
    """Draw how many times as fast as its original every family is, and write a PNG that is wider than high.

    Raises:
        MatplotlibMissing: if matplotlib is not installed.
    """
    from rewrite.benchmark.chart import require_matplotlib

    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = dict(sorted(measured(rows).items(), key=lambda item: -item[1]["speed_up"]))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(timed))
    colours = [GRAPH if row["graph"] else NO_GRAPH for row in timed.values()]
    axes.bar(places, [row["speed_up"] for row in timed.values()], color=colours, width=0.72)
    axes.axhline(1, color="#222222", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks((1, 2, 5, 10, 20, 50), ("1×", "2×", "5×", "10×", "20×", "50×"))
    axes.set_xticks(places, timed, rotation=90, fontsize=7)
    axes.set_xlim(-0.7, len(timed) - 0.3)
    axes.set_ylim(0.5, 60)
    device = _surroundings(list(timed.values()))["device"]
    axes.set_title(f"generate(), rewritten against original, {device}, batch 1 (paler: no decode graph)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)
