"""`generate()` as a captured step, and the prompt before it."""

from .fitness import recomputes_at_switch
from .generation import GraphGeneration

__all__ = ["GraphGeneration", "recomputes_at_switch"]
