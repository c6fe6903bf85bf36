"""Three-way merge of one file: as generated last, as the user has it, as generated now."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import OutputNotWritable, UsageError

MARKERS = ("<<<<<<< ", "||||||| ", ">>>>>>> ")
LABELS = ("yours", "generated last", "generated now")
_MANY_CONFLICTS = 127


@dataclass(frozen=True)
class Merged:
    """The merged text; with conflicts it holds markers."""

    text: str
    conflicts: int = 0


def has_markers(text: str) -> bool:
    """Return whether a line of `text` is a conflict marker."""
    return marked_line(text) is not None


def marked_line(text: str) -> int | None:
    """Return the number of the first line that is a conflict marker, None if there is none."""
    return next((number for number, line in enumerate(text.split("\n"), 1) if line.startswith(MARKERS)), None)


def three_way(base: str, yours: str, generated: str, *options: str) -> Merged:
    """Merge what changed from `base` to `yours` with what changed from `base` to `generated`.

    With an option of git, as `--theirs`, lines that both changed are merged as it says.

    Raises:
        UsageError: if both changed and git, which merges them, is not installed.
        OutputNotWritable: if there is no room for the three texts in the temporary folder.
    """
    if yours in (base, generated):
        return Merged(generated)
    if generated == base:
        return Merged(yours)
    with tempfile.TemporaryDirectory(prefix="rewrite-") as folder:
        paths = [Path(folder, name) for name in ("yours", "last", "new")]
        try:
            for path, text in zip(paths, (yours, base, generated), strict=True):
                path.write_bytes(text.encode("utf-8"))
        except OSError as error:
            raise OutputNotWritable(folder, error.strerror or str(error)) from error
        merged = _merge_file(paths, *options)
        # git's plain form finds fewer conflicts; the one that shows the common ancestor is easier to resolve
        return Merged(_merge_file(paths, "--diff3").text, merged.conflicts) if merged.conflicts else merged


def _merge_file(paths: list[Path], *options: str) -> Merged:
    labels = [part for label in LABELS for part in ("-L", label)]
    command = ["git", "merge-file", "-p", *options, *labels, *map(str, paths)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise UsageError("git is not installed and merging your edits needs it.") from error
    if not 0 <= done.returncode <= _MANY_CONFLICTS:
        raise ChildProcessError(done.stderr.decode("utf-8", "replace"))
    return Merged(done.stdout.decode("utf-8"), done.returncode)
