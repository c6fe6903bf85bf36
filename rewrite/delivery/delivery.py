"""The last steps of a rewrite, whoever asked for it: stage, check, verify, put in place, say so.

Reading on: `rewrite/verify/runner.py`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from rewrite.codemod.build import Build
from rewrite.console.console import Screen
from rewrite.delivery import acceptance, json_report, precheck, summary, verdict_file, verification
from rewrite.delivery.bisection import Bisection, bisect
from rewrite.delivery.worker import Judge
from rewrite.package import output
from rewrite.package.assemble import VERDICT_NAME, Package
from rewrite.package.output import Output, Staged
from rewrite.transform import Transform
from rewrite.transforms import select
from rewrite.verify import Verdict


@dataclass(frozen=True)
class Delivery:
    """How a package is to be checked and put in place."""

    verify: bool
    request: verification.Request
    trust_remote_code: bool = False
    force: bool = False
    """Accept that fewer places are rewritten than before."""
    json_path: Path | None = None
    unverified: str = "not run (--no-verify), the import was not tried"
    """What to say where `verify` is off."""
    judge: Judge | None = None
    """What verifies, if not this process."""
    bisect: bool = True
    """Look for the transform at fault where the verification fails."""


def deliver(delivery: Delivery, screen: Screen, built: Build, package: Package, place: Output) -> int:
    """Put `package` in place if it passes, and return the exit code of the command.

    Raises:
        RewriteError: if fewer places are rewritten than in the package that is there.
        GateFailed: if the package does not hold together.
        OutputNotWritable: if the disk refuses.
    """
    if not delivery.force:
        output.check_sites(place, package.lock)
    with output.stage(place, package) as staged:
        precheck.check_text(staged.folder, package.lock.files)
        verdict, note = _verified(delivery, screen, built, staged)
        data = {**json_report.of_build(built), "verify": verdict.to_json() if verdict else None}
        if verdict is not None and not _passes(delivery, screen, built, staged, verdict):
            summary.show_failures(screen, verdict)
            found = _at_fault(delivery, screen, built, package, place, verdict) if delivery.bisect else None
            summary.show_build(screen, built, _transforms(package, place))
            summary.show_rejected(screen, verdict, str(staged.reject()), place, found, package.lock)
            bisection = found.to_json() if found is not None else None
            json_report.write(delivery.json_path, "apply", {**data, "written": False, "bisection": bisection})
            return 1
        staged.commit()
    summary.show_build(screen, built, _transforms(package, place))
    summary.show_written(screen, built, place, package, verdict, note)
    json_report.write(delivery.json_path, "apply", {**data, "written": True})
    return 0


def _transforms(package: Package, place: Output) -> list[Transform]:
    """Return the transforms that made a package."""
    options = package.lock.options
    return select(options.only, options.skip, options.also, place.folder)


def _at_fault(
    delivery: Delivery, screen: Screen, built: Build, package: Package, place: Output, verdict: Verdict
) -> Bisection:
    """Look for the transform that makes the verification fail."""
    transforms = _transforms(package, place)
    summary.show_search(screen, verdict)
    with screen.working("bisecting") as progress:
        judge = delivery.judge or verification.judge
        return bisect(built.source, transforms, verdict, delivery.request, judge, progress)


def _verified(delivery: Delivery, screen: Screen, built: Build, staged: Staged) -> tuple[Verdict | None, str]:
    """Return the verdict on a staged package, or None and why there is none."""
    if not delivery.verify:
        return None, delivery.unverified
    if built.source.remote_code and not delivery.trust_remote_code:
        return None, "not run: the file came with the checkpoint; --trust-remote-code allows it to run"
    accepted, request = acceptance.read(staged.folder), delivery.request
    if accepted is not None:
        request = replace(request, keep_going=True, itself=True, main_class=accepted.main_class)
    importing = precheck.importing(staged.folder, built.source.path) if request.quick else contextlib.nullcontext()
    with importing, screen.working("verifying") as progress:
        judge = delivery.judge or verification.judge
        verdict = judge(built.source.path, staged.folder, request, progress)
    record = verdict_file.record(verdict, staged.package.lock, staged.folder, staged.output.folder)
    staged.add(VERDICT_NAME, record.text)
    if record.note:
        screen.line("kept", record.note)
    return verdict, ""


def _passes(delivery: Delivery, screen: Screen, built: Build, staged: Staged, verdict: Verdict) -> bool:
    """Return whether all that fails was accepted, and renew what was accepted for the files that are staged.

    The generated text has to pass without the edits: what was accepted hides no fault of ours.
    """
    accepted = acceptance.read(staged.folder)
    if accepted is None:
        return verdict.passed
    if worse := accepted.refused(verdict):
        screen.problem("refused", f"{worse[0]}{f', and {len(worse) - 1} more' if len(worse) > 1 else ''}")
        return False
    if verdict.passed:
        return True
    with acceptance.generated(staged.folder, staged.package.lock) as copy, screen.working("verifying") as progress:
        plain = (delivery.judge or verification.judge)(built.source.path, copy, delivery.request, progress)
    if not plain.passed:
        screen.problem("refused", f"without your edits it fails too: {verification.summary(plain)}")
        return False
    again = acceptance.renewed(accepted, staged.folder, staged.package.lock, verdict)
    staged.add(acceptance.NAME, again.to_json())
    screen.line("accepted", f"what fails was accepted: {accepted.reason}")
    return True
