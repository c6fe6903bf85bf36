"""`rewrite sync [DIR]...`: makes packages anew from what is installed now, with your edits merged in."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import (
    FOLDER,
    Command,
    bisect_option,
    diff_option,
    is_typed,
    reporting_options,
    transformers_option,
    verification_options,
)

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.sync.upgrade import Result, Wish

FILE = click.Path(path_type=Path)
VIEWS = click.Choice(["upstream", "rewritten", "edits"])


HEADINGS = {
    "From where": ("transformers", "original", "trust-remote-code"),
    "What becomes of your edits": ("resolved", "replace", "accept"),
    "What is written": ("dry-run", "commit", "exit-non-zero-on-change"),
    "Verification": ("verify", "quick", "device", "dtype", "weights", "seed", "bisect"),
    "What is said": ("show", "diff", "json", "quiet"),
}


@click.command(
    cls=Command,
    headings=HEADINGS,
    short_help="Make packages anew and merge your edits.",
    examples=("rewrite sync ./optimized_llama --dry-run", "rewrite sync --transformers 5.23.0 --verify"),
)
@click.argument("folders", type=FOLDER, nargs=-1, metavar="[DIR]...")
@transformers_option("Take the original from there, not from what is installed")
@click.option("--accept", "accepted", multiple=True, metavar="RULE", help="Go on although RULE lost a place; repeatable.")  # fmt: skip  # noqa: E501
@click.option("--replace", "replaced", multiple=True, metavar="NAME", help="Drop the edits in this generated file; repeatable.")  # fmt: skip  # noqa: E501
@click.option("--resolved", type=FILE, multiple=True, metavar="FILE", help="Take FILE as the merged text; repeatable.")
@click.option("--show", "views", type=VIEWS, multiple=True, help="Show this difference, old to new; repeatable.")
@click.option("--dry-run", is_flag=True, help="Say what would change and write nothing.")
@click.option("--verify/--no-verify", default=False, help="Run parity too before the package is put in place.")
@diff_option("stat", "How to show what changes in your modeling file.")
@verification_options
@click.option("--commit", "commits", is_flag=True, help="Commit upstream's change, then what a sync makes of it.")
@click.option("--original", "given", type=FILE, metavar="FILE", help="Where the original is.")
@click.option("--exit-non-zero-on-change", is_flag=True, help="Exit with 1 where something was written; for hooks.")
@bisect_option
@reporting_options
def sync(
    folders: tuple[Path, ...],
    asked: str | None,
    resolved: tuple[Path, ...],
    given: Path | None,
    exit_non_zero_on_change: bool,
    json_path: Path | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Rewrite the originals of the packages in DIR anew, with the options of their locks, and merge your edits.

    Without DIR: every package below the working folder. A conflict is shown with markers in a copy beside the file,
    which stays as it is: resolve it there and give the copy with --resolved. Your files keep the layout that your
    formatter gave them.
    """
    from rewrite.console.console import Screen
    from rewrite.package import find
    from rewrite.source import release

    if given and len(folders) != 1:
        raise click.UsageError("--original is for one DIR")
    patch = options["diff_style"] == "unified" or bool(options["views"])
    if quiet and not is_typed("diff_style"):
        options["diff_style"] = "none"
    screen = Screen(patch=patch, json=json_path, quiet=quiet)
    places = list(folders or find.packages(Path()))
    by_folder = _by_folder(resolved, places)
    with release.library(asked) as library:
        wish = _wish(library=library, given=given, **options)
        results = {}
        for number, folder in enumerate(places, 1):
            if len(places) > 1:
                screen.line("package", f"{folder} ({number} of {len(places)})", "bold")
            own = replace(wish, resolved=by_folder.get(folder, {}))
            results[str(folder)] = _one(screen, folder, own, alone=len(places) == 1)
    return _end(results, json_path, exit_non_zero_on_change)


def _wish(
    device: str | None, dtype: str | None, weights: Path | None, seed: int | None, quick: bool, **options: Any
) -> Wish:
    from rewrite.delivery.verification import Request
    from rewrite.sync.upgrade import Wish

    return Wish(request=Request(device, dtype, weights, seed=seed, quick=quick), **options)


def _one(screen: Screen, folder: Path, wish: Wish, alone: bool) -> Result:
    """Sync one package; where there are several, an error of one is said and the others go on."""
    from rewrite.errors import RewriteError
    from rewrite.sync import upgrade

    if alone:
        return upgrade.sync(folder, wish, screen)
    try:
        return upgrade.sync(folder, wish, screen)
    except RewriteError as error:
        click.echo(f"error: {folder}: {error}" if screen.quiet else f"error: {error}", err=True)
        return upgrade.Result(error.exit_code)


def _end(results: dict[str, Result], json_path: Path | None, changed_is_failure: bool) -> int:
    from rewrite.delivery import json_report

    json_report.write(json_path, "sync", {"packages": {folder: asdict(result) for folder, result in results.items()}})
    code = max((result.code for result in results.values()), default=0)
    return code or int(changed_is_failure and any(result.changed for result in results.values()))


def _by_folder(resolved: tuple[Path, ...], folders: list[Path]) -> dict[Path, dict[str, Path]]:
    """Return resolved files by package, and the name that they have in it: of several packages the one they lie in."""
    if len(folders) == 1:
        return {folders[0]: _by_name(resolved)}
    found = {folder: tuple(path for path in resolved if _lies_in(path, folder)) for folder in folders}
    if outside := [path for path in resolved if not any(path in paths for paths in found.values())]:
        raise click.UsageError(f"--resolved {outside[0]} lies in none of the packages: name its DIR alone")
    return {folder: _by_name(paths) for folder, paths in found.items()}


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().parent == folder.resolve()


def _by_name(resolved: tuple[Path, ...]) -> dict[str, Path]:
    """Return resolved files by the name that they have in the package: that of the copy less `.conflict`."""
    from rewrite.package.assemble import INIT
    from rewrite.sync.edits import MODELING

    init = [path for path in resolved if path.name.startswith(INIT)]
    others = [path for path in resolved if path not in init]
    if len(init) > 1 or len(others) > 1:
        raise click.UsageError("--resolved was given twice for the same file")
    named = zip((MODELING, INIT), (others, init), strict=True)
    return {name: paths[0] for name, paths in named if paths}
