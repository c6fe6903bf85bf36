"""`rewrite check`: are packages still what would be made now, and is what they hold verified? Writes nothing."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import FOLDER, json_option


@click.command(short_help="Say whether packages are up to date; for CI and pre-commit.")
@click.argument("folders", type=FOLDER, nargs=-1, metavar="[DIR]...")
@json_option
def check(folders: tuple[Path, ...], json_path: Path | None) -> int:
    """Check the packages in DIR, or every package below the working folder; exit with 1 if one is out of date."""
    from rewrite import renewal, report
    from rewrite.console import Screen
    from rewrite.errors import NothingToRewrite, OriginalNotFound
    from rewrite.lock import read_lock

    screen = Screen(quiet_output=str(json_path) == "-")
    found: dict[str, list[str]] = {}
    for folder in folders or _packages():
        lock = read_lock(folder)
        try:
            with screen.working(f"checking {folder}"):
                _, package = renewal.renewed(folder, lock)
            reasons = renewal.differences(folder, lock, package)
        except (OriginalNotFound, NothingToRewrite) as error:
            reasons = [str(error)]
        stale = renewal.stale_verdict(folder, lock)
        found[str(folder)] = [*reasons, *([stale] if stale else [])]
        screen.line("out of date" if found[str(folder)] else "up to date", str(folder))
        for reason in found[str(folder)]:
            screen.line("", reason)
    report.write(json_path, found)
    if any(found.values()):
        screen.line("", "`rewrite sync DIR` makes a package anew and keeps your edits")
    return 1 if any(found.values()) else 0


def _packages() -> list[Path]:
    from rewrite.errors import NotAPackage
    from rewrite.source import LOCK_NAME

    places = (path.parent for path in Path().rglob(LOCK_NAME) if not any(part.startswith(".") for part in path.parts))
    if not (found := sorted(places)):
        raise NotAPackage(Path.cwd().name, f"no folder below it has a {LOCK_NAME}")
    return found
