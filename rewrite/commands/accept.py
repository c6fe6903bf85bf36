"""`rewrite accept DIR --reason TEXT`: a change of numbers or structure that is meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import FOLDER, Command, class_option, reporting_options, verification_options

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.delivery.acceptance import Acceptance
    from rewrite.delivery.verification import Request
    from rewrite.package.lock import Lock
    from rewrite.source.resolve import Source


@click.command(
    cls=Command,
    short_help="Record that an edit is meant to change the numbers.",
    examples=('rewrite accept ./optimized_llama --reason "logits are capped at 30"',),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--reason", required=True, metavar="TEXT", help="Why; it is shown in the pull request.")
@verification_options
@class_option
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@reporting_options
def accept(
    folder: Path,
    reason: str,
    given: Path | None,
    trust_remote_code: bool,
    weights: Path | None,
    json_path: Path | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Verify the package in DIR, and record what fails as an intended change of numbers or structure.

    The package is compared with its original and with its text as it was generated; the figures of both, and the
    reason, go to accepted.json. `rewrite check` is green again for these files, the pull request's comment shows it,
    and a later sync or verification fails if anything else differs, an error more than doubles, or a check no longer
    runs. What could not run is never accepted, nor a package whose decode loop computes something else than its
    forward; parameters that the original does not have are zeros, or what the class begins with, beside it.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report, verification
    from rewrite.errors import NotAcceptable
    from rewrite.package import original
    from rewrite.package.lock import read_lock

    if not reason.strip():
        raise click.UsageError("--reason is empty: say why the change is meant")
    verification.require_libraries("verification")
    lock = read_lock(folder)
    source = original.find(folder, lock, given)
    verification.require_trust(source, trust_remote_code)
    request = replace(verification.Request(weights=weights, **options), keep_going=True, itself=True)
    screen = Screen(json=json_path, quiet=quiet)
    try:
        accepted = _accept(screen, folder, lock, source, reason.strip(), request)
    except NotAcceptable as error:
        refused = {"folder": str(folder), "accepted": False, "reason": reason.strip(), "refused": str(error)}
        json_report.write(json_path, "accept", refused)
        raise
    failed = {"original": accepted.against_original, "generated": accepted.against_generated} if accepted else {}
    data = {"folder": str(folder), "accepted": accepted is not None, "reason": reason.strip(), "failed": failed}
    json_report.write(json_path, "accept", data)
    return 0


def _accept(
    screen: Screen, folder: Path, lock: Lock, source: Source, reason: str, request: Request
) -> Acceptance | None:
    """Record what fails and return it; None where nothing does.

    Raises:
        NotAcceptable: if a check could not run, nothing was compared, or the package does not agree with itself.
    """
    from rewrite.delivery import acceptable, acceptance, verdict_file, verification
    from rewrite.errors import NotAcceptable
    from rewrite.package import output
    from rewrite.package.assemble import VERDICT_NAME

    with screen.working("verifying against the original") as progress:
        verdict = verification.judge(source.path, folder, request, progress)
    record = verdict_file.record(verdict, lock, folder, folder)
    if verdict.passed:
        output.write_beside(folder / VERDICT_NAME, record.text.encode("utf-8"))
        screen.line("accepted", "nothing: the package passed its verification, so there is nothing to accept")
        return None
    if why := acceptable.unacceptable(verdict):
        output.write_beside(folder / VERDICT_NAME, record.text.encode("utf-8"))
        raise NotAcceptable(folder, why)
    with (
        acceptance.generated(folder, lock) as copy,
        screen.working("verifying against the generated text") as progress,
    ):
        second = verification.judge(copy, folder, replace(request, itself=False), progress)
    accepted = acceptance.of(reason, folder, lock, verdict, second)
    output.write_beside(folder / VERDICT_NAME, record.text.encode("utf-8"))
    output.write_beside(folder / acceptance.NAME, accepted.to_json().encode("utf-8"))
    screen.line("original", acceptance.worst(accepted.against_original))
    screen.line("generated", acceptance.worst(accepted.against_generated))
    screen.line("accepted", f"{folder / acceptance.NAME}: commit it with the edit")
    return accepted
