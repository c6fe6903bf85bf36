"""What the main command says of its work: the source first, and at the end a summary that fits 80 columns."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rewrite.codemod.decode_loops import YES
from rewrite.delivery import verification
from rewrite.delivery.bisection import MOST_SECONDS
from rewrite.delivery.main_class import headline
from rewrite.transform import COMMON_REASONS, Stage
from rewrite.typed import again, takes, typed

if TYPE_CHECKING:
    from pathlib import Path

    from rewrite.codemod.build import Build
    from rewrite.console.console import Screen
    from rewrite.delivery.bisection import Bisection
    from rewrite.package.assemble import Package
    from rewrite.package.lock import Lock
    from rewrite.package.output import Output
    from rewrite.source.resolve import Source
    from rewrite.transform import Rewritten, SkippedSite, Transform
    from rewrite.verify import Verdict

NO_LOOP = "no graph: generate() takes transformers' own loop and launches every kernel for each token"
COSTS: Mapping[Stage, str] = {
    Stage.OPERATOR: "as fast as in the original",
    Stage.GRAPH: "as in the original",
    Stage.STEP: "operator by operator in a step of the graph, not in few kernels a layer",
}
"""What it costs that a place is left alone, by what its transform speeds up."""
NARROW = 69
"""Columns of a narrow terminal beside the labels."""
MOST_LEFT_OUT = 6
"""Reasons that are said; the lock and a report have all."""
LIBRARIES = frozenset({"torch", "transformers", "triton", "numpy", "safetensors", "accelerate", "peft", "rewrite"})
"""What a package or its users import."""
LONGEST_PLACE = 40
"""Characters of a place that are shown."""


def show_source(screen: Screen, source: Source) -> None:
    """Say what is rewritten."""
    screen.line("source", describe(source))


def show_build(screen: Screen, build: Build, transforms: Sequence[Transform]) -> None:
    """Say what the transforms did: loops by class, sites, what was not possible and what that costs."""
    rewritten = build.rewritten
    main = headline(build.source, rewritten.decode_loops)
    screen.line("model", main or build.source.path.name, "bold")
    for number, text in enumerate(_loops(rewritten.decode_loops, main)):
        screen.line("" if number else "generate", text)
    screen.line("sites", _sites(rewritten))
    label, shown = "left out", 0
    left_out = _left_out(rewritten, transforms)
    for cost, reasons in left_out.items():
        for number, reason in enumerate(reasons[: MOST_LEFT_OUT - shown]):
            screen.line(label, reason if number else f"{cost}:")
            label = ""
            if not number:
                screen.line("", reason)
        shown += len(reasons)
    if shown > MOST_LEFT_OUT:
        screen.line("", f"and {shown - MOST_LEFT_OUT} more reasons: --json has them all")


def show_written(
    screen: Screen, build: Build, place: Output, package: Package, verdict: Verdict | None, note: str
) -> None:
    """Say what was written, how the verification ended, and what to do next."""
    names = dict.fromkeys(name.split("/")[0] + ("/" if "/" in name else "") for name in package.files)
    shown = [name for name in names if not name.startswith(".")]
    shown += [] if verdict is None else ["verify.json"]
    screen.line("written", f"{place.shown}/{{{', '.join(shown)}}}")
    if place.backup is not None:
        screen.line("", f"what was there before is in {place.shown.with_name(place.backup.name)}")
    screen.line("needs", f"hf-rewrite-runtime {package.lock.runtime.version}")
    main, hides = headline(build.source, build.rewritten.decode_loops), unimportable(place.folder.name)
    screen.line("verify", _verified(verdict, main) if verdict is not None else note)
    if verdict is None:
        screen.line("next", typed("verify", place.shown.as_posix()))
    elif main and f"class {main}(" in package.files[package.lock.modeling].decode() and not hides:
        screen.line("next", f"from {place.folder.name} import {main}")
    if hides:
        screen.warn(hides)


def unimportable(name: str) -> str:
    """Return why a program cannot import a folder of a name, and a name that it could; "" where it can."""
    if name in sys.stdlib_module_names or name in LIBRARIES:
        return f"'{name}' hides the library of that name from programs beside it; --out optimized_{name} does not"
    if name.isidentifier() and not keyword.iskeyword(name):
        return ""
    hint = re.sub(r"\W", "_", name.strip())
    hint = f"{hint}_" if keyword.iskeyword(hint) else hint if hint.isidentifier() else f"_{hint}"
    return f"'{name}' cannot stand in an import statement; --out {hint} could"


def show_failures(screen: Screen, verdict: Verdict) -> None:
    """Say what failed, by kind."""
    screen.text(verification.rendered(verdict))


def show_rejected(
    screen: Screen, verdict: Verdict, kept: str, place: Output, found: Bisection | None, lock: Lock
) -> None:
    """Say that nothing was written, where the rejected package is, which transform is at fault, and what to do."""
    screen.line("written", f"nothing: {place.shown} is as it was; the rejected package is in {kept}")
    screen.problem("verify", failed(verdict))
    show_bisection(screen, found, lock, place.shown)


def failed(verdict: Verdict) -> str:
    """Say in one line that a verification failed, and where."""
    checks = [check for gate in verdict.gates for check in gate.checks if check.status != "not run"]
    failures = sum(len(gate.failures) for gate in verdict.gates)
    gates = ", ".join(gate.name for gate in verdict.gates if gate.failures)
    where = f"{failures} of {len(checks)} checks, gate {gates}" if failures else verdict.reason
    return f"FAIL: {where} · {verdict.model_class or 'no model class'} · {verdict.seconds:.0f} s"


def show_search(screen: Screen, verdict: Verdict) -> None:
    """Say that the transform at fault is looked for, and how long that may take."""
    failures = sum(len(gate.failures) for gate in verdict.gates)
    checks = "1 check" if failures == 1 else f"{failures} checks"
    minutes = f"{MOST_SECONDS / 60:.0f} minutes at most"
    screen.line("bisecting", f"{checks} failed: making the package with fewer transforms, {minutes} (--no-bisect)")


def show_bisection(screen: Screen, found: Bisection | None, lock: Lock, folder: Path) -> None:
    """Say which transform of the package in `folder` is at fault, if that was looked for, and how to leave it out."""
    if found is None:
        return
    screen.problem("at fault", str(found))
    if found.passes:
        skips = [word for name in found.at_fault for word in ("--skip", name)]
        screen.problem("next", f"mend what it rewrites, or: {_without(lock, folder, skips)}")


def _without(lock: Lock, folder: Path, skips: Sequence[str]) -> str:
    """Return the call that makes a package without some transforms: the one at hand, if it makes packages."""
    if takes("--skip"):
        return again(*skips)
    chosen = (("--only", lock.options.only), ("--skip", lock.options.skip), ("--with", lock.options.also))
    options = [word for option, names in chosen for name in names for word in (option, name)]
    return typed(lock.source.model_type or lock.source.target, "--out", folder, *options, *skips, "--force")


def describe(source: Source) -> str:
    """Return a source in one line: version, path, hash."""
    digest = f"sha256 {source.sha256[:6]}…"
    if source.module is None:
        return f"{source.origin or source.inside or source.path} · {digest}"
    path = "/".join(source.module.split(".")[1:]) + ".py"
    return f"transformers {source.transformers_version} · {path} · {digest}"


def _loops(loops: Mapping[str, str], main: str) -> Iterator[str]:
    """Say which classes generate in a captured graph, the main one first, and of the others why not."""
    names = sorted(loops, key=lambda name: name != main)
    plain = [name for name in names if loops[name] == YES]
    for name in names:
        if name in plain[:1]:
            yield f"in a captured graph, on a GPU: {', '.join(plain)}"
        elif name in plain:
            continue
        elif loops[name].startswith(YES):
            yield f"in a captured graph, on a GPU: {name}{loops[name].removeprefix(YES)}"
        else:
            yield f"not in a graph: {name}: {loops[name].removeprefix('no: ')}"
    if not loops:
        yield "nothing: no class of this file generates"


def _sites(rewritten: Rewritten) -> str:
    applied = sum(1 for report in rewritten.transforms if len(report.rewritten) > len(report.unreached))
    unreached = sum(len(report.unreached) for report in rewritten.transforms)
    candidates = rewritten.sites + sum(len(report.skipped) for report in rewritten.transforms)
    by = f"{applied} transform{'' if applied == 1 else 's'}"
    text = f"{rewritten.sites} of {candidates} rewritten, by {by}"
    if not unreached:
        return text
    nowhere = "none here comes there" if YES in rewritten.decode_loops.values() else "no class here has one"
    return f"{text} ({unreached} of them for a decode loop: {nowhere})"


def _left_out(rewritten: Rewritten, transforms: Sequence[Transform]) -> dict[str, list[str]]:
    """Return what was not possible by what that costs, each reason of a transform once: how often, why and where."""
    known = {transform.name: transform for transform in transforms}
    found: dict[str, dict[tuple[str, str], list[SkippedSite]]] = {}
    for report in rewritten.transforms:
        for skip in report.skipped:
            stage = known[report.name].stage
            refused = stage is Stage.GRAPH and rewritten.decode_loops.get(skip.site, "").startswith("no")
            reasons = found.setdefault(NO_LOOP if refused else COSTS[stage], {})
            reasons.setdefault((report.name, skip.reason), []).append(skip)
    return {
        cost: [_reason(known[name], reason, sites) for (name, reason), sites in reasons.items()]
        for cost, reasons in found.items()
    }


def _reason(transform: Transform, reason: str, sites: Sequence[SkippedSite]) -> str:
    why = {**COMMON_REASONS, **transform.reasons}.get(reason, reason)
    place = " ".join(sites[0].site.split())
    place = place if len(place) <= LONGEST_PLACE else f"{place[: LONGEST_PLACE - 1]}…"
    return f"{transform.name} × {len(sites)}: {why} ({place}{', …' if len(sites) > 1 else ''})"


def _verified(verdict: Verdict, main: str) -> str:
    """Say how a verification ended; where it was another class that was verified in full, how far the main one was."""
    said = verification.summary(verdict)
    if main in ("", verdict.model_class):
        return said
    checks = [check for gate in verdict.gates for check in gate.checks if re.search(rf"\b{main}\b", check.name)]
    ran = sum(check.status == "passed" for check in checks)
    passed = f"{ran} {'check' if ran == 1 else 'checks'} of its own" if ran else "no check of its own"
    return f"{said} · {main} beside {verdict.model_class}, which is verified in full: {passed}"
