"""Compiler drift: what each launch took of its chip when it was recorded, and what it takes of it now.

A record is small and read as a diff: a line for each launch, with `COLUMNS` of every variant compiled under its name.
A launch that only one side has is no drift: kernels and catalogue change more often than compilers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.errors import NoKernelRecord

from .assembly import Row

COLUMNS = ("registers", "spills", "shared", "occupancy")
"""Registers of a thread; what is spilled, as `Figures.spills`; bytes of a workgroup; waves on a SIMD unit."""

MORE_REGISTERS = 1.25
FEW_REGISTERS = 16
"""A launch may take a quarter more registers, or 16: two allocators differ by that much and no wave is lost."""
MORE_SHARED = 1.1
FEW_SHARED = 1024
"""Bytes: scratch of a reduction, which compilers lay out in their own ways."""
LESS_OCCUPANCY = 0.75
"""Part of its waves that a launch keeps at least: 6 of 8, 3 of 4. From 2 to 1 is drift."""

Variants = list[list[float]]
Launches = dict[str, dict[str, Variants]]
"""By chip and by `kernel · shape`; the variants in the order of the catalogue."""


@dataclass(frozen=True)
class Record:
    """What one compiler made of the catalogue."""

    compiler: str
    """Its name and version."""
    launches: Launches

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Record:
        """Return the record of rows; a launch that did not compile has none."""
        launches: Launches = {}
        compiler = ""
        for row in rows:
            compiler = row.compiler
            if row.figures is not None:
                taken = [row.figures.registers, row.figures.spills, row.shared, row.occupancy]
                launches.setdefault(row.arch, {}).setdefault(f"{row.kernel} · {row.shape}", []).append(taken)
        return cls(compiler, launches)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file that `write` wrote.

        Raises:
            NoKernelRecord: it is none.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NoKernelRecord(path, str(error)) from error
        if not isinstance(data, dict) or data.get("columns") != list(COLUMNS):
            raise NoKernelRecord(path, f"its columns are not {', '.join(COLUMNS)}")
        return cls(data["compiler"], data["chips"])

    def write(self, path: Path) -> None:
        """Write a line for each launch, in order, so that a change is one line of a diff."""
        head = f'{{\n "compiler": {json.dumps(self.compiler)},\n "columns": {json.dumps(COLUMNS)},\n "chips": {{\n'
        chips = []
        for arch, launches in sorted(self.launches.items()):
            lines = ",\n".join(f"   {json.dumps(name, ensure_ascii=False)}: {json.dumps(found)}" for name, found in
                               sorted(launches.items()))  # fmt: skip
            chips.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
        path.write_text(head + ",\n".join(chips) + "\n }\n}\n", encoding="utf-8")


@dataclass(frozen=True)
class Drift:
    """One launch that takes more of its chip than was recorded, beyond the slack."""

    arch: str
    launch: str
    column: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.arch} · {self.launch}: {self.column} {self.before:g} → {self.after:g}"

    def to_json(self) -> dict[str, Any]:
        """The drift as plain JSON values."""
        return vars(self).copy()


@dataclass(frozen=True)
class Comparison:
    """What came of holding rows against a record."""

    drifts: tuple[Drift, ...]
    compared: int
    """Launches that both have."""
    new: int
    """Launches that the record does not have."""


def compare(now: Record, before: Record) -> Comparison:
    """Return what takes more than it did; of a launch with several variants, in their order."""
    drifts: list[Drift] = []
    compared = new = 0
    for arch, launches in now.launches.items():
        known = before.launches.get(arch, {})
        for name, variants in launches.items():
            olds = known.get(name, [])
            for old, found in zip(olds, variants, strict=False):
                drifts += [Drift(arch, name, column, *pair) for column, *pair in _worse(old, found)]
            compared += min(len(olds), len(variants))
            new += max(len(variants) - len(olds), 0)
    return Comparison(tuple(drifts), compared, new)


def _worse(before: Sequence[float], after: Sequence[float]) -> list[tuple[str, float, float]]:
    most: Mapping[str, float] = {
        "registers": max(before[0] * MORE_REGISTERS, before[0] + FEW_REGISTERS),
        "spills": before[1],
        "shared": max(before[2] * MORE_SHARED, before[2] + FEW_SHARED),
    }
    found = []
    for column, old, new in zip(COLUMNS, before, after, strict=True):
        if new > most[column] if column in most else new < old * LESS_OCCUPANCY:
            found.append((column, old, new))
    return found


def nearest(folder: Path, compiler: str) -> Path | None:
    """Return the record of a compiler, `triton 3.6.0`, or of the newest before it; None if all are of later ones."""
    wanted = _version(compiler)
    found = {_version(path.stem): path for path in folder.glob("triton-*.json")}
    older = [version for version in found if version <= wanted]
    return found[max(older)] if older else None


def _version(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)
