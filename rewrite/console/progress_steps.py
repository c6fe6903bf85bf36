"""How far some long work is: a message that may know its place among the parts of the work."""

from __future__ import annotations

from typing import TypeVar

Said = TypeVar("Said", bound="Step")


class Step(str):
    """What is done now, as text, with how many of how many parts are done; whoever takes messages takes it too."""

    done: int
    total: int
    beside: int

    def __new__(cls: type[Said], message: str, done: int = 0, total: int = 0, beside: int = 0) -> Said:
        """Return a message.

        Args:
            message: what is done now.
            done: how many parts are.
            total: how many there are; 0 where nobody knows.
            beside: how many parts run at the same time as the one that is done now.
        """
        step = super().__new__(cls, message)
        step.done, step.total, step.beside = done, total, beside
        return step
