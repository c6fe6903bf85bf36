"""The cards of the speed model: what their makers publish, and the few numbers that were fitted to measurements.

Published: NVIDIA's H100, H200 and B200 data sheets and its Hopper architecture white paper (processors, L2, bandwidth,
clock), AMD's "GPU specifications" of ROCm's documentation (compute units, LDS, L2) and the data sheets of MI300X and
MI355X (bandwidth, peak engine clock).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One card. `arch` says what kernels are compiled for, and so registers and shared memory (`chips.MODELLED`)."""

    name: str
    arch: str
    processors: int
    """Streaming multiprocessors, compute units."""
    bandwidth: float
    """TB/s, as published."""
    reached: float
    """Part of it that a long read reaches: fitted where `calibrated`, else assumed."""
    l2: int
    """MiB."""
    clock: float
    """GHz, the highest."""
    latency: float
    """µs from a load to its data while memory is busy: assumed, some 600 to 1,000 cycles; no maker publishes it."""
    calibrated: bool = False
    """Whether predictions were held against measurements on this card (docs/kernels.md)."""
    device: str = ""
    """Its name in the tables of `runtime/launching/tiles.py`; none there takes the rules."""

    @property
    def rate(self) -> float:
        """Bytes that memory gives in a µs."""
        return self.bandwidth * self.reached * 1e6

    @property
    def wanted(self) -> float:
        """Bytes that have to be on their way all the time to reach that rate."""
        return self.rate * self.latency


CARDS = {
    card.name: card
    for card in (
        # 70B's head, 2.1 GB, in 657.65 µs: 95% (docs/gemm.md)
        Card("H100", "sm_90", 132, 3.35, 0.95, 50, 1.98, 0.6, True, "NVIDIA H100 80GB HBM3"),
        # a 2 GiB sum reads 4.13 to 4.33 TB/s (bench/results/profile-h200.json), our kernels a little more
        Card("H200", "sm_90", 132, 4.8, 0.92, 50, 1.98, 0.6, True, "NVIDIA H200"),
        Card("B200", "sm_100", 148, 7.7, 0.9, 126, 1.96, 0.7),
        # published: one row reads 4.65 to 4.87 TB/s there (vLLM's wvSplitK, hipBLASLt); never run by us
        Card("MI300X", "gfx942", 304, 5.3, 0.88, 32, 2.1, 0.8),
        Card("MI355X", "gfx950", 256, 8.0, 0.8, 32, 2.4, 0.8),
    )
}

RAMP = 1.3
"""µs by which a product of one row is longer than its bytes: 0.5 to 0.8 in a chain of independent products on an H100
(docs/gemm.md), the rest from whole steps of 1B and 8B there (docs/performance.md)."""
RAMP_MATRIX = 2.5
"""The same of products of 2 to 32 rows (docs/gemm.md, M 8)."""
RAMP_ATTENTION = 5.0
"""The same of decode attention: 5.4 µs for 1 MB (bench/results/profile-h200.json), a chain of loads and a sum."""
RAMP_SMALL = 1.8
"""Of launches that move next to nothing: 1.5 to 2.4 µs each (bench/results/profile-h200.json)."""
RAMP_LIBRARY = 4.0
"""Of cuBLAS (docs/gemm.md, M 8)."""
GAP = 2.0
"""µs more of any launch where it cannot begin before the one ahead has ended: "alone" less "ours" (docs/gemm.md, M 1).
Fitted on an H100; on AMD's cards, which have no such launch, it is an assumption."""

SHARE_MATRIX = 0.92
"""Part of the card's rate at which products of 2 to 32 rows read, ours and cuBLAS's (docs/gemm.md, 8B)."""
SHARE_ATTENTION = 0.7
"""The same of attention: the slope between 512 and 32,768 tokens (docs/performance.md, 1B and 8B)."""
OVERLOAD = 1.45
"""How many times its even share of the bandwidth one processor can draw: 160 programs on 132 processors took 60.65 µs
where their bytes take 52.8 (70B qkv, 8 rows, docs/gemm.md)."""
IN_REGISTERS = 0.5
"""Part of a thread's registers that can hold loads on their way: assumed."""
