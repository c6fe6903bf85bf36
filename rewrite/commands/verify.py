"""`rewrite verify DIR` and `rewrite verify A B`: does the second compute what the first does?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite.options.shared_options import (
    Command,
    bisect_option,
    class_option,
    reporting_options,
    verification_options,
)

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.delivery.verification import Request
    from rewrite.package.lock import Lock
    from rewrite.source.resolve import Source


@click.command(
    cls=Command,
    short_help="Verify a package, or any two modeling files.",
    examples=("rewrite verify ./optimized_llama", "rewrite verify modeling_a.py modeling_b.py --quick"),
)
@click.argument("sides", nargs=-1, required=True, metavar="DIR | ORIGINAL REWRITTEN")
@verification_options
@class_option
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option("--tp", type=click.IntRange(2), metavar="N", help="Verify the package in N processes: tensor parallel.")
@bisect_option
@reporting_options
def verify(
    sides: tuple[str, ...],
    tp: int | None,
    device: str | None,
    dtype: str | None,
    weights: Path | None,
    seed: int | None,
    quick: bool,
    main_class: str | None,
    trust_remote_code: bool,
    given: Path | None,
    bisect: bool,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Verify the package DIR against the file it was made from, or REWRITTEN against ORIGINAL.

    A side is a package folder, a modeling file, a dotted module or a model type. Both are run.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report, summary, verification

    verification.require_libraries("verification")
    request = verification.Request(device, dtype, weights, seed=seed, quick=quick, main_class=main_class)
    screen = Screen(json=json_path, quiet=quiet)
    if tp is not None:
        if len(sides) != 1:
            raise click.UsageError("--tp verifies one package")
        return _ranks(screen, Path(sides[0]), given, request, trust_remote_code, tp, json_path)
    if len(sides) == 1:
        return _package(screen, Path(sides[0]), given, request, trust_remote_code, bisect, json_path)
    if len(sides) > 2 or given is not None:
        raise click.UsageError("give one package, or two files or packages")
    original, rewritten = (_side(side, trust_remote_code) for side in sides)
    with screen.working("verifying") as progress:
        verdict = verification.judge(original, rewritten, request, progress)
    screen.text(verification.rendered(verdict))
    if quiet and not verdict.passed:
        screen.problem("verify", summary.failed(verdict))
    json_report.write(json_path, "verify", verdict.to_json())
    return 0 if verdict.passed else 1


def _package(
    screen: Screen,
    folder: Path,
    given: Path | None,
    request: Request,
    trusted: bool,
    bisect: bool,
    json_path: Path | None,
) -> int:
    from rewrite.delivery import acceptable, acceptance, bisection, json_report, summary, verdict_file, verification
    from rewrite.package import output
    from rewrite.package.assemble import VERDICT_NAME
    from rewrite.sync import edits, rebuild
    from rewrite.typed import again

    lock, source = _original(folder, given, request, trusted)
    accepted = acceptance.read(folder)
    if accepted is not None:
        named = request.main_class or accepted.main_class
        request = replace(request, keep_going=True, itself=True, main_class=named)
    with screen.working("verifying") as progress:
        verdict = verification.judge(source.path, folder, request, progress)
    refused = accepted.refused(verdict) if accepted is not None else []
    screen.text(verification.rendered(verdict, accepted is not None and not refused))
    record = verdict_file.record(verdict, lock, folder, folder, refused)
    output.write_beside(folder / VERDICT_NAME, record.text.encode("utf-8"))
    if record.note:
        screen.line("kept", record.note)
    if screen.quiet and not verdict.passed and (accepted is None or refused):
        screen.problem("verify", summary.failed(verdict))
    found = None
    if bisect and accepted is None and not verdict.passed:
        transforms = rebuild.transforms_of(folder, lock)
        summary.show_search(screen, verdict)
        with screen.working("bisecting") as progress:
            found = bisection.bisect(source, transforms, verdict, request, verification.judge, progress)
        summary.show_bisection(screen, found, lock, folder)
    edited = [] if accepted is not None or verdict.passed else edits.edited_places(folder, lock)
    if edited and not (found and found.at_fault):
        meant = again("--reason", "TEXT", without=("--bisect", "--tp")).replace("verify", "accept", 1)
        accept = "" if acceptable.unacceptable(verdict) else f", or where they are meant: {meant}"
        screen.problem("next", f"mend your edits in {', '.join(edited)}{accept}")
    json_report.write(json_path, "verify", {**verdict.to_json(), "bisection": found.to_json() if found else None})
    if refused:
        screen.problem("refused", f"{refused[0]}{f', and {len(refused) - 1} more' if len(refused) > 1 else ''}")
        return 1
    if accepted is None or verdict.passed:
        return verdict.exit_code
    renewed = acceptance.renewed(accepted, folder, lock, verdict)
    output.write_beside(folder / acceptance.NAME, renewed.to_json().encode("utf-8"))
    say = screen.problem if screen.quiet else screen.line  # it fails nothing, and still is no pass
    say("accepted", f"what fails was accepted: {accepted.reason}")
    return 0


def _ranks(
    screen: Screen,
    folder: Path,
    given: Path | None,
    request: Request,
    trusted: bool,
    ranks: int,
    json_path: Path | None,
) -> int:
    from rewrite.delivery import json_report
    from rewrite.verify import rank_processes as several

    _, source = _original(folder, given, request, trusted)
    with screen.working(f"verifying on {ranks} ranks"):
        checks = several.verify(
            source.path, folder, ranks, request.device, request.dtype, request.weights, request.seed
        )
    for check in checks:
        screen.line("pass" if check.passed else "FAIL", f"{check.name}: {check.detail}")
    failed = [check for check in checks if not check.passed]
    if failed:
        screen.problem("verify", f"{failed[0].name} on {ranks} ranks: {failed[0].detail}")
    json_report.write(json_path, "verify", {"ranks": ranks, "checks": [check.to_json() for check in checks]})
    return 1 if failed else 0


def _original(folder: Path, given: Path | None, request: Request, trusted: bool) -> tuple[Lock, Source]:
    """Return the lock of a package, and the file that it was made from, which may be run."""
    from rewrite.delivery import verification
    from rewrite.package import original
    from rewrite.package.lock import read_lock
    from rewrite.source.resolve import weights_fit

    lock = read_lock(folder)
    source = original.find(folder, lock, given)
    verification.require_trust(source, trusted)
    if request.weights is not None:
        weights_fit(source, request.weights)
    return lock, source


def _side(side: str, trust_remote_code: bool) -> str | Path:
    """Return a path for anything that is one, the file of a model type or module otherwise."""
    from rewrite.delivery import verification
    from rewrite.source.resolve import resolve

    path = Path(side)
    if path.is_dir() and not (path / "config.json").is_file():
        return path
    source = resolve(side, trust_remote_code)
    verification.require_trust(source, trust_remote_code)
    return source.path
