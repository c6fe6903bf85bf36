"""How many positions a model has for its text: what is padded or drafted is not to go beyond them.

An index behind the last row of a table of positions is an error on a CPU, and the end of the process on a GPU.
"""

from __future__ import annotations

from typing import Any

NAMES = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len")
"""Under which fields configurations say it, the first that is there; Whisper, LED and MPT have another than most."""


def position_count(config: Any) -> int | None:
    """Return the number, by the configuration of the text; None where it names none, or has none to keep to."""
    found = next((value for name in NAMES if isinstance(value := getattr(config, name, None), int)), None)
    return found if found is not None and found > 0 else None
