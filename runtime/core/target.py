"""What a package was made for. One without `--target rocm` has no statements that stand under `if ROCM`."""

from __future__ import annotations

ROCM: bool = True
"""Whether what only AMD's GPUs take came along: aiter, and settings of ROCm's libraries."""
