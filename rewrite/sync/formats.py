"""Findings as text, JSON, SARIF, and annotations of GitHub's runners."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import rewrite
from rewrite.delivery import acceptance, json_report
from rewrite.package.lock import read_lock
from rewrite.sync import edits, rebuild
from rewrite.sync.package_check import CANNOT_TELL, KINDS, Finding, Place
from rewrite.typed import typed

Found = Mapping[str, Sequence[Finding]]
"""Findings by package, in the order in which they are said."""
NOT_BY_SYNC = frozenset(
    {"stale-verification", "broken-edit", "edited-alone", "conflict", "not-readable", "edited-runtime", CANNOT_TELL}
)
"""Kinds of findings that a sync alone does not end; their messages say what does."""
NOT_COMPARED = frozenset({"not-readable", "not-reproducible", "broken-edit", "conflict"})
"""Kinds of findings of a package whose edits cannot be told, or are named by them."""
MOST_EDITS = 4
"""Edited places that a line names."""


def as_text(found: Found, asked: str | None = None) -> str:
    """Return one line a package, and how to make those anew that are out of date.

    Args:
        found: the findings.
        asked: which transformers they were compared with, as the user named it; None is the installed one.
    """
    lines = [_line(folder, several) for folder, several in found.items()]
    stale = [folder for folder, several in found.items() if {finding.kind for finding in several} - NOT_BY_SYNC]
    if stale:
        options = () if asked is None else ("--transformers", asked)
        lines.append(
            f"to make {'it' if len(stale) == 1 else 'them'} anew with your edits: {typed('sync', *stale, *options)}"
        )
    return "\n".join(lines) + "\n"


def exit_code(found: Found) -> int:
    """Return 1 if a package is out of date, else 2 if of one nobody can tell, else 0."""
    kinds = {finding.kind for several in found.values() for finding in several}
    return 1 if kinds - {CANNOT_TELL} else 2 if kinds else 0


def _line(folder: str, several: Sequence[Finding]) -> str:
    if not several:
        return _green(folder)
    kinds = {finding.kind for finding in several}
    state = "cannot tell" if kinds == {CANNOT_TELL} else "out of date"
    edited = "" if kinds & NOT_COMPARED else _edits(folder)
    return f"{state} {folder}: {'; '.join([*(finding.message for finding in several), *([edited] if edited else [])])}"


def wrapped(text: str, width: int) -> str:
    """Return lines broken at spaces where they pass `width`, the rest below the text behind the first words."""
    lines = [
        textwrap.wrap(line, width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "".join(f"{piece}\n" for pieces in lines for piece in pieces)


def as_json(found: Found) -> str:
    """Return every finding with its places."""
    data = {folder: [asdict(finding) for finding in several] for folder, several in found.items()}
    unverified = [folder for folder in found if not rebuild.is_verified(Path(folder))]
    return (
        json.dumps(
            {**json_report.envelope("check"), "packages": data, "unverified": unverified},
            indent=2,
            sort_keys=True,
            ensure_ascii=False,
        )
        + "\n"
    )


def as_sarif(found: Found) -> str:
    """Return SARIF 2.1.0, which code scanning reads; paths are relative to the working folder."""
    rules = [{"id": kind, "shortDescription": {"text": text}} for kind, text in KINDS.items()]
    driver = {
        "name": "rewrite check",
        "version": rewrite.__version__,
        "rules": rules,
    }
    results = [_result(finding) for several in found.values() for finding in several]
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    data = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def as_github(found: Found) -> str:
    """Return one workflow command for every place: GitHub shows them on the lines of a pull request."""
    return "".join(line for several in found.values() for finding in several for line in _commands(finding))


FORMATS: Mapping[str, Callable[[Found], str]] = {
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}


def _green(folder: str) -> str:
    """Return what is said of a package that is as it would be made now: nobody may read of it that it was verified."""
    edited = _edits(folder)
    if not rebuild.is_verified(Path(folder)):
        never = f"never verified ({typed('verify', folder)})"
        return f"unverified  {folder}: {f'{edited}, ' if edited else ''}{never}"
    how = "accepted" if (Path(folder) / acceptance.NAME).is_file() else "verified"
    return f"up to date  {folder}{f': {edited}, {how}' if edited else ''}"


def _edits(folder: str) -> str:
    """Return which classes and functions the user edited, nothing where none is."""
    places = edits.edited_places(Path(folder), read_lock(Path(folder)))
    shown = places if len(places) <= MOST_EDITS else [*places[:MOST_EDITS], f"{len(places) - MOST_EDITS} more"]
    return f"your edits in {', '.join(shown)}" if places else ""


def _result(finding: Finding) -> dict[str, Any]:
    locations = [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": _uri(place.path)},
                "region": {"startLine": place.line, "endLine": place.end},
            }
        }
        for place in finding.places
    ]
    return {
        "ruleId": finding.kind,
        "level": "error",
        "message": {"text": finding.message},
        "locations": locations,
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(_relative(path).replace("\\", "/"))


def _relative(path: str) -> str:
    """Return a path below the working folder relative to it."""
    pure, here = PurePath(path), Path.cwd()
    return str(pure.relative_to(here)) if pure.is_absolute() and pure.is_relative_to(here) else str(pure)


def _commands(finding: Finding) -> Iterator[str]:
    for place in finding.places:
        yield f"::error {_properties(finding, place)}::{_escaped(finding.message)}\n"


def _properties(finding: Finding, place: Place) -> str:
    values = {
        "file": _relative(place.path),
        "line": str(place.line),
        "endLine": str(place.end),
        "title": f"rewrite check, {finding.kind}",
    }
    return ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in values.items()
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
