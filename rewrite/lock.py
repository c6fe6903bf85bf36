"""`rewrite.lock`: what was rewritten, from what, with which rules. Nothing measured and no time is in it."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rewrite.errors import NotAPackage
from rewrite.source import LOCK_NAME
from rewrite.transform import SkippedSite, Transform, TransformReport

SCHEMA = 1


@dataclass(frozen=True)
class Origin:
    """Where the original is to be found again."""

    target: str
    """Module inside transformers; else the path relative to the output folder, or the bare file name."""
    path: str
    """Inside transformers (`models/llama/modeling_llama.py`), else the file name."""
    sha256: str
    module: str | None
    model_type: str | None
    transformers: str | None


@dataclass(frozen=True)
class Options:
    """What the user chose that changes the generated text."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lock:
    """The content of `rewrite.lock`."""

    tool: str
    """Version of this tool."""
    source: Origin
    options: Options
    rules: Mapping[str, str]
    """sha256 of the code of each transform that ran, by name."""
    transforms: tuple[TransformReport, ...]
    upstream: Mapping[str, str]
    """sha256 of every file of transformers that was read."""
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of every generated file, by its path in the package."""

    @property
    def modeling(self) -> str:
        """Name of the modeling file."""
        return next(name for name in self.files if name.startswith("modeling_"))

    def to_json(self) -> str:
        """Return the text of the file: sorted, one trailing newline."""
        data = {
            "schema": SCHEMA,
            "tool": {"name": "hf-rewrite", "version": self.tool},
            "source": asdict(self.source),
            "options": asdict(self.options),
            "rules": dict(self.rules),
            "transforms": {report.name: _report(report) for report in self.transforms},
            "upstream": dict(self.upstream),
            "files": dict(self.files),
        }
        return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_lock(folder: Path) -> Lock:
    """Read the lock of an output package.

    Raises:
        NotAPackage: if the folder has none, or one that cannot be read.
    """
    path = folder / LOCK_NAME
    if not folder.is_dir():
        raise NotAPackage(folder, "there is no such folder")
    if not path.is_file():
        raise NotAPackage(folder, f"it has no {LOCK_NAME}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _parse(folder, data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAPackage(folder, f"its {LOCK_NAME} cannot be read ({type(error).__name__}: {error})") from error


def rule_hashes(transforms: Sequence[Transform]) -> dict[str, str]:
    """Return the sha256 of the file of each transform, by its name."""
    sources = {t.name: inspect.getsource(sys.modules[type(t).__module__]) for t in transforms}
    return {name: sha256(text.encode("utf-8")) for name, text in sources.items()}


def sha256(data: bytes) -> str:
    """Return the hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def _report(report: TransformReport) -> dict[str, Any]:
    return {"rewritten": list(report.rewritten), "skipped": [asdict(site) for site in report.skipped]}


def _parse(folder: Path, data: dict[str, Any]) -> Lock:
    if data["schema"] != SCHEMA:
        raise NotAPackage(folder, f"its {LOCK_NAME} has schema {data['schema']} and this version reads {SCHEMA}")
    if not any(name.startswith("modeling_") for name in data["files"]):
        raise KeyError("modeling file")
    return Lock(
        tool=data["tool"]["version"],
        source=Origin(**data["source"]),
        options=Options(tuple(data["options"]["only"]), tuple(data["options"]["skip"])),
        rules=data["rules"],
        transforms=tuple(_parse_report(name, entry) for name, entry in data["transforms"].items()),
        upstream=data["upstream"],
        files=data["files"],
    )


def _parse_report(name: str, entry: Mapping[str, Iterable[Any]]) -> TransformReport:
    skipped = tuple(SkippedSite(**site) for site in entry["skipped"])
    return TransformReport(name, tuple(entry["rewritten"]), skipped)
