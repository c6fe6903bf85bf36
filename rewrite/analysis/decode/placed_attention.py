"""An attention whose `forward` is in place already: read again, for another layer that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.terms import MAX_DEPTH, NoStep, Step, cache_parameters
from rewrite.analysis.decode.attention_heads import HIDDEN, POSITIONS
from rewrite.analysis.decode.attention_step import MASK
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import calls_in, parameters

OPERATOR = "cached_attention"


@dataclass(frozen=True)
class PlacedAttention:
    """What is known of it: it takes a norm and a residual, and attends to the buffers of a cache."""

    info: ClassInfo
    takes: Mapping[str, str]
    """Its parameters by what they are."""
    layer_idx: Term
    told: Term
    """The window that its attention function is given; None's term for none."""
    window: Term
    """The one that a step's attention is given."""
    unless: tuple[Term, ...] = ()

    @property
    def turns(self) -> bool:
        """Whether it is given where the tokens are."""
        return POSITIONS.value in self.takes


def is_placed(info: ClassInfo) -> bool:
    """Whether the `forward` of an attention attends to the buffers of a cache."""
    forward = info.methods.get("forward")
    return forward is not None and any(_is_call(call) for call in calls_in(forward.body))


def placed_attention(info: ClassInfo, module: Module) -> PlacedAttention:
    """Read an attention that is in place.

    Raises:
        NoStep: if somebody changed what this is read from.
    """
    forward = info.methods["forward"]
    made = next(call for call in calls_in(forward.body) if _is_call(call))
    first = made.args[0].value  # the function, which is given its own name again
    name = first.value if isinstance(first, cst.Name) else ""
    called = m.Call(func=m.Name(name))
    call = next((one for one in calls_in(forward.body) if one.func is made or m.matches(one, called)), None)
    plain = [] if call is None else [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    if call is None or len(plain) < 5 or not isinstance(plain[4], cst.Name) or len(made.args) < 3:
        raise NoStep("other_attention", "its attention function is called in another way")
    own = {*parameters(forward)}
    takes = {HIDDEN.value: parameters(forward)[1]}
    if plain[4].value in own:
        takes[MASK] = plain[4].value
    for inner in calls_in(forward.body):
        if m.matches(inner.func, m.Name("qkv_rope_cache") | m.Name("fp8_qkv_rope_cache")):
            positions = [node.value for node in walk(inner.args[2].value) if isinstance(node, cst.Name)]
            takes |= {POSITIONS.value: next(name for name in positions if name in own)} if own & {*positions} else {}
    if POSITIONS.value not in takes:
        left = own - {"self", "norm", "residual", *takes.values(), *cache_parameters(forward)}
        read = {node.value for node in walk(forward.body) if isinstance(node, cst.Name)} & left
        gathered = forward.params.star_kwarg
        read -= {gathered.name.value} if gathered is not None else set()
        takes |= {POSITIONS.value: read.pop()} if len(read) == 1 else {}
    step = Step(module, info, MAX_DEPTH)
    told = next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == _WINDOW), None)
    window = next((arg.value for arg in made.args if arg.keyword is not None and arg.keyword.value == _WINDOW), told)
    try:
        layer_idx, told_term, term = (
            NONE if value is None else step.expression(value, {}) for value in (made.args[2].value, told, window)
        )
    except NotComputable as error:
        raise NoStep("other_attention", error.what) from error
    return PlacedAttention(info, takes, layer_idx, told_term, term)


_WINDOW = "sliding_window"


def _is_call(call: cst.Call) -> bool:
    return m.matches(call.func, m.Name(OPERATOR))
