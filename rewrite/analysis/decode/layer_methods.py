"""The methods that a decoder layer and its parts get for a decode step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import libcst as cst
import libcst.matchers as m

from rewrite.analysis import effects
from rewrite.analysis.blocks.masks_passed import mask_changed
from rewrite.analysis.blocks.mlp_step import NAME, mlp_method
from rewrite.analysis.blocks.mlp_step import PARAMETERS as BLOCK_PARAMETERS
from rewrite.analysis.blocks.own_methods import is_own_method, why_taken
from rewrite.analysis.blocks.term_source import NotWritable, held
from rewrite.analysis.blocks.terms import CACHE, NoStep, canonical, of_the_object, passed_cache
from rewrite.analysis.blocks.windows import agreed_window, stacked_in
from rewrite.analysis.decode.attention_step import PARAMETERS as ATTENTION_PARAMETERS
from rewrite.analysis.decode.attention_step import AttentionStep, attention_step
from rewrite.analysis.decode.handed_on import Block, NotInPlace, TokenStep, attention_block, hands_on, mlp_block
from rewrite.analysis.decode.kwargs_to_layers import told_beside
from rewrite.analysis.decode.latent_step import LatentStep
from rewrite.analysis.decode.layer_blocks import LayerBlocks
from rewrite.analysis.decode.layer_step import (
    ORDER,
    PARAMETERS,
    LayerStep,
    attention_calls,
    attention_input,
    cache_of,
    layer_step,
    parts_with_cache,
)
from rewrite.analysis.decode.layer_text import LayerText, chosen
from rewrite.analysis.decode.mixer_step import MixerStep, keeps_states, mixer_step
from rewrite.analysis.decode.mixer_text import Renamed
from rewrite.analysis.decode.placed_attention import PlacedAttention, is_placed, placed_attention
from rewrite.analysis.decode.prepared_attention import prepared_attention
from rewrite.analysis.decode.written_attention import WrittenAttention, written_attention
from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.residual import choices
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make
from rewrite.analysis.tree.methods import TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import calls_in, parameters


@dataclass(frozen=True)
class LayerMethods:
    """What a layer and its parts get for a decode step."""

    layer: LayerStep
    """What the layer computes."""
    methods: tuple[Method, ...]
    """Methods of those that cannot do it in their `forward`."""
    blocks: tuple[Block, ...]
    """The `forward` of those that can; the layer's own last, if that can."""
    in_place: bool
    """Whether the layer is one of them, and needs no method."""


def layer_methods(info: ClassInfo, module: Module) -> LayerMethods:
    """Return the methods that the layer and its parts get, or their `forward` in place.

    Raises:
        NoStep: with the reason why neither can be written.
    """
    _check_heirs(info, module)
    if not stacked_in(info, module):
        raise NoStep("other_layer", "nothing in the file builds several of it by its name")
    if not cache_of(info, module):
        raise NoStep("other_layer", "its attention is given a cache that is no parameter of the layer")
    layer = layer_step(info, lambda call: _takes(_classes(info, call.args[0].value, module), module), module)
    methods: list[Method] = []
    placed: list[Block] = []
    steps: dict[str, list[TokenStep]] = {}
    blocks: dict[str, tuple[str, ...]] = {}
    inputs: dict[Term, Term] = {}
    taken = dict(PARAMETERS)
    unless: list[Term] = []
    asked: set[str] = set()
    """The attentions whose attributes are asked."""
    for call in attention_calls(layer.output):
        attribute = call.args[0].value
        for owner in _classes(info, attribute, module):
            step = _windowed(_token_step(owner, module), layer, info, module)
            _check_heirs(owner, module)
            if missing := [name for name in layer.missing if name != "position_embeddings" or _turns(step)]:
                raise NoStep("other_layer", f"it takes no {missing[0]}")
            steps.setdefault(attribute, []).append(step)
            if not isinstance(step, MixerStep):
                unless += [held(test, attribute) for test in step.unless]
                asked |= {attribute} if step.unless else set()
            inputs[call] = attention_input(call, _takes([owner], module))
        blocks[attribute] = ("position_embeddings", CACHE)
    handed: set[str] = set()
    for attribute, found in _blocks(info, module):
        if isinstance(found, Handed):
            placed += found.blocks
            handed.add(attribute)
        else:
            methods += found
        blocks[attribute] = ()
    if not asked <= _always_called(layer.output):
        raise NoStep("other_layer", "what an attention is asked that only some layers have")
    layer = replace(layer, output=_unpacked(layer.output, blocks), unless=tuple(dict.fromkeys(unless)))
    _check_order(layer, blocks)
    each_step = [step for given in steps.values() for step in given]
    try:
        if layer.unless:
            raise NotInPlace("a step has no form for what a configuration may ask of attention")
        if apart := sorted({*blocks} - {*steps} - handed):
            raise NotInPlace(f"`{apart[0]}` takes no norm and residual in its own")
        others = (t for t in subterms(layer.output) if t.op == "index" and t.args[0] in inputs)
        if any(term.args[1:] != (constant(0),) for term in others):
            raise NotInPlace("a layer reads more of attention than its output")
        attentions = [attention_block(step, module) for step in each_step if not isinstance(step, PlacedAttention)]
        own = LayerBlocks(info, module, frozenset(blocks)).block()
        return LayerMethods(layer, (), _changing([*placed, *attentions, own]), True)
    except NotInPlace as error:
        why = str(error)
    _check_free(info, "decode", module)
    for step in each_step:
        if isinstance(step, PlacedAttention):
            raise NoStep("other_layer", f"{step.info.name} has its step in place, which the layer cannot have")
        if not _has_own(step.info, ATTENTION_PARAMETERS, module):
            _check_free(step.info, NAME, module)
            methods.append(step.method(module))
        taken["position_embeddings"] = step.positions
    writer = LayerText(info, module, blocks, inputs, frozenset(handed))
    body = writer.write(layer.output)
    text = (
        "Returns the layer's output for one token a row, against a preallocated cache.\n\n"
        f"        A second form of `forward`, since {why}.\n        "
    )
    types = ("PreallocatedCache",)
    methods.append(Method(layer.forward, "decode", taken, TENSOR, text, body, tuple(sorted(writer.uses)), types))
    each = {(id(method.after), method.name): method for method in methods}
    return LayerMethods(layer, tuple(map(_as_passed, each.values())), _changing(placed), False)


def _changing(blocks: list[Block]) -> tuple[Block, ...]:
    """Return the blocks whose `forward` changes, each once."""
    return tuple({id(block.before): block for block in blocks if block.after is not block.before}.values())


def is_decoded(info: ClassInfo, module: Module) -> bool:
    """Whether a layer has the `decode` of this step, or parts that do all of it in their `forward`."""
    method = info.methods.get("decode")
    if method is not None and canonical(parameters(method)[1:]) == [*PARAMETERS]:
        return True
    parts = parts_with_cache(info, module)
    if "forward" not in info.methods or not all(map(is_placed, parts)):
        return False
    if parts and any(
        m.matches(call.func, m.Name("residual_block")) for call in calls_in(info.methods["forward"].body)
    ):
        return True
    with contextlib.suppress(NoStep, NotWritable):
        found = layer_methods(info, module)
        return found.in_place and not found.blocks
    return False


@dataclass(frozen=True)
class Handed:
    """The classes that an attribute may be of take a norm and a residual, or come to do so."""

    blocks: tuple[Block, ...]


def _always_called(output: Term) -> set[str]:
    """Return the attributes that are called whatever the tests in a term say."""
    known: dict[Term, set[str]] = {}

    def read(term: Term) -> set[str]:
        if term not in known:
            called = {term.args[0].value} if term.op == "call" and term.args[0].op == "attribute" else set()
            if term.op == "select":
                called |= read(term.args[0]) | (read(term.args[1]) & read(term.args[2]))
            else:
                called = called.union(*map(read, term.args))
            known[term] = called
        return known[term]

    return read(output)


def _as_passed(method: Method) -> Method:
    """Return a method whose cache is called what the method before it calls it, where transformers does too."""
    name = passed_cache(method.after)
    held = {node.value for line in method.statements for node in walk(line) if isinstance(node, cst.Name)}
    if name is None or CACHE not in method.parameters or name in held:
        return method
    taken = {name if own == CACHE else own: kind for own, kind in method.parameters.items()}
    statements = tuple(cast(cst.BaseStatement, line.visit(Renamed({CACHE: name}))) for line in method.statements)
    return replace(method, parameters=taken, statements=statements)


def _takes(owners: list[ClassInfo], module: Module) -> Mapping[str, str]:
    """Return the parameters of attention by what they are.

    Raises:
        NoStep: if they are not the same for all classes that it may be of.
    """
    found = []
    for owner in owners:
        takes = _token_step(owner, module).takes
        names = parameters(owner.methods["forward"])[1:]
        found.append({**takes, CACHE: cache_of(owner, module), ORDER: " ".join(names)})
    if any(other != found[0] for other in found):
        raise NoStep("other_layer", "its attentions take different arguments")
    return found[0]


def _token_step(owner: ClassInfo, module: Module) -> TokenStep:
    """Return what attention, or a mixer that keeps states, computes in a step."""
    if is_placed(owner):
        return placed_attention(owner, module)
    if keeps_states(owner):
        return mixer_step(owner, cache_of(owner, module), module)
    try:
        return attention_step(owner, module)
    except NoStep:
        if "forward" not in owner.methods:
            raise
        with contextlib.suppress(NoStep):
            if (prepared := prepared_attention(owner, module)) is not None:
                return prepared
        with contextlib.suppress(NoStep, NotComputable):
            return written_attention(owner, module)
        raise


def _turns(step: TokenStep) -> bool:
    """Whether queries and keys are rotated, for which the layer has to be given the tables."""
    if isinstance(step, LatentStep):
        return bool(step.turned.ways)
    if isinstance(step, (WrittenAttention, PlacedAttention)):
        return step.turns
    return isinstance(step, AttentionStep) and step.query.turns


def _windowed(step: TokenStep, layer: LayerStep, info: ClassInfo, module: Module) -> TokenStep:
    if isinstance(step, MixerStep):
        return step
    models = stacked_in(info, module)
    if changed := next(filter(None, (mask_changed(model, module) for model in models)), ""):
        raise NoStep("other_layer", f"a model changes a mask before its layers get it: {changed}")
    if beside := next(filter(None, (told_beside(model, layer.forward, module) for model in models)), ""):
        raise NoStep("other_layer", f"layers are given `{beside}`, which they take no parameter for")
    place = (step.layer_idx, step.info, models, module)
    if isinstance(step, PlacedAttention):
        if agreed_window(step.told, *place) != step.window:
            raise NoStep("window_differs", step.info.name)
        return step
    window = agreed_window(step.window, *place)
    if window is not None:
        return replace(step, window=window)
    told = not isinstance(step, AttentionStep) or not of_the_object(step.window)
    if told or agreed_window(NONE, *place) != NONE:
        raise NoStep("window_differs", step.info.name)
    return replace(step, window=NONE, unless=(*step.unless, make("isnot", step.window, NONE)))


def _unpacked(output: Term, blocks: Mapping[str, tuple[str, ...]]) -> Term:
    """Return a layer's output without the way it would go if a block, which returns a tensor, returned a tuple."""
    for choice in [term for term in subterms(output) if term.op == "select" and term.args[0].op == "isinstance"]:
        of, kind = choice.args[0].args
        returns_tensor = of.op == "call" and of.args[0].op == "attribute" and blocks.get(of.args[0].value) == ()
        if returns_tensor and kind == Term("name", (), "tuple"):
            output = chosen(output, choice, choice.args[2])
    return output


def _check_order(layer: LayerStep, blocks: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse two calls of modules that may have something in common and do not depend on one another.

    Raises:
        NoStep: saying which they are.
    """
    loud = [call.term for call in layer.step.calls if not call.is_quiet and call.term.args[0].value not in blocks]
    for place, first in enumerate(loud):
        for second in loud[place + 1 :]:
            if first not in subterms(second):
                names = f"{first.args[0]} and {second.args[0]}"
                raise NoStep("other_layer", f"{names} may have something in common, and their order would count")


def _classes(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo]:
    """Return the classes of the file that the attribute may be of.

    Raises:
        NoStep: if it may be something else.
    """
    names = effects_of(module).names
    found = effects.attribute(info, attribute, names)
    values = [choice for value in found.values for choice in choices(value)]
    built = [names.resolved(value.func) if isinstance(value, cst.Call) else "" for value in values]
    if found.unknown or not built or not all(name in module.classes for name in built):
        raise NoStep("other_layer", found.unknown or f"{attribute} is not of one class of the file")
    return [module.classes[name] for name in built]


def _check_free(info: ClassInfo, name: str, module: Module) -> None:
    """Refuse a class that has something else of the method's name, or whose `forward` other classes inherit."""
    if (taken := why_taken(info, name, module)) is not None:
        raise NoStep("name_taken", taken)
    _check_heirs(info, module)


def _check_heirs(info: ClassInfo, module: Module) -> None:
    """Refuse a class whose `forward` other classes inherit."""
    heirs = (other for other in module.classes.values() if info.name in other.bases and "forward" not in other.methods)
    if (heir := next(heirs, None)) is not None:
        raise NoStep("other_layer", f"{heir.name} inherits from {info.name}")


def _has_own(info: ClassInfo, wanted: Mapping[str, str], module: Module) -> bool:
    """Whether a class has the method that this rule, or the one for sparse blocks, gives it."""
    return is_own_method(info.methods.get(NAME), wanted, module)


def _blocks(info: ClassInfo, module: Module) -> Iterator[tuple[str, list[Method] | Handed]]:
    """Yield the attributes all of whose classes take, or come to take, a norm and a residual: in their `forward`, or
    in a `decode_residual(hidden_states, norm, residual)`.
    """
    for attribute in info.assigned:
        try:
            classes = _classes(info, attribute, module)
        except NoStep:
            continue
        if any(map(cache_of, classes, [module] * len(classes))):
            continue
        with contextlib.suppress(NotInPlace):
            waiting = [c for c in classes if not hands_on(c)]
            for c in waiting:
                _check_heirs(c, module)
            yield attribute, Handed(tuple(mlp_block(c, module) for c in waiting))
            continue
        own = [_has_own(c, BLOCK_PARAMETERS, module) for c in classes]
        found = [None if has else _mlp(c, module) for c, has in zip(classes, own, strict=True)]
        if all(method is not None or has for method, has in zip(found, own, strict=True)):
            yield attribute, [method for method in found if method is not None]


def _mlp(info: ClassInfo, module: Module) -> Method | None:
    try:
        _check_free(info, NAME, module)
    except NoStep:
        return None
    return mlp_method(info, module)
