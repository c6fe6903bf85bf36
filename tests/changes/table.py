"""Tables of a walk: what was seen, what was refused, and what went wrong in silence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from .walk import ABSENT, DIFFERENT, EQUAL, NO_ERROR, RAISES, REFUSED, SAME_ERROR, UNDEFINED, Row

_OUTCOMES = (EQUAL, SAME_ERROR, REFUSED, ABSENT, UNDEFINED, NO_ERROR, RAISES, DIFFERENT)


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of a run."""
    lines = ["## By kind of change", "", _head("kind"), _rule()]
    by_kind = _grouped(rows, lambda row: row.kind)
    lines += [_line(kind, some) for kind, some in by_kind.items()] + [_line("all", rows)]
    lines += ["", "## By family", "", _head("family"), _rule()]
    lines += [_line(family, some) for family, some in _grouped(rows, lambda row: row.family).items()]
    lines += ["", "## Refused with", ""]
    counts = Counter(reason for row in rows for reason in row.reasons)
    lines += [f"- {count} × {reason}" for reason, count in counts.most_common()]
    lines += ["", "## What went wrong", ""]
    wrong: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.wrong:
            wrong[row.kind, row.name].append(row)
    for (kind, name), some in sorted(wrong.items()):
        where = "; ".join(f"{row.family} {row.when} {_told(row)}" for row in some[:4])
        lines.append(f"- **{kind}** {name} ({len(some)}): {where}")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Return what a walk comes to, in one line."""
    changes = {(row.kind, row.name) for row in rows}
    wrong = sum(bool(row.wrong) for row in rows)
    phases = Counter(outcome for row in rows for outcome in row.outcomes.values())
    effective = _share(row.effective for row in rows)
    looped = _share("changed" in row.looped or "again" in row.looped for row in rows)
    seconds = sum(row.seconds for row in rows)
    return (
        f"{len(rows)} cases of {len(changes)} changes, {len({row.family for row in rows})} families: {wrong} wrong "
        f"({phases[DIFFERENT]} calls differ in silence, {phases[RAISES]} raise); {effective:.0%} of the changes move "
        f"the original's result, {looped:.0%} keep the loop; {seconds / max(1, len(rows)):.2f} s a case"
    )


def _told(row: Row) -> str:
    loops = ",".join(row.looped) or "no loop"
    reasons = f" [{'; '.join(row.reasons)}]" if row.reasons else ""
    return ", ".join(f"{phase}: {row.details[phase]}" for phase in row.wrong[:1]) + f" ({loops}){reasons}"


def _head(first: str) -> str:
    return f"| {first} | cases | effective | loop ran | {' | '.join(_OUTCOMES)} | wrong cases |"


def _rule() -> str:
    return "|---|" + "---:|" * (len(_OUTCOMES) + 4)


def _line(name: str, rows: Sequence[Row]) -> str:
    counts = Counter(outcome for row in rows for outcome in row.outcomes.values())
    effective = sum(row.effective for row in rows)
    looped = sum("changed" in row.looped or "again" in row.looped for row in rows)
    cells = [len(rows), effective, looped, *(counts[outcome] for outcome in _OUTCOMES)]
    return f"| {name} | {' | '.join(map(str, cells))} | {sum(bool(row.wrong) for row in rows)} |"


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _grouped(rows: Sequence[Row], key: object) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r"\s+", " ", key(row))].append(row)  # type: ignore[operator]
    return dict(sorted(groups.items()))
