"""Which files a sweep examines."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rewrite.errors import MissingLibrary, UsageError, close
from rewrite.source.installed import Installed, copy_at, find_transformers
from rewrite.sweep import pool
from rewrite.sweep.sweep_row import Row

if TYPE_CHECKING:
    from rewrite.sweep.examine import Depth


def library(root: Path | None) -> Installed:
    """The transformers to sweep; one that is given is also the one that this process and its children import.

    Raises:
        UsageError: `root` holds none.
        MissingLibrary: none is installed.
    """
    if root is None:
        found = find_transformers()
        if found is None:
            raise MissingLibrary("transformers", "a sweep (or --transformers DIR)")
        return found
    for place in (root, root / "transformers", root / "src" / "transformers"):
        if (place / "models" / "auto").is_dir() and (given := copy_at(place.resolve())) is not None:
            sys.path.insert(0, str(given.root.parent))
            os.environ["PYTHONPATH"] = os.pathsep.join(
                filter(None, (str(given.root.parent), os.environ.get("PYTHONPATH")))
            )
            return given
    raise UsageError(f"{root} holds no transformers package: name the folder with models/auto in it, or its parent.")


def files(installed: Installed, folders: Sequence[str]) -> list[tuple[str, Path]]:
    """Name and path of every modeling file, sorted; those of `models/auto` are no models.

    Raises:
        UsageError: one of `folders` has none.
    """
    models = installed.root / "models"
    found = [path for path in sorted(models.glob("*/modeling_*.py")) if path.parent.name != "auto"]
    known = list(dict.fromkeys(path.parent.name for path in found))
    for folder in folders:
        if folder not in known:
            near = close(folder.partition("/")[0], known)
            hint = f"did you mean {', '.join(near)}?" if near else "`rewrite models` lists them."
            raise UsageError(f"transformers.models has no folder '{folder}' with a modeling file: {hint}")
    wanted = [path for path in found if not folders or path.parent.name in folders]
    return [(path.relative_to(models).as_posix(), path) for path in wanted]


def tasks(chosen: Sequence[tuple[str, Path]], rows: Path, depth: Depth, devices: Sequence[str]) -> list[pool.Task]:
    """A task for each file, the devices in turn; rows of the same file on other kinds of devices lie beside it."""
    kind = devices[0].partition(":")[0]
    suffix = ".json" if kind == "cpu" else f".{kind}.json"
    turns = itertools.cycle(devices)
    return [
        pool.Task(file, name, rows / (name.replace("/", ".") + suffix), depth, next(turns)) for name, file in chosen
    ]


def sampled(tasks: Sequence[pool.Task], count: int) -> set[str]:
    """The names of `count` tasks, spread evenly."""
    return {tasks[index * len(tasks) // count].name for index in range(min(count, len(tasks)))}


def changed(tasks: Sequence[pool.Task], before: Mapping[str, Row], jobs: int) -> set[str]:
    """The names of the tasks whose rewritten text is not the one of the run before.

    To know it every file is rewritten, without running anything.
    """
    quick = [replace(t, depth="text", result=t.result.with_suffix(".text.json")) for t in tasks]
    known = {name: row.rewritten_sha256 for name, row in before.items()}
    return {row.file for row in pool.run(quick, jobs) if row.rewritten_sha256 != known.get(row.file)}
