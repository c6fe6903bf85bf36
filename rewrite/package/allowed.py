"""Which folders may become an output: --force replaces packages of ours, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from rewrite.codemod.relocate import is_rewritten
from rewrite.errors import OutputNotOurs
from rewrite.offers import VENDORED
from rewrite.package.assemble import ATTRIBUTES, INIT, KEPT, VERDICT_NAME
from rewrite.source.resolve import LOCK_NAME

_OF_A_PACKAGE = (
    "modeling_", INIT, VENDORED, LOCK_NAME, VERDICT_NAME, KEPT, ATTRIBUTES, "__pycache__", "tuned.json",
    "gemm.json", "attention.json", "tunableop", "kernels",
)  # fmt: skip
"""How the names begin that a package, with what was measured and merged in it, has at its top."""


def check_place(shown: Path, folder: Path, source: Path) -> None:
    """Refuse what can never be an output, whatever is in it.

    Raises:
        OutputNotOurs: for a file, for what cannot be made, and for a folder that holds the working folder, the user's
            home or the source.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputNotOurs(shown, "is a file", forcible=False)
    above = next(parent for parent in folder.parents if parent.exists())
    if not above.is_dir():
        raise OutputNotOurs(shown, f"cannot lie in {above.name}, which is a file", forcible=False)
    if not folder.exists() and not os.access(above, os.W_OK):
        raise OutputNotOurs(shown, f"cannot be made: {above} may not be written to", forcible=False)
    if Path.cwd().resolve().is_relative_to(folder):
        raise OutputNotOurs(shown, "is, or contains, the folder you are in", forcible=False)
    if Path(os.path.expanduser("~")).resolve().is_relative_to(folder):
        raise OutputNotOurs(shown, "is, or contains, your home folder", forcible=False)
    resolved = source.resolve()
    if resolved.is_relative_to(folder) and not resolved.is_relative_to(folder / KEPT):  # a package keeps its original
        raise OutputNotOurs(shown, f"contains the source {source.name}", forcible=False)


def check_without_lock(shown: Path, folder: Path) -> None:
    """Refuse a folder without a lock unless it holds a package of ours (ejected, or its lock broken) and no more.

    Raises:
        OutputNotOurs: if it holds anything else.
    """
    modeling = [path for path in folder.glob("modeling_*.py") if path.is_file()]
    if not any(is_rewritten(path.read_text("utf-8", "replace")) for path in modeling):
        why = "is not empty and not an output of this tool, and --force replaces nothing else"
        raise OutputNotOurs(shown, why, forcible=False)
    foreign = sorted(path.name for path in folder.iterdir() if not path.name.startswith(_OF_A_PACKAGE))
    if foreign:
        raise OutputNotOurs(shown, f"has no lock and holds what is no part of a package, {foreign[0]}", forcible=False)
