"""Verifies in a process that imports torch and transformers while this one still rewrites: that takes as long."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from rewrite.delivery import precheck, verification

if TYPE_CHECKING:
    from rewrite.delivery.verification import Request
    from rewrite.verify import Verdict

Progress = Callable[[str], None]
Judge = Callable[["str | Path", "str | Path", "Request", Progress], "Verdict"]
END_SECONDS = 5


@contextlib.contextmanager
def judge(wanted: bool, quick: bool = False) -> Iterator[Judge | None]:
    """Yield what verifies in another process, which begins to import now; None where nothing would be gained."""
    alone = not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2
    if not wanted or alone or "torch" in sys.modules or precheck.missing_libraries():
        yield None
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, ours, quick))
    process.start()
    theirs.close()
    try:
        yield partial(_asked, ours)
    finally:
        ours.close()
        process.terminate()
        process.join(END_SECONDS)
        process.kill()
        process.join()


def _asked(
    pipe: Connection, original: str | Path, rewritten: str | Path, request: Request, progress: Progress
) -> Verdict:
    """The other process's verdict; where it has none, that of this process, with its error if it raises one."""
    with contextlib.suppress(EOFError, OSError):
        pipe.send((original, rewritten, request))
        while (said := pipe.recv()) is not None:
            if not isinstance(said, str):
                return said  # type: ignore[no-any-return]
            progress(said)
    return verification.judge(original, rewritten, request, progress)


def _serve(pipe: Connection, theirs: Connection, quick: bool) -> None:
    """Import, then judge whatever is asked until nobody asks any more."""
    theirs.close()
    with open(os.devnull, "w") as nowhere, contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        sys.stdout = sys.stderr = nowhere
        from rewrite.verify.preload import MODULES

        for name in MODULES[1:] if quick else MODULES:  # the first is for compiling, which a quick one does not
            importlib.import_module(name)
        while True:
            original, rewritten, request = pipe.recv()
            try:
                verdict = verification.judge(original, rewritten, request, pipe.send)
            except Exception:  # the other process finds the same, and says so
                pipe.send(None)
            else:
                pipe.send(verdict)
