"""`rewrite.lock`: what was rewritten, from what, with which rules. Nothing measured and no time is in it."""

from __future__ import annotations

import importlib.resources
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.codemod.text_layout import formatter
from rewrite.errors import NotAPackage
from rewrite.package import lock_text, syntax
from rewrite.package.lock_text import sha256
from rewrite.source.resolve import LOCK_NAME
from rewrite.transform import SkippedSite, Transform, TransformReport

if TYPE_CHECKING:
    from importlib.abc import Traversable

SCHEMA = 3
OF_2026_11_28 = 2
"""The schema of packages with their runtime in a folder `runtime/`, as versions until 2026-11-28 made them: a sync
makes one of this version of it, and reading it goes with the next release."""
ENGINE = (
    "analysis", "codemod", "offers.py", "operators.py", "package/assemble.py", "package/vendored_files.py",
    "transform.py",
)  # fmt: skip
"""What decides the generated files besides the transforms, in `rewrite/`."""

__all__ = ["SCHEMA", "Lock", "Options", "Origin", "Runtime", "engine_digest", "read_lock", "rule_hashes", "sha256"]


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
    vendored: bool = False
    """Whether the package has a runtime of its own (`rewrite vendor`)."""


@dataclass(frozen=True)
class Runtime:
    """The runtime that a package was made with."""

    version: str
    sha256: str
    """Of all its files."""


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
    """What every generated file says, apart from its layout."""
    engine: str = ""
    """sha256 of what decides the text besides the rules, the formatter too."""
    decode_loops: Mapping[str, str] = field(default_factory=dict)
    """Of every class that generates whether it does so in a decode loop, and why not."""
    modeling: str = ""
    """Name of the modeling file."""
    runtime: Runtime = field(default_factory=lambda: Runtime("", ""))
    called: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The functions of transformers that the modeling file calls, with the keywords that it gives."""
    imported: Mapping[str, str] = field(default_factory=dict)
    """Each function and class that the package imports from transformers: its file and name there, digests of its
    text, its parameters and its code, and the methods that are used."""
    intact: bool = True
    """Whether the file is as this tool wrote it; not part of the file."""

    def as_generated(self, folder: Path, name: str) -> bool:
        """Return whether a file in `folder` is as it was generated, in whatever layout; not where it is missing."""
        path = folder / name
        listed = name in self.files and path.is_file()
        return listed and syntax.unchanged(path, self.files[name], self.syntax.get(name))

    @property
    def taken(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """What the guard looks at."""
        return {name: [*keywords] for name, keywords in self.called.items()}, dict(self.imported)

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
            "options": asdict(self.options),
            "rules": dict(self.rules),
            "decode_loops": dict(self.decode_loops),
            "transforms": {report.name: _report(report) for report in self.transforms},
            "upstream": dict(self.upstream),
            "files": dict(self.files),
            "syntax": dict(self.syntax),
            "modeling": self.modeling,
            "runtime": asdict(self.runtime),
            "guard": {"called": dict(self.called), "imported": dict(self.imported)},
        }
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


def _report(report: TransformReport) -> dict[str, Any]:
    unreached = {"unreached": list(report.unreached)} if report.unreached else {}
    return {"rewritten": list(report.rewritten), "skipped": [asdict(site) for site in report.skipped], **unreached}


@dataclass(frozen=True)
class _Tool:
    version: str
    engine: str


@dataclass(frozen=True)
class _Sites:
    rewritten: tuple[str, ...]
    skipped: tuple[SkippedSite, ...]
    unreached: tuple[str, ...] = ()


def _parse(data: dict[str, Any]) -> Lock:
    part = partial(lock_text.part, data=data)
    schema = part(int, name="schema")
    if schema not in (OF_2026_11_28, SCHEMA):
        raise lock_text.Malformed(f"has schema {schema} and this version reads {SCHEMA}: update hf-rewrite")
    if schema == OF_2026_11_28 and part(dict, name="options").get("runtime") is not None:
        raise lock_text.Malformed("shares its runtime with other packages, which is gone: rewrite the model anew")
    texts = Mapping[str, str]
    tool, origin = part(_Tool, name="tool"), part(Origin, name="source")
    files, modeling = part(texts, name="files"), part(str, name="modeling")
    lock_text.check_generated(list(files), modeling)
    lock_text.check_origin(origin.target, origin.path, origin.module)
    sites = part(Mapping[str, _Sites], name="transforms")
    lock = Lock(
        tool=tool.version,
        source=origin,
        options=part(Options, name="options"),
        rules=part(texts, name="rules"),
        transforms=tuple(TransformReport(name, *vars(found).values()) for name, found in sites.items()),
        upstream=part(texts, name="upstream"),
        files=files,
        syntax=part(texts, name="syntax"),
        engine=tool.engine,
        decode_loops=part(texts, name="decode_loops"),
        modeling=modeling,
        intact=data.get("digest") == lock_text.digest({name: data[name] for name in data if name != "digest"}),
    )
    if schema == OF_2026_11_28:
        return lock
    guard = part(dict, name="guard")
    return replace(
        lock,
        runtime=part(Runtime, name="runtime"),
        called=lock_text.part(Mapping[str, tuple[str, ...]], guard, "called", "guard"),
        imported=lock_text.part(texts, guard, "imported", "guard"),
    )
