"""What the code of a function names: read without running it."""

from __future__ import annotations

from types import CodeType
from typing import Any

ATTENDS = "cached_attention"
"""The operator that the `forward` of an attention names where it reads the buffers of a preallocated cache."""


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function, without what decorates it; None of what has none."""
    function = getattr(function, "__func__", function)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def names_in(code: CodeType, name: str) -> bool:
    """Return whether a function, or one inside it, names something that is no local variable."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(names_in(one, name) for one in inner)


def attends(kind: type) -> bool:
    """Return whether the `forward` of a class reads the buffers of a preallocated cache by an operator of its own."""
    code = code_of(getattr(kind, "forward", None))
    return code is not None and names_in(code, ATTENDS)
