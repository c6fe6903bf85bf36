"""The sliding window of a layer: what its mask hides, and what its attention function is told.

A decode step makes no mask, so both have to say the same.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

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
    for loop in walk(model.methods["forward"].body):
        if isinstance(loop, cst.For) and m.matches(loop.iter, m.Call(func=m.Name("enumerate"))):
            number = loop.target.elements[0].value if isinstance(loop.target, cst.Tuple) else loop.target
            wanted = f"attention_mask=causal_mask_mapping[self.config.layer_types[{module.code(number)}]]"
            return any(module.code(a).rstrip(", ") == wanted for a in walk(loop) if isinstance(a, cst.Arg))
        if isinstance(loop, cst.For) and isinstance(loop.target, cst.Name):
            wanted = f"attention_mask=causal_mask_mapping[{loop.target.value}.attention_type]"
            if any(module.code(a).rstrip(", ") == wanted for a in walk(loop) if isinstance(a, cst.Arg)):
                return all(_has_type(layer, module) for layer, names in module.stacks.items() if model.name in names)
    return False


def _has_type(layer: str, module: Module) -> bool:
    types = module.classes[layer].assigned.get("attention_type", [])
    return [module.code(value) for value in types] == ["config.layer_types[layer_idx]"]


def stacked_in(layer: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes whose `__init__` builds several layers of this class."""
    return [module.classes[name] for name in module.stacks.get(layer.name, ())]


def mask_functions(function: cst.FunctionDef) -> set[str]:
    """Return the names in a method that sound like functions that make masks."""
    return {name for name in names_in([function.body]) if name.startswith("create_") and name.endswith("mask")}


def _masked(model: ClassInfo, module: Module) -> str | None:
    forward = model.methods.get("forward")
    if forward is None:
        return None
    made = mask_functions(forward)
    if any(name.endswith("mask_function") and name != "mask_function" for name in names_in([forward.body])):
        return None
    if made == {FULL}:
        return _NEVER
    if made == {SLIDING}:
        return _ALWAYS
    if made != {FULL, SLIDING}:
        return None
    if any(isinstance(n, cst.SimpleString) and n.evaluated_value == "sliding_attention" for n in walk(forward.body)):
        return _BY_TYPE
    choices = (node for node in walk(forward.body) if isinstance(node, cst.IfExp))
    wanted = f"{FULL} if self.config.sliding_window is None else {SLIDING}"
    return _ALWAYS if any(module.code(node) == wanted for node in choices) else None


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
