"""States that a model carries from call to call without a cache (`runtime/decode/recurrent_state.py`).

A module may keep one on itself: an attribute that `forward` makes from what it was. Or `forward` takes states by a
name, gives them back by the same one, and the generation loop hands them on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.tree.module import MOVES, ClassInfo, Module, kept, of_kind, parts, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, given, parameters

_HANDED_ON = ("state",)
"""What transformers' loop hands on by the name by which it is given back, besides a cache."""
_UPDATES = "_update_model_kwargs_for_generation"
_DESCRIBE = frozenset({"shape", "dtype", "device", "ndim", "is_cuda"})
_BLANK = ("torch.zeros", "torch.empty", "torch.ones", "torch.full")
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_OUT = m.Arg(keyword=m.Name("out"))
_RENAMES = frozenset({*MOVES, "type", "type_as", "contiguous", "detach"})


def kept_states(module: Module) -> tuple[list[str], str | None]:
    """Return the attributes in which modules of a file keep states, and one that cannot be given a buffer, if any.

    A state is None before the first call. One that is zeros, or of which nothing is said, would have to be known how
    to forget; what begins as anything else is a table or a number, and no state.
    """
    names: set[str] = set()
    live = _live(module)
    for info in module.classes.values():
        methods = {name: method for name, method in info.methods.items() if (info.name, name) in live}
        for name, in_place in _recurring(methods):
            values = _first_values(info, name, module)
            if all(m.matches(value, m.Name("None")) for value in values) and values:
                names.add(name)
            elif not in_place and all(_is_blank(value, module) for value in values):
                return [], name
    return sorted(names), None


def handed_states(info: ClassInfo, module: Module) -> str | None:
    """Return the argument by which `forward` of a class takes the states that it gives back and the loop hands on."""
    forward = module.method(info, "forward")
    if forward is None:
        return None
    taken = {*parameters(forward)}
    for call in calls_in(forward.body):
        for argument in call.args:
            name = argument.keyword.value if argument.keyword is not None else ""
            if name in taken and _gives_back(argument.value, name) and _is_handed_on(name, info, module):
                return name
    return None


def _gives_back(value: cst.BaseExpression, name: str) -> bool:
    """Whether a value is what a part of the model gave back by a name: `outputs.name`."""
    return isinstance(value, cst.Attribute) and value.attr.value == name and self_attribute(value) is None


def _is_handed_on(name: str, info: ClassInfo, module: Module) -> bool:
    own = module.method(info, _UPDATES)
    if own is None:
        return name in _HANDED_ON
    key = m.Subscript(
        slice=[m.SubscriptElement(m.Index(m.SimpleString(value=m.MatchIfTrue(lambda v: v[1:-1] == name))))]
    )
    lines = (line for line in of_kind(own.body, cst.Assign) if _gives_back(line.value, name))
    return any(m.matches(target.target, key) for line in lines for target in line.targets)


@dataclass
class _Flows:
    """Which attributes of a class are computed from which, in what a call of the model may run."""

    made: dict[str, set[str]]
    """By the attribute that is given a value."""
    written: dict[str, set[str]]
    """With what is written in place."""
    read: set[str]
    """Those whose contents are read at all."""

    def recurring(self) -> Iterator[tuple[str, bool]]:
        """Yield what is made from what it was, and what is made from that; each with whether in place alone."""
        made, written = (_in_circles(flows) for flows in (self.made, self.written))
        while True:
            behind = {name for name, of in self.written.items() if of & written and name in self.read} - written
            if not behind:
                break
            written |= behind
        yield from sorted((name, name not in made) for name in written)


def _in_circles(flows: Mapping[str, set[str]]) -> set[str]:
    """Return the names that lead back to themselves."""
    reached = {name: set(of) for name, of in flows.items()}
    while True:
        wider = {name: of | set().union(*(reached.get(inner, set()) for inner in of)) for name, of in reached.items()}
        if wider == reached:
            return {name for name, of in reached.items() if name in of}
        reached = wider


def _recurring(methods: Mapping[str, cst.FunctionDef]) -> list[tuple[str, bool]]:
    """Return the attributes that methods of a class make from what they were; each with whether in place alone."""
    if not any(_sets_attributes(method) for method in methods.values()):
        return []
    inside = {name: _read_inside(name, methods) for name in methods}
    found = _Flows({}, {}, set().union(*(_attributes(method.body) for method in methods.values())))
    for method in methods.values():
        _Locals(inside, found).follow(method)
    return list(found.recurring())


def _live(module: Module) -> set[tuple[str, str]]:
    """Return the methods that a call of a model may run, by class: each `forward`, and all that bear a called name."""
    found: set[tuple[str, str]] = set()
    named, known = {"forward"}, set[str]()
    while named - known:
        known |= named
        for info in module.classes.values():
            for name in known & {*info.methods} - {"__init__"}:
                if (info.name, name) not in found:
                    found.add((info.name, name))
                    named |= _named_calls(info.methods[name])
    return {(owner, name) for owner, name in found if module.method(module.classes[owner], "forward") is not None}


@kept
def _named_calls(method: cst.FunctionDef) -> frozenset[str]:
    calls = (call.func for call in calls_in(method.body))
    return frozenset(func.attr.value for func in calls if isinstance(func, cst.Attribute))


@kept
def _sets_attributes(method: cst.FunctionDef) -> bool:
    """Whether a method gives an attribute of `self` a value, or may write what lies in one."""
    targets = [node.target for node in of_kind(method.body, cst.AssignTarget, cst.AnnAssign)]
    written = any(self_attribute(node) is not None for target in targets for node in walk(target))
    in_place = any(_IN_PLACE.fullmatch(name) for name in _named_calls(method))
    outs = any(m.matches(argument, _OUT) for argument in of_kind(method.body, cst.Arg))
    return written or in_place or outs or any(True for _ in of_kind(method.body, cst.AugAssign))


def _read_inside(name: str, methods: Mapping[str, cst.FunctionDef]) -> set[str]:
    """Return the attributes whose contents a method reads, and the methods of the class that it calls."""
    found: set[str] = set()
    waiting, seen = [name], set[str]()
    while waiting:
        method = methods.get(waiting.pop())
        if method is None or method.name.value in seen:
            continue
        seen.add(method.name.value)
        found |= _attributes(method.body)
        waiting += [called for call in calls_in(method.body) if (called := self_attribute(call.func))]
    return found


def _attributes(node: cst.CSTNode) -> set[str]:
    """Return the attributes of `self` that code reads; their shapes and the like aside."""
    if isinstance(node, cst.Attribute) and node.attr.value in _DESCRIBE:
        return set()
    if (name := self_attribute(node)) is not None:
        return {name}
    if isinstance(node, cst.AssignTarget) and not isinstance(node.target, cst.Subscript):
        return set()
    return set().union(*map(_attributes, parts(node)))


class _Locals:
    """What the locals of a method are, and what they were computed from."""

    def __init__(self, inside: Mapping[str, set[str]], found: _Flows):
        self._inside, self._found = inside, found
        self._same: dict[str, set[str]] = {}
        self._computed: dict[str, set[str]] = {}

    def follow(self, method: cst.FunctionDef) -> None:
        """Note what flows into attributes, until nothing more does."""
        before = None
        while before != (before := self._size()):
            for node in walk(method.body):
                if isinstance(node, cst.Assign):
                    for target, value in given(node):
                        self._assign(target, value)
                elif isinstance(node, cst.AnnAssign) and node.value is not None:
                    self._assign(node.target, node.value)
                elif isinstance(node, cst.AugAssign):
                    self._write(node.target, node.value)
                elif isinstance(node, cst.Call):
                    self._call(node)

    def _size(self) -> int:
        return sum(len(of) for flows in (self._same, self._computed, self._found.written) for of in flows.values())

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        renamed = _unmoved(value)
        same = self._meant(renamed)
        computed = set() if same else self._sources(value)
        if isinstance(target, cst.Name) and isinstance(renamed, cst.Name):
            computed |= self._computed.get(renamed.value, set())
        if (name := self_attribute(target)) is not None:
            of = (same - {name}) | computed | (self._sources(value) if isinstance(renamed, cst.Name) else set())
            for flows in (self._found.made, self._found.written):
                flows.setdefault(name, set()).update(of)
        elif isinstance(target, cst.Subscript):
            self._write(target, value)
        elif isinstance(target, cst.Name):
            self._same.setdefault(target.value, set()).update(same)
            self._computed.setdefault(target.value, set()).update(computed)
        else:
            for node in walk(target):
                if (name := self_attribute(node)) is not None:
                    for flows in (self._found.made, self._found.written):
                        flows.setdefault(name, set()).update(computed)
                elif isinstance(node, cst.Name) and node.value != "self":
                    self._computed.setdefault(node.value, set()).update(computed)

    def _write(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        """Note a write in place: `target += value`, `target[...] = value`."""
        while isinstance(target, cst.Subscript):
            target = target.value
        for name in self._meant(target):
            self._found.written.setdefault(name, set()).update({name} | self._sources(value))

    def _call(self, call: cst.Call) -> None:
        """Note `target.write_(…)`, also behind other calls of its kind, and `out=target`."""
        targets = [argument.value for argument in call.args if m.matches(argument, _OUT)]
        if isinstance(call.func, cst.Attribute) and _IN_PLACE.fullmatch(call.func.attr.value):
            target = call.func.value
            while isinstance(target, cst.Call) and isinstance(target.func, cst.Attribute):
                target = target.func.value
            targets.append(target)
        for target in targets:
            self._write(target, call)

    def _meant(self, value: cst.BaseExpression) -> set[str]:
        """Return the attributes that an expression is."""
        if (name := self_attribute(value)) is not None:
            return {name}
        return self._same.get(value.value, set()) if isinstance(value, cst.Name) else set()

    def _sources(self, node: cst.CSTNode) -> set[str]:
        """Return the attributes that code computes from."""
        if isinstance(node, cst.Attribute) and node.attr.value in _DESCRIBE:
            return set()
        if isinstance(node, cst.Attribute):
            name = self_attribute(node)
            return self._sources(node.value) if name is None else self._inside.get(name, {name})
        if isinstance(node, cst.Name):
            return self._same.get(node.value, set()) | self._computed.get(node.value, set())
        if isinstance(node, cst.Arg):
            return self._sources(node.value)
        return set().union(*map(self._sources, parts(node)))


def _unmoved(value: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _RENAMES:
        value = value.func.value
    return value


def _first_values(info: ClassInfo, name: str, module: Module) -> list[cst.BaseExpression]:
    """Return what `__init__` sets an attribute to."""
    init = module.method(info, "__init__")
    lines = [*of_kind(init.body, cst.Assign)] if init is not None else []
    return [value for line in lines for target, value in given(line) if self_attribute(target) == name]


def _is_blank(value: cst.BaseExpression, module: Module) -> bool:
    """Whether a value is nothing yet: None, or a tensor of one number, in a buffer or not."""
    if isinstance(value, cst.Call) and module.qualified(value.func).endswith(".Buffer") and value.args:
        value = value.args[0].value
    called = module.qualified(value.func) if isinstance(value, cst.Call) else ""
    return m.matches(value, m.Name("None")) or called in _BLANK
