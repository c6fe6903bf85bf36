"""Packages as `rewrite MODEL` writes them, made in the process of the tests."""

from __future__ import annotations

from pathlib import Path

from rewrite.codemod.build import build
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import resolve
from rewrite.transforms import select


def write(model: str, folder: Path) -> Path:
    """Write the package of a model, or of a modeling file by its path, and return its folder."""
    transforms = select()
    for path, content in assemble(build(resolve(model), transforms), transforms, Options(), folder).files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
