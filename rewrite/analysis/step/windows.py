"""The sliding window of a layer: what its mask hides, and what its attention function is told.

A decode step makes no mask, so both have to say the same.
"""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.syntax.module import ClassInfo, Module, names_in, walk
from rewrite.analysis.syntax.nodes import parameters, single_assignments
from rewrite.analysis.terms.computation import NotComputable, Run, subterms
from rewrite.analysis.terms.spelling import NONE, Term

FULL, SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"
_CONFIG = Term("parameter", (), "config")
_WINDOWS = (
    Term(".sliding_window", (_CONFIG,)),
    Term("getattr", (_CONFIG, Term("constant", (), '"sliding_window"'), NONE)),
)
_NEVER, _ALWAYS, _BY_TYPE = "never", "where the config has one", "by the layer's type"


def agreed_window(
    told: Term, layer_idx: Term, attention: ClassInfo, models: list[ClassInfo], module: Module
) -> Term | None:
    """Return the window in the masks of every model that has the layer; None where it is not known.

    Args:
        told: what the attention function is given.
        layer_idx: the layer's number, over attributes of the attention.
        attention: the class of the attention.
        models: those that build the layer.
        module: their file.
    """
    masked = {_masked(model, module) for model in models}
    if len(masked) != 1 or (kind := masked.pop()) is None:
        return None
    if kind == _told(told, attention, module):
        return told
    if kind == _ALWAYS and _told(told, attention, module) == _NEVER and "config" in attention.assigned:
        return Term(".sliding_window", (Term("attribute", (), "config"),))
    if kind == _BY_TYPE and "config" in attention.assigned and all(_reads_type(model, module) for model in models):
        config = Term("attribute", (), "config")
        layer_type = Term("index", (Term(".layer_types", (config,)), layer_idx))
        test = Term("eq", (layer_type, Term("constant", (), '"sliding_attention"')))
        return Term("select", (test, Term(".sliding_window", (config,)), NONE))
    return None


def _reads_type(model: ClassInfo, module: Module) -> bool:
    """Whether the loop over the layers takes each one's mask by `config.layer_types` at its number."""
    forward = model.methods["forward"]
    for loop in walk(forward.body):
        if not isinstance(loop, cst.For) or (mask := _mask_given(loop, model, module)) is None:
            continue
        locals_ = {name.value: Term("parameter", (), name.value) for name in _targets(loop.target)}
        try:
            key = _step(model, module).expression(mask, _bound_once(loop, locals_, model, module)).args[-1]
        except (NotComputable, IndexError):
            return False
        if key.op == "index" and key.args[0] == Term(".layer_types", (Term("attribute", (), "config"),)):
            counted = isinstance(loop.iter, cst.Call) and module.qualified(loop.iter.func) == "enumerate"
            first = next(iter(locals_.values()), None)
            return counted and len(loop.iter.args) == 1 and key.args[1:] == (first,)  # type: ignore[attr-defined]
        if key.op == ".attention_type" and key.args[0].op == "parameter":
            return all(_has_type(layer, module) for layer, names in module.stacks.items() if model.name in names)
    return False


def _bound_once(loop: cst.For, names: dict[str, Term], model: ClassInfo, module: Module) -> dict[str, Term]:
    """Return the loop's targets, and the locals that a statement of its body binds from them once."""
    bound = dict(names)
    for name, value in single_assignments(model.methods["forward"]).items():
        if any(value is node for node in walk(loop.body)) and names_in([value]) & {*names}:
            bound[name] = _step(model, module).expression(value, names)
    return bound


def _step(owner: ClassInfo, module: Module) -> Run:
    return Run(module, owner, 0)


def _targets(target: cst.CSTNode) -> list[cst.Name]:
    if isinstance(target, cst.Tuple):
        return [name for element in target.elements for name in _targets(element.value)]
    return [target] if isinstance(target, cst.Name) else []


def _mask_given(loop: cst.For, model: ClassInfo, module: Module) -> cst.BaseExpression | None:
    """Return what the layers of a loop are given as their mask."""
    layers = {name.value for name in _targets(loop.target)}
    for call in walk(loop.body):
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Name) and call.func.value in layers:
            for layer in (module.classes[name] for name, models in module.stacks.items() if model.name in models):
                forward = layer.methods.get("forward")
                names = [] if forward is None else parameters(forward)[1:]
                if (given := _argument(call, "attention_mask", names)) is not None:
                    return given
    return None


def _argument(call: cst.Call, wanted: str, names: list[str]) -> cst.BaseExpression | None:
    for place, argument in enumerate(call.args):
        name = argument.keyword.value if argument.keyword is not None else "".join(names[place : place + 1])
        if name == wanted and not argument.star:
            return argument.value
    return None


def _has_type(layer: str, module: Module) -> bool:
    """Whether a layer's `attention_type` is `config.layer_types` at its number."""
    value = _assigned("attention_type", module.classes[layer], module)
    return value == Term("index", (Term(".layer_types", (_CONFIG,)), Term("parameter", (), "layer_idx")))


def stacked_in(layer: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes whose `__init__` builds several layers of this class."""
    return [module.classes[name] for name in module.stacks.get(layer.name, ())]


def mask_functions(function: cst.FunctionDef, module: Module) -> dict[str, str]:
    """Return the names in a method of functions that make masks, and what those are called where they are from."""
    meant = {name: module.imports.get(name, name).rsplit(".", 1)[-1] for name in names_in([function.body])}
    return {name: made for name, made in meant.items() if made.startswith("create_") and made.endswith("mask")}


def _masked(model: ClassInfo, module: Module) -> str | None:
    forward = model.methods.get("forward")
    if forward is None:
        return None
    made = mask_functions(forward, module)
    if any(name.endswith("mask_function") and name != "mask_function" for name in names_in([forward.body])):
        return None
    kinds = {*made.values()}
    if kinds == {FULL}:
        return _NEVER
    if kinds == {SLIDING}:
        return _ALWAYS
    if kinds != {FULL, SLIDING}:
        return None
    if any(isinstance(n, cst.SimpleString) and n.evaluated_value == "sliding_attention" for n in walk(forward.body)):
        return _BY_TYPE
    choices = (n for n in walk(forward.body) if isinstance(n, (cst.IfExp, cst.If)))
    return _ALWAYS if any(_by_config(node, model, made, module) for node in choices) else None


def _by_config(choice: cst.IfExp | cst.If, model: ClassInfo, made: dict[str, str], module: Module) -> bool:
    """Whether a mask without a window is chosen where the config has none, and one with a window elsewhere."""
    if choice.orelse is None:
        return False
    ways = [{made[n] for n in names_in([way]) & {*made}} for way in (choice.body, choice.orelse)]
    try:
        test = _step(model, module).expression(choice.test, {})
    except NotComputable:
        return False
    if test.op == "isnot" or test.op == "not":
        test = test.args[0] if test.op == "not" else Term("is", test.args)
        ways = ways[::-1]
    windows = [_resolved(side, model, module) for side in test.args]
    return ways == [{FULL}, {SLIDING}] and test.op == "is" and windows[0] in _WINDOWS and windows[1] == NONE


def _told(window: Term, attention: ClassInfo, module: Module) -> str | None:
    resolved = _resolved(window, attention, module)
    if resolved == NONE:
        return _NEVER
    if resolved in _WINDOWS:
        return _ALWAYS
    if resolved.op == "select" and resolved.args[1] in _WINDOWS and resolved.args[2] == NONE:
        test = resolved.args[0]
        typed = any(t.op == ".layer_types" for t in subterms(test))
        if test.op == "eq" and typed and Term("constant", (), '"sliding_attention"') in test.args:
            return _BY_TYPE
    return None


def _resolved(term: Term, owner: ClassInfo, module: Module, depth: int = 6) -> Term:
    """Return `term` with attributes replaced by what `__init__` assigns to them, over its parameters."""
    if term.op == "attribute" and depth:
        if term.value == "config":
            return _CONFIG
        value = _assigned(term.value, owner, module)
        return term if value is None else _resolved(value, owner, module, depth - 1)
    return Term(term.op, tuple(_resolved(a, owner, module, depth) for a in term.args), term.value)


def _assigned(attribute: str, owner: ClassInfo, module: Module) -> Term | None:
    values, init = owner.assigned.get(attribute, []), owner.methods.get("__init__")
    if len(values) != 1 or init is None:
        return None
    environment = {name: Term("parameter", (), name) for name in parameters(init) if name != "self"}
    run = Run(module, owner, 0)
    try:
        for name, value in single_assignments(init).items():
            if name not in environment and name in names_in(values):
                environment[name] = run.expression(value, environment)
        return run.expression(values[0], environment)
    except NotComputable:
        return None
