"""`rewrite.lock`: what was rewritten, from what, with which rules. Nothing measured and no time is in it."""

from __future__ import annotations

import importlib.resources
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.engine.layout import formatter
from rewrite.errors import NotAPackage
from rewrite.package import features, lock_text, syntax, targets
from rewrite.package.lock_text import sha256
from rewrite.transform import SkippedSite, Transform, TransformReport
from rewrite.upstream.source import LOCK_NAME

if TYPE_CHECKING:
    from importlib.abc import Traversable

SCHEMA = 2
ENGINE = (
    "analysis", "engine", "operators.py", "package/assemble.py", "package/bundle.py", "package/closure.py",
    "package/features.py", "package/parts.py", "package/runtime_files.py", "package/shared.py", "package/targets.py",
    "runtime", "transform.py",
)  # fmt: skip
"""What decides the generated files besides the transforms, in `rewrite/`."""

__all__ = ["SCHEMA", "Lock", "Options", "Origin", "engine_digest", "read_lock", "rule_hashes", "sha256"]


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
    also: tuple[str, ...] = ()
    """Transforms that run on request only, `--with`."""
    target: str = targets.CUDA
    """GPUs that the runtime is for. Packages of versions that had no choice have what ROCm's take, and keep it."""
    runtime: str | None = None
    """The way from the package to the runtime that it shares with others (`shared.py`); None if it has its own."""
    without: tuple[str, ...] = ()
    """What the runtime does not have, keys of `features.FEATURES`, sorted."""


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
    syntax: Mapping[str, str] = field(default_factory=dict)
    """What every generated file says, apart from its layout; empty in a lock of a version that did not write it."""
    engine: str = ""
    """sha256 of what decides the text besides the rules, the formatter too; empty in a lock of schema 1."""
    decode_loops: Mapping[str, str] = field(default_factory=dict)
    """Of every class that generates whether it does so in a decode loop, and why not; older versions did not say."""
    named: str | None = None
    """Name of the modeling file; None in a lock of a version that did not write it."""
    intact: bool = True
    """Whether the file is as this tool wrote it; not part of the file."""

    @property
    def modeling(self) -> str:
        """Name of the modeling file."""
        return lock_text.modeling_file(self.files, self.named)

    def as_generated(self, folder: Path, name: str) -> bool:
        """Return whether a file in `folder` is as it was generated, in whatever layout; not where it is missing."""
        path = folder / name
        listed = name in self.files and path.is_file()
        return listed and syntax.unchanged(path, self.files[name], self.syntax.get(name))

    @property
    def rewritten(self) -> dict[str, tuple[str, ...]]:
        """The rewritten sites of each rule that has some."""
        return {report.name: report.rewritten for report in self.transforms if report.rewritten}

    def to_json(self) -> str:
        """Return the text of the file: sorted, one trailing newline."""
        data = {
            "schema": SCHEMA,
            "tool": {"name": "hf-rewrite", "version": self.tool, "engine": self.engine},
            "source": asdict(self.source),
            "options": _options(self.options),
            "rules": dict(self.rules),
            "decode_loops": dict(self.decode_loops),
            "transforms": {report.name: _report(report) for report in self.transforms},
            "upstream": dict(self.upstream),
            "files": dict(self.files),
            "syntax": dict(self.syntax),
        }
        if self.named is not None:
            data["modeling"] = self.named
        return lock_text.dumps({**data, "digest": lock_text.digest(data)})


def read_lock(folder: Path) -> Lock:
    """Read the lock of an output package.

    Raises:
        NotAPackage: if the folder has none, or one that cannot be read or that asks for something outside the folder.
    """
    path = folder / LOCK_NAME
    if not folder.is_dir():
        raise NotAPackage(folder, "it is a file" if folder.is_file() else "there is no such folder")
    if not path.is_file():
        raise NotAPackage(folder, f"it has no {LOCK_NAME}")
    try:
        return _parse(lock_text.loads(path))
    except lock_text.Malformed as error:
        raise NotAPackage(folder, f"its {LOCK_NAME} {error}") from error


def rule_hashes(transforms: Sequence[Transform]) -> dict[str, str]:
    """Return the sha256 of the file of each transform, by its name."""
    sources = {t.name: inspect.getsource(sys.modules[type(t).__module__]) for t in transforms}
    return {name: sha256(text.encode("utf-8")) for name, text in sources.items()}


@cache
def engine_digest() -> str:
    """Return the sha256 of the files in `ENGINE` and of the formatter's version.

    Raises:
        MissingLibrary: if ruff is not installed.
    """
    root = importlib.resources.files("rewrite")
    found = {path: text for name in ENGINE for path, text in _sources(root / name, name)}
    texts = [f"{name} {sha256(found[name])}\n" for name in sorted(found)]
    return sha256("".join([*texts, formatter()]).encode("utf-8"))


def _sources(place: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of a Python file, or of all below a folder."""
    if place.is_file():
        yield from [(name, place.read_bytes())] if name.endswith(".py") else []
    elif not name.endswith("__pycache__"):
        for inner in place.iterdir():
            yield from _sources(inner, f"{name}/{inner.name}")


def _options(options: Options) -> dict[str, Any]:
    """As in locks of versions that knew no `also`, `runtime` and `without`, where nothing was requested."""
    later = ("also", "runtime", "without")
    return {name: value for name, value in asdict(options).items() if name not in later or value}


def _report(report: TransformReport) -> dict[str, Any]:
    unreached = {"unreached": list(report.unreached)} if report.unreached else {}
    return {"rewritten": list(report.rewritten), "skipped": [asdict(site) for site in report.skipped], **unreached}


def _parse(data: lock_text.Table) -> Lock:
    schema = data.number("schema")
    if schema not in (1, SCHEMA):
        raise lock_text.Malformed(f"has schema {schema} and this version reads up to {SCHEMA}: update hf-rewrite")
    source, options, tool = data.table("source"), data.table("options"), data.table("tool")
    files = data.table("files")
    names, named = files.names(), data.optional("modeling")
    lock_text.check_generated(names, named)
    origin = Origin(
        target=source.text("target"),
        path=source.text("path"),
        sha256=source.text("sha256"),
        module=source.optional("module"),
        model_type=source.optional("model_type"),
        transformers=source.optional("transformers"),
    )
    lock_text.check_origin(origin.target, origin.path, origin.module)
    return Lock(
        tool=tool.text("version"),
        source=origin,
        options=Options(
            options.texts("only"),
            options.texts("skip"),
            options.texts("also") if "also" in options.names() else (),
            _target(options),
            _runtime(options),
            without(options),
        ),
        rules=data.table("rules").all_text(),
        transforms=tuple(_parse_report(name, data.table("transforms")) for name in data.table("transforms").names()),
        upstream=data.table("upstream").all_text(),
        files={name: files.text(name) for name in names},
        syntax=data.table("syntax").all_text() if "syntax" in data.names() else {},
        engine=tool.optional("engine") or "",
        decode_loops=data.table("decode_loops").all_text() if "decode_loops" in data.names() else {},
        named=named,
        intact=schema == 1 or data.optional("digest") == lock_text.digest(data.without("digest")),
    )


def _target(options: lock_text.Table) -> str:
    target = options.optional("target") or targets.ROCM
    if target not in targets.TARGETS:
        raise lock_text.Malformed(f"has the target '{target}', which this version does not know: update hf-rewrite")
    return target


def without(options: lock_text.Table) -> tuple[str, ...]:
    """Return what a package leaves out of its runtime.

    Raises:
        Malformed: if that is nothing that this version can leave out.
    """
    found = options.texts("without") if "without" in options.names() else ()
    for name in found:
        if name not in features.FEATURES:
            raise lock_text.Malformed(f"leaves '{name}' out, which this version does not know: update hf-rewrite")
    return found


def _runtime(options: lock_text.Table) -> str | None:
    way = options.optional("runtime")
    return None if way is None else lock_text.check_way(way)


def _parse_report(name: str, reports: lock_text.Table) -> TransformReport:
    entry = reports.table(name)
    skipped = [
        SkippedSite(s.text("site"), s.text("reason"), s.optional("detail") or "") for s in entry.tables("skipped")
    ]
    unreached = entry.texts("unreached") if "unreached" in entry.names() else ()
    return TransformReport(name, entry.texts("rewritten"), tuple(skipped), unreached)
