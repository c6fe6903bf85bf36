"""Every file under every rewriting: one row each, kept in a folder so that a run that is cut off goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rewrite.source.resolve import resolve

from .rewriting import respell
from .rewritings import all_rewritings
from .sites import Fate, Site, fates, sites_of


@dataclass
class Row:
    """What a rewriting did to the sites of a file."""

    file: str
    rewriting: str
    places: int = 0
    """Where the rewriting changed something; with 0 nothing was run."""
    fates: list[Fate] = field(default_factory=list)
    gained: int = 0
    """Sites rewritten after it and not before."""
    error: str = ""
    seconds: float = 0.0
    """Of processor time."""

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        found = [Fate(Site(**fate["site"]), fate["after"], fate["detail"]) for fate in data["fates"]]
        return cls(**{**data, "fates": found})


@dataclass(frozen=True)
class Task:
    """One file and the rewritings to try on it."""

    file: Path
    name: str
    rewritings: tuple[str, ...]
    rows: Path
    """Folder of the rows of all files."""
    enough: int = 0
    """How many rewritings that change something are tried; 0 for all."""


def run(tasks: Sequence[Task], jobs: int) -> Iterator[list[Row]]:
    """Yield the rows of each file as they are done; each file is one piece of work for one process."""
    if jobs == 1:
        yield from map(rows_of, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(rows_of, tasks)


def rows_of(task: Task) -> list[Row]:
    """Return the rows of a file; those that are there from a run before are read."""
    rows, changed = list[Row](), 0
    for name in task.rewritings:
        rows.append(_row(task, name))
        changed += rows[-1].places > 0 or bool(rows[-1].error)
        if changed == task.enough > 0:
            break
    return rows


def turned(rewritings: Sequence[str], file: str) -> tuple[str, ...]:
    """Return the rewritings from a place on that the name of the file gives: over all files each has its share."""
    place = int(hashlib.sha256(file.encode()).hexdigest(), 16) % len(rewritings)
    return (*rewritings[place:], *rewritings[:place])


def _row(task: Task, name: str) -> Row:
    place = task.rows / task.name.replace("/", ".") / f"{name}.json"
    if place.exists():
        return Row.from_json(json.loads(place.read_text("utf-8")))
    started = time.process_time()
    row = Row(task.name, name)
    try:
        source = resolve(str(task.file))
        respelled = respell(source.text, all_rewritings()[name])
        row.places = respelled.places
        if respelled.places:
            before, after = _baseline(task), sites_of(source, respelled.text)
            row.fates = fates(before, after)
            row.gained = max(0, _count(after) - _count(before))
    except Exception as error:  # the matrix goes on, and the row says why this one did not
        where = traceback.extract_tb(error.__traceback__)[-1]
        row.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where.name}:{where.lineno})"
    row.seconds = round(time.process_time() - started, 2)
    _write(place, row.to_json())
    return row


def _count(sites: Sequence[Site]) -> int:
    return sum(site.outcome == "rewritten" for site in sites)


def _baseline(task: Task) -> list[Site]:
    """The sites of the file as it is, found once."""
    digest = hashlib.sha256(task.file.read_bytes()).hexdigest()[:16]
    place = task.rows / task.name.replace("/", ".") / f"baseline-{digest}.json"
    if place.exists():
        return [Site(**site) for site in json.loads(place.read_text("utf-8"))]
    source = resolve(str(task.file))
    found = sites_of(source, source.text)
    _write(place, [asdict(site) for site in found])
    return found


def _write(place: Path, data: Any) -> None:
    """Write at once, so that a run that is cut off leaves nothing by half."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    part.replace(place)
