"""Norms, alone and behind a residual add."""

from .add_norm import add_norm
from .add_rms_norm import add_rms_norm
from .layer_norm import layer_norm
from .rms_norm import rms_norm

__all__ = ["add_norm", "add_rms_norm", "layer_norm", "rms_norm"]
