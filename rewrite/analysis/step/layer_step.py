"""A decoder layer in a decode step: its `forward` as a sequence of blocks, each with its norm and residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.step.terms import CACHE, NoStep, computed_in_step
from rewrite.analysis.syntax.module import ClassInfo, Module
from rewrite.analysis.syntax.nodes import parameters
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import Term

HIDDEN = Term("parameter", (), "hidden_states")
PARAMETERS = ("hidden_states", "position_embeddings", CACHE)
_IGNORED = {"attention_mask", "position_ids", "use_cache", "output_attentions", "cache_position", "causal_mask"}
"""What a layer passes to attention and a step does without: the cache knows the positions and what is valid."""


@dataclass(frozen=True)
class LayerStep:
    """What a layer returns in a decode step."""

    forward: cst.FunctionDef
    output: Term
    returns: str
    """How `forward` returns it: `{}`, or `({},)` for a tuple."""


def layer_step(info: ClassInfo, module: Module) -> LayerStep:
    """Return what the layer computes, blocks as calls `block(self.<attribute>, input)`.

    Raises:
        NoStep: if its `forward` is not readable.
    """
    forward = info.methods["forward"]
    if not {*PARAMETERS} <= {*parameters(forward)}:
        raise NoStep("other_layer", "it takes no hidden_states, position_embeddings and past_key_values")
    try:
        term = computed_in_step(forward, module, info)
    except NotComputable as error:
        raise NoStep("other_layer", error.what) from error
    if term.op != "tuple":
        return LayerStep(forward, term, "{}")
    if len(term.args) == 1:
        return LayerStep(forward, term.args[0], "({},)")
    raise NoStep("other_layer", "it returns more than hidden states")


def is_decoded(info: ClassInfo) -> bool:
    """Whether a layer has the `decode` of this step."""
    method = info.methods.get("decode")
    return method is not None and parameters(method)[1:] == [*PARAMETERS]


def attention_calls(term: Term) -> Iterator[Term]:
    """Yield every call below `term` of an attribute that is given the cache, each once."""
    seen: set[Term] = set()
    stack = [term]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "call" and current.args[0].op == "attribute":
            if any(_argument(a) == Term("parameter", (), CACHE) for a in current.args[1:]):
                yield current
        stack.extend(current.args)


def _argument(term: Term) -> Term:
    return term.args[0] if term.op == "keyword" else term


def attention_input(call: Term, takes: list[str]) -> Term:
    """Return the hidden states that the call of an attention with parameters `takes` passes.

    Raises:
        NoStep: if the step's attention would not get what the call passes.
    """
    given = {argument.value: argument.args[0] for argument in call.args[1:] if argument.op == "keyword"}
    plain = [argument for argument in call.args[1:] if argument.op != "keyword"]
    given |= dict(zip([name for name in takes if name != "self"], plain, strict=False))
    for name in ("position_embeddings", CACHE):
        if given.pop(name, None) != Term("parameter", (), name):
            raise NoStep("other_layer", f"attention is given another {name}")
    hidden = given.pop("hidden_states", None)
    if hidden is None or (unknown := {*given} - _IGNORED):
        raise NoStep("other_layer", f"attention is given {', '.join(sorted(unknown)) if hidden else 'other input'}")
    return hidden
