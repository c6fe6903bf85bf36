"""How a short kernel of a captured step follows the one before it, and lets the next begin.

Inside a graph a kernel may be launched as a dependent of the one before it (`launch.overlaps`): it starts early, and
waits. A product waits in its own middle, with weights on their way that were there before the step, and lets the next
kernel start at once (`products.linear`). A kernel that is short whatever it loads first waits before that (`follow`),
and lets the next start when it has read (`lead`): a product behind it brings as many weights as the card has room for,
and what is read meanwhile would have to queue behind them. Every kernel that is launched so has to wait, since the one
after it takes its end for that of all before it.
"""

from __future__ import annotations

from . import backend

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def follow(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait for the kernel before; ahead of everything that is loaded or stored."""
        if OVERLAP:
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def lead(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel start; behind what is read."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
