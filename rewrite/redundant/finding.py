"""What is found of compute that need not happen: where, how much, and why nothing changes without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rewrite.measure import categories

from .watch import Frame, Op


@dataclass(frozen=True)
class Finding:
    """Something that could be left out."""

    kind: str
    line: int
    function: str
    module: str
    bytes: int
    """Of one call: what the operators move that could be left out."""
    operators: int
    """Of one call."""
    names: tuple[str, ...]
    text: str
    proof: str
    lines: tuple[int, ...] = ()
    """Where its operators are, in functions that `line` calls; empty where they are all in `line`."""


@dataclass
class Site:
    """One place in one call."""

    kind: str
    frame: Frame
    ops: list[Op]
    bytes: int
    what: str
    proof: str
    times: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        """What the sites of a line have in common."""
        return self.kind, self.frame.line, self.frame.function, self.what

    def finding(self, calls: int) -> Finding:
        """Say it, of so many calls."""
        names = tuple(dict.fromkeys(op.name for op in self.ops))
        at = f"line {self.frame.line}, {self.frame.function}"
        often = f", {self.times} times a call" if self.times > 1 else ""
        return Finding(
            self.kind,
            self.frame.line,
            self.frame.function,
            pattern(self.frame.module),
            self.bytes,
            len(self.ops),
            names,
            f"{at}: {self.what}{often} ({size(self.bytes)} a call)",
            f"{self.proof}; so it was in {calls} calls with other inputs",
        )


def grouped(sites: Iterator[Site]) -> dict[tuple[Any, ...], Site]:
    """Sites of one line are one: the same line of every layer."""
    found: dict[tuple[Any, ...], Site] = {}
    for site in sites:
        known = found.get(site.key)
        if known is None:
            found[site.key] = site
        else:
            known.ops += site.ops
            known.bytes += site.bytes
            known.times += 1
    return found


def pattern(module: str) -> str:
    """`layers.*.mlp` of a module's name."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def size(count: float) -> str:
    """`1.5 KiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def bare(op: Op) -> str:
    """`mm` of `aten::mm`."""
    return op.name.rpartition("::")[2]


def is_product(op: Op) -> bool:
    """Whether it multiplies matrices, convolves or attends."""
    return categories.operator_category(op.name) in (categories.GEMM, categories.ATTENTION)
