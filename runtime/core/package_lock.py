"""The lock beside a modeling file: what it was made from, and which of its classes have a decode loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "rewrite.lock"


def read_lock(folder: Path) -> dict[str, Any]:
    """Return the content of the lock in a package's folder; nothing where there is none, or a merge has left marks."""
    path = folder / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
