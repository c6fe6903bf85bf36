"""The plots of a report, drawn by matplotlib as SVG whose colours are those of the page: they follow dark and light.

A plot is drawn in colours that stand for names; in the SVG each becomes the page's variable of that name. Text stays
text.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewrite.measure import categories

from . import profile_tables
from .accounts import BETWEEN, HOST, UNKNOWN, WAITS
from .profile_tables import NAMES

LIGHT = {
    categories.GEMM: "#0067a5",
    categories.ATTENTION: "#d98200",
    categories.ELEMENTWISE: "#00876a",
    categories.ROTARY: "#b8578f",
    categories.COPIES: "#3fa0dc",
    categories.SAMPLING: "#b3a200",
    categories.COMMUNICATION: "#c74a00",
    categories.OTHER: "#6b6b6b",
    HOST: "#c9ccd1",
    BETWEEN: "#a9adb5",
    UNKNOWN: "#dfe1e5",
    "text": "#1d2127",
    "axis": "#8b919b",
    "on": "#fefefe",
}
DARK = LIGHT | {
    categories.GEMM: "#4ba3dd",
    categories.ATTENTION: "#f0a63c",
    categories.ELEMENTWISE: "#2fbf98",
    categories.ROTARY: "#dd86b8",
    categories.COPIES: "#7cc4f0",
    categories.SAMPLING: "#ddcc3e",
    categories.COMMUNICATION: "#f07f45",
    categories.OTHER: "#a0a0a0",
    HOST: "#4a4f58",
    BETWEEN: "#666c77",
    UNKNOWN: "#383c44",
    "text": "#e6e8eb",
    "axis": "#7d8491",
    "on": "#14161a",
}
WIDTH = 8.0
"""Inches; the page scales it."""
PICTURE = 5.0
"""Inches of a picture of its own, whose words a phone shows."""
NARROWEST = 0.05
"""Share of a bar from which a part has its share on it."""


def bars(record: Mapping[str, Any], colours: Mapping[str, str] = LIGHT) -> Any:
    """Both sides as stacked bars: in the same unit, and below that each as a whole of its own."""
    sides = record["sides"]
    figure, (absolute, own) = _figure(1.1 + 1.0 * len(sides), 2, colours)
    longest = max(side["sum_us"] for side in sides.values())
    names = [NAMES[name] if record["kind"] != "trace" else "trace" for name in sides]
    for axes, scaled in ((absolute, False), (own, True)):
        for place, side in enumerate(sides.values()):
            unit = 100 / side["sum_us"] if scaled else 1.0
            _bar(axes, place, [(kind, us * unit) for kind, us in parts(side)], 100.0 if scaled else longest, colours)
            if not scaled:
                said = f"  {side['sum_us'] / 1e3:.3g} ms"
                axes.text(side["sum_us"], place, said, va="center", fontsize=8.5, color=colours["text"])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 100.0 if scaled else longest * 1.13)
    absolute.set_xlabel("µs a step, less is better")
    own.set_xlabel("% of each side's own step")
    return figure


def _bar(axes: Any, place: int, pieces: Sequence[tuple[str, float]], whole: float, colours: Mapping[str, str]) -> None:
    left = 0.0
    total = sum(length for _, length in pieces)
    for kind, length in pieces:
        axes.barh(place, length, left=left, height=0.66, color=colours[kind], edgecolor="none")
        if length > NARROWEST * whole:
            said = f"{length / total:.0%}"
            on = colours["text" if kind in WAITS else "on"]
            axes.text(left + length / 2, place, said, ha="center", va="center", fontsize=7.5, color=on)
        left += length


def parts(side: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What a side's step is made of, categories first."""
    found = [(kind, side["categories"][kind]["us"]) for kind in categories.CATEGORIES if kind in side["categories"]]
    return found + [(kind, side["waits"][kind]) for kind in WAITS if kind in side["waits"]]


def points(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that have a place in a roofline: they move bytes and take operations and time."""
    return [
        {
            "side": name,
            **row,
            "intensity": row["operations"] / row["bytes"],
            "rate": row["operations"] / row["us"] * 1e6,
        }
        for name, side in record["sides"].items()
        for row in side["rows"]
        if row["bytes"] and row["operations"] and row["us"] > 0.002 * side["sum_us"]
    ]


def roofline(record: Mapping[str, Any]) -> Any:
    """Operations a second against operations a byte, with what the card can do."""
    figure, axes = _figure(3.9)
    found, card = points(record), record["card"]
    low = min([point["intensity"] for point in found] + [0.1]) / 2
    ridge = card["arithmetic"] / card["read"]
    high = max([point["intensity"] for point in found] + [ridge]) * 4
    axes.plot(
        [low, ridge, high], [low * card["read"], card["arithmetic"], card["arithmetic"]], color=LIGHT["text"], lw=1.2
    )
    said = f" memory, {card['read'] / 1e9:,.0f} GB/s"
    axes.text(low, low * card["read"] * 3, said, fontsize=8, color=LIGHT["text"])
    said = f"products, {card['arithmetic'] / 1e9:,.0f} GFLOP/s "
    axes.text(high, card["arithmetic"] * 1.15, said, ha="right", fontsize=8, color=LIGHT["text"])
    for point in found:
        share = point["us"] / record["sides"][point["side"]]["sum_us"]
        face = LIGHT[point["category"]] if point["side"] == "ours" else "none"
        axes.scatter(
            point["intensity"],
            point["rate"],
            s=14 + 500 * share,
            marker="o",
            facecolors=face,
            edgecolors=LIGHT[point["category"]],
            linewidths=1.1,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("operations a second")
    return figure


def timeline(record: Mapping[str, Any]) -> Any:
    """One step of each side, from its first activity on; each side in its own time."""
    sides = {name: side for name, side in record["sides"].items() if side["timeline"]}
    figure, grid = _figure(0.5 + 0.95 * len(sides), len(sides))
    for axes, (name, side) in zip(grid, sides.items(), strict=True):
        for kind in categories.CATEGORIES:
            spans = [(start, us) for start, us, own, _ in side["timeline"] if own == kind]
            if spans:
                axes.broken_barh(spans, (0, 1), facecolors=LIGHT[kind], edgecolor="none")
        axes.set_yticks([0.5], [NAMES[name] if record["kind"] != "trace" else "trace"])
        axes.set_ylim(0, 1)
        end = max(start + us for start, us, _, _ in side["timeline"])
        axes.set_xlim(0, max(end, 1e-3))
    grid[-1].set_xlabel("µs from the begin of the step; each side in its own time")
    return figure


def _figure(height: float, rows: int = 0, colours: Mapping[str, str] = LIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(max(rows, 1), 1, squeeze=False)[:, 0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(colours["axis"])
        axes.tick_params(colors=colours["text"], labelsize=8.5)
        axes.xaxis.label.set_color(colours["text"])
        axes.yaxis.label.set_color(colours["text"])
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
    figure.patch.set_alpha(0.0)
    for axes in grid:
        axes.patch.set_alpha(0.0)
    return figure, grid if rows else grid[0]


def svg(draw: Callable[[Mapping[str, Any]], Any], record: Mapping[str, Any], name: str, title: str) -> str:
    """A plot as SVG to stand in a page: without a size, with the page's colours, and with names that are its own."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        buffer = io.StringIO()
        draw(record).savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title" ', 1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    head, _, rest = text.partition(">")
    text = f'{head}><title id="{name}-title">{title}</title>{rest}'
    for colour, variable in _variables():
        text = text.replace(colour, f"var(--{variable})")
    return re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", text)


def _variables() -> Sequence[tuple[str, str]]:
    return [(colour, name) for name, colour in LIGHT.items()]


def png(record: Mapping[str, Any], path: Path) -> None:
    """The bars as two pictures, PATH and one for dark pages beside it, with the conditions and a legend."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, colours, page in (("", LIGHT, "#ffffff"), ("-dark", DARK, "#16181c")):
        _picture(record, colours, page).savefig(path.with_stem(path.stem + suffix), dpi=150, format="png")


def _picture(record: Mapping[str, Any], colours: Mapping[str, str], page: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Patch

    figure = bars(record, colours)
    figure.set_size_inches(PICTURE, figure.get_figheight() + 1.3)
    kinds = list(dict.fromkeys(kind for side in record["sides"].values() for kind, _ in parts(side)))
    named = profile_tables.titles(record)
    patches = [Patch(color=colours[kind], label=named[kind]) for kind in kinds]
    key = figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    for text in key.get_texts():
        text.set_color(colours["text"])
    lines = textwrap.wrap(profile_tables.conditions(record), 66)
    figure.suptitle("\n".join(lines), fontsize=8, color=colours["text"])
    figure.patch.set_alpha(1.0)
    figure.patch.set_facecolor(page)
    FigureCanvasAgg(figure)
    return figure
