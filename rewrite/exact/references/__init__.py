"""What each kernel computes, in a few lines of plain torch, written from its docstring and not from its code.

A reference sees a launch's arguments before it (`exact_launch.Arguments`), and returns what its outputs hold then.
"""

from __future__ import annotations

from .of_attention import ATTENTION
from .of_experts import EXPERTS
from .of_integers import INTEGERS
from .of_norms import NORMS
from .of_products import PRODUCTS
from .of_rotations import ROTATIONS
from .of_states import STATES

REFERENCES = {one.kernel: one for one in (*NORMS, *PRODUCTS, *ROTATIONS, *ATTENTION, *EXPERTS, *STATES, *INTEGERS)}

_QUANTISED = "rounds to 8 bits by operations on the bits of numbers"
_INTEGERS = "makes numbers of integers by their bits"
UNSEEN = {
    "chain": "written anew for each chain of operations: it has no formula of its own",
    "dequantize_integers": _INTEGERS,
    "fp8_add_rms_norm": _QUANTISED,
    "fp8_gated_activation": _QUANTISED,
    "fp8_rows": _QUANTISED,
    "integer_skinny": "its matrix units take columns in words of two bf16",
    "integer_linear": _INTEGERS,
    "integer_rows": _INTEGERS,
    "keep": _QUANTISED,
    "move_rows": "reads addresses of caches, and computes nothing",
    "mxfp4_down": "its matrix units take columns in words of two bf16",
    "mxfp4_gate_up": "its matrix units take columns in words of two bf16",
    "shared_sum": "sums what cards send each other in words of two bf16",
}
"""Kernels that mean nothing in the ring, and why: their tests compare numbers."""
