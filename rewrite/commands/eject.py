"""`rewrite eject DIR`: plain files that this tool no longer looks after."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import FOLDER


@click.command(short_help="Drop the lock and the guard, and leave plain files.")
@click.argument("folder", type=FOLDER)
def eject(folder: Path) -> int:
    """Drop the lock of the package in FOLDER, the kept texts, and the guard that compares the installed transformers.

    The other files stay as they are, your edits too: plain files, which sync and check forget.
    """
    from rewrite.show.console import Screen
    from rewrite.sync import restore

    gone = restore.eject(folder)
    screen = Screen()
    screen.line("ejected", f"{folder}: plain files, and yours; only the imports of the __init__.py were changed")
    screen.line("dropped", ", ".join(gone))
    return 0
