"""What the experts of a sparse mixture compute, where that is not `act_fn(gate) * up` of packed weights.

gated = a(min(gate, limit)) * (clamp(up, -limit, limit) + shift)
a(g)  = activation(g), or g * sigmoid(alpha * g)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from ..core import backend
from ..linear.gated_activation import _REFERENCE as ACTIVATIONS
from ..linear.gated_activation import activation_kind

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gated_activation import _activate

    @triton.jit
    def load_tile(pointers, mask, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load a tile, all of which is there where EVEN."""
        if EVEN:
            return tl.load(pointers)
        return tl.load(pointers, mask=mask, other=0.0)

    @triton.jit
    def gate_experts(gate, up, scaling, limit, offset, ACTIVATION: tl.constexpr, BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what the second product reads; what is not a number stays so."""
        if BOUNDED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + offset
        if ACTIVATION == "swish":  # noqa: SIM108
            activated = gate / (1.0 + tl.exp(-scaling * gate))
        else:
            activated = _activate(gate, ACTIVATION)
        return activated * up


SWISH = "swish"
"""The activation `g * sigmoid(alpha * g)`, beside those of `gated_activation`."""


class ExpertsForm(NamedTuple):
    """What experts compute, and how their weights lie; their class returns one from a method `form()`."""

    activation: Callable[[Tensor], Tensor] | None = None
    """A module or function; None for `g * sigmoid(alpha * g)`."""
    alpha: float = 1.0
    limit: float | None = None
    """The largest gate, and the largest up of either sign; None for no limit."""
    shift: float = 0.0
    """Added to up."""
    interleaved: bool = False
    """Whether gates and ups alternate; else all gates come first."""
    transposed: bool = False
    """Whether the weights are `[E, H, 2 M]` and `[E, M, H]`."""
    biased: bool = False
    """Whether there are `gate_up_proj_bias` `[E, 2 M]` and `down_proj_bias` `[E, H]`."""
    every_expert: bool = False
    """Whether the module is given `[E N, H]`, each expert's tokens times their weights, and computes all."""


class Gating(NamedTuple):
    """What the kernels are told of a form."""

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    interleaved: bool = False
    transposed: bool = False
    scaling: float = 1.0
    """What the sum over the experts is multiplied by."""

    @property
    def bounded(self) -> bool:
        """Whether gate and up change before they meet."""
        return self.limit is not None or self.shift != 0.0

    @property
    def largest(self) -> float:
        """The limit, as a number."""
        return math.inf if self.limit is None else self.limit


def form_of(experts: nn.Module, some: bool = False) -> ExpertsForm | None:
    """Return what the experts' class says of them; packed weights and `act_fn` where it says nothing.

    `some` says that who asks knows which of the experts are another rank's.

    None if what `use_experts_implementation` says is something else, or what nobody has a form for.
    """
    describe = getattr(type(experts), "form", None)
    form = ExpertsForm(getattr(experts, "act_fn", None)) if describe is None else describe(experts)
    state = experts.__dict__
    same = {"is_transposed": form.transposed, "has_bias": form.biased}
    unwanted = ("has_post_expert_norm",) if some else ("has_post_expert_norm", "_is_expert_parallel")
    if any(bool(state.get(name, wanted)) != wanted for name, wanted in same.items()):
        return None
    if not state.get("has_gate", True) or any(state.get(name) for name in unwanted):
        return None
    if describe is None and (form.activation is None or not state.get("is_concatenated", True)):
        return None
    return form


def gating(form: ExpertsForm, scaling: float = 1.0) -> Gating | None:
    """Return what the kernels compute of a form; None for an activation they do not have, or tensors for numbers."""
    kind = SWISH if form.activation is None else activation_kind(form.activation)
    numbers = (form.alpha, form.limit or 0.0, form.shift, scaling)
    if kind is None or not all(isinstance(number, (int, float)) for number in numbers):
        return None
    limit = None if form.limit is None else float(form.limit)
    layout = (form.interleaved, form.transposed)
    return Gating(kind, float(form.alpha), limit, float(form.shift), *layout, float(scaling))


def gated(gate: Tensor, up: Tensor, how: Gating) -> Tensor:
    """Return what the experts' second product reads, in torch."""
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(min=-how.limit, max=how.limit)
    up = up + how.shift if how.shift else up
    activated = gate * (how.alpha * gate).sigmoid() if how.activation == SWISH else ACTIVATIONS[how.activation](gate)
    return activated * up
