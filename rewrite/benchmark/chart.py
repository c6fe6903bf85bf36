"""A bar chart of the results: ms per token of every side, how the rewritten one compares, and the memory limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewrite.errors import UsageError

from .benchmark_plan import LIGER, ORIGINAL, OURS, STATIC, STEP, TITLES
from .benchmark_tables import said

COLOURS = {ORIGINAL: "#9aa5b1", LIGER: "#c3a6b1", STATIC: "#7b93b4", STEP: "#56749c", OURS: "#d1495b"}
PAGES = {"": ("#ffffff", "#1d2127"), "-dark": ("#16181c", "#e6e8eb")}
"""What is added to the file's name: the colours of the page and of what is written on it."""


class MatplotlibMissing(UsageError):
    """A chart was asked for and matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("a chart needs matplotlib, which is not installed: pip install 'hf-rewrite[bench]'")


def require_matplotlib() -> None:
    """Check before measuring that a chart can be drawn.

    Raises:
        MatplotlibMissing: if it cannot.
    """
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise MatplotlibMissing


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw one group of bars for each batch shape and write two PNGs: PATH, and for dark pages one beside it.

    Raises:
        MatplotlibMissing: if matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, (page, ink) in PAGES.items():
        names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        colours = {**dict.fromkeys(names, ink), "figure.facecolor": page, "axes.facecolor": page}
        with matplotlib.rc_context(colours):
            figure(record, ink).savefig(path.with_stem(path.stem + suffix), dpi=150)


def figure(record: Mapping[str, Any], ink: str) -> Any:
    """One group of bars for each batch shape, in the colours that matplotlib is set to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in record["cells"] if any("decode_ms" in side for side in cell["sides"].values())]
    bars = [sum("decode_ms" in side for side in cell["sides"].values()) for cell in cells]
    drawn = Figure(figsize=(8, 1.2 + sum(0.36 * count + 0.75 for count in bars)), layout="constrained")
    grid = drawn.subplots(len(cells), 1, squeeze=False, height_ratios=[count + 1.2 for count in bars])
    for axes, cell in zip(grid[:, 0], cells, strict=True):
        _group(axes, cell, ink)
    grid[-1, 0].set_xlabel(
        "ms per token, less is better; how many times as fast the rewritten model is (95% interval)"
    )
    shape = record["shape"] or "checkpoint"
    drawn.suptitle(f"{record['model']}, {shape}, {record['dtype']} · {record['device']}", fontsize=11)
    FigureCanvasAgg(drawn)
    return drawn


def _group(axes: Any, cell: Mapping[str, Any], ink: str) -> None:
    sides = {name: side for name, side in cell["sides"].items() if "decode_ms" in side}
    order = sorted(sides, key=lambda name: (name != OURS, sides[name]["decode_ms"]))
    values = [sides[name]["decode_ms"] for name in order]
    axes.barh(range(len(order)), values, color=[COLOURS[name] for name in order], height=0.68)
    for place, (name, value) in enumerate(zip(order, values, strict=True)):
        axes.text(value + max(values) * 0.01, place, f"{value:.2f}   {said(sides[name])}", va="center", fontsize=9)
    axes.set_yticks(range(len(order)), [TITLES[name] for name in order], fontsize=9)
    axes.set_xlim(0, max(values) * 1.4)
    axes.set_title(f"batch {cell['batch']}, {cell['context']} tokens before", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    limit = cell["limit"].get("weights_ms")
    if limit:
        axes.axvline(limit, color=ink, linestyle="--", linewidth=1)
        top = len(order) - 0.42
        axes.text(limit, top, f" reading the weights: {limit:.2f} ms", fontsize=8, va="bottom")
        axes.set_ylim(-0.6, len(order) - 0.05)
