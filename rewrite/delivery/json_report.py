"""Reports as JSON: their form, what a build says, and where they are written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rewrite
from rewrite.delivery.main_class import headline
from rewrite.errors import OutputNotWritable

if TYPE_CHECKING:
    from rewrite.codemod.build import Build


def of_build(build: Build) -> dict[str, Any]:
    """Return the report of a build as JSON values."""
    source = build.source
    return {
        "source": {
            "target": source.target,
            "path": str(source.path),
            "sha256": source.sha256,
            "module": source.module,
            "model_type": source.model_type,
            "transformers": source.transformers_version,
        },
        "transforms": {report.name: asdict(report) for report in build.rewritten.transforms},
        "runtime": list(build.rewritten.runtime),
        "sites": build.rewritten.sites,
        "decode_loops": dict(build.rewritten.decode_loops),
        "model_class": headline(source, build.rewritten.decode_loops),
    }


VERSION = 1
"""Of the form of reports: it grows where a key goes, or means something else."""


def envelope(command: str) -> dict[str, Any]:
    """Return what begins every report: the version of its form, the command and the tool that made it."""
    return {"version": VERSION, "command": command, "tool": rewrite.__version__}


def write(path: Path | None, command: str, data: Mapping[str, Any]) -> None:
    """Write the report of a command to `path`, to standard output for `-`, nowhere for None.

    Raises:
        OutputNotWritable: if the disk refuses.
    """
    if path is None:
        return
    text = json.dumps({**data, **envelope(command)}, indent=2, sort_keys=True, ensure_ascii=False)
    write_raw(path, text + "\n")


WIDEST = 240
"""Characters of a line that holds one thing which holds others."""


def by_the_line(value: Any, indent: str = "") -> str:
    """Return JSON with sorted keys and a line for each thing that holds nothing but values: a check, its figures.

    A verdict has several hundred of them, and each would be eight lines of a pull request.
    """
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    depth = _depth(value)
    if depth < 2 or (depth == 2 and len(line) <= WIDEST):
        return line
    inner = f"{indent}  "
    if isinstance(value, Mapping):
        pairs = ((json.dumps(name, ensure_ascii=False), value[name]) for name in sorted(value))
        lines = [f"{inner}{name}: {by_the_line(each, inner)}" for name, each in pairs]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{by_the_line(each, inner)}" for each in value) + f"\n{indent}]"


def _depth(value: Any) -> int:
    """Return how many things lie in each other."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def write_raw(path: Path, text: str) -> None:
    """Write the text of a report to `path`, to standard output for `-`.

    Raises:
        OutputNotWritable: if the disk refuses.
    """
    if str(path) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.buffer.flush()
        return
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        OutputNotWritable: if the disk refuses.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OutputNotWritable(path, error.strerror or str(error)) from error
