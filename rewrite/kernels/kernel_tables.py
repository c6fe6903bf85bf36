"""What was compiled, as tables that fit into 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .assembly import Row, Widths, share_below
from .chips import CHIPS
from .findings import Finding

HEADINGS = {
    "hip": ("", "thr", "VGPR", "SGPR", "spill", "LDS", "occ", "loads", "LDS rd", "code"),
    "cuda": ("", "thr", "regs", "spill", "shared", "occ", "loads", "sh rd"),
}
LEGEND = {
    "hip": (
        "thr: threads · VGPR, SGPR: vector (accumulators after +) and scalar registers",
        "spill: vector registers in memory, after + scalar ones in vector registers",
        "LDS: bytes · occ: waves on a SIMD unit, of 8 · code: bytes",
        "loads, LDS rd: bits of the widest; then the part of all bits that they move",
    ),
    "cuda": (
        "thr: threads · regs: registers · spill: bytes · shared: bytes of shared memory",
        "occ: warps on a scheduler, of 16",
        "loads, sh rd: bits of the widest; then the part of all bits that they move",
    ),
}


@dataclass(frozen=True)
class Table:
    """The rows of one chip, by kernel."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each chip."""
    for arch in dict.fromkeys(row.arch for row in rows):
        chip = CHIPS[arch]
        of_chip = [row for row in rows if row.arch == arch]
        lines: list[tuple[str, ...]] = []
        headings = HEADINGS[chip.backend]
        for kernel in dict.fromkeys(row.kernel for row in of_chip):
            lines.append((kernel, *[""] * (len(headings) - 1)))
            lines += [_line(row, chip.backend) for row in of_chip if row.kernel == kernel]
        yield Table(f"{arch} · {chip.cards}", headings, tuple(lines), LEGEND[chip.backend])


def _line(row: Row, backend: str) -> tuple[str, ...]:
    head, figures = (f" {row.shape}", str(row.threads)), row.figures
    if figures is None:
        return (*head, "does not compile", *[""] * (len(HEADINGS[backend]) - 3))
    loads, reads = _widths(figures.loads), _widths(figures.shared_loads)
    if backend == "cuda":
        middle = (str(figures.registers), str(figures.spills), str(row.shared), f"{row.occupancy:.2g}")
        return (*head, *middle, loads, reads)
    plus = f"+{figures.accumulators}" if figures.accumulators else ""
    scalar = f"+{figures.scalar_spills}" if figures.scalar_spills else ""
    return (
        *head,
        f"{figures.registers - figures.accumulators}{plus}",
        str(figures.scalars),
        f"{figures.spills}{scalar}",
        str(row.shared),
        f"{row.occupancy:.2g}",
        loads,
        reads,
        str(figures.code),
    )


def _widths(widths: Widths) -> str:
    """`128`, or `128 77%` where narrower ones move the rest."""
    if not widths:
        return "–"
    widest = max(widths)
    share = 1 - share_below(widths, widest)
    return str(widest) if share > 0.995 else f"{widest} {share:.0%}"


def record(rows: Sequence[Row], findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as plain JSON values."""
    chips = {}
    for arch in dict.fromkeys(row.arch for row in rows):
        chips[arch] = {
            "rows": [row.to_json() for row in rows if row.arch == arch],
            "findings": [finding.to_json() for finding in findings if finding.row.arch == arch],
        }
    return {"chips": chips}
