"""`rewrite sync DIR`: makes a package anew from what is installed now, with your edits merged in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.commands.options import FOLDER, diff_option, json_option, verification_options

if TYPE_CHECKING:
    from rewrite.lock import Lock
    from rewrite.package import Package


@click.command(short_help="Make a package anew and merge your edits.")
@click.argument("folder", type=FOLDER)
@click.option("--no-verify", is_flag=True, help="Write without running anything; works without torch.")
@diff_option("stat", "How to show what changes in your modeling file.")
@verification_options
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option("--resolved", type=click.Path(path_type=Path), metavar="FILE", help="Take FILE as the merged text.")
@json_option
@click.option("--force", is_flag=True, help="Accept that fewer places are rewritten than before.")
def sync(**options: Any) -> int:
    """Rewrite the original of the package in FOLDER anew, with the options of its lock, and merge your edits.

    A conflict is shown with markers in a copy beside the modeling file, which stays as it is: resolve it there and
    give the copy with --resolved.
    """
    return _sync(**options)


def _sync(
    folder: Path,
    no_verify: bool,
    diff_style: str,
    given: Path | None,
    resolved: Path | None,
    trust_remote_code: bool,
    force: bool,
    json_path: Path | None,
    **request: Any,
) -> int:
    from rewrite import judge, original, output, renewal, report
    from rewrite.console import Screen
    from rewrite.delivery import Delivery, deliver
    from rewrite.lock import read_lock

    screen = Screen(quiet_output=diff_style == "unified" or str(json_path) == "-")
    lock = read_lock(folder)
    if not no_verify:
        judge.require_libraries("verification (--no-verify leaves it out)")
    with screen.working("rewriting"):
        built, package = renewal.renewed(folder, lock, given)
    report.show_build(screen, built)
    package, conflict = _merged(folder, lock, package, resolved)
    if conflict is not None:
        screen.line("written", "nothing: your edits and the new text change the same lines")
        screen.line("conflict", f"resolve {conflict}, then: rewrite sync {folder} --resolved {conflict}")
        return 1
    if not renewal.differences(folder, lock, package):
        screen.line("written", "nothing: the package is up to date")
        return 0
    before = original.text_of(folder / lock.modeling)
    screen.show_diff(before, package.files[lock.modeling].decode("utf-8"), lock.modeling, diff_style)
    place = output.prepare(folder, built.source.path, merged=(lock.modeling,))
    delivery = Delivery(not no_verify, judge.Request(**request), trust_remote_code, force, json_path)
    return deliver(delivery, screen, built, package, place)


def _merged(folder: Path, lock: Lock, package: Package, resolved: Path | None) -> tuple[Package, Path | None]:
    """Return the package with the user's edits, or the path of the copy that shows the conflict."""
    from rewrite import merge, original, report
    from rewrite.package import KEPT

    name = lock.modeling
    if resolved is not None:
        text = original.text_of(resolved)
        if merge.MARKER in text:
            raise click.UsageError(f"{resolved} still has conflict markers")
        return replace(package, files={**package.files, name: text.encode("utf-8")}), None
    base, yours = (original.text_of(path) for path in (folder / KEPT / name, folder / name))
    merged = merge.three_way(base, yours, package.files[name].decode("utf-8"))
    if merged.conflicts:
        copy = folder / f"{name}.conflict"
        report.write_text(copy, merged.text)
        return package, copy
    return replace(package, files={**package.files, name: merged.text.encode("utf-8")}), None
