"""Compares a sweep with a previous one: anything that was better there is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rewrite.codemod.decode_loops import YES
from rewrite.sweep import table
from rewrite.sweep.sweep_row import Row

_RANK = {"pass": 2, "not run": 1, "fail": 0}


def previous(path: Path) -> dict[str, Row]:
    """The rows of a table that `--json` wrote, by file.

    Raises:
        NotASweep: if the file holds something else.
    """
    return {row.file: row for row in table.read(path).rows}


def regressions(before: Mapping[str, Row], now: Sequence[Row]) -> list[str]:
    """What is worse now than before, in words; files that one of the runs lacks are not compared."""
    return [text for row in now if row.file in before for text in _worse(before[row.file], row)]


def _worse(old: Row, new: Row) -> Iterator[str]:
    where = new.file
    if new.error and new.error != old.error:
        yield f"{where}: {new.error}"
        return
    verified = bool(new.classes or new.imported)
    for name in ("round_trip", "deterministic", "stable", *(("imported",) if verified else ())):
        if getattr(old, name) and not getattr(new, name):
            yield f"{where}: {name} no more"
    for name in sorted(old.sites):
        lost = sorted(set(old.sites[name]) - set(new.sites.get(name, ())))
        if lost and old.sha256 == new.sha256:
            yield f"{where}: {name} rewrites {', '.join(lost)} no more"
    for name, loop in old.decode_loops.items():
        if loop.startswith(YES) and not new.decode_loops.get(name, "no").startswith(YES) and old.sha256 == new.sha256:
            yield f"{where}: {name} has no decode loop any more"
    if not verified:
        return
    outcomes = {found.name: found for found in new.classes}
    for found in old.classes if old.imported else ():  # of a file that did not import, none was found
        current = outcomes.get(found.name)
        if current is None or _RANK[current.outcome] < _RANK[found.outcome]:
            what = f"{current.outcome}: {current.detail}" if current is not None else "gone"
            yield f"{where}: {found.name} was '{found.outcome}' and is {what}"
