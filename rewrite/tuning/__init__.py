"""`rewrite tune DIR`: finds the fastest tiles of a package's decode step on the card at hand.

The measure is the whole captured step: a kernel that is faster alone can be slower where it overlaps with the kernels
around it. `steps` captures and times steps, `candidates` says what is worth trying, `search` tries it, `results`
writes and prints what was found.
"""

from .tuning_run import Plan, tune

__all__ = ["Plan", "tune"]
