"""References of products with weights of 16, 8 and 4 bits."""

from __future__ import annotations

from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs, activated, entered, scaled_codes


def _left(a: Arguments, y: Tensor) -> Outputs:
    """Return a product with what stands behind it."""
    y = y + a.bias_ptr.reshape(-1) if a.BIAS else y
    y = activated(a.ACTIVATION, y) * a.factor
    return {"out_ptr": y + a.residual_ptr.reshape(y.shape) if a.RESIDUAL else y}


def _gated(a: Arguments, y: Tensor) -> Outputs:
    """Return the first half of columns, activated, times the second."""
    gate, up = (y + a.bias_ptr.reshape(-1) if a.BIAS else y).chunk(2, -1)
    return {"out_ptr": activated(a.ACTIVATION, gate) * up}


def _weight(a: Arguments) -> Tensor:
    return scaled_codes(a, a.weight_ptr, a.I, fnuz=a.FNUZ) if a.SCALED else a.weight_ptr


def _linear(a: Arguments) -> Outputs:
    return _left(a, entered(a) @ _weight(a).T)


def _gated_product(a: Arguments) -> Outputs:
    return _gated(a, entered(a) @ _weight(a).T)


def _skinny_linear(a: Arguments) -> Outputs:
    y = entered(a) @ a.weight_ptr.T
    return _gated(a, y) if a.GATED else _left(a, y)


def _transposed_linear(a: Arguments) -> Outputs:
    return _left(a, entered(a) @ a.weight_ptr)


def _beside(a: Arguments) -> Outputs:
    found = {"normed_ptr": entered(a)} if a.KEEPS else {}
    for number, size, biased in (
        ("", a.O, a.BIAS),
        ("second_", a.SECOND_O, a.SECOND_BIAS),
        ("third_", a.THIRD_O, a.THIRD_BIAS),
    ):
        if size:
            y = entered(a) @ getattr(a, f"{number}weight_ptr").T
            y = y + getattr(a, f"{number}bias_ptr") if biased else y
            found[f"{number}out_ptr"] = activated(a.ACTIVATION, y) * getattr(a, f"{number}factor")
    return found


def _added(a: Arguments, y: Tensor) -> Outputs:
    y = y + a.bias_ptr.reshape(-1) if a.BIAS else y
    return {"out_ptr": y + a.residual_ptr.reshape(y.shape) if a.RESIDUAL else y}


def _fp8_skinny(a: Arguments) -> Outputs:
    return _added(a, entered(a) @ scaled_codes(a, a.code_ptr, a.I, fnuz=a.FNUZ).T)


def _block_rows(a: Arguments) -> Outputs:
    return _added(a, entered(a) @ scaled_codes(a, a.values_ptr, a.I).T)


def _block_linear(a: Arguments) -> Outputs:
    y = entered(a) @ scaled_codes(a, a.values_ptr, a.I).T
    return _gated(a, y) if a.ACTIVATION else _added(a, y)


def _dequantize(a: Arguments) -> Outputs:
    columns = 2 * a.BYTES if a.FOUR else a.BYTES
    return {"out_ptr": scaled_codes(a, a.values_ptr, columns)}


PRODUCTS = (
    Reference("linear", _linear),
    Reference("gated", _gated_product),
    Reference("skinny_linear", _skinny_linear, scratch=("part_ptr", "square_ptr")),
    Reference("transposed_linear", _transposed_linear, scratch=("part_ptr",)),
    Reference("beside", _beside),
    Reference("fp8_skinny", _fp8_skinny),
    Reference("block_rows", _block_rows, scratch=("part_ptr", "square_ptr")),
    Reference("block_linear", _block_linear),
    Reference("dequantize", _dequantize),
)
