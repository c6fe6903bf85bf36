"""`rewrite check`: are packages still what would be made now, and is what they hold verified? Writes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rewrite.options.shared_options import FOLDER, OUTPUT, Command, reporting_options, transformers_option


@click.command(
    cls=Command,
    short_help="Say whether packages are up to date; for CI and pre-commit.",
    examples=("rewrite check", "rewrite check ./optimized_llama --transformers 5.23.0 --format github"),
)
@click.argument("folders", type=FOLDER, nargs=-1, metavar="[DIR]...")
@transformers_option("Compare with that, not with what is installed")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "sarif", "github"]),
    default="text",
    show_default=True,
    help="How to say it; github annotates the lines of a pull request.",
)
@click.option("--full", is_flag=True, help="Rewrite every original anew, even where nothing has moved.")
@reporting_options
def check(
    folders: tuple[Path, ...], asked: str | None, style: str, full: bool, json_path: Path | None, quiet: bool
) -> int:
    """Check the packages in DIR, or every package below the working folder; exit with 1 if one is out of date.

    Exits with 2 where nobody can tell, as there is no transformers to compare with.

    With --quiet only the packages that are. What a formatter changes is no edit. A package that was never verified is
    said to be `unverified`.
    """
    import shutil

    from rewrite.delivery import json_report
    from rewrite.package import find
    from rewrite.source import release
    from rewrite.sync import formats
    from rewrite.sync.package_check import of_all

    places = folders or find.packages(Path())
    with release.library(asked) as library:
        found = of_all(places, library, full)
    if quiet and style == "text":
        stale = {folder: several for folder, several in found.items() if several}
        sys.stderr.write(formats.as_text(stale, asked) if stale else "")
    elif str(json_path) != OUTPUT:
        text = formats.as_text(found, asked) if style == "text" else formats.FORMATS[style](found)
        wide = style == "text" and sys.stdout.isatty()
        sys.stdout.write(formats.wrapped(text, shutil.get_terminal_size().columns) if wide else text)
    if json_path is not None:
        json_report.write_raw(json_path, formats.as_json(found))
    return formats.exit_code(found)
