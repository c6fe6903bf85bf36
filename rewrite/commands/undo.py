"""`rewrite undo DIR`: the text as it was generated."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.options.shared_options import FOLDER, Command, reporting_options


@click.command(
    cls=Command,
    short_help="Put a package back to its generated text.",
    examples=("rewrite undo ./optimized_llama",),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@reporting_options
def undo(folder: Path, json_path: Path | None, quiet: bool) -> int:
    """Put every file of the package in DIR back to the text as it was generated last.

    Each edited file is kept beside it, with .undone at the end of its name.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.sync import restore

    screen = Screen(json=json_path, quiet=quiet)
    names = restore.undo(folder)
    if not names:
        screen.line("written", f"nothing: {folder} is as it was generated")
    for name in names:
        screen.line("restored", f"{folder / name}")
    if names:
        screen.line("", f"a file that was edited is kept beside it, with {restore.UNDONE} at the end of its name")
    json_report.write(json_path, "undo", {"folder": str(folder), "restored": list(names)})
    return 0
