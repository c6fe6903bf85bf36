"""`rewrite diff DIR`: what a package changed against its original, your edits included."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite.options.shared_options import FOLDER, Command, diff_option, reporting_options

if TYPE_CHECKING:
    from rewrite.package.lock import Lock


@click.command(
    cls=Command,
    short_help="Show what a package changed against its original.",
    examples=("rewrite diff ./optimized_llama --diff stat", "rewrite diff ./optimized_llama --edits > my_edits.patch"),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
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
@reporting_options
def diff(
    folder: Path,
    diff_style: str,
    given: Path | None,
    generated: bool,
    markdown: bool,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Show what the package in DIR changed against the file that it was made from.

    With --quiet how much, in a line. `rewrite sync DIR --dry-run --show upstream` and `--show rewritten` show the
    other differences of an upgrade.
    """
    from rewrite.console import differences
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.package import original
    from rewrite.package.lock import read_lock
    from rewrite.sync import edits, rebuild, review

    if markdown and str(json_path) == "-":
        raise click.UsageError("--format markdown and --json both want standard output: give --json a FILE")
    lock = read_lock(folder)
    after = original.text_of(folder / lock.modeling)
    if generated:
        before, path = edits.generated_like_yours(folder, lock, lock.modeling), lock.modeling
    elif markdown and given is None and (kept := rebuild.kept_original(folder, lock)) is not None:
        before, path = kept, lock.modeling
    else:
        before, path = _before(folder, lock, given)
    screen = Screen(patch=True, json=json_path, quiet=quiet)
    changes = differences.statistics(before, after)
    others = edits.of_init(folder, lock) if generated else None
    if markdown:
        sys.stdout.write(review.markdown(folder, lock, before, after))
    elif quiet:
        screen.payload(f"{differences.total(changes, path)}\n")
    else:
        screen.show_diff(before, after, path, diff_style)
        if others is not None:
            screen.show_diff(*others, diff_style)
    if others is not None:
        changes += differences.statistics(*others[:2])
    places, patch = [asdict(change) for change in changes], differences.unified(before, after, path)
    patch += differences.unified(*others) if others is not None else ""
    json_report.write(json_path, "diff", {"path": path, "places": places, "patch": patch})
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
