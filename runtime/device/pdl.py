"""How a short kernel of a captured step follows the one before it, and lets the next begin.

Inside a graph a kernel may be launched as a dependent of the one before it (`launch.overlaps`): it starts early, and
waits. A product waits in its own middle, with weights on their way that were there before the step
(`linear.linear`). A kernel that is short whatever it loads first waits at once; that it lets the next one start even
so is what brings that one's weights on their way. Every kernel that is launched so has to wait, since the one after it
takes its end for that of all before it.

A step's kernels, H100, 2026-11-25, ms: letting the next one start at once, or when everything is read, Gemma 3 1B
1.10 and 1.14, Falcon-H1 1.5B 1.76 and 1.80, Mamba2 1.3B 1.47 and 1.54, Granite 4.0 tiny 1.90 and 1.94.
"""

from __future__ import annotations

from ..core import backend

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def follow(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel start, and wait for the one before; ahead of everything that is loaded or stored."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
