"""`rewrite undo DIR`: the text as it was generated."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import FOLDER


@click.command(short_help="Put a package back to its generated text.")
@click.argument("folder", type=FOLDER)
def undo(folder: Path) -> int:
    """Put every file of the package in FOLDER back to the text as it was generated last.

    Each edited file is kept beside it, with .undone at the end of its name.
    """
    from rewrite.show.console import Screen
    from rewrite.sync import restore

    screen = Screen()
    names = restore.undo(folder)
    if not names:
        screen.line("written", f"nothing: {folder} is as it was generated")
    for name in names:
        screen.line("restored", f"{folder / name}")
    if names:
        screen.line("", f"what was edited is kept beside with {restore.UNDONE} at the end of its name")
    return 0
