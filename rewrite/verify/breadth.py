"""The verifier's answer for every class of one file: the main class in full, each other by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rewrite.errors import VerificationError

from .calls.single_forward import low_precision_alone
from .generation.loop_scenarios import talk_alone
from .judging.checks import CheckRun, describe, run_check
from .judging.compare import NotRun
from .judging.verdict import Check, Figure, Options
from .models import loaded_sides
from .models.configs import small_variants
from .models.model_pair import Workbench
from .models.subjects import Subject, model_classes, paired
from .runner import settled, verify
from .secondary_classes import class_alone

Outcome = Literal["pass", "fail", "not run"]
OPTIONS = Options(
    quick=True,
    compile=False,
    clean_process=False,
    gates=("structure", "parity", "generation"),
    keep_going=True,
    others=False,
    configuration=False,
)
OUTCOMES: dict[str, Outcome] = {"passed": "pass", "failed": "fail", "not run": "not run"}


def class_outcomes(
    original: Path, folder: Path, device: str = "cpu"
) -> tuple[dict[str, Outcome], list[tuple[str, Outcome, str, bool]]]:
    """Verify a package on a device.

    Returns the gates of the main class, and name, outcome, detail and causality of every class. The main class is the
    first causal language model, or base, that can be built small.
    """
    options = replace(OPTIONS, device=device)
    left, right = loaded_sides.load(loaded_sides.locate(original)), loaded_sides.load(loaded_sides.locate(folder))
    subjects = paired(left, right)
    missing = [cls.__name__ for cls in model_classes(left) if not hasattr(right, cls.__name__)]
    gates: dict[str, Outcome] = {}
    rows: list[tuple[str, Outcome, str, bool]] = [
        (name, "fail", "the rewritten file lacks it", False) for name in missing
    ]
    main = next((subject for subject in subjects if subject.causal), None)
    with settled(options):
        for subject in subjects:
            if subject is main:
                continue
            check = run_check(CheckRun(subject.name, partial(_alone, subject, options)))
            rows.append((subject.name, OUTCOMES[check.status], brief(check.detail), subject.causal))
    if main is not None:
        gates, row = _main(original, folder, main, options)
        rows.append(row)
    return gates, sorted(rows)


def brief(text: str) -> str:
    """A reason in one line, without what a user of a single model could do about it."""
    return " ".join(text.split()).partition(", so there is nothing to verify with")[0][:300]


def _main(
    original: Path, folder: Path, main: Subject, options: Options
) -> tuple[dict[str, Outcome], tuple[str, Outcome, str, bool]]:
    try:
        verdict = verify(original, folder, options)
    except VerificationError as error:
        return {}, (main.name, "not run", brief(str(error)), main.causal)
    except Exception as error:  # foreign model code raises what it likes, outside any check too
        return {}, (main.name, "fail", describe(error), main.causal)
    outcomes: dict[str, Outcome] = {gate.name: OUTCOMES[gate.status] for gate in verdict.gates}
    failed: list[Check] = [check for gate in verdict.gates for check in gate.failures]
    detail = "; ".join(f"{check.name}: {check.detail}" for check in failed[:3]) or verdict.reason
    outcome: Outcome = "fail" if failed else "pass" if verdict.passed else "not run"
    return outcomes, (main.name, outcome, detail, main.causal)


def _alone(subject: Subject, options: Options) -> Mapping[str, Figure]:
    """What is cheap in fp64, in which no kernel takes part; on a GPU a forward pass in 16 bits too."""
    try:
        variants = small_variants(subject.original, subject.causal, {})
    except VerificationError as error:
        raise NotRun(str(error)) from error
    bench = Workbench(subject, variants[:1], options)
    figures = {**class_alone(bench), **talk_alone(bench)}
    return figures if options.device == "cpu" else {**figures, **low_precision_alone(bench)}
