"""Changes of numbers or structure that a user means: recorded once, with the verifier's figures, and held to later.

What is accepted is what checks found that ran. One that could not run has found nothing, so it is never accepted; and
one that ran when the rest was accepted has to go on running.

`accepted.json` lies in the package and goes through review like everything in it. It holds for the files as they were
when it was written; of a package that is made anew it allows what failed before to fail again, no worse.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.delivery import json_report
from rewrite.delivery.acceptable import ERRORS, SAYS, failed, named, raised
from rewrite.errors import AcceptanceNotReadable
from rewrite.package import snapshots, syntax
from rewrite.package.assemble import INIT
from rewrite.package.lock import Lock

if TYPE_CHECKING:
    from rewrite.verify import Verdict

NAME = "accepted.json"
MOST_GROWTH = 2.0
"""By how much an accepted error may grow: another upstream and other roundings change it by tenths, a second change of
the model that hides behind the first is not of the same size."""
LEAST_COSINE = 0.2
"""By how much the cosine with what the original computes may fall."""
LONGEST = 300
"""Characters of what is said of a check."""
Failed = Mapping[str, Mapping[str, Any]]
"""Figures of the checks that failed, by gate and name."""


@dataclass(frozen=True)
class Acceptance:
    """What was accepted, and why."""

    reason: str
    files: Mapping[str, str]
    """What each file of the package said (`rewrite.package.syntax`)."""
    original: str
    """sha256 of the original that it was compared with."""
    against_original: Failed
    against_generated: Failed
    ran: Mapping[str, tuple[str, ...]]
    """The checks that passed then, by gate: they have to run later too."""
    quick: bool = False
    device: str = "cpu"
    main_class: str | None = None
    """What the main class is called in the package, where that had to be said."""

    def covers(self, folder: Path, lock: Lock) -> bool:
        """Return whether the files of a package are those that were accepted."""
        return self.original == lock.source.sha256 and dict(self.files) == _digests(folder, lock)

    def refused(self, verdict: Verdict) -> list[str]:
        """Return in words what does not run in a verdict, and what fails and was not accepted, or is worse."""
        found = [
            f"{name} {'ran when it was accepted and does not any more' if name in self._ran else 'could not run'}: "
            f"{check.detail}"
            for name, check in raised(verdict)
        ]
        less = " (what was accepted was verified with --quick)" if self.quick and not verdict.options.quick else ""
        found += [
            f"{said}{less}" for name, figures in failed(verdict).items() if (said := self._refused(name, figures))
        ]
        found += self._stopped(verdict)
        return [textwrap.shorten(said, LONGEST, placeholder=" …") for said in found] or (
            [] if verdict.passed or failed(verdict) else [verdict.reason]
        )

    @property
    def _ran(self) -> set[str]:
        passed = {f"{gate}: {name}" for gate, names in self.ran.items() for name in names}
        return passed | set(self.against_original)

    def _stopped(self, verdict: Verdict) -> Iterator[str]:
        """Yield the checks that ran when it was accepted and do not in a verdict that was asked for as much."""
        if (verdict.options.quick, verdict.options.device) != (self.quick, self.device):
            return
        there = dict(named(verdict))
        for name in sorted(self._ran) if all(gate in {g.name for g in verdict.gates} for gate in self.ran) else ():
            if name not in there:
                yield f"{name} ran when it was accepted and is not there any more"
            elif there[name].status == "not run":
                yield f"{name} ran when it was accepted and does not any more: {there[name].detail}"

    def _refused(self, name: str, figures: Mapping[str, Any]) -> str | None:
        if name not in self.against_original:
            return f"{name} was not accepted"
        known = self.against_original[name]
        if figures.get(SAYS) != known.get(SAYS):
            return f"{name} finds something else than what was accepted: {figures.get(SAYS) or 'an error'}"
        if _number(figures.get("cosine")) < _number(known.get("cosine")) - LEAST_COSINE:
            return f"{name}: cosine {figures['cosine']:.3g}, accepted were {known['cosine']:.3g}"
        size, before = _number(figures.get("size")), _number(known.get("size"))
        if "size" in known and not before / MOST_GROWTH <= size <= before * MOST_GROWTH:
            return f"{name}: size {size:.3g} of the original's, accepted were {before:.3g}"
        for figure in ERRORS:
            now, then = _number(figures.get(figure)), _number(known.get(figure))
            if now > then * MOST_GROWTH:
                return f"{name}: {figure} {now:.3g}, accepted were {then:.3g}"
        return None

    def to_json(self) -> str:
        """Return the text of the file: sorted, one trailing newline."""
        data = {
            "reason": self.reason,
            "files": dict(self.files),
            "original": {"sha256": self.original, "failed": dict(self.against_original)},
            "generated": {"failed": dict(self.against_generated)},
            "ran": {gate: list(names) for gate, names in self.ran.items()},
            "options": {"quick": self.quick, "device": self.device, "class": self.main_class},
        }
        return json_report.by_the_line(data) + "\n"


def of(reason: str, folder: Path, lock: Lock, original: Verdict, generated: Verdict) -> Acceptance:
    """Return the record of a package that was compared with its original and with its generated text."""
    ran = {
        gate.name: tuple(sorted(check.name for check in gate.checks if check.status == "passed"))
        for gate in original.gates
        if gate.name != "latency"  # of which the machine decides what runs
    }
    options = original.options
    return Acceptance(
        reason,
        _digests(folder, lock),
        lock.source.sha256,
        failed(original),
        failed(generated),
        ran,
        options.quick,
        options.device,
        options.main_class,
    )


def renewed(kept: Acceptance, folder: Path, lock: Lock, verdict: Verdict) -> Acceptance:
    """Return what was accepted for the files as they are now; the figures stay, so that they do not creep."""
    now = {name: figures for name, figures in kept.against_original.items() if name in failed(verdict)}
    return replace(kept, files=_digests(folder, lock), original=lock.source.sha256, against_original=now)


def read(folder: Path) -> Acceptance | None:
    """Return what was accepted of the package in `folder`, None if nothing was.

    Raises:
        AcceptanceNotReadable: if the file is not one that this tool wrote.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        original, generated = data["original"], data["generated"]
        tables = [dict(original["failed"]), dict(generated["failed"])]
        if not all(isinstance(figures, dict) for table in tables for figures in table.values()):
            raise TypeError("figures")
        ran = {str(gate): tuple(map(str, names)) for gate, names in dict(data["ran"]).items()}
        asked = data["options"]
        return Acceptance(
            str(data["reason"]),
            dict(data["files"]),
            str(original["sha256"]),
            tables[0],
            tables[1],
            ran,
            bool(asked["quick"]),
            str(asked["device"]),
            asked.get("class"),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise AcceptanceNotReadable(path) from error


def worst(found: Failed) -> str:
    """Return failed checks in one line: how many, and the one with the largest error."""
    if not found:
        return "nothing differs"
    count = f"{len(found)} {'check' if len(found) == 1 else 'checks'} differ{'s' if len(found) == 1 else ''}"
    measured = {name: figures for name, figures in found.items() if "max" in figures}
    if not measured:
        return f"{count}: {min(found)}"
    errors = {name: _number(figures["max"]) for name, figures in measured.items()}
    name = max(errors, key=lambda each: (math.isfinite(errors[each]), errors[each], each))  # no infinity, if it can be
    return f"{count}, the most {name}: {errors[name]:.3g}"


@contextmanager
def generated(folder: Path, lock: Lock) -> Iterator[Path]:
    """Give a copy of a package in which its modeling file and `__init__.py` are as they were generated."""
    with tempfile.TemporaryDirectory(prefix="rewrite-") as place:
        copy = Path(place) / folder.resolve().name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (lock.modeling, INIT):
            if (text := snapshots.text(folder, name)) is not None:
                (copy / name).write_bytes(text)
        yield copy


def _digests(folder: Path, lock: Lock) -> dict[str, str]:
    names = [name for name in lock.files if not name.startswith(".") and (folder / name).is_file()]
    return syntax.digests({name: (folder / name).read_bytes() for name in names})


def _number(value: object) -> float:
    """Return a figure as a number; the verifier writes infinities and NaN as text, and both are the worst."""
    if isinstance(value, str):
        return math.inf
    return float(value) if isinstance(value, (int, float)) else 0.0
