"""The command line's way into the verifier: what it is asked, and how its verdict is kept and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite import collector
from rewrite.deliver import precheck, report
from rewrite.errors import MissingLibrary, NotTrusted
from rewrite.package import syntax, vendor
from rewrite.package.lock import Lock, sha256

if TYPE_CHECKING:
    from rewrite.upstream.source import Source
    from rewrite.verify import Verdict

LATENCY_ONLY = ("latency",)
QUICK = "quick"
"""Where `verify.json` has a quick verdict beside the full one on the same files."""


@dataclass(frozen=True)
class Request:
    """What the user asked of a verification; None and empty leave the choice to the verifier."""

    device: str | None = None
    dtype: str | None = None
    weights: Path | None = None
    shape: str | None = None
    gates: tuple[str, ...] = ()
    seed: int | None = None
    quick: bool = False
    keep_going: bool = False
    """Run the later gates after a failure too: what was accepted is compared with all of it."""
    checks: tuple[str, ...] = ()
    """Run these checks alone: what failed, once more."""
    itself: bool = False
    """Compare the package's own ways of running with each other too."""
    main_class: str | None = None
    """What the main class is called in the package, where nothing shows it."""


def require_libraries(needed_for: str) -> None:
    """Check that torch, transformers and the runtime are installed.

    Raises:
        MissingLibrary: if one is not.
    """
    for library in precheck.missing_libraries():
        raise MissingLibrary(library, needed_for)


def require_trust(source: Source, trusted: bool) -> None:
    """Check that the file may be run.

    Raises:
        NotTrusted: if it came with a checkpoint and the user did not allow its code to run.
    """
    if source.remote_code and not trusted:
        raise NotTrusted(source.path)


def judge(original: str | Path, rewritten: str | Path, request: Request, progress: Callable[[str], None]) -> Verdict:
    """Run the verifier on two sides and return its verdict.

    Raises:
        VerificationError: if the verification cannot be carried out.
    """
    from rewrite.verify import Options, verify
    from rewrite.verify.models.device import usable_device
    from rewrite.verify.parallel import usable_workers

    with collector.paused():  # it imports torch
        device = usable_device(request.device)
    chosen: dict[str, Any] = {
        "device": device,
        "dtype": request.dtype,
        "weights": str(request.weights) if request.weights is not None else None,
        "shape": request.shape,
        "gates": request.gates,
        "seed": request.seed,
        "quick": request.quick,
        "keep_going": request.keep_going,
        "itself": request.itself,
        "main_class": request.main_class,
        "workers": usable_workers(),
    }
    options = Options(**{name: value for name, value in chosen.items() if value})
    if request.checks:
        options = replace(options, checks=request.checks, reach=False, clean_process=False)
    return verify(original, rewritten, options, progress)


def rendered(verdict: Verdict, accepted: bool = False) -> str:
    """Return the verifier's own report of a verdict; `accepted`: what fails in it was."""
    from rewrite.verify import render

    return render(verdict, accepted=accepted)


def summary(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    from rewrite.verify import summary

    return summary(verdict)


@dataclass(frozen=True)
class Record:
    """The text of `verify.json`, and what is to be said about it."""

    text: str
    note: str = ""


def record(verdict: Verdict, lock: Lock, folder: Path, before: Path, refused: Sequence[str] = ()) -> Record:
    """Return what is to be kept of the verdict on the files in `folder` as they are, without machine paths.

    What is `refused` of it, since it is not what was accepted of the package, is kept with it.
    A quick verdict never takes the place of a full one on the same files, which is in `before` if anywhere: the full
    one stays, with the quick one beside it.
    """
    data = verdict.to_json()
    names = sorted(name for name in lock.files if not name.startswith("."))
    texts = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    files = {name: sha256(text) for name, text in texts.items()}
    data["original"] = {"name": lock.source.module or lock.source.path, "sha256": lock.source.sha256}
    data["rewritten"] = {
        "name": lock.modeling,
        "sha256": files.get(lock.modeling),
        "files": files,
        "syntax": syntax.digests(texts),
    }
    version, digest = vendor.runtime()
    data["rewritten"]["runtime"] = {"version": version, "sha256": digest}
    data["options"].pop("weights", None)
    if refused:
        data["refused"] = list(refused)
    full = _kept(before) if verdict.options.quick else None
    if full is None or full.get("original") != data["original"] or not _same_files(full, data):
        return Record(_text(data))
    state = "passed" if full.get("passed") is True else "did not pass"
    note = f"{before.name} keeps the full verification of these files, which {state}; this quick one is beside it"
    return Record(_text({**full, QUICK: data}), note)


def _kept(path: Path) -> dict[str, Any] | None:
    """Return the full verdict that a file holds, None if it holds none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data if data["options"]["quick"] is False else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _same_files(full: Mapping[str, Any], quick: Mapping[str, Any]) -> bool:
    """Return whether two verdicts are on files that say the same; one of an earlier version knows bytes alone."""
    one, other = full.get("rewritten"), quick["rewritten"]
    if not isinstance(one, dict) or one.get("runtime") != other.get("runtime"):
        return False
    return any(one.get(known) == other[known] for known in ("files", "syntax"))


def _text(data: Mapping[str, Any]) -> str:
    return report.by_the_line(data) + "\n"
