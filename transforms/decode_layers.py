"""Decoder layers get a method for one new token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.attention_step import PARAMETERS as ATTENTION_PARAMETERS
from rewrite.analysis.attention_step import NoStep, attention_step
from rewrite.analysis.layer_step import (
    PARAMETERS,
    LayerStep,
    LayerText,
    attention_calls,
    attention_input,
    is_decoded,
    layer_step,
)
from rewrite.analysis.methods import Method
from rewrite.analysis.mlp_step import PARAMETERS as BLOCK_PARAMETERS
from rewrite.analysis.mlp_step import mlp_method
from rewrite.analysis.module import ClassInfo, Module
from rewrite.analysis.norms import runtime_norm
from rewrite.analysis.replacement import is_docstring, line, name_is_free
from rewrite.analysis.residual import choices, norm_classes
from rewrite.analysis.spelling import Term
from rewrite.analysis.step import CACHE, CACHES, NotWritable
from rewrite.analysis.syntax import called_attribute, calls_in, parameters
from rewrite.analysis.windows import agreed_window, stacked_in
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class DecodeLayers(Transform):
    """Decoder layers compute one new token with few kernels.

    What it does:
        Gives a decoder layer, its attention and its MLP a method `decode`, and its norms a method `prologue`. The
        layer's `forward` calls `decode` while a decode step against a `PreallocatedCache` runs. There, a norm is the
        first stage of the product that reads it, a residual the last of the one that is added to it, and query and
        key norms, rotary embedding and cache write are one kernel.

    Why:
        For one token a layer's time is reading its weights; every further kernel adds a launch and a trip to memory.

    What it needs:
        Attention of the usual form: projections, norms and rotation of queries and keys, cache, attention function,
        output projection, with a mask that is causal or has the window that the attention function is told. Blocks of
        another form than `down(act(gate(x)) * up(x))` or `down(act(up(x)))` are called as they stand.

    Numerics:
        Reordered: sums may be taken in another order, and what stays inside a kernel is not rounded.

    Known limits:
        Only in evaluation: dropout is left out. What a layer returns besides hidden states is not computed.
    """

    name = "decode_layers"
    summary = "Decoder layers get a method for one new token, with norms and residuals inside the products."
    numerics = Numerics.REORDERED
    after = (
        "fuse_add_norm", "fuse_experts", "fuse_gate_up", "fuse_gated_activation", "fuse_layer_norm", "fuse_qkv",
        "fuse_rms_norm", "fuse_rope", "native_gqa",
    )  # fmt: skip
    reasons: ClassVar[Mapping[str, str]] = {
        "other_layer": "the layer does something that a step has no form for",
        "other_attention": "attention does something that a step has no form for",
        "other_projection": "queries, keys and values are not three products or one of them in this order",
        "other_heads": "heads are split or normalised in another way",
        "other_rotation": "queries and keys are rotated in another way",
        "not_linear": "a projection is not built as a plain nn.Linear",
        "attention_argument": "the attention function is given an argument that a step does not have",
        "window_differs": "the mask's window is not surely the one that the attention function is told",
        "name_taken": "the file has a name of its own that the new code would call",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class that another one stacks and whose `forward` takes a cache and passes it on."""
        for info in module.classes.values():
            forward = info.methods.get("forward")
            if forward is None or not {*CACHES} & {*parameters(forward)}:
                continue
            if stacked_in(info, module) and not is_decoded(info) and _calls_attention(info):
                yield Candidate(info.node, info.name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Read the layer and its attention, then write the methods."""
        info = module.classes[candidate.where]
        try:
            methods, layer = _methods(info, module)
        except NoStep as refusal:
            return Skip(refusal.reason, refusal.detail)
        except NotWritable as error:
            return Skip("other_layer", error.what)
        uses = {use for method in methods for use in method.uses} | {"cache.decodes"}
        forwards = [method.after for method in methods]
        if not all(name_is_free(use.split(".")[1], module, *forwards) for use in uses):
            return Skip("name_taken")
        edits = [method.edit(module) for method in methods if method.after is not layer.forward]
        own = next(method for method in methods if method.after is layer.forward)
        return Found((*edits, Edit(layer.forward, (_guarded(layer, module), own.node(module)))), tuple(sorted(uses)))


def _calls_attention(info: ClassInfo) -> bool:
    """Whether the cache is passed on to an attribute."""
    calls = (call for call in calls_in(info.methods["forward"].body) if called_attribute(call) is not None)
    return any(m.matches(argument.value, m.OneOf(*map(m.Name, CACHES))) for call in calls for argument in call.args)


def _methods(info: ClassInfo, module: Module) -> tuple[list[Method], LayerStep]:
    """Return the methods that the layer and its parts get, and what the layer computes."""
    layer = layer_step(info, module)
    methods: list[Method] = []
    blocks: dict[str, tuple[str, ...]] = {}
    inputs: dict[Term, Term] = {}
    norms: list[ClassInfo] = []
    for call in attention_calls(layer.output):
        attribute = call.args[0].value
        for owner in _classes(info, attribute, module):
            step = attention_step(owner, module)
            window = agreed_window(step.window, step.layer_idx, owner, stacked_in(info, module), module)
            if window is None:
                raise NoStep("window_differs", owner.name)
            step = replace(step, window=window)
            methods += [] if _has_decode(owner, ATTENTION_PARAMETERS) else [step.method(module)]
            norms += [n for attr in step.norms for n in _norms(owner, attr, module)]
            inputs[call] = attention_input(call, parameters(owner.methods["forward"]))
        blocks[attribute] = ("position_embeddings", CACHE)
    if not inputs:
        raise NoStep("other_layer", "nothing is given the cache")
    for attribute, found in _blocks(info, module):
        methods += found
        blocks[attribute] = ()
    norms += [n for attribute in info.assigned for n in _norms(info, attribute, module)]
    methods += _prologues(norms, module)
    writer = LayerText(info, module, blocks, inputs)
    body = writer.write(layer.output)
    text = "Returns the layer's output for one token a row, against a preallocated cache."
    methods.append(Method(layer.forward, "decode", PARAMETERS, text, body, tuple(sorted(writer.uses))))
    return list({(id(method.after), method.name): method for method in methods}.values()), layer


def _classes(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo]:
    """Return the classes of the file that the attribute may be of.

    Raises:
        NoStep: if it may be something else.
    """
    values = [choice for value in module.assignments(info, attribute) for choice in choices(value)]
    names = [module.qualified(value.func) if isinstance(value, cst.Call) else "" for value in values]
    if not names or not all(name in module.classes for name in names):
        raise NoStep("other_layer", f"{attribute} is not of one class of the file")
    return [module.classes[name] for name in names]


def _has_decode(info: ClassInfo, wanted: tuple[str, ...]) -> bool:
    method = info.methods.get("decode")
    return method is not None and parameters(method)[1:] == [*wanted]


def _blocks(info: ClassInfo, module: Module) -> Iterable[tuple[str, list[Method]]]:
    """Yield the attributes all of whose classes have, or get, `decode(hidden_states, norm, residual)`."""
    for attribute in info.assigned:
        try:
            classes = _classes(info, attribute, module)
        except NoStep:
            continue
        found = [None if _has_decode(c, BLOCK_PARAMETERS) else mlp_method(c, module) for c in classes]
        if all(f is not None or _has_decode(c, BLOCK_PARAMETERS) for f, c in zip(found, classes, strict=True)):
            yield attribute, [method for method in found if method is not None]


def _norms(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo]:
    names = norm_classes(info, attribute, module)
    return [module.classes[name] for name in names if name in module.classes]


def _prologues(norms: list[ClassInfo], module: Module) -> Iterable[Method]:
    """Yield the method of every norm class that calls the runtime's `rms_norm` and has none yet."""
    for info in norms:
        found = runtime_norm(info, module)
        if found is None or found[1].function != "rms_norm" or module.method(info, "prologue") is not None:
            continue
        forward, call = found
        after = info.methods.get("add_forward", forward)
        statement = line(f"return Prologue({', '.join(call.arguments)})", module)
        text = "Returns this norm as the first stage of a product's kernel."
        yield Method(after, "prologue", (), text, (statement,), ("prologue.Prologue",))


def _guarded(layer: LayerStep, module: Module) -> cst.FunctionDef:
    """Return the layer's `forward` with the way to `decode` before its first statement."""
    block = layer.forward.body
    statements = list(block.body)
    place = 1 if is_docstring(statements[0]) else 0
    returned = layer.returns.format(f"self.decode({', '.join(PARAMETERS)})")
    guard = cst.parse_statement(
        f"if decodes({CACHE}):\n    return {returned}\n", config=module.tree.config_for_parsing
    )
    first = statements[place]
    if not getattr(first, "leading_lines", ()):
        statements[place] = first.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    new = [*statements[:place], guard, *statements[place:]]
    return layer.forward.with_changes(body=block.with_changes(body=new))
