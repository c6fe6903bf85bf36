"""Tensors that a decode step makes from nothing but shapes and positions are read from buffers made once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import passed_cache
from rewrite.analysis.effects import HEAP, effects_of
from rewrite.analysis.loops.host_constants import (
    constants,
    dtype_of,
    is_held,
    is_number,
    is_rounded,
    is_tensor,
    listed,
)
from rewrite.analysis.loops.positions import reckoned_positions
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind, self_attribute, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, expression, parameters, single_assignments
from rewrite.analysis.tree.replacement import with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform


class PreallocateBuffers(Transform):
    """Rotary tables that are computed once, and constants that are made where they are used.

    What it does:
        `self.rotary_emb(hidden_states, position_ids)` becomes
        `rotary_rows(self.rotary_emb, hidden_states, position_ids, past_key_values)`. In a decode step it reads the
        rows of tables that hold every position; everywhere else it calls the module.
        `torch.tensor(number, device=…)` becomes `torch.full((), number, device=…)`, in fp64 and rounded from there
        where the number may be beyond the dtype, and `x[..., [-2], :]` becomes `x[..., -2, None, :].clone()`.

    Why:
        A rotary module runs eight kernels to make one row of cosines and sines; reading them is one. A number or a
        list that is copied from the host to the device cannot be part of a captured step.

    What it needs:
        The module's class is in the file, reads only dtype and device of its first argument, changes nothing of its
        own, and returns two tables. Nothing in the file sets what it reads.
        The function that calls it has the cache.

    Numerics:
        Exact: the module itself fills the tables, and they are used only if they have the bits it returns.

    Known limits:
        Frequencies that change with the length of the text (`dynamic`, beyond the original context) have no table.
        Modules that return complex numbers, or take positions of several axes, are called as before.
    """

    name = "preallocate_buffers"
    summary = "A decode step reads cosines and sines from tables that are computed once."
    numerics = Numerics.EXACT
    stage = Stage.GRAPH
    reasons: ClassVar[Mapping[str, str]] = {
        "no_cache": "the function that calls the module does not see the cache",
        "reads_input": "the module reads more of its first argument than dtype and device",
        "other_positions": "the positions are reckoned with, and may be none of the cache's slots, or the call has "
        "other arguments than a tensor, its positions and a layer type",
        "other_result": "the module does not return two tables, the same at each call",
        "not_a_number": "nothing shows that the value put on the device is a number that its dtype holds, or that "
        "what is indexed is a tensor",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every constant copied to the device, every call of a module of this file that computes cosines and sines."""
        for owner, name, method in module.methods():
            for constant in constants(method, module):
                yield Candidate(constant, f"{owner.name}.{name}", " ".join(module.code(constant).split()))
            for call in calls_in(method.body):
                attribute = called_attribute(call)
                if attribute is not None and _rotary_class(owner, attribute, module) is not None:
                    yield Candidate(call, f"{owner.name}.{name}", attribute)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check module and call, and replace the call."""
        owner, method = candidate.where.split(".")
        function = module.classes[owner].methods[method]
        call = candidate.node
        if isinstance(call, cst.Subscript):
            if not is_tensor(call, function, module.classes[owner], module):
                return Skip("not_a_number", module.code(call.value))
            return _as_copy(call, module)
        if isinstance(call, cst.Call) and called_attribute(call) is None:
            return _filled(call, module.classes[owner], module)
        if not isinstance(call, cst.Call):
            raise TypeError("a candidate is a call")
        rotary = _rotary_class(module.classes[owner], candidate.label, module)
        if rotary is None or not _returns_two(rotary.methods["forward"]):
            return Skip("other_result")
        if not _reads_only_kind(rotary.methods["forward"]):
            return Skip("reads_input", rotary.name)
        if why := _why_not_constant(rotary, module):
            return Skip("other_result", why)
        arguments = _arguments(call, rotary.methods["forward"], module)
        if arguments is None:
            return Skip("other_positions", module.code(call))
        if (cache := passed_cache(function)) is None:
            return Skip("no_cache")
        if reckoned := reckoned_positions(expression(arguments[1]), candidate.label, function, module):
            return Skip("other_positions", reckoned)
        all_arguments = [module.code(call.func), *arguments[:2], cache, *arguments[2:]]
        old, new = with_call(call, "rotary_rows", all_arguments, module)
        return Found((Edit(old, (new,)),), ("rotary_rows",))


def _filled(call: cst.Call, owner: ClassInfo, module: Module) -> Found | Skip:
    """Turn `torch.tensor(number, …)` into `torch.full((), number, …)`, which refuses what the dtype cannot hold.

    A number that the text does not tell is filled in where every one has its place, and rounded from there.
    """
    if not is_number(call, owner, module):
        return Skip("not_a_number", module.code(call.args[0].value))
    given = {a.keyword.value if a.keyword is not None else "": module.code(a).rstrip(", ") for a in call.args}
    dtype, suffix = dtype_of(call), ""
    if not is_held(call, owner, module):
        if dtype is None or not is_rounded(call, owner, module):
            return Skip("not_a_number", module.code(call.args[0].value))
        given["dtype"], suffix = "dtype=torch.float64", f".to({module.code(dtype)})"
    old, new = with_call(call, "torch.full", ["()", *given.values()], module, suffix)
    return Found((Edit(old, (new,)),))


def _as_copy(node: cst.Subscript, module: Module) -> Found | Skip:
    """Turn `x[..., [i], :]` into `x[..., i, None, :].clone()`: a copy, as an index in a list makes."""
    found = listed(node)
    if found is None:
        raise TypeError("a candidate has a list of one number")
    element, number = found
    parts = ", ".join(f"{number}, None" if part is element else module.code(part.slice) for part in node.slice)
    return Found((Edit(node, (expression(f"{module.code(node.value)}[{parts}].clone()"),)),))


def _rotary_class(owner: ClassInfo, attribute: str, module: Module) -> ClassInfo | None:
    """Return the class of `self.<attribute>` if it is in this file and computes cosines and sines of positions."""
    for value in module.assignments(owner, attribute):
        name = module.qualified(value.func) if isinstance(value, cst.Call) else ""
        info = effects_of(module).names.class_of(name)
        if info is None or "forward" not in info.methods or len(parameters(info.methods["forward"])) < 3:
            return None
        called = {_called(call) for call in calls_in(info.methods["forward"].body)}
        if {"cos", "sin"} <= called or "polar" in called:
            return info
    return None


def _called(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""


def _returns_two(forward: cst.FunctionDef) -> bool:
    kept = single_assignments(forward)
    results = [node.value for node in walk(forward.body) if isinstance(node, cst.Return)]
    results = [kept.get(value.value) if isinstance(value, cst.Name) else value for value in results]
    return bool(results) and all(isinstance(value, cst.Tuple) and len(value.elements) == 2 for value in results)


def _reads_only_kind(forward: cst.FunctionDef) -> bool:
    """Whether the function reads only `.dtype` and `.device` of its first argument."""
    name = parameters(forward)[1]
    kinds = {
        id(node.value)
        for node in walk(forward.body)
        if isinstance(node, cst.Attribute) and node.attr.value in ("dtype", "device")
    }
    return all(id(node) in kinds for node in walk(forward.body) if isinstance(node, cst.Name) and node.value == name)


def _why_not_constant(rotary: ClassInfo, module: Module) -> str:
    """Return what makes the module return other tables for the same positions, `""` where nothing in the file does."""
    forward = rotary.methods["forward"]
    scope = effects_of(module).scope(forward, rotary)
    effect = scope.of(forward.body)
    if effect.stores:
        return f"{rotary.name}.forward sets .{min(effect.stores)}"
    if HEAP in scope.memory(effect.writes):
        return f"{rotary.name}.forward writes in place"
    read = set[str]().union(*(_attributes(node) for node in walk(forward.body)))
    for node in of_kind(module.tree, cst.AssignTarget, cst.AugAssign):
        target = node.target
        if isinstance(target, cst.Attribute) and target.attr.value in read and self_attribute(target) is None:
            return f"`{module.code(target)}` is set"
    return ""


def _attributes(node: cst.CSTNode) -> set[str]:
    """Return the attributes that `self.a.b` reads one after the other, none for what is no such thing."""
    found: set[str] = set()
    while isinstance(node, cst.Attribute):
        found.add(node.attr.value)
        node = node.value
    return found if isinstance(node, cst.Name) and node.value == "self" else set()


def _arguments(call: cst.Call, forward: cst.FunctionDef, module: Module) -> list[str] | None:
    """Return the code of tensor, positions and, where given, the layer type; None if the call has anything else."""
    names = parameters(forward)[1:]
    if any(argument.star for argument in call.args) or len(call.args) > len(names):
        return None
    given = {
        names[place] if argument.keyword is None else argument.keyword.value: module.code(argument.value)
        for place, argument in enumerate(call.args)
    }
    wanted = [*names[:2], "layer_type"] if "layer_type" in given else names[:2]
    return [given[name] for name in wanted] if set(given) == set(wanted) else None
