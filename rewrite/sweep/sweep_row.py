"""One line of the sweep's table, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "not run"]


@dataclass
class ClassRow:
    """What happened to one model class."""

    name: str
    outcome: Outcome
    detail: str = ""
    causal: bool = False


@dataclass
class Row:
    """What happened to one modeling file; what was not reached is False or empty."""

    file: str
    """Folder and name, `llama/modeling_llama.py`."""
    sha256: str = ""
    rewritten_sha256: str = ""
    round_trip: bool = False
    deterministic: bool = False
    stable: bool = False
    """A second run over the rewritten text changes nothing."""
    imported: bool = False
    sites: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    """By transform: site, reason, detail."""
    decode_loops: dict[str, str] = field(default_factory=dict)
    """What the tool says of each class that generates: `yes`, or why it has no decode loop."""
    classes: list[ClassRow] = field(default_factory=list)
    gates: dict[str, Outcome] = field(default_factory=dict)
    """Of the file's main class, by the verifier's gates."""
    error: str = ""
    """Why the row ends early: an exception, a crash of its process, its time limit."""
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of rewritten sites."""
        return sum(map(len, self.sites.values()))

    @property
    def outcome(self) -> Outcome:
        """The row in a word."""
        outcomes = {found.outcome for found in self.classes} | set(self.gates.values())
        if self.error or "fail" in outcomes or not (self.round_trip and self.deterministic and self.stable):
            return "fail"
        return "pass" if "pass" in outcomes else "not run"

    def reasons(self) -> Counter[tuple[str, str]]:
        """How often each transform skipped for each reason."""
        return Counter((name, reason) for name, skips in self.skipped.items() for _, reason, _ in skips)

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        skipped = {name: [(s[0], s[1], s[2]) for s in skips] for name, skips in data["skipped"].items()}
        return cls(**{**data, "skipped": skipped, "classes": [ClassRow(**found) for found in data["classes"]]})
