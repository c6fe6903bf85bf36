"""One kernel at one shape on one chip, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .assembly import Figures


@dataclass(frozen=True)
class Row:
    """What the compiler made of a launch, or why it made nothing."""

    arch: str
    kernel: str
    shape: str
    """Of which model or size, and in which form."""
    threads: int
    """Of a workgroup."""
    options: dict[str, int] = field(default_factory=dict)
    """What the compiler was given, as at a launch."""
    figures: Figures | None = None
    shared: int = 0
    """Bytes of LDS (shared memory) of a workgroup."""
    occupancy: float = 0.0
    """Waves that a SIMD unit holds at a time."""
    compiler: str = ""
    """Its name and version."""
    error: str = ""
    """Why there are no figures."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.arch} · {self.kernel} · {self.shape}"

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        found = data["figures"]
        if found is not None:
            widths = ("loads", "shared_loads")
            whole = {name: {int(width): count for width, count in found[name].items()} for name in widths}
            found = Figures(**{**found, **whole})
        return cls(**{**data, "figures": found})
