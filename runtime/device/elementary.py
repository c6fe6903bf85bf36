"""Functions of numbers that several kernels compute, and that Triton's language has not."""

from __future__ import annotations

from ..core import backend

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def tanh(x):  # type: ignore[no-untyped-def]
        """Return it to about one unit in the last place: by a polynomial below 0.625, where exponentials cancel.

        Its coefficients are those of Cephes' tanhf (Moshier).
        """
        size, square = tl.abs(x), x * x
        far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
        near = -5.70498872745e-3 * square + 2.06390887954e-2
        near = near * square - 5.37397155531e-2
        near = near * square + 1.33314422036e-1
        near = near * square - 3.33332819422e-1
        return tl.where(size < 0.625, near * square * x + x, tl.where(x < 0.0, -far, far))
