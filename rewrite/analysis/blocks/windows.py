"""The sliding window of a layer: what its mask hides, and what its attention function is told.

A decode step makes no mask, so both have to say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import effects_of
from rewrite.analysis.terms.computation import NotComputable, Run, subterms
from rewrite.analysis.terms.spelling import NONE, Term, make
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, walk
from rewrite.analysis.tree.nodes import assigned_once, calls_in, parameters, single_assignments

FULL, SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"
_OF_STATES = "create_recurrent_attention_mask"
"""Makes what mixers with states are given: None for a single token."""
_CONFIG = Term("parameter", (), "config")
_WINDOWS = (
    Term(".sliding_window", (_CONFIG,)),
    Term("getattr", (_CONFIG, Term("constant", (), '"sliding_window"'), NONE)),
)
_OWN_CONFIG = Term("attribute", (), "config")
_OWN_TYPES = Term(".layer_types", (_OWN_CONFIG,))
_TYPE = "sliding_attention"
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
        if not isinstance(loop, cst.For):
            continue
        numbered = m.matches(loop.iter, m.Call(func=m.Name("enumerate"), args=[m.Arg(keyword=None)]))
        if numbered and isinstance(loop.target, cst.Tuple) and len(loop.target.elements) == 2:
            number, layer = (element.value for element in loop.target.elements)
        else:
            number, layer = None, loop.target
        types = list(_chosen_by(loop, forward, model, module))
        if isinstance(number, cst.Name) and Term("index", (_OWN_TYPES, Term("parameter", (), number.value))) in types:
            return True
        if isinstance(layer, cst.Name) and (attribute := _own_attribute(layer.value, types)) is not None:
            stacked = [name for name, models in module.stacks.items() if model.name in models]
            return all(_has_type(module.classes[name], attribute, model, module) for name in stacked)
    return False


def _chosen_by(loop: cst.For, forward: cst.FunctionDef, model: ClassInfo, module: Module) -> Iterator[Term]:
    """Yield by what the calls in a loop choose an argument among several, temporaries looked through."""
    reading = _Reading(model, forward, module)
    for call in calls_in(loop.body):
        for argument in call.args:
            chosen = reading.term(argument.value)
            if chosen is not None and chosen.op == "index" and len(chosen.args) == 2:
                yield chosen.args[1]


def _own_attribute(layer: str, types: Iterable[Term]) -> str | None:
    of_layer = (Term("parameter", (), layer),)
    return next((t.op[1:] for t in types if t.op.startswith(".") and t.args == of_layer), None)


def _has_type(layer: ClassInfo, attribute: str, model: ClassInfo, module: Module) -> bool:
    """Whether a layer keeps `config.layer_types` at the number that the model gives it."""
    kept = _assigned(attribute, layer, module)
    if kept is None or kept.op != "index" or kept.args[0] != Term(".layer_types", (_CONFIG,)) or len(kept.args) != 2:
        return False
    return kept.args[1].op == "parameter" and _is_number(kept.args[1].value, layer, model, module)


def _is_number(parameter: str, layer: ClassInfo, model: ClassInfo, module: Module) -> bool:
    """Whether a model builds its layers with their number for a parameter: `[Layer(config, i) for i in range(…)]`."""
    names = parameters(layer.methods["__init__"])[1:]
    built = [call for call in calls_in(model.methods["__init__"].body) if module.qualified(call.func) == layer.name]
    for call in built:
        given = {names[place] if a.keyword is None else a.keyword.value: a.value for place, a in enumerate(call.args)}
        counted = [above.target for above in _loops_above(call, module) if _counts(above.iter)]
        value = given.get(parameter)
        if value is None or not any(target.deep_equals(value) for target in counted):
            return False
    return bool(built)


def _loops_above(call: cst.Call, module: Module) -> Iterator[cst.CompFor | cst.For]:
    for above in module.ancestors(call):
        if isinstance(above, cst.For):
            yield above
        elif isinstance(above, cst.BaseComp):
            yield above.for_in


def _counts(iterated: cst.BaseExpression) -> bool:
    return m.matches(iterated, m.Call(func=m.Name("range"), args=[m.Arg()]))


def stacked_in(layer: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes whose `__init__` builds several layers of this class."""
    return [module.classes[name] for name in module.stacks.get(layer.name, ())]


def mask_functions(function: cst.FunctionDef, module: Module) -> dict[str, str]:
    """Return what a method calls the functions that make masks, and what they are called where they come from."""
    found: dict[str, str] = {}
    for node in walk(function.body):
        if isinstance(node, (cst.Name, cst.Attribute)):
            name = module.qualified(node).rpartition(".")[2]
            if name.startswith("create_") and name.endswith("mask"):
                found[module.code(node)] = name
    return found


def _masked(model: ClassInfo, module: Module) -> str | None:
    forward = model.methods.get("forward")
    if forward is None:
        return None
    functions = mask_functions(forward, module)
    made = {*functions.values()} - {_OF_STATES}
    if any(name.endswith("mask_function") and name != "mask_function" for name in names_in([forward.body])):
        return None
    if made == {FULL}:
        return _NEVER
    if made == {SLIDING}:
        return _ALWAYS
    if made != {FULL, SLIDING}:
        return None
    kinds = list(_kinds(forward, functions, module))
    if any(key == _TYPE for key, _ in kinds):
        agrees = all(made in ({SLIDING if key == _TYPE else FULL}, {_OF_STATES}) for key, made in kinds)
        return _BY_TYPE if agrees else None
    reading = _Reading(model, forward, module)
    choices = (reading.term(node) for node in walk(forward.body) if isinstance(node, cst.IfExp))
    return _ALWAYS if any(choice is not None and _by_window(choice) for choice in choices) else None


def _kinds(forward: cst.FunctionDef, functions: Mapping[str, str], module: Module) -> Iterator[tuple[str, set[str]]]:
    """Yield each key under which a method keeps masks, and the functions that make them."""
    kept = single_assignments(forward)
    for node in walk(forward.body):
        pairs: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
        if isinstance(node, cst.Dict):
            pairs = [(e.key, e.value) for e in node.elements if isinstance(e, cst.DictElement)]
        elif isinstance(node, cst.Assign) and isinstance(target := node.targets[0].target, cst.Subscript):
            pairs = [(e.slice.value, node.value) for e in target.slice if isinstance(e.slice, cst.Index)]
        for key, value in pairs:
            given = kept.get(value.value, value) if isinstance(value, cst.Name) else value
            inside = (inner for inner in walk(given) if isinstance(inner, (cst.Name, cst.Attribute)))
            made = {functions[code] for inner in inside if (code := module.code(inner)) in functions}
            if isinstance(key, cst.SimpleString) and made:
                yield str(key.evaluated_value), made


def _by_window(choice: Term) -> bool:
    """Whether a term is the function without a window where the config has none, and the other one else."""
    if choice.op != "select" or choice.args[0] != make("is", Term(".sliding_window", (_OWN_CONFIG,)), NONE):
        return False
    ends = [(way.value if way.op == "name" else way.op).rpartition(".")[2] for way in choice.args[1:]]
    return ends == [FULL, SLIDING]


class _Reading:
    """The terms of what a method computes, over its parameters and the locals that it binds more than once."""

    def __init__(self, owner: ClassInfo, function: cst.FunctionDef, module: Module):
        self.run = Run(module, owner, 0)
        self.names = effects_of(module).scope(function, owner).locals - {"self"}
        self.single = assigned_once(function)

    def term(self, node: cst.BaseExpression, depth: int = 4) -> Term | None:
        """Return the term of an expression, None if it has none."""
        environment = {}
        for name in names_in([node]) & self.names:
            value = self.single.get(name) if depth else None
            inner = self.term(value, depth - 1) if value is not None else None
            environment[name] = inner or Term("parameter", (), name)
        try:
            return self.run.expression(node, environment)
        except NotComputable:
            return None


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
