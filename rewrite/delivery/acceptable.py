"""What of a verdict may be accepted as a change that is meant: what checks found that ran, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewrite.verify import Check, Verdict

ERRORS = ("max", "rms", "max ratio", "rms ratio")
"""The figures of a check that are errors: the larger, the worse."""
SAYS = "says"
"""Among figures where none is an error: what the check found, without the numbers in it."""
_MEASURED = ("parity", "model", "generation")
"""The gates that compare numbers."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\w.+-]*")


def named(verdict: Verdict) -> Iterator[tuple[str, Check]]:
    """Yield every check, by gate and name."""
    return ((f"{gate.name}: {check.name}", check) for gate in verdict.gates for check in gate.checks)


def failed(verdict: Verdict) -> dict[str, dict[str, Any]]:
    """Return what the checks found that ran and failed, as it is written: figures, or words where none is an error."""
    checks = [(gate["name"], check) for gate in verdict.to_json()["gates"] for check in gate["checks"]]
    ran = [(gate, check) for gate, check in checks if check["status"] == "failed" and check["failure"] != "raised"]
    return {f"{gate}: {check['name']}": _found(check) for gate, check in ran}


def _found(check: Mapping[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = dict(check["figures"])
    return figures if figures.keys() & {*ERRORS} else {**figures, SAYS: _without_numbers(check["detail"])}


def _without_numbers(text: str) -> str:
    """Return what a check says without numbers, which another input or version changes."""
    return re.sub(r"\[#(, #)*\]", "[#]", _NUMBER.sub("#", text))


def raised(verdict: Verdict) -> list[tuple[str, Check]]:
    """Return the checks that could not run to their end, by gate and name, those of the commonest cause first."""
    from rewrite.verify.failure_groups import of_verdict

    found = [
        [(f"{cause.gate}: {check.name}", check) for check in cause.checks if check.failure == "raised"]
        for cause in of_verdict(verdict)
    ]
    return [one for several in sorted(found, key=len, reverse=True) for one in several]


def unacceptable(verdict: Verdict) -> str:
    """Return why what fails in a verdict cannot be accepted, `""` where it can."""
    from rewrite.verify.judging.verdict import ITSELF

    checks = [check for _, check in named(verdict)]
    if stopped := raised(verdict):
        (name, first), many = stopped[0], len(stopped) > 1
        said = f"{len(stopped)} of {len(checks)} checks" if many else "a check"
        compares = "they compare" if many else "it compares"
        return f"{said} could not run, so nothing is known of what {compares}. {name}: {first.detail}"
    own = (check for check in checks if check.status == "failed" and check.name.startswith(ITSELF))
    if (first_own := next(own, None)) is not None:
        return f"the package does not agree with itself. {first_own.name}: {first_own.detail}"
    if not any(check.figures for gate in verdict.gates if gate.name in _MEASURED for check in gate.checks):
        return f"no number could be compared. {verdict.reason}"
    return "" if failed(verdict) else verdict.reason
