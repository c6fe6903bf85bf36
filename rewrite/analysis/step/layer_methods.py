"""The methods that a decoder layer and its parts get for a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from rewrite.analysis.sites.norms import runtime_norm
from rewrite.analysis.sites.residual import choices, norm_classes
from rewrite.analysis.step.attention_step import PARAMETERS as ATTENTION_PARAMETERS
from rewrite.analysis.step.attention_step import attention_step
from rewrite.analysis.step.layer_step import PARAMETERS, LayerStep, attention_calls, attention_input, layer_step
from rewrite.analysis.step.layer_text import LayerText
from rewrite.analysis.step.mlp_step import PARAMETERS as BLOCK_PARAMETERS
from rewrite.analysis.step.mlp_step import mlp_method
from rewrite.analysis.step.terms import CACHE, NoStep
from rewrite.analysis.step.windows import agreed_window, stacked_in
from rewrite.analysis.syntax.methods import Method
from rewrite.analysis.syntax.module import ClassInfo, Module
from rewrite.analysis.syntax.nodes import parameters
from rewrite.analysis.syntax.replacement import line
from rewrite.analysis.terms.spelling import Term


def layer_methods(info: ClassInfo, module: Module) -> tuple[list[Method], LayerStep]:
    """Return the methods that the layer and its parts get, and what the layer computes.

    Raises:
        NoStep: with the reason why they cannot be written.
    """
    _check_free(info, module)
    layer = layer_step(info, module)
    methods: list[Method] = []
    blocks: dict[str, tuple[str, ...]] = {}
    inputs: dict[Term, Term] = {}
    norms: list[ClassInfo] = []
    for call in attention_calls(layer.output):
        attribute = call.args[0].value
        for owner in _classes(info, attribute, module):
            has_decode = _has_decode(owner, ATTENTION_PARAMETERS)
            if not has_decode:
                _check_free(owner, module)
            step = attention_step(owner, module)
            window = agreed_window(step.window, step.layer_idx, owner, stacked_in(info, module), module)
            if window is None:
                raise NoStep("window_differs", owner.name)
            step = replace(step, window=window)
            methods += [] if has_decode else [step.method(module)]
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


def _check_free(info: ClassInfo, module: Module) -> None:
    """Refuse a class that has something else of the method's name, or whose `forward` other classes inherit."""
    if module.method(info, "decode") is not None or module.assignments(info, "decode"):
        raise NoStep("name_taken", f"{info.name}.decode")
    heirs = (other for other in module.classes.values() if info.name in other.bases and "forward" not in other.methods)
    if (heir := next(heirs, None)) is not None:
        raise NoStep("other_layer", f"{heir.name} inherits from {info.name}")


def _has_decode(info: ClassInfo, wanted: tuple[str, ...]) -> bool:
    method = info.methods.get("decode")
    return method is not None and parameters(method)[1:] == [*wanted]


def _blocks(info: ClassInfo, module: Module) -> Iterator[tuple[str, list[Method]]]:
    """Yield the attributes all of whose classes have, or get, `decode(hidden_states, norm, residual)`."""
    for attribute in info.assigned:
        try:
            classes = _classes(info, attribute, module)
        except NoStep:
            continue
        found = [None if _has_decode(c, BLOCK_PARAMETERS) else _mlp(c, module) for c in classes]
        if all(f is not None or _has_decode(c, BLOCK_PARAMETERS) for f, c in zip(found, classes, strict=True)):
            yield attribute, [method for method in found if method is not None]


def _mlp(info: ClassInfo, module: Module) -> Method | None:
    try:
        _check_free(info, module)
    except NoStep:
        return None
    return mlp_method(info, module)


def _norms(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo]:
    names = norm_classes(info, attribute, module)
    return [module.classes[name] for name in names if name in module.classes]


def _prologues(norms: list[ClassInfo], module: Module) -> Iterator[Method]:
    """Yield the method of every norm class that calls the runtime's `rms_norm` and has none yet."""
    for info in norms:
        found = runtime_norm(info, module)
        if found is None or found[1].function != "rms_norm" or module.method(info, "prologue") is not None:
            continue
        forward, call = found
        after = info.methods.get("add_forward", forward)
        statement = line(f"return Prologue({', '.join(call.arguments)})", module)
        text = "Returns this norm as the first stage of a product's kernel."
        yield Method(after, "prologue", (), text, (statement,), ("products.Prologue",))
