"""Models make no attention mask where their layers read none: in a step, and in a prompt that is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.step.layer_step import is_decoded
from rewrite.analysis.step.terms import CACHE
from rewrite.analysis.step.windows import mask_functions, stacked_in
from rewrite.analysis.syntax.module import ClassInfo, Module, walk
from rewrite.analysis.syntax.nodes import LINE_LENGTH, calls_in, expression, parameters, single_assignments
from rewrite.analysis.syntax.replacement import name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_MASK = "attention_mask"
_TESTS = m.Name("decodes") | m.Name("needs_no_mask")
_PLAIN = frozenset(
    {"config", "input_embeds", "inputs_embeds", "attention_mask", "cache_position", "past_key_values", "position_ids"}
)


class DecodeMasks(Transform):
    """Make no mask in a decode step, nor in a graph that reads a prompt.

    What it does:
        Turns `create_causal_mask(…)` into `None if needs_no_mask(past_key_values) else create_causal_mask(…)`. A call
        with arguments that may hide more, such as `and_mask_function`, becomes `None if decodes(…) else …`.

    Why:
        A mask of one row costs a dozen kernels a token; the step's attention reads the valid slots of its cache.
        Without padding transformers makes no mask for a prompt, except while a graph is captured, and attention with a
        mask took 2.6 times as long as without (2,048 tokens of an 8B Llama, H100).

    What it needs:
        Every class that the model builds and that takes a mask has the `decode` of decode_layers, and nothing but
        their calls reads the mask.

    Numerics:
        Exact: the step does not read it, and the prompt's attention is causal by itself.

    Known limits:
        Only masks made by transformers' functions in the model's own `forward`.
    """

    name = "decode_masks"
    summary = "No attention mask is made in steps and captured prompts whose layers need none."
    numerics = Numerics.EXACT
    stage = Stage.STEP
    after = ("decode_layers",)
    reasons: ClassVar[Mapping[str, str]] = {
        "layer_without_decode": "a layer that takes the mask has no method for one new token",
        "mask_read": "the mask is read by more than the calls of layers",
        "name_taken": "the file has a name `needs_no_mask` or `decodes` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of a mask function in the `forward` of a class that builds layers; of those that are not seen to
        take a cache, the calls that make causal masks.
        """
        for info in module.classes.values():
            forward = info.methods.get("forward")
            if forward is None or not _stacked(info, module):
                continue
            known = CACHE in parameters(forward) and bool(_masked(info, module))
            for number, call in enumerate(_mask_calls(forward, module)):
                if not known and "causal" not in mask_functions(forward, module).get(module.code(call.func), ""):
                    continue
                label = module.code(call.func) + (f" #{number + 1}" if number else "")
                yield Candidate(call, f"{info.name}.forward", label)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check who reads the mask, then put the test before the call."""
        info = module.classes[candidate.where.split(".")[0]]
        forward, call = info.methods["forward"], candidate.node
        known = CACHE in parameters(forward) and bool(_masked(info, module))
        layers = _masked(info, module) if known else _stacked(info, module)
        missing = [layer.name for layer in layers if not (known and is_decoded(layer))]
        if missing:
            return Skip("layer_without_decode", ", ".join(missing))
        if (reader := _other_reader(call, forward, module)) is not None:
            return Skip("mask_read", reader)
        test = "needs_no_mask" if _is_plain(call, forward) else "decodes"
        if not name_is_free(test, module, forward):
            return Skip("name_taken")
        return Found((Edit(call, (_unless(test, call, module),)),), (f"cache.{test}",))


def _is_plain(call: cst.CSTNode, forward: cst.FunctionDef) -> bool:
    """Whether a call of a mask function hides nothing but what is padding, later or out of the window."""
    arguments = call.args if isinstance(call, cst.Call) else ()
    named = [arg.keyword.value for arg in arguments if arg.keyword is not None]
    for arg in arguments:
        if arg.star == "**":
            names = _literal_keys(arg.value, forward)
            if names is None:
                return False
            named += names
        elif arg.keyword is None:
            return False
    return _PLAIN.issuperset(named)


def _literal_keys(mapping: cst.BaseExpression, forward: cst.FunctionDef) -> list[str] | None:
    """Return the keys of a local that is assigned once, a mapping in braces, and changed nowhere; None for others."""
    value = single_assignments(forward).get(mapping.value) if isinstance(mapping, cst.Name) else None
    if not isinstance(mapping, cst.Name) or not isinstance(value, cst.Dict):
        return None
    name = m.Name(mapping.value)
    changes = m.AssignTarget(target=m.Subscript(value=name)) | m.Attribute(value=name)
    if any(m.matches(node, changes) for node in walk(forward.body)):
        return None
    keys = [element.key if isinstance(element, cst.DictElement) else None for element in value.elements]
    if not all(isinstance(key, cst.SimpleString) for key in keys):
        return None
    return [str(key.evaluated_value) for key in keys if isinstance(key, cst.SimpleString)]


def _unless(function: str, call: cst.CSTNode, module: Module) -> cst.IfExp:
    """Return the call behind the test; in parentheses where the line would become too long for one."""
    text = f"None if {function}({CACHE}) else call"
    above = module.parent(call)
    line = above if isinstance(above, cst.DictElement) else module.statement(call)
    indent = module.indentation(call) + (4 if line is above else 0)
    length = indent + len(module.code(line)) + len(text) - len("call,")
    long = "\n" not in module.code(line) and length > LINE_LENGTH
    test = expression(f"(\n    {text}\n)" if long else text)
    if not isinstance(test, cst.IfExp) or not isinstance(call, cst.Call):
        raise TypeError("not a conditional expression of a call")
    return test.with_changes(orelse=call)


def _stacked(info: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes of which `info` builds several."""
    return [layer for layer in module.classes.values() if info in stacked_in(layer, module)]


def _masked(info: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the layers that `info` stacks and whose `forward` takes a mask and a cache."""
    return [layer for layer in _stacked(info, module) if _takes_both(layer)]


def _takes_both(info: ClassInfo) -> bool:
    forward = info.methods.get("forward")
    return forward is not None and {_MASK, CACHE} <= {*parameters(forward)}


def _mask_calls(forward: cst.FunctionDef, module: Module) -> Iterable[cst.Call]:
    """Yield the calls that make masks, those left out that a step does not make any more."""
    made = {*mask_functions(forward, module)}
    chosen = {name for name, value in single_assignments(forward).items() if _chooses(value, made)}
    for call in calls_in(forward.body):
        if module.code(call.func) in made | chosen:
            above = module.parent(call)
            if not (isinstance(above, cst.IfExp) and m.matches(above.test, m.Call(func=_TESTS))):
                yield call


def _chooses(value: cst.BaseExpression, made: set[str]) -> bool:
    """Whether a value is one of the mask functions, chosen by a test."""
    if isinstance(value, cst.IfExp):
        return _chooses(value.body, made) and _chooses(value.orelse, made)
    return isinstance(value, cst.Name) and value.value in made


def _other_reader(call: cst.CSTNode, forward: cst.FunctionDef, module: Module) -> str | None:
    """Return the source of what reads the mask besides arguments called `attention_mask`, if there is such a thing."""
    names = _names_of(call, module)
    names |= {made for name in names for made in _made_by(name, forward, module)}
    if not names:
        return module.code(module.statement(call)).splitlines()[0]
    for use in walk(forward.body):
        if isinstance(use, cst.Name) and use.value in names and not _is_passed_on(use, module):
            return module.code(module.statement(use)).splitlines()[0]
    return None


def _names_of(call: cst.CSTNode, module: Module) -> set[str]:
    """Return the local that holds the mask, or the mapping that it is put in."""
    statement = module.statement(call)
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return set()
    holder = _holder(small)
    whole = small.value is call or (isinstance(small.value, cst.Dict) and _is_value(call, small.value))
    return {holder.value} if whole and isinstance(holder, cst.Name) else set()


def _is_value(call: cst.CSTNode, mapping: cst.Dict) -> bool:
    """Whether the call, or a function that does nothing else, is one of the mapping's values."""
    values = (element.value for element in mapping.elements if isinstance(element, cst.DictElement))
    return any(call is (value.body if isinstance(value, cst.Lambda) else value) for value in values)


def _made_by(name: str, forward: cst.FunctionDef, module: Module) -> set[str]:
    """Return the locals that hold what the functions in the mapping `name` make."""
    made = {
        holder.value
        for call in calls_in(forward.body)
        if m.matches(call.func, m.Subscript(value=m.Name(name)))
        and isinstance(small := getattr(module.statement(call), "body", [None])[0], cst.Assign)
        and isinstance(holder := _holder(small), cst.Name)
    }
    return made


def _holder(small: cst.Assign) -> cst.BaseExpression:
    """Return what an assignment gives a value to: the local, or the mapping that gets an item."""
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Subscript) else target


def _is_passed_on(use: cst.Name, module: Module) -> bool:
    """Whether `use` is a target, an argument `attention_mask`, or the test whether the caller gave the mask."""
    top: cst.CSTNode = use
    above = module.parent(top)
    while isinstance(above, (cst.Subscript, cst.IfExp)):
        top, above = above, module.parent(above)
    if isinstance(above, cst.AssignTarget):
        return True
    if isinstance(above, cst.Call) and above.func is top:
        return isinstance(top, cst.Subscript)
    if isinstance(above, cst.NamedExpr):
        return above.target is top and m.matches(above.value, m.Name(_MASK))
    if isinstance(above, cst.Arg):
        call = module.parent(above)
        given = above.keyword is not None and above.keyword.value == _MASK
        return given or m.matches(call, m.Call(func=m.Name("isinstance")))
    return False
