"""Which GPUs the runtime of a package is for."""

from __future__ import annotations

from pathlib import Path

CUDA, ROCM = "cuda", "rocm"
TARGETS = (CUDA, ROCM)
"""A package for ROCm has all that one for CUDA has: kernels in Triton run on both."""
DEVICES = Path("/dev")
_SIGNS = (Path("/opt/rocm"), Path("/dev/kfd"))
"""What a machine with AMD's GPUs, or the software for them, has."""


def of_machine() -> str:
    """Return the target of the machine at hand, by its files: nothing is imported."""
    return ROCM if any(sign.exists() for sign in _SIGNS) else CUDA


def cards() -> int:
    """Return how many GPUs the machine at hand shows, by its files."""
    nvidia = [one for one in DEVICES.glob("nvidia*") if one.name.removeprefix("nvidia").isdecimal()]
    return len(nvidia) or (len(list(DEVICES.glob("dri/renderD*"))) if of_machine() == ROCM else 0)


def left_out(target: str) -> frozenset[str]:
    """Return the names of `runtime/core/target.py` that a package for a target does not have."""
    return frozenset() if target == ROCM else frozenset({"ROCM"})
