"""`rewrite diff DIR`: what a package changed against its original, your edits included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite.commands.options import FOLDER, diff_option

if TYPE_CHECKING:
    from rewrite.package.lock import Lock


@click.command(short_help="Show what a package changed against its original.")
@click.argument("folder", type=FOLDER)
@diff_option("unified", "How to show the changes; unified in a pipe is a patch that git applies.")
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option(
    "--format",
    "markdown",
    type=click.Choice(["text", "markdown"]),
    default="text",
    callback=lambda ctx, param, value: value == "markdown",
    help="markdown is a comment for a pull request: summary, verdict, a difference for each class.",
)
@click.option(
    "--edits",
    "--generated",
    "generated",
    is_flag=True,
    help="Compare your file with the text as it was generated: your edits only.",
)
def diff(folder: Path, diff_style: str, given: Path | None, generated: bool, markdown: bool) -> int:
    """Show what the package in FOLDER changed against the file that it was made from.

    `rewrite sync DIR --dry-run --show upstream` and `--show rewritten` show the other differences of an upgrade.
    """
    from rewrite.package import original
    from rewrite.package.lock import read_lock
    from rewrite.show.console import Screen
    from rewrite.sync import edits, rebuild, review

    lock = read_lock(folder)
    after = original.text_of(folder / lock.modeling)
    if markdown:
        before = rebuild.kept_original(folder, lock) if given is None else None
        text = before if before is not None else original.text_of(original.find(folder, lock, given).path)
        sys.stdout.write(review.markdown(folder, lock, text, after))
        return 0

    screen = Screen(quiet_output=True)
    if generated:
        before, path = edits.generated_like_yours(folder, lock, lock.modeling), lock.modeling
    else:
        before, path = _before(folder, lock, given)
    screen.show_diff(before, after, path, diff_style)
    return 0


def _before(folder: Path, lock: Lock, given: Path | None) -> tuple[str, str]:
    """Return the original's text and its name in a patch; the kept text where no transformers is installed."""
    from rewrite.errors import MissingTransformers
    from rewrite.package import original
    from rewrite.sync import rebuild

    try:
        source = original.find(folder, lock, given)
    except MissingTransformers:
        kept = rebuild.kept_original(folder, lock)
        if kept is None:
            raise
        return kept, Path(lock.source.path).name
    return original.text_of(source.path), original.patch_path(source)
