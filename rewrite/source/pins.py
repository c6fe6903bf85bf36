"""Which transformers a project pins, read from its dependency files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml")
LISTS = ("requirements*.txt", "constraints*.txt", "pyproject.toml", "Pipfile", "environment.yml", "environment.yaml")
_PIN = re.compile(r"""(?<![\w.-])transformers(?:\[[\w, -]*\])?["']?\s*={1,3}\s*["']?=*(\d+(?:\.\w+)+)(?![\w.*,])""")
_ENTRY = re.compile(r"""^name\s*=\s*["']transformers["']\s*$\n^version\s*=\s*["']([^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Pin:
    """A line that asks for exactly one version."""

    path: Path
    line: int
    version: str


def transformers_pin(folder: Path) -> Pin | None:
    """Return the pin of the project around `folder`: of the nearest folder above it that has one, up to a repository.

    A lock file counts before a list; None where nothing pins one exact version.
    """
    for place in (folder, *folder.parents):
        if (found := next(_pins(place), None)) is not None:
            return found
        if (place / ".git").exists():
            return None
    return None


def _pins(folder: Path) -> Iterator[Pin]:
    for names, pattern in ((LOCKS, _ENTRY), (LISTS, _PIN)):
        for path in sorted(path for name in names for path in folder.glob(name) if path.is_file()):
            text = "\n".join(line.split("#")[0] for line in path.read_text("utf-8", "replace").splitlines())
            if (found := pattern.search(text)) is not None:
                yield Pin(path, text.count("\n", 0, found.start(1)) + 1, found.group(1))
