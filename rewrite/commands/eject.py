"""`rewrite eject DIR`: plain files that this tool no longer looks after."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import FOLDER


@click.command(short_help="Drop the lock and leave plain files.")
@click.argument("folder", type=FOLDER)
def eject(folder: Path) -> int:
    """Drop the lock of the package in FOLDER and the kept texts: its files stay, sync and check forget them."""
    from rewrite.show.console import Screen
    from rewrite.sync import restore

    gone = restore.eject(folder)
    Screen().line("ejected", f"{folder}: {', '.join(gone)} dropped; the other files stay as they are")
    return 0
