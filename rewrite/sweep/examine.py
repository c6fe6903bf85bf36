"""Examines one modeling file: rewrites it, packs it, and has the verifier compare every class that can be built."""

from __future__ import annotations

import hashlib
import importlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import libcst as cst

from rewrite.codemod.build import Build
from rewrite.codemod.passes import rewrite_text
from rewrite.codemod.relocate import relocate
from rewrite.codemod.text_layout import laid_out
from rewrite.errors import RewriteError
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import Source, resolve
from rewrite.sweep.sweep_row import ClassRow, Row
from rewrite.transforms import select

Depth = Literal["text", "rewritten", "verified"]
"""How far to go: only the text that comes out, with what is promised of it, or with the verifier's answer."""


def examine(file: Path, name: str, depth: Depth, device: str = "cpu") -> Row:
    """Return the row of a modeling file, whose classes run on `device`.

    Whatever the file or a rule does wrong ends in the row.
    """
    started = time.perf_counter()
    row = Row(name)
    try:
        source = resolve(str(file))
        built = _rewritten(row, source, depth)
        if depth == "verified":
            with tempfile.TemporaryDirectory() as folder:
                _verified(row, built, Path(folder) / f"swept_{file.stem.removeprefix('modeling_')}", device)
    except RewriteError as error:
        row.error = f"{type(error).__name__}: {error}"
    except Exception as error:  # the sweep goes on, and the row says why this file did not
        row.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def _rewritten(row: Row, source: Source, depth: Depth) -> Build:
    """Rewrite a source twice and its output once more; fill in the static part of the row."""
    transforms = select()
    row.sha256 = source.sha256
    moved = relocate(source)
    first = rewrite_text(moved.text, transforms, moved.uses)
    first = replace(first, text=laid_out(first.text, source.text))
    if depth != "text":
        again = relocate(source)
        row.round_trip = cst.parse_module(source.text).code == source.text
        second = rewrite_text(again.text, transforms, again.uses)
        row.deterministic = first == replace(second, text=laid_out(second.text, source.text))
        row.stable = rewrite_text(first.text, transforms).text == first.text
    for report in first.transforms:
        if report.rewritten:
            row.sites[report.name] = list(report.rewritten)
        if report.skipped:
            row.skipped[report.name] = [(s.site, s.reason, s.detail) for s in report.skipped]
    row.decode_loops = dict(first.decode_loops)
    build = Build(source, first)
    row.rewritten_sha256 = hashlib.sha256(first.text.encode()).hexdigest()
    return build


def _verified(row: Row, built: Build, folder: Path, device: str) -> None:
    """Write the package, import it, and verify its classes."""
    from rewrite.verify.breadth import class_outcomes

    for path, data in assemble(built, select(), Options(), folder).files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    if built.source.module is not None:
        try:
            importlib.import_module(built.source.module)
        except ImportError as error:  # a library that transformers can do without
            row.classes = [ClassRow("(the file)", "not run", f"the original does not import: {error}")]
            return
    sys.path.insert(0, str(folder.parent))  # the process ends with this row
    importlib.import_module(folder.name)
    row.imported = True
    gates, classes = class_outcomes(built.source.path, folder, device)
    row.gates = gates
    row.classes = [ClassRow(*found) for found in classes]
