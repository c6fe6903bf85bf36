"""A package as a comment for a pull request: summary, verdict, and the difference class by class."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rewrite.console import differences
from rewrite.delivery import acceptance, verdict_file
from rewrite.errors import AcceptanceNotReadable, VerdictNotReadable
from rewrite.package import output
from rewrite.package.lock import Lock
from rewrite.sync import rebuild
from rewrite.typed import typed

MOST_CHARACTERS = 60_000
"""GitHub refuses a comment of more than 65,536."""


def markdown(folder: Path, lock: Lock, before: str, after: str) -> str:
    """Return a review comment in GitHub's Markdown.

    Args:
        folder: the package.
        lock: its lock.
        before: text of the original.
        after: text of the modeling file as it is.
    """
    said = [*_summary(folder, lock), "", *_rules(lock), "", *_loops(lock), *_verdict(folder, lock), ""]
    head = "\n".join(said)
    parts, left_out = [], []
    room = MOST_CHARACTERS - len(head)
    for name, changes in _by_class(differences.statistics(before, after)).items():
        part = _details(name, changes, before, after)
        if len(part) > room:
            left_out.append(name)
            continue
        room -= len(part)
        parts.append(part)
    if left_out:
        parts.append(f"Too long for a comment: {', '.join(left_out)} (`{typed('diff', folder)}` shows them).\n")
    return "\n".join([head, *parts])


def _summary(folder: Path, lock: Lock) -> Iterator[str]:
    origin = lock.source
    made_of = f"transformers {origin.transformers}, `{origin.path}`" if origin.module else f"`{origin.path}`"
    rewritten = sum(len(sites) for sites in lock.rewritten.values())
    skipped = sum(len(report.skipped) for report in lock.transforms)
    edited = output.edited_files(folder, lock)
    yield f"### `{folder.name}`: {lock.modeling.removesuffix('.py').removeprefix('modeling_')}, rewritten"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| made from | {made_of}, sha256 `{origin.sha256[:12]}` |"
    yield f"| made by | hf-rewrite {lock.tool} |"
    yield f"| places | {rewritten} rewritten by {len(lock.rewritten)} rules, {skipped} skipped |"
    yield f"| own edits | {', '.join(f'`{name}`' for name in edited) or 'none'} |"


def _rules(lock: Lock) -> Iterator[str]:
    yield "| rule | rewritten | skipped |"
    yield "|---|---|---|"
    for report in lock.transforms:
        if report.rewritten or report.skipped:
            reasons = Counter(site.reason for site in report.skipped)
            said = ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))
            idle = f", {len(report.unreached)} of them out of a decode loop's reach" if report.unreached else ""
            yield f"| `{report.name}` | {len(report.rewritten)}{idle} | {said or '0'} |"


def _loops(lock: Lock) -> Iterator[str]:
    if lock.decode_loops:
        yield "| class | decode loop |"
        yield "|---|---|"
        for name, said in lock.decode_loops.items():
            yield f"| `{name}` | {said.replace('|', chr(92) + '|')} |"
        yield ""


def _verdict(folder: Path, lock: Lock) -> Iterator[str]:
    try:
        verdict = verdict_file.read(folder)
    except VerdictNotReadable as error:
        yield f"**Verdict**: {error}."
        return
    if verdict is None:
        yield "**Verdict**: not verified (`rewrite verify` has not run on this package)."
        return
    stale = rebuild.stale_verdict(folder, lock)
    accepted, passed, environment = _accepted(folder, lock), verdict.passed, verdict.environment
    where = ", ".join(
        f"{name} {environment[name]}" for name in ("device", "torch", "transformers") if name in environment
    )
    word = "passed" if passed and not stale else "passed, but out of date" if passed else "**failed**"
    word = "differs from the original, as accepted" if accepted and not passed and not stale else word
    yield f"**Verdict**: {word}{f' ({where})' if where else ''}."
    if stale:
        yield f"{stale}."
    if verdict.reason:
        yield f"{verdict.reason}."
    yield ""
    yield from accepted
    yield from _gates(verdict)


def _accepted(folder: Path, lock: Lock) -> list[str]:
    """Return what was accepted, as a table; nothing where nothing was, or where it cannot be read."""
    try:
        accepted = acceptance.read(folder)
    except AcceptanceNotReadable:
        return []  # the verdict says it
    if accepted is None:
        return []
    state = "" if accepted.covers(folder, lock) else " (of other files than these)"
    reason = " ".join(accepted.reason.split()).replace("|", "\\|")
    return [
        f"**Accepted**{state}: {reason}",
        "",
        "| against | what differs |",
        "|---|---|",
        f"| the original | {acceptance.worst(accepted.against_original)} |",
        f"| the generated text | {acceptance.worst(accepted.against_generated)} |",
        "",
    ]


def _gates(verdict: verdict_file.Kept) -> Iterator[str]:
    if verdict.gates:
        yield "| gate | outcome | checks | nearest to its bound |"
        yield "|---|---|---|---|"
    for gate in verdict.gates:
        counts = (f"{gate[name]} {name}" for name in ("failed", "not run", "passed") if gate.get(name))
        yield f"| {gate.get('name')} | {gate.get('status')} | {', '.join(counts)} | {gate.get('worst', '')} |"


def _by_class(changes: Sequence[differences.Change]) -> dict[str, list[differences.Change]]:
    found: dict[str, list[differences.Change]] = {}
    for change in changes:
        found.setdefault(change.where.split(".")[0], []).append(change)
    return found


def _details(name: str, changes: Sequence[differences.Change], before: str, after: str) -> str:
    added, removed = sum(c.added for c in changes), sum(c.removed for c in changes)
    text = "".join(differences.hunks_in(before, after, [change.where for change in changes]))
    fence = "```"
    while fence in text:
        fence += "`"
    summary = f"<summary><code>{html.escape(name)}</code> +{added} −{removed}</summary>"
    return (
        f"<details>{summary}\n\n{fence}diff\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n\n</details>\n"
    )
