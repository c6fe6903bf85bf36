"""Tables of the matrix: what is kept, what is skipped, what is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .matrix import Row
from .sites import LOST, REWRITTEN, Fate

KEPT_AT_LEAST = 0.98
"""Of the sites rewritten in a file as it was, how many have to be under each rewriting."""


@dataclass(frozen=True)
class Tally:
    """What became of sites that were rewritten, and of those that were skipped."""

    sites: int
    kept: int
    skipped: int
    lost: int
    lost_skips: int

    @property
    def share(self) -> float:
        """How many of the sites are still rewritten, from 0 to 1."""
        return self.kept / self.sites if self.sites else 1.0


@dataclass(frozen=True)
class Summary:
    """The verdict on a run."""

    worst: float
    lost: int
    errors: int

    @property
    def holds(self) -> bool:
        """Whether nothing is lost without a reason and enough is kept under every rewriting."""
        return self.worst >= KEPT_AT_LEAST and not self.lost and not self.errors


def tally(found: Iterable[Fate]) -> Tally:
    """Count fates."""
    counts: Counter[tuple[bool, str]] = Counter()
    for fate in found:
        kind = fate.after if fate.after in (REWRITTEN, LOST) else "skipped"
        counts[fate.site.outcome == REWRITTEN, kind] += 1
    kept, skipped, lost = (counts[True, kind] for kind in (REWRITTEN, "skipped", LOST))
    return Tally(kept + skipped + lost, kept, skipped, lost, counts[False, LOST])


def summary(rows: Sequence[Row]) -> Summary:
    """Judge rows."""
    each = [
        tally(fate for row in some for fate in row.fates) for some in _grouped(rows, lambda r: r.rewriting).values()
    ]
    worst = min((found.share for found in each), default=1.0)
    return Summary(worst, sum(t.lost + t.lost_skips for t in each), sum(bool(row.error) for row in rows))


def markdown(rows: Sequence[Row]) -> str:
    """The tables of a run."""
    changed = [row for row in rows if row.places]
    pairs = [(row, fate) for row in changed for fate in row.fates]
    lines = ["## By rewriting", "", "| rewriting | files | places | sites | kept | skipped | lost | lost skips |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, some in _grouped(changed, lambda row: row.rewriting).items():
        places = sum(row.places for row in some)
        lines.append(f"| {name} | {len(some)} | {places} |{_cells(fate for row in some for fate in row.fates)}")
    lines += ["", "## By transform", "", "| transform | sites | kept | skipped | lost | lost skips |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    by_transform: dict[str, list[Fate]] = {}
    for _, fate in pairs:
        by_transform.setdefault(fate.site.transform, []).append(fate)
    lines += [f"| {name} |{_cells(found)}" for name, found in sorted(by_transform.items())]
    lines += ["", "## What each rewriting takes from each transform", ""]
    lines += ["| rewriting | transform | after | sites | details | files |", "|---|---|---|---:|---|---|"]
    lines += _changes(pairs)
    lines += ["", "## Lost without a reason", ""]
    lines += [
        f"- {row.rewriting} · {row.file} · {fate.site.transform} · {fate.site.where}: {fate.site.label}"
        f" (was {fate.site.outcome})"
        for row, fate in pairs
        if fate.after == LOST
    ] or ["None."]
    errors = [f"- {row.rewriting} · {row.file}: {row.error}" for row in rows if row.error]
    lines += ["", "## Errors", "", *(errors or ["None."])]
    seconds = sorted(row.seconds for row in changed)
    if seconds:
        lines += ["", f"{len(changed)} of {len(rows)} pairs changed something; median {seconds[len(seconds) // 2]} s,"]
        lines += [f"mean {sum(seconds) / len(seconds):.1f} s, longest {seconds[-1]} s of processor time a pair."]
    return "\n".join(lines) + "\n"


def _changes(pairs: Sequence[tuple[Row, Fate]]) -> list[str]:
    groups: dict[tuple[str, str, str], list[tuple[Row, Fate]]] = {}
    for row, fate in pairs:
        if fate.after != REWRITTEN and (fate.site.outcome == REWRITTEN or fate.after == LOST):
            after = fate.after if fate.site.outcome == REWRITTEN else f"{fate.after} (was skipped)"
            groups.setdefault((row.rewriting, fate.site.transform, after), []).append((row, fate))
    lines = []
    for (rewriting, transform, after), some in sorted(groups.items()):
        details = Counter(fate.detail for _, fate in some if fate.detail)
        told = "; ".join(f"{detail} ×{count}" for detail, count in details.most_common(3)).replace("|", "\\|")
        names = sorted({row.file.split("/")[0] for row, _ in some})
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"| {rewriting} | {transform} | {after} | {len(some)} | {told} | {shown} |")
    return lines


def _cells(found: Iterable[Fate]) -> str:
    counted = tally(found)
    cells = (counted.sites, f"{100 * counted.share:.1f}%", counted.skipped, counted.lost, counted.lost_skips)
    return "".join(f" {cell} |" for cell in cells)


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))
