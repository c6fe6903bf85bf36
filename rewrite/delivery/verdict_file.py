"""`verify.json`: what a package keeps of its last verdict, on one screen, and how that is read again.

Whoever reviews a package sees whether it passed, what that holds for, a line for each gate, and in full what failed.
Every check with its figures is in a report (`rewrite verify DIR --json FILE`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.delivery import json_report
from rewrite.errors import VerdictNotReadable
from rewrite.offers import VENDORED
from rewrite.package import syntax, vendored_files
from rewrite.package.assemble import VERDICT_NAME
from rewrite.package.lock import Lock, sha256

if TYPE_CHECKING:
    from rewrite.verify import Verdict

FORM = 2
"""Of the file: it grows where a key goes, or means something else."""
QUICK = "quick"
"""Where it has a quick verdict beside the full one on the same files."""
ASKED = ("device", "dtype", "quick", "seed")
"""The options that are always said; of the others, those that are not as they are without being asked for."""
UNSAID = ("checks", "weights", "workers")
"""Those that say nothing of what was found, or hold a path of this machine."""
Covered = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Record:
    """The text of `verify.json`, and what is to be said about it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """What `verify.json` says."""

    passed: bool
    reason: str
    environment: Mapping[str, str]
    gates: Sequence[Mapping[str, Any]]
    """Name, status, how many checks passed, failed and did not run, and the figures nearest to their bounds."""
    covers: Covered
    """sha256 and digest of what it says (`rewrite.package.syntax`) of each file; a vendored runtime is one entry."""
    original: Mapping[str, str]
    runtime: Mapping[str, str]
    options: Mapping[str, Any]
    failed: Sequence[Mapping[str, Any]] = ()
    """Each check that failed: gate, name, how, what it says and its figures."""
    refused: Sequence[str] = ()
    """What fails of a package that something was accepted of, and was not accepted."""
    quick: Mapping[str, Any] = field(default_factory=dict)

    @property
    def raised(self) -> list[str]:
        """The checks that could not run to their end, and why."""
        return [f"{one['gate']}: {one['name']}: {one['detail']}" for one in self.failed if one["failure"] == "raised"]

    @property
    def quick_passed(self) -> bool:
        """Whether a later quick verification of the same files passed, or there was none."""
        return self.quick.get("passed", True) is True

    def changed(self, folder: Path, names: Iterable[str]) -> str | None:
        """Return the first file that is not as it was verified, None if all are.

        Args:
            folder: the package.
            names: its files.
        """
        there = _groups(folder, names)
        for name in sorted({*there, *self.covers}):
            known = self.covers.get(name)
            if known is None or name not in there or not _alike(there[name], known):
                return name
        return None


def read(folder: Path) -> Kept | None:
    """Return the verdict that is kept in a package, None if there is none.

    Raises:
        VerdictNotReadable: if the file is not as this version writes it.
    """
    path = folder / VERDICT_NAME
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["form"] != FORM or data["passed"] not in (True, False):
            raise ValueError(data["form"])
        kept = Kept(**{one.name: data[one.name] for one in fields(Kept) if one.name in data})
        _ = kept.raised, kept.quick_passed, [dict(one) for one in (*kept.gates, *kept.covers.values())]
        _ = dict(kept.environment), kept.original["sha256"], kept.runtime["sha256"], kept.options["quick"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VerdictNotReadable(folder, VERDICT_NAME) from error
    return kept


def record(verdict: Verdict, lock: Lock, folder: Path, before: Path, refused: Sequence[str] = ()) -> Record:
    """Return what is to be kept of the verdict on the files in `folder` as they are.

    What is `refused` of it, since it is not what was accepted of the package, is kept with it.
    A quick verdict never takes the place of a full one on the same files, which is in the folder `before` if anywhere:
    the full one stays, with the quick one beside it.
    """
    found = _found(verdict, refused)
    files = {name: _digests(texts) for name, texts in _groups(folder, importable(lock)).items()}
    version, digest = vendored_files.runtime()
    data = {
        **found,
        "form": FORM,
        "covers": files,
        "original": {"name": lock.source.module or lock.source.path, "sha256": lock.source.sha256},
        "runtime": {"version": version, "sha256": digest},
    }
    full = _full(before) if verdict.options.quick else None
    if full is None or full.original != data["original"] or full.runtime != data["runtime"]:
        return Record(_text(data))
    if full.changed(folder, importable(lock)) is not None:
        return Record(_text(data))
    state = "passed" if full.passed else "did not pass"
    note = f"{VERDICT_NAME} keeps the full verification of these files, which {state}; this quick one is beside it"
    kept = json.loads((before / VERDICT_NAME).read_text(encoding="utf-8"))
    return Record(_text({**kept, QUICK: found}), note)


def importable(lock: Lock) -> list[str]:
    """Return the files of a package that a verdict is on."""
    return [name for name in lock.files if not name.startswith(".")]


def _full(folder: Path) -> Kept | None:
    """Return the full verdict that a package has, None if it has none."""
    try:
        kept = read(folder)
    except VerdictNotReadable:
        return None
    return kept if kept is not None and kept.options["quick"] is False else None


def _found(verdict: Verdict, refused: Sequence[str]) -> dict[str, Any]:
    """Return what a verdict found, without times: the same package has the same text."""
    from rewrite.verify import not_verified

    plain = verdict.to_json()
    divergence = plain["divergence"]
    said = {
        "passed": verdict.passed,
        "reason": verdict.reason,
        "model_class": verdict.model_class,
        "environment": plain["environment"],
        "options": _asked(verdict, plain["options"]),
        "gates": [*_gates(verdict)],
    }
    more = {
        "failed": [*_failed(plain["gates"])],
        "not_run": [*_not_run(verdict)],
        "not_verified": not_verified(verdict),
        "divergence": divergence and {**divergence, "index": str(divergence["index"])},
        "refused": list(refused),
    }
    return said | {name: value for name, value in more.items() if value}


def _asked(verdict: Verdict, plain: Mapping[str, Any]) -> dict[str, Any]:
    ordinary = type(verdict.options)()
    return {
        name: value
        for name, value in plain.items()
        if name in ASKED or (name not in UNSAID and getattr(verdict.options, name) != getattr(ordinary, name))
    }


def _gates(verdict: Verdict) -> Iterator[dict[str, Any]]:
    from rewrite.verify import worst

    for gate in verdict.gates:
        counts = {name: sum(one.status == name for one in gate.checks) for name in ("passed", "failed", "not run")}
        near = worst(gate)
        yield {"name": gate.name, "status": gate.status, **counts, **({"worst": near} if near else {})}


def _failed(gates: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for gate in gates:
        for check in gate["checks"]:
            if check["status"] == "failed":
                kept = {name: check[name] for name in ("name", "detail", "failure")}
                yield {"gate": gate["name"], **kept, "figures": _in_words(check["figures"])}


def _in_words(figures: Mapping[str, Any]) -> str:
    """Return figures as text, so that a check is a line of the file whatever it measured."""
    said = (f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in figures.items())
    return ", ".join(said)


def _not_run(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield the reasons for which checks did not run, with their names."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for gate in verdict.gates:
        for check in gate.checks:
            if check.status == "not run":
                reasons.setdefault((gate.name, check.detail), []).append(check.name)
    for (gate_name, reason), names in sorted(reasons.items()):
        yield {"gate": gate_name, "reason": reason, "checks": sorted(names)}


def _groups(folder: Path, names: Iterable[str]) -> dict[str, dict[str, bytes]]:
    """Return the texts of the files that are there, by name; those of a vendored runtime under its folder's."""
    groups: dict[str, dict[str, bytes]] = {}
    for name in sorted(names):
        if (folder / name).is_file():
            inside = name.startswith(f"{VENDORED}/")
            groups.setdefault(VENDORED if inside else name, {})[name] = (folder / name).read_bytes()
    return groups


def _alike(texts: Mapping[str, bytes], known: Mapping[str, str]) -> bool:
    """Return whether files are those of two digests, in whatever layout."""
    return _bytes(texts) == known.get("sha256") or _says(texts) == known.get("syntax")


def _digests(texts: Mapping[str, bytes]) -> dict[str, str]:
    return {"sha256": _bytes(texts), "syntax": _says(texts)}


def _bytes(texts: Mapping[str, bytes]) -> str:
    return _joined({name: sha256(text) for name, text in texts.items()})


def _says(texts: Mapping[str, bytes]) -> str:
    return _joined(syntax.digests(texts))[: syntax.LENGTH]


def _joined(digests: Mapping[str, str]) -> str:
    """Return one digest of several files, that of the file where there is one."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return sha256("".join(f"{name} {digest}\n" for name, digest in sorted(digests.items())).encode("utf-8"))


def _text(data: Mapping[str, Any]) -> str:
    return json_report.by_the_line(data) + "\n"
