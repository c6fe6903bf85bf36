"""What makes a folder of rewritten classes a package that loads checkpoints."""

from .auto import from_config
from .checkpoint import NativeCheckpoint

__all__ = ["NativeCheckpoint", "from_config"]
