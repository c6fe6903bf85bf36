"""`rewrite diff DIR`: what a package changed against its original, your edits included."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import FOLDER, diff_option


@click.command(short_help="Show what a package changed against its original.")
@click.argument("folder", type=FOLDER)
@diff_option("unified", "How to show the changes; unified in a pipe is a patch that git applies.")
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option(
    "--generated", is_flag=True, help="Compare your file with the text as it was generated: your edits only."
)
def diff(folder: Path, diff_style: str, given: Path | None, generated: bool) -> int:
    """Show what the package in FOLDER changed against the file that it was made from."""
    from rewrite import original
    from rewrite.console import Screen
    from rewrite.lock import read_lock
    from rewrite.package import KEPT

    lock = read_lock(folder)
    after = original.text_of(folder / lock.modeling)
    screen = Screen(quiet_output=True)
    if generated:
        before, path = original.text_of(folder / KEPT / lock.modeling), lock.modeling
    else:
        source = original.find(folder, lock, given)
        before, path = original.text_of(source.path), original.patch_path(source)
    screen.show_diff(before, after, path, diff_style)
    return 0
