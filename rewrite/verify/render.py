"""Puts a verdict into words, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from .failure_groups import causes
from .judging.verdict import POLYNOMIALS, Asked, Check, ConfigField, Divergence, Figure, Gate, Reached, Verdict

WIDTH = 80
APPROXIMATE = "approximate, "
"""What the checks of a package that rounds on request begin with; they are shown also where they pass."""
SIGNS = {"passed": "ok", "failed": "FAILED", "not run": "not run"}


def summary(verdict: Verdict) -> str:
    """One line: the outcome, the error in low precision, how many checks, the speed on a GPU, or what failed."""
    checks = [check for gate in verdict.gates for check in gate.checks]
    left = sum(check.status == "not run" for check in checks)
    parts = [f"{verdict.model_class or 'no model class'}"]
    parts.append(f"{len(checks) - left} checks" + (f", {left} not run" if left else ""))
    timed = [check for check in checks if "outcome" in check.figures]
    parts += [_speed(check) for check in timed if not str(check.figures["outcome"]).startswith("not claimed")]
    parts += [f"{share:.0%} of the memory limit" for share in _figures(checks, "rewritten share")]
    parts += [f"not verified: {left_out}"] if (left_out := not_verified(verdict)) else []
    parts.append(f"{verdict.seconds:.0f} s" if verdict.passed else _short(verdict.reason))
    outcome = f"pass{_approximate(verdict)}" if verdict.passed else "FAIL"
    return f"parity: {outcome}{_low_precision(checks)} · {' · '.join(parts)}"


def not_verified(verdict: Verdict) -> str:
    """How many lines of the modeling file and of the runtime that it brings no check ran, and what none asked for."""
    own, brought = verdict.reached[:1], verdict.reached[1:]
    counts = [(sum(file.missed for file in files), sum(file.lines for file in files)) for files in (own, brought)]
    said = [f"{missed} of {lines} lines" for missed, lines in counts[:1] if lines]
    said += [f"{missed / lines:.0%} of the runtime" for missed, lines in counts[1:] if lines]
    fields = verdict.config_fields
    said += [f"{sum(not one.values for one in fields)} of {len(fields)} config fields"] if fields else []
    for kind in dict.fromkeys(asked.kind for asked in verdict.asked):
        of_kind = [asked for asked in verdict.asked if asked.kind == kind]
        if missed := sum(len(asked.missed) for asked in of_kind):
            said.append(f"{missed} of {sum(asked.names for asked in of_kind)} {kind}")
    return _listed(said)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([*([", ".join(parts[:-1])] if parts[:-1] else []), *parts[-1:]])


def _approximate(verdict: Verdict) -> str:
    """How far a package that rounds on request is from the original; empty for an exact one."""
    checks = [check for gate in verdict.gates for check in gate.checks if check.name.startswith(APPROXIMATE)]
    if not checks:
        return ""
    figures = checks[-1].figures
    moved, alone = (float(figures.get(name, 0.0)) for name in ("KL mean", "KL mean, of the rounding alone"))
    times = moved / alone if alone else 1.0
    return f", approximate: KL {moved:.2g} from the original, {times:.2f}× that of the rounding"


def _low_precision(checks: Sequence[Check]) -> str:
    """The largest error against fp64 of each low precision, as a multiple of the original's own."""
    worst = {}
    for dtype in ("float32", "bfloat16", "float16"):
        ratios = _figures([check for check in checks if check.name.startswith(dtype)], "max ratio")
        if ratios:
            worst[dtype] = max(ratios)
    said = ", ".join(f"{dtype} {ratio:.2f}×" for dtype, ratio in worst.items())
    return f" ({said} the original's own error)" if said else ""


def _speed(check: Check) -> str:
    figures = check.figures
    ratio = f"{figures['original ms']:.3g} → {figures['rewritten ms']:.3g} ms ({figures['speed-up']:.2f}×)"
    return f"{check.name} {ratio}"


def _figures(checks: Sequence[Check], name: str) -> list[float]:
    return [float(check.figures[name]) for check in checks if name in check.figures]


def _short(text: str) -> str:
    return textwrap.shorten(text, 160, placeholder=" …")


def render(verdict: Verdict, verbose: bool = False, accepted: bool = False) -> str:
    """The verdict as text: a line per gate, failures by kind, every check that was not run; all checks if verbose.

    `accepted`: what fails is a change that was accepted.
    """
    lines = [*_head(verdict)]
    for gate in verdict.gates:
        lines += _gate(gate, verbose)
    if verdict.divergence is not None:
        lines += _divergence(verdict.divergence)
    if verdict.passed or verbose:
        lines += _left_unseen(verdict, verbose)
    else:  # what failed is the news
        if said := not_verified(verdict):
            lines += _wrap(f"not verified: {said} (--json FILE lists them)", "  ")
    if verdict.reason and not verdict.passed:
        lines += _wrap(f"{'differs' if accepted else 'failed'}: {verdict.reason}", "")
    approximate = ", approximate" if _approximate(verdict) else ""
    otherwise = "differs as accepted" if accepted else "NOT PASSED"
    lines.append(f"passed{approximate}" if verdict.passed else otherwise)
    return "\n".join(lines)


def _left_unseen(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """What no check ran, gave, compared or varied."""
    yield from _reached(verdict.reached, verbose)
    others = (
        []
        if verbose or not verdict.options.quick
        else [one for one in verdict.asked if one.missed and one.model_class != verdict.model_class]
    )
    yield from _unasked([one for one in verdict.asked if one not in others])
    yield from _unasked_of_others(others)
    if not verdict.reached and verdict.options.reach and not verdict.options.quick:
        text = "not counted   which lines ran: none did, or a debugger or another counter is at work"
        yield from _wrap(text, " " * 14)
    yield from _config_fields(verdict.config_fields, verbose)


def _head(verdict: Verdict) -> Iterator[str]:
    for label, side in (("original", verdict.original), ("rewritten", verdict.rewritten)):
        if side is not None:
            yield from _wrap(f"{label:<10} {side.name} · sha256 {side.sha256[:8]}", "           ")
    facts = " · ".join(f"{name} {value}" for name, value in verdict.environment.items())
    yield from _wrap(f"{'on':<10} {facts} · seed {verdict.options.seed}", "           ")


def _gate(gate: Gate, verbose: bool) -> Iterator[str]:
    ran = [check for check in gate.checks if check.status != "not run"]
    passed = sum(check.status == "passed" for check in ran)
    left = len(gate.checks) - len(ran)
    counts = f"{passed}/{len(ran)} checks" + (f", {left} not run" if left else "")
    yield f"gate {gate.number}  {gate.name:<11} {SIGNS[gate.status]:<8} {counts} · {gate.seconds:.1f} s"
    for check in gate.checks:
        told = gate.name == "latency" or check.name.startswith((APPROXIMATE, POLYNOMIALS))
        if verbose or (told and check.status == "passed"):
            yield from _check(check)
    if not verbose:
        yield from _failures(gate)
        yield from _left_out(gate)


def _failures(gate: Gate) -> Iterator[str]:
    """The checks that failed, those that failed in the same way by the worst of them."""
    for cause in causes(gate):
        yield from _check(cause.worst)
        if len(cause.checks) > 1:
            yield from _wrap(f"          and {cause.others()}", "          ")


def _left_out(gate: Gate) -> Iterator[str]:
    """The checks that did not run, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for check in gate.checks:
        if check.status == "not run":
            reasons.setdefault(check.detail, []).append(check.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield from _wrap(f"  {SIGNS['not run']:<7} {names[0]}{more}: {reason}", "          ")


def _check(check: Check) -> Iterator[str]:
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in check.figures.items())
    text = f"{'RAISED' if check.failure == 'raised' else SIGNS[check.status]:<7} {check.name}"
    for part in (check.detail, figures):
        text += f": {part}" if part else ""
    yield from _wrap(f"  {text}", "          ")


def _divergence(divergence: Divergence) -> Iterator[str]:
    place = list(divergence.index)
    text = (
        f"first divergence: {divergence.module} ({divergence.kind}) in {divergence.scenario!r}: largest error "
        f"{divergence.error:.3g} at {place}, bound {divergence.bound:.2g}: expected {divergence.expected:.9g}, "
        f"found {divergence.found:.9g}"
    )
    yield from _wrap(f"{text}{'; ' + divergence.note if divergence.note else ''}", "  ")
    for label, said in (("computed in", divergence.place), ("goes wrong", divergence.between)):
        if said:
            yield from _wrap(f"  {label} {said}", "    ")
    if divergence.likely:
        yield from _wrap(f"  likely: {divergence.likely}", "    ")


def _reached(reached: Sequence[Reached], verbose: bool) -> Iterator[str]:
    """The modeling file's lines that no check ran, and how much of the runtime; every file of it if verbose."""
    indent = " " * 14
    for file in reached[:1]:
        where = f": {file.where}" if file.where else ""
        text = f"{file.missed} of {file.lines} lines, {file.missed_branches} of {file.branches} branches{where}"
        yield from _wrap(f"not verified  {file.file}: {text}", indent)
    if brought := reached[1:]:
        lines, missed, branches, missed_branches = (
            sum(getattr(file, name) for file in brought) for name in ("lines", "missed", "branches", "missed_branches")
        )
        yield f"{indent}what it brings: {missed} of {lines} lines, {missed_branches} of {branches} branches"
    for file in brought if verbose else ():
        if file.missed:
            yield from _wrap(f"{indent}{file.file}: {file.missed} of {file.lines}: {file.where}", indent + "  ")


def _config_fields(fields: Sequence[ConfigField], verbose: bool) -> Iterator[str]:
    """The fields of the configuration that kept their values, with the reason; all fields if verbose."""
    kept = [one for one in fields if not one.values]
    if fields:
        yield f"not varied    {len(kept)} of {len(fields)} fields of the configuration that the model reads"
    for one in kept:
        yield from _wrap(f"{' ' * 14}{one.name}: {one.reason}", " " * 16)
    for one in fields if verbose else ():
        if one.values:
            yield from _wrap(f"  varied      {one.name}: {', '.join(one.values)}", " " * 16)


def _unasked(asked: Sequence[Asked]) -> Iterator[str]:
    """The arguments that no check gave and the outputs that none compared, of classes that lack the same ones once."""
    alike: dict[tuple[str, frozenset[str]], list[Asked]] = {}
    for one in asked:
        if one.missed:
            alike.setdefault((one.kind, frozenset(one.missed)), []).append(one)
    for (kind, missed), classes in alike.items():
        first, names = classes[0], ", ".join(one.model_class for one in classes)
        of = f" of {first.names}" if len({one.names for one in classes}) == 1 else ""
        yield from _wrap(f"not verified  {names}: {len(missed)}{of} {kind}: {', '.join(first.missed)}", " " * 14)


def _unasked_of_others(asked: Sequence[Asked]) -> Iterator[str]:
    """How much of the classes that a quick verification calls in one way only was not asked for."""
    if asked:
        classes = len({one.model_class for one in asked})
        said = [
            f"{sum(len(one.missed) for one in asked if one.kind == kind)} {kind}"
            for kind in dict.fromkeys(one.kind for one in asked)
        ]
        text = f"{classes} other class{'es'[: 2 * (classes > 1)]}: {_listed(said)}, which --quick leaves out"
        yield from _wrap(f"not verified  {text}", " " * 14)


def _figure(value: Figure) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=True, break_on_hyphens=False)
