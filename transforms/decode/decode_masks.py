"""Models make no attention mask where their layers read none: in a step, and in a prompt that is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.terms import PASSED, cache_parameters, passed_cache
from rewrite.analysis.blocks.windows import mask_functions, stacked_in
from rewrite.analysis.decode.layer_methods import is_decoded
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import (
    LINE_LENGTH,
    called_attribute,
    calls_in,
    expression,
    parameters,
    single_assignments,
)
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_MASK = "attention_mask"
_TESTS = m.Name("is_decode_step") | m.Name("skips_mask")
_PLAIN = frozenset(
    {"config", "input_embeds", "inputs_embeds", "attention_mask", "cache_position", *PASSED, "position_ids"}
)


class DecodeMasks(Transform):
    """Make no mask in a decode step, nor in a graph that reads a prompt.

    What it does:
        Turns `create_causal_mask(…)` into `None if skips_mask(past_key_values) else create_causal_mask(…)`. A call
        with arguments that may hide more, such as `and_mask_function`, becomes `None if is_decode_step(…) else …`.

    Why:
        A mask of one row costs a dozen kernels a token; the step's attention reads the valid slots of its cache.
        Without padding transformers makes no mask for a prompt, except while a graph is captured, and attention with a
        mask took 2.6 times as long as without (2,048 tokens of an 8B Llama, H100).

    What it needs:
        decode_layers has rewritten every class that the model builds and that takes a mask, and nothing but their
        calls reads the mask.

    Numerics:
        Exact: the step does not read it, and the prompt's attention is causal by itself.

    Known limits:
        Only masks made by transformers' functions in the model's own `forward`.
    """

    name = "decode_masks"
    summary = "No attention mask is made in steps and captured prompts whose layers need none."
    numerics = Numerics.EXACT
    stage = Stage.STEP
    in_decode_loop = True
    after = ("decode_layers",)
    reasons: ClassVar[Mapping[str, str]] = {
        "layer_without_decode": "a layer that takes the mask has no method for one new token, or not always one",
        "mask_read": "the mask is read by more than the calls of layers",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of a mask function in the `forward` of a class that builds layers; of those that are not seen to
        take a cache, the calls that make causal masks.
        """
        for info in module.classes.values():
            forward = info.methods.get("forward")
            if forward is None or not _stacked(info, module):
                continue
            stacked = _stacked(info, module)
            known = passed_cache(forward) is not None and any(_takes_cache(layer, module) for layer in stacked)
            for number, call in enumerate(_mask_calls(forward, module)):
                if not known and not _makes_causal(call, forward, module):
                    continue
                label = " ".join(module.code(call.func).split()) + (f" #{number + 1}" if number else "")
                yield Candidate(call, f"{info.name}.forward", label)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check who reads the mask, then put the test before the call."""
        info = module.classes[candidate.where.split(".")[0]]
        forward, call = info.methods["forward"], candidate.node
        cache = passed_cache(forward)
        known = cache is not None and bool(_masked(info, module))
        layers = _masked(info, module) if known else _stacked(info, module)
        steps = {layer.name for layer in layers if is_decoded(layer, module) and not _asks_more(layer)}
        missing = [layer.name for layer in layers if not known or layer.name not in steps]
        if cache is None or missing:
            return Skip("layer_without_decode", ", ".join(missing))
        flow = _Flow(info, layers, module)
        if (reader := flow.other_reader(call)) is not None:
            return Skip("mask_read", reader)
        test = "skips_mask" if _is_plain(call, forward) and flow.passed <= {_MASK} else "is_decode_step"
        return Found((Edit(call, (_unless(test, cache, call, module),)),), (test,))


def _asks_more(layer: ClassInfo) -> bool:
    """Whether a layer asks for more than a step before it takes its own, and reads the mask where it does not."""
    tests = [s.test for s in layer.methods["forward"].body.body if isinstance(s, cst.If)]
    joined = [test for test in tests if isinstance(test, cst.BooleanOperation)]
    return any(m.matches(call.func, m.Name("is_decode_step")) for test in joined for call in calls_in(test))


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


def _unless(function: str, cache: str, call: cst.CSTNode, module: Module) -> cst.IfExp:
    """Return the call behind the test; in parentheses where the line would become too long for one."""
    text = f"None if {function}({cache}) else call"
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
    """Return the layers that `info` stacks and whose `forward` takes a cache and reads a mask, of whatever name."""
    stacked = _stacked(info, module)
    return [layer for layer in stacked if _takes_cache(layer, module) and _reads_mask(layer, module)]


def _reads_mask(layer: ClassInfo, module: Module) -> bool:
    """Whether a layer reads what may be a mask; cross-attention can take the mask of the others and leave it."""
    names = _mask_parameters(layer, module)
    read = [node for node in walk(layer.methods["forward"].body) if isinstance(node, cst.Name) and node.value in names]
    return any(not isinstance(above := module.parent(node), cst.Arg) or above.keyword is not node for node in read)


def _takes_cache(info: ClassInfo, module: Module) -> bool:
    """Whether a class takes a cache by the name that transformers passes on, or by the one that its step knows."""
    forward = info.methods.get("forward")
    if passed_cache(forward) is not None:
        return True
    return forward is not None and is_decoded(info, module) and bool(cache_parameters(forward))


def _mask_parameters(info: ClassInfo, module: Module) -> set[str]:
    """Return the parameters of a layer that may be a mask: by its name, or because its `decode` is not given them."""
    names = {*parameters(info.methods["forward"])}
    if _MASK in names or not is_decoded(info, module):
        return names & {_MASK}
    steps = (call for call in calls_in(info.methods["forward"].body) if called_attribute(call) == "decode")
    read = {argument.value.value for call in steps for argument in call.args if isinstance(argument.value, cst.Name)}
    return names - read - {"self"}


def _mask_calls(forward: cst.FunctionDef, module: Module) -> Iterable[cst.Call]:
    """Yield the calls that make masks, those left out that a step does not make any more."""
    made = {*mask_functions(forward, module)}
    chosen = {name for name, value in single_assignments(forward).items() if _chooses(value, made)}
    for call in calls_in(forward.body):
        if module.code(call.func) in made | chosen or _chooses(call.func, made):
            above = module.parent(call)
            if not (isinstance(above, cst.IfExp) and m.matches(above.test, m.Call(func=_TESTS))):
                yield call


def _makes_causal(call: cst.Call, forward: cst.FunctionDef, module: Module) -> bool:
    """Whether the function that is called, or one of those that it is chosen from, makes causal masks."""
    known = mask_functions(forward, module)
    return any("causal" in known.get(module.code(node), "") for node in (call.func, *walk(call.func)))


def _chooses(value: cst.BaseExpression, made: set[str]) -> bool:
    """Whether a value is one of the mask functions, chosen by a test."""
    if isinstance(value, cst.IfExp):
        return _chooses(value.body, made) and _chooses(value.orelse, made)
    return isinstance(value, cst.Name) and value.value in made


class _Flow:
    """Who reads the masks of a model besides its layers."""

    def __init__(self, info: ClassInfo, layers: Sequence[ClassInfo], module: Module):
        forward = info.methods["forward"]
        self.info, self.forward, self.layers, self.module = info, forward, layers, module
        self.parameters = {_MASK}.union(*(_mask_parameters(layer, module) for layer in layers))
        self.passed: set[str] = set()
        """As what the layers are given the mask."""
        loops = (node for node in walk(forward.body) if isinstance(node, cst.For))
        self.turns = {name.value for loop in loops for name in walk(loop.target) if isinstance(name, cst.Name)}
        """Locals that loops bind: the layers, one after the other."""

    def other_reader(self, call: cst.CSTNode) -> str | None:
        """Return the source of what reads a mask besides arguments of layers, if there is such a thing."""
        if not (first := _names_of(call, self.module)):
            return self.module.code(self.module.statement(call)).splitlines()[0]
        names = [*first, *(made for name in sorted(first) for made in sorted(self.made_by(name)))]
        for name in names:  # grows by the locals that hold the same
            for use in (n for n in walk(self.forward.body) if isinstance(n, cst.Name) and n.value == name):
                if self.is_passed_on(use):
                    continue
                held = _names_of(_whole(use, self.module), self.module)
                if not held or (isinstance(self.module.parent(use), cst.Subscript) and not self.is_mapping(name)):
                    return self.module.code(self.module.statement(use)).splitlines()[0]
                names += sorted(held - {*names})
        return None

    def is_mapping(self, name: str) -> bool:
        """Whether a local holds masks by name: an item of it is a mask."""
        lines = [node for node in walk(self.forward.body) if isinstance(node, cst.Assign)]
        return any(
            m.matches(target.target, m.Subscript(value=m.Name(name)))
            or (m.matches(target.target, m.Name(name)) and isinstance(line.value, cst.Dict))
            for line in lines
            for target in line.targets
        )

    def made_by(self, name: str) -> set[str]:
        """Return the locals that hold what the functions in the mapping `name` make."""
        return {
            holder.value
            for call in calls_in(self.forward.body)
            if m.matches(call.func, m.Subscript(value=m.Name(name)))
            and isinstance(small := getattr(self.module.statement(call), "body", [None])[0], cst.Assign)
            and isinstance(holder := _holder(small), cst.Name)
        }

    def is_passed_on(self, use: cst.Name) -> bool:
        """Whether `use` is a target, a mask for a layer, or the test whether the caller gave the mask."""
        top = _whole(use, self.module)
        above = self.module.parent(top)
        if isinstance(above, cst.AssignTarget):
            return True
        if isinstance(above, cst.Call) and above.func is top:
            return isinstance(top, cst.Subscript)
        if isinstance(above, cst.NamedExpr):
            return above.target is top and m.matches(above.value, m.Name(_MASK))
        call = self.module.parent(above) if isinstance(above, cst.Arg) else None
        if not isinstance(above, cst.Arg) or not isinstance(call, cst.Call):
            return False
        return self.is_given(above, call) or m.matches(call, m.Call(func=m.Name("isinstance")))

    def is_given(self, argument: cst.Arg, call: cst.Call) -> bool:
        """Whether an argument is the mask of a layer; one of another name is that only of what a loop runs over."""
        turn = isinstance(call.func, cst.Name) and call.func.value in self.turns
        turn = turn or (isinstance(call.func, cst.Subscript) and self.is_stack(call.func.value))
        word = argument.keyword.value if argument.keyword is not None else self.named(argument, call) if turn else ""
        if word != _MASK and not (turn and word in self.parameters):
            return False
        self.passed.add(word)
        return True

    def is_stack(self, value: cst.BaseExpression) -> bool:
        """Whether an expression is an attribute that holds layers, and nothing else."""
        attribute = self_attribute(value)
        built = self.module.assignments(self.info, attribute) if attribute is not None else ()
        names = {layer.name for layer in self.layers}
        made = [
            {self.module.qualified(call.func) for call in calls_in(value)} & {*self.module.classes} for value in built
        ]
        return bool(made) and all(classes and classes <= names for classes in made)

    def named(self, argument: cst.Arg, call: cst.Call) -> str:
        """Return the parameter of every layer that an argument without a keyword is for; empty where they differ."""
        place = next(place for place, given in enumerate(call.args) if given is argument)
        if argument.star or any(given.star for given in call.args[:place]):
            return ""
        takes = [parameters(layer.methods["forward"])[1:] for layer in self.layers]
        found = {names[place] if place < len(names) else "" for names in takes}
        return found.pop() if len(found) == 1 else ""


def _whole(use: cst.CSTNode, module: Module) -> cst.CSTNode:
    """Return the expression that is the mask: an item of the mapping, or one of two."""
    while isinstance(above := module.parent(use), (cst.Subscript, cst.IfExp)):
        if isinstance(above, cst.IfExp) and above.test is use:
            break
        use = above
    return use


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


def _holder(small: cst.Assign) -> cst.BaseExpression:
    """Return what an assignment gives a value to: the local, or the mapping that gets an item."""
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Subscript) else target
