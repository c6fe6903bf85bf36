"""Three-way merge of a modeling file: as generated last, as the user has it, as generated now."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import MissingProgram

MARKER = "<<<<<<< "
_MANY_CONFLICTS = 127


@dataclass(frozen=True)
class Merged:
    """The merged text; with conflicts it holds markers."""

    text: str
    conflicts: int = 0


def three_way(base: str, yours: str, generated: str) -> Merged:
    """Merge what changed from `base` to `yours` with what changed from `base` to `generated`.

    Raises:
        MissingProgram: if both changed and git, which merges them, is not installed.
    """
    if yours in (base, generated):
        return Merged(generated)
    if generated == base:
        return Merged(yours)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("yours", "last", "new")]
        for path, text in zip(paths, (yours, base, generated), strict=True):
            path.write_bytes(text.encode("utf-8"))
        labels = ("-L", "yours", "-L", "generated last", "-L", "generated now")
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        try:
            done = subprocess.run(command, capture_output=True)
        except FileNotFoundError as error:
            raise MissingProgram("git", "merging your edits") from error
    if not 0 <= done.returncode <= _MANY_CONFLICTS:
        raise ChildProcessError(done.stderr.decode("utf-8", "replace"))
    return Merged(done.stdout.decode("utf-8"), done.returncode)
