"""The chips that kernels are compiled for: their limits, and how many waves of a kernel fit on one.

Sources: AMD's "GPU specifications" (registers, LDS) and "MI300X workload optimization" (occupancy), LLVM's "User Guide
for AMDGPU Backend" (granules, waves), NVIDIA's "CUDA C++ Programming Guide", technical specifications by compute
capability. A multiprocessor of either kind has four SIMD units, each with 512 vector registers a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMDS = 4
REGISTERS = 512
GRANULE = 8
"""Vector registers a lane of a SIMD unit, and how many are handed out at a time."""
MOST_THREADS = 1024
"""Of a workgroup, on every chip."""


@dataclass(frozen=True)
class Chip:
    """Limits of one chip; a multiprocessor is AMD's compute unit."""

    arch: str
    """As compilers call it."""
    cards: str
    backend: str
    """As Triton calls it."""
    wave: int
    """Threads of a wave (a warp)."""
    most_waves: int
    """On one SIMD unit."""
    most_groups: int
    """Workgroups of one multiprocessor."""
    shared_of_group: int
    """Bytes of LDS (shared memory) that a workgroup can have."""
    shared: int
    """Bytes that a multiprocessor has."""
    shared_taken: int = 0
    """Bytes that the system takes for each workgroup."""
    scalars: int | None = None
    """Scalar registers of a SIMD unit, handed out 16 at a time."""
    processors: int = 132
    """Multiprocessors of the largest card with this chip that one process sees."""


KIB = 1024
CHIPS = {
    chip.arch: chip
    for chip in (
        Chip("gfx90a", "AMD MI210, MI250", "hip", 64, 8, 32, 64 * KIB, 64 * KIB, scalars=800, processors=104),
        Chip("gfx942", "AMD MI300, MI325", "hip", 64, 8, 32, 64 * KIB, 64 * KIB, scalars=800, processors=304),
        Chip("gfx950", "AMD MI350, MI355", "hip", 64, 8, 32, 160 * KIB, 160 * KIB, scalars=800, processors=256),
        Chip("sm_80", "NVIDIA A100", "cuda", 32, 16, 32, 163 * KIB, 164 * KIB, KIB, processors=108),
        Chip("sm_90", "NVIDIA H100, H200", "cuda", 32, 16, 32, 227 * KIB, 228 * KIB, KIB),
    )
}

_BLACKWELL = Chip("sm_100", "NVIDIA B200", "cuda", 32, 16, 32, 227 * KIB, 228 * KIB, KIB, processors=148)
MODELLED = {**CHIPS, _BLACKWELL.arch: _BLACKWELL}
"""What the speed model compiles for: kernels are judged for `CHIPS`, which the oldest Triton knows too."""


def occupancy(chip: Chip, threads: int, registers: int, scalars: int | None, shared: int) -> float:
    """Return how many waves of a kernel one SIMD unit holds at a time, at most `chip.most_waves`; 0 if it cannot run.

    As AMD describes it: what the registers allow, in whole workgroups, and what LDS allows; an average of the four.

    Args:
        chip: that it runs on.
        threads: of a workgroup.
        registers: vector registers of a thread, accumulators included.
        scalars: scalar registers of a wave.
        shared: bytes of LDS of a workgroup.
    """
    waves = -(-threads // chip.wave)
    allowed = min(chip.most_waves, REGISTERS // max(_up(registers, GRANULE), GRANULE))
    if chip.scalars is not None and scalars:
        allowed = min(allowed, chip.scalars // _up(scalars, 16))
    groups = min(allowed * SIMDS // waves, chip.most_groups)
    if shared:
        groups = min(groups, chip.shared // (shared + chip.shared_taken))
    return groups * waves / SIMDS


def _up(number: int, granule: int) -> int:
    return -(-number // granule) * granule
