"""Verdicts that nobody had to run for."""

from __future__ import annotations

from pathlib import Path

from rewrite.delivery import verdict_file
from rewrite.package.assemble import VERDICT_NAME
from rewrite.package.lock import read_lock
from rewrite.verify.judging.verdict import Check, Gate, Identity, Options, Verdict

ENVIRONMENT = {"torch": "2.13", "device": "cpu"}


def verdict(*checks: Check, quick: bool = False) -> Verdict:
    """A verdict of one gate; one check that passed if none is given."""
    gate = Gate(2, "parity", checks or (Check("logits", "passed"),), 0.1)
    reason = "; ".join(f"gate 2 (parity): {check.name}: {check.detail}" for check in gate.failures)
    side = Identity("/here/a.py", "/here/a.py", "0" * 64)
    options = Options(quick=quick, workers=7)
    return Verdict(not reason, side, side, "TinyLlama", (gate,), None, reason, ENVIRONMENT, options, 0.1)


def keep(folder: Path, *checks: Check) -> str:
    """Put the verdict on a package's files as they are into the package, and return its text."""
    record = verdict_file.record(verdict(*checks), read_lock(folder), folder, folder)
    (folder / VERDICT_NAME).write_text(record.text)
    return record.text
