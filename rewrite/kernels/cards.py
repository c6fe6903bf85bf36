"""Cards by the names of their makers: NVIDIA's data sheets and AMD's "GPU specifications" of ROCm's documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One card. `arch` says what kernels are compiled for, and so registers and shared memory (`chips.MODELLED`)."""

    name: str
    arch: str
    processors: int
    """Streaming multiprocessors, compute units."""
    device: str = ""
    """Its name in the tables of `runtime/launching/tiles.py`; none there takes the rules."""


CARDS = {
    card.name: card
    for card in (
        Card("H100", "sm_90", 132, "NVIDIA H100 80GB HBM3"),
        Card("H200", "sm_90", 132, "NVIDIA H200"),
        Card("B200", "sm_100", 148),
        Card("MI300X", "gfx942", 304),
        Card("MI355X", "gfx950", 256),
    )
}
