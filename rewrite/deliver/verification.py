"""The command line's way into the verifier: what it is asked, and how its verdict is kept and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.deliver import precheck
from rewrite.errors import MissingLibrary, NotTrusted
from rewrite.package.lock import Lock, sha256

if TYPE_CHECKING:
    from rewrite.upstream.source import Source
    from rewrite.verify import Verdict

LATENCY_ONLY = ("latency",)


@dataclass(frozen=True)
class Request:
    """What the user asked of a verification; None and empty leave the choice to the verifier."""

    device: str | None = None
    dtype: str | None = None
    weights: Path | None = None
    shape: str | None = None
    gates: tuple[str, ...] = ()
    quick: bool = False


def require_libraries(needed_for: str) -> None:
    """Check that torch and transformers are installed.

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
    from rewrite.verify.device import usable_device

    chosen: dict[str, Any] = {
        "device": usable_device(request.device),
        "dtype": request.dtype,
        "weights": str(request.weights) if request.weights is not None else None,
        "shape": request.shape,
        "gates": request.gates,
        "quick": request.quick,
    }
    options = Options(**{name: value for name, value in chosen.items() if value})
    return verify(original, rewritten, options, progress)


def rendered(verdict: Verdict) -> str:
    """Return the verifier's own report of a verdict."""
    from rewrite.verify import render

    return render(verdict)


def summary(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    from rewrite.verify import summary

    return summary(verdict)


def record(verdict: Verdict, lock: Lock, folder: Path) -> str:
    """Return the text of `verify.json`: the verdict on the files in `folder` as they are, without machine paths."""
    data = verdict.to_json()
    names = sorted(name for name in lock.files if not name.startswith("."))
    files = {name: sha256((folder / name).read_bytes()) for name in names if (folder / name).is_file()}
    data["original"] = {"name": lock.source.module or lock.source.path, "sha256": lock.source.sha256}
    data["rewritten"] = {"name": lock.modeling, "sha256": files.get(lock.modeling), "files": files}
    data["options"].pop("weights", None)
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
