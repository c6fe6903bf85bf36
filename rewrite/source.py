"""From what the user typed to the bytes of one modeling file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One modeling file, as read."""

    target: str
    """What the user typed."""
    path: Path
    text: str
    sha256: str
    """Of the bytes of the file."""
    module: str | None
    """Dotted name inside transformers, `transformers.models.llama.modeling_llama`; None for a file outside it."""
    model_type: str | None
    transformers_version: str | None
    """Version of the installed transformers; None where it is not installed."""
    checkpoint: Path | None = None
    """The checkpoint folder that was given, if one was."""
