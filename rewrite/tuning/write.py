"""Puts what was measured into a table by chip that the runtime reads (`runtime/launching/card_tables.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rewrite.benchmark.benchmark_plan import write_json


def write(folder: Path, name: str, chip: str, entries: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Path:
    """Make the entries of a chip those that `entries` returns for what is there; other chips' stay."""
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content[chip] = entries(content.get(chip, {}))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(sorted(content.items())))
    return path
