"""`rewrite eject DIR`: plain files that this tool no longer looks after."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.options.shared_options import FOLDER, Command, reporting_options


@click.command(
    cls=Command,
    short_help="Drop the lock and the guard, and leave plain files.",
    examples=("rewrite eject ./optimized_llama",),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@reporting_options
def eject(folder: Path, json_path: Path | None, quiet: bool) -> int:
    """Drop the lock of the package in DIR, the kept texts, and the guard that compares the installed transformers.

    The other files stay as they are, your edits too: plain files, which sync and check forget.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.sync import restore

    gone = restore.eject(folder)
    screen = Screen(json=json_path, quiet=quiet)
    screen.line("ejected", f"{folder}: plain files, and yours; only the imports of the __init__.py were changed")
    screen.line("dropped", ", ".join(gone))
    json_report.write(json_path, "eject", {"folder": str(folder), "dropped": list(gone)})
    return 0
