"""The command line's way into the verifier: what it is asked, how its verdict is kept and put in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rewrite import gate
from rewrite.errors import MissingLibrary
from rewrite.lock import Lock, sha256

LATENCY_ONLY = ("latency",)


@dataclass(frozen=True)
class Request:
    """What the user asked of a verification; None leaves the choice to the verifier."""

    device: str | None = None
    dtype: str | None = None
    weights: Path | None = None
    shape: str | None = None
    gates: tuple[str, ...] = ()


def require_libraries(needed_for: str) -> None:
    """Check that torch and transformers are installed.

    Raises:
        MissingLibrary: if one is not.
    """
    for library in gate.missing_libraries():
        raise MissingLibrary(library, needed_for)


def judge(original: str | Path, rewritten: str | Path, request: Request, progress: Callable[[str], None]) -> Any:
    """Run the verifier on two sides and return its verdict.

    Raises:
        VerificationError: if the verification cannot be carried out.
    """
    from rewrite.verify import Options, verify

    weights = str(request.weights) if request.weights is not None else None
    chosen = {**asdict(request), "weights": weights}
    options = Options(**{name: value for name, value in chosen.items() if value})
    return verify(original, rewritten, options, progress)


def rendered(verdict: Any) -> str:
    """Return the verifier's own report of a verdict."""
    from rewrite.verify import render

    return str(render(verdict))


def summary(verdict: Any) -> str:
    """Return a verdict in one line."""
    gates = ", ".join(f"{gate.name} {gate.status}" for gate in verdict.gates)
    word = "pass" if verdict.passed else "FAIL"
    return f"{word} ({gates}; {verdict.seconds:.0f} s)" + (f": {verdict.reason}" if verdict.reason else "")


def record(verdict: Any, lock: Lock, folder: Path) -> str:
    """Return the text of `verify.json`: the verdict on the files in `folder` as they are, without machine paths."""
    data = verdict.to_json()
    names = sorted(name for name in lock.files if not name.startswith("."))
    files = {name: sha256((folder / name).read_bytes()) for name in names if (folder / name).is_file()}
    data["original"] = {"name": lock.source.module or lock.source.path, "sha256": lock.source.sha256}
    data["rewritten"] = {"name": lock.modeling, "sha256": files.get(lock.modeling), "files": files}
    data["options"].pop("weights", None)
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
