"""The command line's way into the verifier: what it is asked, and how its verdict is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite import gc_paused
from rewrite.delivery import precheck
from rewrite.errors import MissingLibrary, UsageError

if TYPE_CHECKING:
    from rewrite.source.resolve import Source
    from rewrite.verify import Verdict


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
        UsageError: if it came with a checkpoint and the user did not allow its code to run.
    """
    if source.remote_code and not trusted:
        raise UsageError(
            f"{source.path} came with a checkpoint, and this would run it: --trust-remote-code allows that."
        )


def judge(original: str | Path, rewritten: str | Path, request: Request, progress: Callable[[str], None]) -> Verdict:
    """Run the verifier on two sides and return its verdict.

    Raises:
        VerificationError: if the verification cannot be carried out.
    """
    from rewrite.verify import Options, verify
    from rewrite.verify.models.device import usable_device
    from rewrite.verify.parallel import usable_workers

    with gc_paused.paused():  # it imports torch
        device = usable_device(request.device)
    weights = str(request.weights) if request.weights is not None else None
    chosen: dict[str, Any] = {**vars(request), "device": device, "weights": weights, "workers": usable_workers()}
    options = Options(**{name: value for name, value in chosen.items() if value})
    if request.checks:
        options = replace(options, reach=False, clean_process=False)
    return verify(original, rewritten, options, progress)


def rendered(verdict: Verdict, accepted: bool = False) -> str:
    """Return the verifier's own report of a verdict; `accepted`: what fails in it was."""
    from rewrite.verify import render

    return render(verdict, accepted=accepted)


def summary(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    from rewrite.verify import summary

    return summary(verdict)
