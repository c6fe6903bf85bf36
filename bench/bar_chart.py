"""A bar chart as SVG text: it follows dark and light by itself, and its words are large enough for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW, FONT = 480, 26, 15
"""Units; a phone shows 480 of them on some 360 pixels."""
BEHIND = 66
"""Room for what is said behind the longest bar."""
COLOURS = {"ours": "#d1495b", "original": "#9aa5b1", "other": "#5f7fa8", "limit": "#7a8a4f"}
STYLE = """\
rect.page { fill: #ffffff } text { font: %dpx sans-serif; fill: #1d2127 } line { stroke: #1d2127 }
@media (prefers-color-scheme: dark) {
rect.page { fill: #1e2129 } text { fill: #e6e8eb } line { stroke: #e6e8eb }
}"""


@dataclass(frozen=True)
class Bar:
    """A row: its name, lengths one after the other by colour, and what is said behind them."""

    name: str
    parts: Sequence[tuple[str, float]]
    said: str


def drawn(bars: Sequence[Bar], names: int, mark: float | None = None, legend: Mapping[str, str] | None = None) -> str:
    """Return the chart.

    Args:
        bars: from the top.
        names: units for the names.
        mark: where a dashed line stands.
        legend: words by colour, below the bars.
    """
    longest = max(sum(length for _, length in bar.parts) for bar in bars)
    scale = (WIDTH - names - BEHIND) / max(longest, mark or 0.0)
    lines = []
    for number, bar in enumerate(bars):
        middle, x = ROW * number + ROW // 2 + 4, float(names)
        lines.append(_text(names - 8, middle, bar.name, "end"))
        for colour, length in bar.parts:
            place = f'x="{x:.1f}" y="{middle - 8}" width="{length * scale:.1f}" height="16"'
            lines.append(f'<rect {place} fill="{COLOURS.get(colour, colour)}"/>')
            x += length * scale
        end = x if mark is None else names + mark * scale  # no word across the line
        lines.append(_text(end + 6, middle, bar.said, "start"))
    bottom = ROW * len(bars) + 8
    if mark is not None:
        place = f'x1="{names + mark * scale:.1f}" x2="{names + mark * scale:.1f}" y1="0" y2="{bottom - 4}"'
        lines.append(f'<line {place} stroke-dasharray="4 3"/>')
    for colour, words in (legend or {}).items():
        lines.append(f'<rect x="8" y="{bottom + 5}" width="14" height="14" fill="{COLOURS.get(colour, colour)}"/>')
        lines.append(_text(30, bottom + 12, words, "start"))
        bottom += 22
    size = f'width="{WIDTH}" height="{bottom}" viewBox="0 0 {WIDTH} {bottom}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE % FONT}</style>'
    return "\n".join([head, f'<rect class="page" width="{WIDTH}" height="{bottom}"/>', *lines, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" dy=".35em" text-anchor="{anchor}">{escape(words)}</text>'
