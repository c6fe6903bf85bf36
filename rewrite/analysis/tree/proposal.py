"""What a rule says of a place: a candidate, and then either what to change there or why not."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst


@dataclass(frozen=True)
class Candidate:
    """A place that looks like a transform's business."""

    node: cst.CSTNode
    where: str
    """Qualified name, `LlamaAttention.forward`."""
    label: str = ""
    """What tells it from other candidates in the same place, `q_proj, k_proj, v_proj`."""

    @property
    def site(self) -> str:
        """The stable identifier that reports and locks use."""
        return f"{self.where}: {self.label}" if self.label else self.where


@dataclass(frozen=True)
class Edit:
    """Replace one node of the tree by others; statements may become any number, expressions exactly one."""

    old: cst.CSTNode
    new: tuple[cst.CSTNode, ...]


@dataclass(frozen=True)
class Found:
    """What a transform would change at one candidate."""

    edits: tuple[Edit, ...]
    uses: tuple[str, ...] = ()
    """Runtime functions that the new code calls, as `room.function`: `linear.packed_linear`."""
    imports: tuple[str, ...] = ()
    """Other lines that the new code needs at the top of the file, `from my_kernels import rms_norm`; for rules that
    users bring."""


@dataclass(frozen=True)
class Skip:
    """Why a candidate is left alone."""

    reason: str
    """A key of the transform's `reasons`, or of `COMMON_REASONS`."""
    detail: str = ""
