"""How a short kernel of a captured step follows the one before it, and lets the next begin.

Inside a graph a kernel may be launched as a dependent of the one before it (`launch.overlaps`): it starts early, and
waits. A kernel that loads much first, weights that were there before the step, waits in its own middle
(`products.linear`). One that is short whatever it loads first waits at once; that it says so early lets the kernel
after it have its weights on their way meanwhile. Every kernel that is launched so has to wait, since the one after it
takes its end for that of all before it.
"""

from __future__ import annotations

from . import backend

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def follow(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel start, and wait for the one before; before anything is loaded or stored."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
