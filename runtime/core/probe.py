"""What stands for a tensor while a function of a generated file is asked what it computes.

An operator that is called with `INPUT` answers with the other arguments of the call. So a file says once what it
computes, and a kernel that does it along with something else reads it there; a function that does anything else with
its input fails, and is called with tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Form = TypeVar("Form")


class Input:
    """Stands for a tensor."""

    __slots__ = ()


INPUT: Any = Input()


def asked(function: Callable[..., Any], kind: type[Form], inputs: int = 1) -> Form | None:
    """Return what a function of so many tensors answers; None where it does more than to call the operator."""
    try:
        found = function(*[INPUT] * inputs)
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, kind) else None
