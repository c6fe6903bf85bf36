"""Packages that share a runtime move to another version of this tool together, or none of them does."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rewrite.errors import NotAPackage, RewriteError, SharedRuntimeNotUsable
from rewrite.package import shared
from rewrite.package.lock import engine_digest, read_lock
from rewrite.show.console import Screen
from rewrite.sync import upgrade


def moving(folders: Iterable[Path]) -> list[Path]:
    """Return the packages, these and others, whose shared runtime was made by another version of this tool."""
    found: dict[Path, Path] = {}
    for folder in folders:
        for partner in _group(folder):
            found.setdefault(partner, folder if partner == folder.resolve() else Path(os.path.relpath(partner)))
    return list(found.values())


def trial(wishes: Mapping[Path, upgrade.Wish], screen: Screen) -> dict[Path, Path]:
    """Try without writing anything the syncs of packages whose runtime moves, where there are several.

    Returns:
        The packages that have to stay as they are, each with one that cannot be made anew.
    """
    stopped: dict[Path, Path] = {}
    by_place = {folder.resolve(): folder for folder in wishes}
    for folder in wishes:
        group = [by_place[place] for place in _group(folder) if place in by_place]
        if len(group) < 2 or folder != group[0]:
            continue
        failing = next((one for one in group if not _works(one, wishes[one], screen)), None)
        stopped |= dict.fromkeys(group, failing) if failing is not None else {}
    return stopped


def _works(folder: Path, wish: upgrade.Wish, screen: Screen) -> bool:
    quiet = Screen(quiet=True)
    quiet.errors = Console(file=io.StringIO())
    with screen.working(f"trying {folder}"):
        try:
            tried = replace(wish, dry_run=True, verify=False, views=(), diff_style="none")
            return upgrade.sync(folder, tried, quiet).code == 0
        except RewriteError:  # said when its turn comes
            return False


def _group(folder: Path) -> list[Path]:
    """Return the packages that share the runtime of one, itself included, if that moves; sorted."""
    with contextlib.suppress(NotAPackage, SharedRuntimeNotUsable):
        place = shared.of(folder, read_lock(folder))
        there = shared.read(place) if place is not None else None
        if place is not None and there is not None and there.engine != engine_digest():
            gone = shared.gone(place, there)
            users = [shared.place_of(place, way) for way in there.users]
            return sorted(user for user in users if user not in gone)
    return []
