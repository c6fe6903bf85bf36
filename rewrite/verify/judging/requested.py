"""What a verification asked for, so that it can say what it did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .verdict import Asked


@dataclass
class Record:
    """What a verification asked for: of each class the arguments and outputs, and whether a check gave or compared it.

    Outputs are the fields that a result's class declares.
    """

    arguments: dict[str, dict[str, bool]] = field(default_factory=dict)
    outputs: dict[str, dict[str, bool]] = field(default_factory=dict)
    prompts: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Of each class that generates in a loop of its package: what may stand in a prompt."""

    def prompted(self, name: str, kind: str, done: bool) -> None:
        """Note that a class takes a kind of prompt, and whether a check that passed gave it."""
        known = self.prompts.setdefault(name, {})
        known[kind] = known.get(kind, False) or done

    def expect(self, name: str, arguments: tuple[str, ...]) -> None:
        """Note the arguments that a class takes."""
        known = self.arguments.setdefault(name, {})
        known |= {argument: known.get(argument, False) for argument in arguments}

    def gave(self, name: str, arguments: tuple[str, ...], fields: Mapping[str, bool]) -> None:
        """Note what a check that passed gave, and the fields it compared."""
        known, seen = self.arguments.setdefault(name, {}), self.outputs.setdefault(name, {})
        known |= {argument: True for argument in arguments if argument in known}
        seen |= {output: found or seen.get(output, False) for output, found in fields.items()}

    def merge(self, other: Record) -> None:
        """Add what was noted elsewhere."""
        for mine, theirs in ((self.arguments, other.arguments), (self.outputs, other.outputs)):
            for name, noted in theirs.items():
                known = mine.setdefault(name, {})
                known |= {one: done or known.get(one, False) for one, done in noted.items()}

    def given(self) -> set[str]:
        """The arguments that any class was given."""
        return {name for known in self.arguments.values() for name, done in known.items() if done}

    def asked(self) -> tuple[Asked, ...]:
        """What was given and compared, class by class."""
        kinds = (("arguments", self.arguments), ("outputs", self.outputs), ("prompts", self.prompts))
        return tuple(
            Asked(name, kind, len(known), tuple(one for one, done in known.items() if not done))
            for kind, classes in kinds
            for name, known in classes.items()
        )
