"""A block of a layer with the norm before it and the residual behind it: `residual + block(norm(x))`.

B rows, S tokens, H hidden_size. A block whose `forward` takes `norm` and `residual` hands them to its first and to its
last product, which are one kernel with them for the few rows of a decode step. Whoever looks at the block's call sees
what the block was written to take and to return: where something does, or where gradients are wanted, or somebody put
another module there, norm and sum are computed around the call, as the formula says.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..core import backend
from ..guards.observers import is_idle
from ..norms.sum_norm import normed

_TAKES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Of each `forward` whether it takes a norm and a residual."""


def residual_block(
    block: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> Callable[..., Any]:
    """Return what computes `residual + block(norm(x), …)`, to be called as the block is, `x` first.

    Args:
        block: whose output, or the first of several, is `[B, S, H]`.
        norm: of `x`; None for none.
        residual: `[B, S, H]`; None for none.
        dropout: of the block's output, before it is added; None for none.
    """
    drops = dropout is not None and not (type(dropout) in _DROPS_NOTHING or _is_off(dropout))

    def run(*args: Any, **kwargs: Any) -> Any:
        name = "" if args else next(iter(kwargs))
        hidden_states = kwargs[name] if name else args[0]
        if _hands_on(block, hidden_states):
            if not drops:
                return block(*args, **kwargs, norm=norm, residual=residual)
            output = block(*args, **kwargs, norm=norm)
            return _added(output, residual, dropout)
        if norm is not None:
            given = normed(hidden_states, norm)
            args, kwargs = ((given, *args[1:]), kwargs) if not name else (args, {**kwargs, name: given})
        return _added(block(*args, **kwargs), residual, dropout)

    return run


_DROPS_NOTHING = (nn.Identity,)


def _is_off(dropout: nn.Module) -> bool:
    """Return whether a dropout returns what it is given, and nobody looks."""
    if type(dropout) is not nn.Dropout or backend.observed(dropout):
        return False
    return not dropout.training or dropout.p == 0.0


def _added(output: Any, residual: Tensor | None, dropout: nn.Module | None) -> Any:
    """Return a residual with what a block returned, or the first of that, added."""
    first = output[0] if isinstance(output, tuple) else output
    if dropout is not None:
        first = dropout(first)
    if residual is not None:
        first = residual + first
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _hands_on(block: nn.Module, hidden_states: Any) -> bool:
    """Return whether a block is given the norm of its input and the residual of its output."""
    if is_compiling() or type(hidden_states) is not Tensor or backend.wants_gradient(hidden_states):
        return False
    return takes_norm_and_residual(type(block)) and (not backend.observed(block) or is_idle(block))


def takes_norm_and_residual(kind: type[nn.Module]) -> bool:
    """Return whether the `forward` of a class takes `norm` and `residual`."""
    known = _TAKES.get(kind.forward)
    if known is None:
        taken = inspect.signature(kind.forward).parameters
        known = _TAKES[kind.forward] = {"norm", "residual"} <= taken.keys()
    return known
