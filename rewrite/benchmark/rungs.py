"""Prepares the ladder: one package for each transform, with all that stand below it.

The order is the registry's, by stage: what a graph needs stands on the operators, what is faster inside a graph stands
on the graph.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewrite.codemod.build import build
from rewrite.console.progress_steps import Step
from rewrite.errors import NothingToRewrite
from rewrite.package.assemble import Package, assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import Source
from rewrite.transform import Stage, Transform

MANIFEST = "ladder.json"


def prepare(
    source: Source, transforms: list[Transform], folder: Path, progress: Callable[[str], None] = lambda message: None
) -> list[dict[str, Any]]:
    """Write a package for each rung and the manifest into `folder`, and return the rungs.

    A transform that rewrites nothing in this file is no rung.

    Raises:
        NothingToRewrite: if no transform matched anything.
    """
    rungs: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    climbing = sorted(transforms, key=lambda transform: list(Stage).index(transform.stage))
    for count, transform in enumerate(climbing, start=1):
        progress(Step(transform.name, count - 1, len(climbing)))
        below = [other for other in transforms if other in climbing[:count]]
        try:
            built = build(source, below)
        except NothingToRewrite:
            continue
        report = next(r for r in built.rewritten.transforms if r.name == transform.name)
        if not report.rewritten:
            continue
        names = tuple(t.name for t in below)
        package = folder / f"rung_{len(rungs) + 1:02}"
        shutil.rmtree(package, ignore_errors=True)
        write(assemble(built, below, Options(only=names), package), package)
        entry = {"package": package.name, "transforms": names, "sites": len(report.rewritten)}
        rungs.append({"name": f"+ {transform.name}", "summary": transform.summary, **entry})
    if not rungs:
        raise NothingToRewrite(source.path, [])
    manifest = {"source": source.path.name, "rungs": rungs}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return rungs


def write(package: Package, folder: Path) -> None:
    """Write a package as it is, for a measurement: unlike the main command, without checks and swap."""
    for name, data in package.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
