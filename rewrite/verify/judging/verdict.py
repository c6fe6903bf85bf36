"""What the verifier is asked and what it answers, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not run"]
Failure = Literal["", "differs", "wrong", "raised"]
"""How a check failed: it ran, and a figure is over its bound; it ran, and what it looks for is not so; it did not run
to its end."""
Figure = float | int | str | bool
POLYNOMIALS = "equal as polynomials"
"""The check in a finite ring, which is said where it passes, too."""
ITSELF = "itself: "
"""What the names of checks begin with that compare the rewritten side's ways of running with each other."""
IMPORTS = "both sides import"
"""The name of the check without which there is nothing to compare."""
GATES = ("structure", "parity", "model", "generation", "latency")


@dataclass(frozen=True)
class Options:
    """How to verify.

    `dtype` is the low precision (`bfloat16`, `float16`); `weights` a checkpoint folder or hub name; `config` holds
    overrides for the small configuration; `shape` is the size measured for latency (`tiny`, `1b`, `8b`); `seeds` are
    independent inputs a check.
    `keep_going` runs the later gates after a failure; `fail_fast` ends a gate at its first failure;
    without `others` the main class alone is compared. `reach` counts which lines of the rewritten side ran, unless
    it is `quick`; `configuration` varies the fields that the model reads, one after another, or if `quick` at once.
    `workers` processes run the checks of a gate on a CPU; on a GPU, and with a checkpoint, there is one. `checks` are
    the names of those to run, with what they cannot do without; all if it is empty. `itself` compares the rewritten
    side's own ways of running with each other too, with random values of parameters that the original does not have.
    `main_class` is what the main class is called on the rewritten side, where its name is not the original's.
    """

    device: str = "cpu"
    dtype: str = "bfloat16"
    weights: str | None = None
    seed: int = 0
    seeds: int = 2
    quick: bool = False
    shape: str | None = None
    gates: tuple[str, ...] = GATES
    clean_process: bool = True
    compile: bool = True
    keep_going: bool = False
    fail_fast: bool = False
    others: bool = True
    reach: bool = True
    configuration: bool = True
    workers: int = 1
    checks: tuple[str, ...] = ()
    itself: bool = False
    main_class: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check: what was measured, and if it did not pass, why."""

    name: str
    status: Status
    detail: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0
    failure: Failure = ""


@dataclass(frozen=True)
class Gate:
    """The checks of one gate, in the order they ran."""

    number: int
    name: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def status(self) -> Status:
        """Failed if any check failed, not run if none ran."""
        statuses = {check.status for check in self.checks}
        return "failed" if "failed" in statuses else "passed" if "passed" in statuses else "not run"

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def said_first(self) -> Check:
        """Of the failures the one that explains others: an import, or ways of running that differ."""
        telling = (check for check in self.failures if check.name.startswith((IMPORTS, ITSELF)))
        named = (check for check in self.failures if check.name != POLYNOMIALS)  # which says that, and not where
        return next(telling, next(named, self.failures[0]))


@dataclass(frozen=True)
class Divergence:
    """The first module whose output differs although its inputs agree, and the largest error there.

    `place` is where the rewritten side computes it (`modeling_llama.py:312`); `between` names the modules in it after
    which and before which it goes wrong; `likely` is what the difference looks like. Each is empty where unknown.
    """

    module: str
    kind: str
    error: float
    bound: float
    index: tuple[int, ...]
    expected: float
    found: float
    scenario: str
    note: str = ""
    place: str = ""
    between: str = ""
    likely: str = ""


@dataclass(frozen=True)
class Reached:
    """How much of a file of the rewritten side no check ran: `missed` of its `lines`, as numbers in `where`."""

    file: str
    lines: int
    missed: int
    branches: int
    missed_branches: int
    where: str


@dataclass(frozen=True)
class ConfigField:
    """A field of the configuration that the model reads: the values it was given, or why it kept its own."""

    name: str
    values: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """How many `names` of a kind (the arguments of `forward`, the outputs) a class has, and those that `missed`.

    An argument is missed that no check gave a value, an output that no check compared.
    """

    model_class: str
    kind: str
    names: int
    missed: tuple[str, ...]


@dataclass(frozen=True)
class Identity:
    """Which file one side was, by content."""

    name: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Verdict:
    """The answer: `passed` only if every gate asked for ran and no check in it failed."""

    passed: bool
    original: Identity | None
    rewritten: Identity | None
    model_class: str
    gates: tuple[Gate, ...]
    divergence: Divergence | None
    reason: str
    environment: Mapping[str, str]
    options: Options
    seconds: float
    reached: tuple[Reached, ...] = ()
    config_fields: tuple[ConfigField, ...] = ()
    asked: tuple[Asked, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 for a pass, 1 otherwise."""
        return 0 if self.passed else 1

    @property
    def raised(self) -> tuple[Check, ...]:
        """The checks that could not run to their end."""
        return tuple(check for gate in self.gates for check in gate.failures if check.failure == "raised")

    @property
    def failed_gate(self) -> Gate | None:
        """The first gate that failed."""
        return next((gate for gate in self.gates if gate.status == "failed"), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON values; infinities and NaN become strings."""
        plain: dict[str, Any] = _plain(asdict(self))
        for gate, written in zip(self.gates, plain["gates"], strict=True):
            written["status"] = gate.status
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
