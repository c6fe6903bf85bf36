"""Keys and values in buffers of fixed size."""

from .key_length import key_length
from .preallocated import PreallocatedCache, decodes, needs_no_mask

__all__ = ["PreallocatedCache", "decodes", "key_length", "needs_no_mask"]
