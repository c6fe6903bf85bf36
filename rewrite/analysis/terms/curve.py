"""Which function of one number a term is, told by its values: nothing of how it is written counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rewrite.analysis.terms.spelling import Term

_POINTS = tuple(number / 4 for number in range(-40, 41))
_CLOSE = 1e-9
"""Between two activations that files write with constants of ten digits; fewer make another function in fp64."""

ACTIVATIONS: Mapping[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
"""Those that people write out."""

_ONE: Mapping[str, Callable[[float], float]] = {
    "neg": lambda x: -x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "special.expit": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "erf": math.erf,
    "exp": math.exp,
    "math.sqrt": math.sqrt,
    "nn.functional.silu": lambda x: x / (1 + math.exp(-x)),
    "nn.functional.gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
}
_TWO: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
}
_NAMES = {"math.pi": math.pi, "torch.pi": math.pi, "numpy.pi": math.pi}


def activation_written(term: Term, of: Term) -> str | None:
    """Return the activation that a term computes of another one, None if it is none, or of anything else as well."""
    if term == of:
        return None
    try:
        values = [_value(term, of, point) for point in _POINTS]
        for name, function in ACTIVATIONS.items():
            if all(abs(value - function(x)) <= _CLOSE for value, x in zip(values, _POINTS, strict=True)):
                return name
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return None


def _value(term: Term, of: Term, point: float) -> float:
    """Return the value of a term where `of` is a number.

    Raises:
        LookupError: if it is something else than a function of that number.
        ArithmeticError, TypeError, ValueError: if there is no such value.
    """
    if term == of:
        return point
    if term.op == "constant":
        return float(term.value)
    if term.op == "name":
        return _NAMES[term.value]
    if term.op == "cast":  # what is rounded in between is not what is computed
        return _value(term.args[0], of, point)
    values = [_value(argument, of, point) for argument in term.args]
    if len(values) == 1:
        return _ONE[term.op](values[0])
    return _TWO[term.op](*values)
