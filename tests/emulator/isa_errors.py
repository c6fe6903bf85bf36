"""What can be wrong with a kernel, or with the emulator."""

from __future__ import annotations


class Fault(Exception):
    """The kernel does what it may not: leaves its memory, uses a register before its load is there, never ends."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message
        self.instruction: str | None = None
        self.where: str | None = None
        """The launch."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.instruction, self.message) if part is not None)


class UnknownInstruction(Exception):
    """The emulator does not know an instruction, or one of its modifiers or operands."""
