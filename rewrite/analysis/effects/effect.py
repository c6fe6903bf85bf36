"""What running a piece of code may do, as far as it can be proven."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEAP = "<heap>"
"""The root of everything that code outside the method can reach: parameters, weights, attributes, globals."""


@dataclass(frozen=True)
class Effect:
    """What a statement or an expression may do. The union of two effects is what running both may do."""

    binds: frozenset[str] = frozenset()
    """Locals that it binds anew, or deletes."""
    reads: frozenset[str] = frozenset()
    """Locals that it reads."""
    attributes: frozenset[str] = frozenset()
    """Names of attributes that it reads, of whatever object."""
    stores: frozenset[str] = frozenset()
    """Names of attributes, and `global` names, that it binds anew, of whatever object."""
    writes: frozenset[str] = frozenset()
    """Roots whose memory it may write in place: locals, or `HEAP`."""
    anything: str = ""
    """Why it may write anything at all; empty where it is understood."""
    leaves: frozenset[str] = frozenset()
    """What may keep the rest of its block from running, or from running in order: `return`, `yield`, …"""
    draws: str = ""
    """Which shared state it uses up, so that its order among others of the kind counts."""

    def __or__(self, other: Effect) -> Effect:
        return Effect(
            self.binds | other.binds,
            self.reads | other.reads,
            self.attributes | other.attributes,
            self.stores | other.stores,
            self.writes | other.writes,
            self.anything or other.anything,
            self.leaves | other.leaves,
            self.draws or other.draws,
        )

    @property
    def is_pure(self) -> bool:
        """Whether it only computes a value: nothing is written, bound, left or used up."""
        return not (self.binds or self.stores or self.writes or self.anything or self.leaves or self.draws)


NOTHING = Effect()


def union(effects: Iterable[Effect]) -> Effect:
    """Return what running all of them may do."""
    total = NOTHING
    for effect in effects:
        total = total | effect
    return total


@dataclass(frozen=True)
class Value:
    """What an expression does, and which roots' memory its value may share; none for a value of its own."""

    roots: frozenset[str]
    effect: Effect = NOTHING
    joins: tuple[frozenset[str], ...] = ()
    """Groups of roots that may share memory afterwards; with `HEAP`, that may then be reachable from anywhere."""
