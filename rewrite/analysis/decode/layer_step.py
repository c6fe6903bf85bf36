"""A decoder layer in a decode step: its `forward` as a sequence of blocks, each with its norm and residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.flattened import unflattened
from rewrite.analysis.blocks.terms import (
    CACHE,
    MAX_DEPTH,
    NoStep,
    Step,
    affirmed,
    cache_parameters,
    decided,
    of_the_object,
    run_step,
)
from rewrite.analysis.decode.attention_step import MASK, TOLD
from rewrite.analysis.effects.bound import targets
from rewrite.analysis.patterns.residual import choices
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant
from rewrite.analysis.tree.methods import TABLES, TENSOR
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, parameters

ORDER = "order"
"""Beside the roles of an attention's parameters: all their names, in order."""
HIDDEN = Term("parameter", (), "hidden_states")
PARAMETERS = {"hidden_states": TENSOR, "position_embeddings": f"{TABLES} | None", CACHE: "PreallocatedCache"}


@dataclass(frozen=True)
class LayerStep:
    """What a layer returns in a decode step."""

    forward: cst.FunctionDef
    output: Term
    returns: str
    """How `forward` returns it: `{}`, or `({},)` for a tuple."""
    takes: tuple[str, ...]
    """The parameters of `forward` that are the hidden states, the tables of the rotation and the cache."""
    mask: str
    """The parameter of `forward` that is the mask of attention; empty for none."""
    step: Step
    """The execution that read it."""
    unless: tuple[Term, ...] = ()
    """Tests that do not hold where this is what its attention computes."""

    @property
    def missing(self) -> list[str]:
        """What `forward` does not take of what `decode` does."""
        return [name for name, own in zip(PARAMETERS, self.takes, strict=True) if not own]


def layer_step(info: ClassInfo, attention: Callable[[Term], Mapping[str, str]], module: Module) -> LayerStep:
    """Return what the layer computes, blocks as calls `block(self.<attribute>, input)`.

    Args:
        info: the layer's class.
        attention: says what the parameters are called of the attention that a call in the layer is of.
        module: the file.

    Raises:
        NoStep: if its `forward` is not readable.
    """
    forward = info.methods["forward"]
    try:
        cache = {cache_of(info, module): CACHE}
        roles = _roles(_execute(info, forward, cache, module)[0], attention)
        term, step = _execute(info, forward, cache | {name: role for role, name in roles.items()}, module)
        term = _chosen_once(unflattened(term))
    except NotComputable as error:
        raise NoStep("other_layer", error.what) from error
    takes = (roles.get("hidden_states", ""), roles.get("position_embeddings", ""), cache_of(info, module))
    mask = roles.get(MASK, "")
    if term.op != "tuple":
        return LayerStep(forward, term, "{}", takes, mask, step)
    if len(term.args) == 1:
        return LayerStep(forward, term.args[0], "({},)", takes, mask, step)
    if len(term.args) == 2 and _is_weights(term.args[1], term.args[0], forward):
        return LayerStep(forward, term.args[0], "{}, None", takes, mask, step)
    raise NoStep("other_layer", "it returns more than hidden states")


def _chosen_once(term: Term) -> Term:
    """Return a choice whose two ways do not make it again."""
    if term.op != "select" or not of_the_object(term.args[0]):
        return term
    test = affirmed(term.args[0])
    ways = (
        decided(way, test, holds is (term.args[0] == test))
        for way, holds in zip(term.args[1:], (True, False), strict=True)
    )
    return Term("select", (term.args[0], *ways))


def _is_weights(term: Term, output: Term, forward: cst.FunctionDef) -> bool:
    """Whether a term is the second result of a call that is given the cache, or None: the weights of attention."""
    if term.op == "select":
        return all(_is_weights(way, output, forward) for way in term.args[1:])
    if term.op == "name" and term != NONE:  # a local that one of several ways does not bind
        attentions = {call.args[0].value for call in attention_calls(output)}
        lines = [line for line in walk(forward.body) if isinstance(line, cst.Assign)]
        binding = [line for line in lines if term.value in targets(line.targets[0].target)]
        return bool(binding) and all(_binds_weights(line, term.value, attentions) for line in binding)
    of_attention = term.op == "index" and term.args[1:] == (constant(1),) and term.args[0] in attention_calls(term)
    return term == NONE or of_attention


def _binds_weights(line: cst.Assign, name: str, attentions: set[str]) -> bool:
    if m.matches(line, m.Assign(targets=[m.AssignTarget(m.Name(name))], value=m.Name("None"))):
        return True
    pair = m.Tuple(elements=[m.Element(m.Name()), m.Element(m.Name(name))])
    return m.matches(line.targets[0].target, pair) and called_attribute(line.value) in attentions


def _execute(info: ClassInfo, forward: cst.FunctionDef, names: Mapping[str, str], module: Module) -> tuple[Term, Step]:
    step = Step(module, info, MAX_DEPTH)
    return run_step(step, forward, names), step


def _roles(term: Term, attention: Callable[[Term], Mapping[str, str]]) -> dict[str, str]:
    """Return the parameters of a layer by what it does with them: they are what its attention is given.

    Raises:
        NoStep: if nothing is given the cache, or the hidden states are several parameters.
    """
    found: dict[str, set[str]] = {}
    for call in attention_calls(term):
        takes = attention(call)
        for role, given in bound(call, takes).items():
            names = {inner.value for inner in subterms(given) if inner.op == "parameter"}
            if role == MASK and MASK not in takes:  # of a mixer: what is padding
                continue
            if role in ("hidden_states", "position_embeddings", MASK):
                found.setdefault(role, set()).update(names - {CACHE})
    if not found:
        raise NoStep("other_layer", "nothing is given the cache")
    if several := sorted(role for role, names in found.items() if len(names) > 1):
        raise NoStep("other_layer", f"{several[0]} of attention is made of {', '.join(sorted(found[several[0]]))}")
    return {role: names.pop() for role, names in found.items() if names}


def cache_of(info: ClassInfo, module: Module, depth: int = 3) -> str:
    """Return the parameter of a class's `forward` that is a cache, or is given to a part as one; empty for none."""
    forward = info.methods.get("forward")
    if forward is None or (named := cache_parameters(forward)):
        return "" if forward is None else named[0]
    takes = parameters(forward)
    for call in calls_in(forward.body) if depth else ():
        for part in _parts(info, called_attribute(call) or "", module):
            wanted = cache_of(part, module, depth - 1)
            given = _given(call, wanted, parameters(part.methods["forward"])[1:]) if wanted else None
            if isinstance(given, cst.Name) and given.value in takes:
                return given.value
    return ""


def takes_cache(info: ClassInfo, module: Module) -> bool:
    """Whether a class or a part that it calls takes a cache, whatever becomes of it (broad)."""
    if cache_parameters(info.methods["forward"]):
        return True
    called = {called_attribute(call) for call in calls_in(info.methods["forward"].body)} - {None}
    parts = [part for name in sorted(map(str, called)) for part in _parts(info, name, module)]
    forwards = [part.methods["forward"] for part in parts if "forward" in part.methods]
    return any(cache_parameters(forward) for forward in forwards)


def _given(call: cst.Call, wanted: str, names: list[str]) -> cst.BaseExpression | None:
    """Return the argument that a call passes for the parameter `wanted` of `names`."""
    plain = [argument.value for argument in call.args if argument.keyword is None and not argument.star]
    named = {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
    return (dict(zip(names, plain, strict=False)) | named).get(wanted)


def _parts(info: ClassInfo, attribute: str, module: Module) -> Iterator[ClassInfo]:
    """Yield the classes of the file that an attribute may be of, as far as that shows."""
    for value in (choice for given in module.assignments(info, attribute) for choice in choices(given)):
        if isinstance(value, cst.Call) and (part := module.classes.get(module.qualified(value.func))) is not None:
            if part is not info:
                yield part


def parts_with_cache(info: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes of the file that a layer calls, or hands a norm to, and that take a cache."""
    forward = info.methods.get("forward")
    calls = [] if forward is None else list(calls_in(forward.body))
    called = {called_attribute(call) for call in calls}
    called |= {self_attribute(call.args[0].value) for call in calls if m.matches(call, _HANDED)}
    parts = [part for name in sorted(filter(None, called)) for part in _parts(info, name, module)]
    return [part for part in parts if "forward" in part.methods and cache_parameters(part.methods["forward"])]


_HANDED = m.Call(func=m.Name("residual_block"), args=[m.Arg(), m.ZeroOrMore()])


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


def bound(call: Term, takes: Mapping[str, str]) -> dict[str, Term]:
    """Return what the call of an attention passes: by what the parameter is, by its name where that is not known."""
    roles = {name: role for role, name in takes.items() if role != ORDER}
    order = takes[ORDER].split()
    plain = [argument for argument in call.args[1:] if argument.op != "keyword"]
    given = dict(zip(order, plain, strict=False))
    given |= {argument.value: argument.args[0] for argument in call.args[1:] if argument.op == "keyword"}
    return {roles.get(name, name): value for name, value in given.items()}


def attention_input(call: Term, takes: Mapping[str, str]) -> Term:
    """Return the hidden states that the call of an attention passes.

    Raises:
        NoStep: if the step's attention would not get what the call passes.
    """
    given = bound(call, takes)
    if unknown := sorted({*given} - {*takes, *takes[ORDER].split(), *TOLD}):
        raise NoStep("other_layer", f"attention is given {unknown[0]}")
    for name in ("position_embeddings", CACHE, MASK):
        passed = given.pop(name, None)
        if name in takes and passed != Term("parameter", (), name):
            raise NoStep("other_layer", f"attention is given another {name}: {str(passed)[:60]}")
    hidden = given.pop("hidden_states", None)
    if hidden is None:
        raise NoStep("other_layer", "attention is given no hidden states")
    return hidden
