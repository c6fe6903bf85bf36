"""`rewrite vendor DIR`: the runtime beside the package, for who wants no distribution."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.options.shared_options import FOLDER, Command, reporting_options


@click.command(
    cls=Command,
    short_help="Copy the runtime beside a package.",
    examples=("rewrite vendor ./optimized_llama",),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@reporting_options
def vendor(folder: Path, json_path: Path | None, quiet: bool) -> int:
    """Copy the files of hf-rewrite-runtime that the package in DIR needs to DIR/_runtime, whole and with their names.

    Imports of it become relative, and nothing but torch, transformers and Triton is needed from then on. Your edits
    stay, and a sync copies the files anew.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.sync import restore

    added = restore.vendor_runtime(folder)
    screen = Screen(json=json_path, quiet=quiet)
    screen.line("vendored", f"{folder}/_runtime: {len(added)} files")
    json_report.write(json_path, "vendor", {"folder": str(folder), "files": added})
    return 0
