"""What the main command says about its work, as lines and as JSON."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rewrite
from rewrite.deliver import verification
from rewrite.engine.decode_loops import YES
from rewrite.errors import OutputNotWritable

if TYPE_CHECKING:
    from rewrite.engine.build import Build
    from rewrite.package.assemble import Package
    from rewrite.package.output import Output
    from rewrite.show.console import Screen
    from rewrite.transform import Rewritten
    from rewrite.upstream.source import Source
    from rewrite.verify import Verdict


def show_build(screen: Screen, build: Build) -> None:
    """Say what was read and what the transforms did, each reason for a skip once with its count."""
    screen.line("source", describe(build.source))
    rewritten = build.rewritten
    applied = sum(1 for report in rewritten.transforms if len(report.rewritten) > len(report.unreached))
    unreached = sum(len(report.unreached) for report in rewritten.transforms)
    skips = sum(len(report.skipped) for report in rewritten.transforms)
    text = f"{applied} applied at {_sites(rewritten.sites)}"
    if unreached:
        nowhere = "none here comes there" if YES in rewritten.decode_loops.values() else "no class here has one"
        text += f" ({unreached} of them for a decode loop: {nowhere})"
    screen.line("transforms", f"{text}, {_sites(skips)} skipped:" if skips else text)
    for (name, reason), sites in _skips(rewritten).items():
        screen.line("", f"{name}: {reason} × {len(sites)} ({sites[0]}{', …' if len(sites) > 1 else ''})", "dim")
    for number, (name, said) in enumerate(rewritten.decode_loops.items()):
        screen.line("" if number else "generate", f"{name}: decode loop: {said}")


def show_written(screen: Screen, place: Output, package: Package, verdict: Verdict | None, note: str) -> None:
    """Say what was written and how the verification ended."""
    names = dict.fromkeys(name.split("/")[0] + ("/" if "/" in name else "") for name in package.files)
    shown = [name for name in names if not name.startswith(".")]
    shown += [] if verdict is None else ["verify.json"]
    screen.line("written", f"{place.shown}/{{{', '.join(shown)}}}")
    if place.backup is not None:
        screen.line("", f"what was there before is in {place.shown.with_name(place.backup.name)}")
    screen.line("verify", verification.summary(verdict) if verdict is not None else note)
    if not place.folder.name.isidentifier():
        hint = re.sub(r"\W", "_", place.folder.name.strip())
        hint = hint if hint.isidentifier() else f"_{hint}"
        screen.warn(f"'{place.folder.name}' cannot stand in an import statement; --out {hint} could")


def show_rejected(screen: Screen, verdict: Verdict, kept: Path, place: Output) -> None:
    """Say that the verification failed, why, and where the rejected package is."""
    screen.said.print(verification.rendered(verdict), markup=False, soft_wrap=True)
    screen.line("written", f"nothing: {place.shown} is as it was; the rejected package is in {kept}")
    screen.line("verify", verification.summary(verdict), "red")


def describe(source: Source) -> str:
    """Return a source in one line: version, path, hash."""
    digest = f"sha256 {source.sha256[:6]}…"
    if source.module is None:
        return f"{source.origin or source.path} · {digest}"
    path = "/".join(source.module.split(".")[1:]) + ".py"
    return f"transformers {source.transformers_version} · {path} · {digest}"


def of_build(build: Build) -> dict[str, Any]:
    """Return the report of a build as JSON values."""
    source = build.source
    return {
        "tool": rewrite.__version__,
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
    }


def write(path: Path | None, data: dict[str, Any]) -> None:
    """Write a report to `path`, to standard output for `-`, nowhere for None.

    Raises:
        OutputNotWritable: if the disk refuses.
    """
    if path is None:
        return
    write_raw(path, json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


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


def _sites(number: int) -> str:
    return f"{number} site" if number == 1 else f"{number} sites"


def _skips(rewritten: Rewritten) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for report in rewritten.transforms:
        for skip in report.skipped:
            found.setdefault((report.name, skip.reason), []).append(skip.site)
    return found
