"""What a norm module computes, read off its own `forward`: for a kernel that computes it along with something else.

A norm class of a generated file calls `rms_norm` with its weight and its epsilon. Called with `core.probe.INPUT`, the
operator answers with these; a `forward` that does anything else to its input is no norm that a kernel knows.
"""

from __future__ import annotations

import inspect
import weakref
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.probe import asked
from .torch_rms_norm import torch_rms_norm


class Prologue(NamedTuple):
    """An RMSNorm: the arguments of `rms_norm` after its input."""

    weight: torch.Tensor | None
    eps: float
    offset: float = 0.0
    weight_in_fp32: bool = False


OPERATOR = "rms_norm"

_NAMES_OPERATOR: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Of each `forward` whether it names the operator; any other is never called with `INPUT`."""


def norm_form(norm: nn.Module) -> Prologue | None:
    """Return what a norm computes as an RMSNorm over the last dimension; None where it is, or does, something else.

    It is read anew each time, so that an attribute that the `forward` asks may change.
    """
    if (of_torch := torch_rms_norm(norm)) is not None:
        return Prologue(*of_torch, weight_in_fp32=True)
    if not names_operator(type(norm)):
        return None
    return asked(norm.forward, Prologue)


def names_operator(kind: type[nn.Module]) -> bool:
    """Return whether the `forward` of a class calls `rms_norm`, as far as its names say."""
    forward = kind.forward
    known = _NAMES_OPERATOR.get(forward)
    if known is None:
        code = getattr(inspect.unwrap(forward), "__code__", None)
        known = isinstance(code, CodeType) and OPERATOR in code.co_names
        _NAMES_OPERATOR[forward] = known
    return known
