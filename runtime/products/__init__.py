"""Products with weights: packed, for few rows, gated, and who multiplies."""

from .gated_activation import gated_activation
from .gemm import routed_linear
from .linear import gated_linear, linear
from .packing import packed_linear
from .prologue import Prologue

__all__ = ["Prologue", "gated_activation", "gated_linear", "linear", "packed_linear", "routed_linear"]
