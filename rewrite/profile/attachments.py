"""What other commands recorded, to stand in a report beside the profile: a ladder, and families of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewrite.errors import UsageError


class NoSuchRecord(UsageError):
    """A file that is to stand in a report is not what was asked for."""

    def __init__(self, path: object, what: str, why: str):
        super().__init__(f"{path} holds no {what}: {why}.")


def ladder(path: Path) -> dict[str, Any]:
    """Read what `rewrite bench MODEL --ladder --json FILE` wrote.

    Raises:
        NoSuchRecord: the file is another one.
    """
    found = _json(path, "ladder")
    rungs = found.get("rungs") if isinstance(found, dict) else None
    if (
        not isinstance(rungs, list)
        or not rungs
        or not all(isinstance(rung, dict) and "name" in rung for rung in rungs)
    ):
        raise NoSuchRecord(path, "ladder", "`rewrite bench MODEL --ladder --json FILE` writes one")
    assert isinstance(found, dict)
    return found


def families(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Read the rows of `bench/families.py measure`, by the name of the family; those that have times.

    Raises:
        NoSuchRecord: no file in the folder is a row.
    """
    rows = {path.stem: _json(path, "row of a family") for path in sorted(folder.glob("*.json"))}
    timed: dict[str, Mapping[str, Any]] = {
        name: row for name, row in rows.items() if isinstance(row, dict) and "speed_up" in row and "file" in row
    }
    if not timed:
        raise NoSuchRecord(folder, "rows of families", "`python bench/families.py measure` writes them")
    return timed


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoSuchRecord(path, what, f"it cannot be read as JSON ({error})") from error
