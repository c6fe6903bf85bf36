"""A mixer with states in a decode step: its `forward` for one token, norm and residual inside its products.

What the mixer does between its first and its last product is left as the file has it; what a step decides is left out:
training, several tokens, a cache that is not there, padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.terms import NoStep, cache_parameters
from rewrite.analysis.decode.attention_step import PARAMETERS
from rewrite.analysis.decode.mixer_text import MixerText, NeedsNorm
from rewrite.analysis.effects import effects_of
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.methods import TABLES, TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.nodes import calls_in, parameters

STATES = ("get_conv_state", "get_recurrent_state")
"""What transformers' caches are asked for a state; it is there once a prompt was read."""
_UNCHANGING = ("force_accelerate_hooks", "deprecate_kwarg")
"""Decorators that let hooks of parts run (where something is hooked, no step is fused), or take an older keyword."""


@dataclass(frozen=True)
class MixerStep:
    """A mixer in one decode step, for who reads it in the place of an attention."""

    info: ClassInfo
    takes: Mapping[str, str]
    """The parameter that is `hidden_states`."""
    statements: tuple[cst.BaseStatement, ...]
    calls: tuple[str, ...]
    window: Term = NONE
    norms: tuple[str, ...] = ()
    positions: str = f"{TABLES} | None"

    def method(self, module: Module) -> Method:
        """Return its `decode_residual`."""
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        forward, types = self.info.methods["forward"], ("PreallocatedCache",)
        return Method(forward, NAME, PARAMETERS, TENSOR, text, self.statements, self.calls, types)


def keeps_states(info: ClassInfo) -> bool:
    """Whether a class asks a cache for states of fixed size."""
    forward = info.methods.get("forward")
    calls = calls_in(forward.body) if forward is not None else ()
    return any(isinstance(call.func, cst.Attribute) and call.func.attr.value in STATES for call in calls)


def mixer_step(info: ClassInfo, cache: str, module: Module) -> MixerStep:
    """Return what a mixer that keeps states computes in one decode step.

    Args:
        info: the mixer's class.
        cache: the parameter of its `forward` that is the cache.
        module: the file.

    Raises:
        NoStep: with the reason why its `forward` cannot be taken apart.
    """
    forward = info.methods["forward"]
    check_plain(info, forward, module)
    takes = parameters(forward)[1:]
    if not takes or not cache or takes[0] == cache:
        raise NoStep("other_layer", f"{info.name} takes no hidden states and cache")
    try:
        text = MixerText(info, module, takes[0], cache)
        statements = text.write()
    except NeedsNorm:
        text = MixerText(info, module, takes[0], cache, norm_first=True)
        statements = text.write()
    return MixerStep(info, {"hidden_states": takes[0]}, statements, tuple(sorted(text.uses)))


def check_plain(info: ClassInfo, forward: cst.FunctionDef, module: Module) -> None:
    """Refuse a class whose `forward` may be another one than it shows, or changed around its call.

    Raises:
        NoStep: saying why.
    """
    names = effects_of(module).names
    decorators = [module.qualified(getattr(d.decorator, "func", d.decorator)) for d in forward.decorators]
    if any(name.rsplit(".", 1)[-1] not in _UNCHANGING for name in decorators):
        raise NoStep("other_layer", f"{info.name}.forward is decorated")
    if not names.means(info.name) or names.why_strange(info) or names.class_names(info)["forward"] != 1:
        raise NoStep("other_layer", f"{info.name} is defined or changed more than once")
    if len(cache_parameters(forward)) > 1 or "forward" in names.stored or "*" in names.stored:
        raise NoStep("other_layer", f"{info.name}.forward may be replaced")
