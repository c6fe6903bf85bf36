"""Where a file divides by the root of a mean of squares, in whatever spelling, function or class.

This is a notion of its own, broad and blind to what the operators offer: it follows names to everything that a
function assigns to them and looks for the parts of a norm. What it finds and nobody understands is a skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from rewrite.analysis.effects.name_bindings import dotted_end
from rewrite.analysis.terms.computation import NotComputable, body
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, of_kind, parts, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in

_MEANS = ("mean", "var", "var_mean")
_ASSIGNING = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)
_RELEVANT = (cst.Call, cst.BinaryOperation, *_ASSIGNING)
_DIVISIONS = ("div", "true_divide", "divide")


@dataclass(frozen=True)
class Place:
    """A function that normalises by the root of a mean of squares."""

    where: str
    """Qualified name, `LlamaRMSNorm.forward`."""
    function: cst.FunctionDef
    owner: ClassInfo | None
    """The class whose method it is."""
    centered: bool
    """Whether the squares are of differences from a mean, as in a LayerNorm."""

    @property
    def is_forward(self) -> bool:
        """Whether it is what a module computes, not a function or method that others call."""
        return self.owner is not None and self.function.name.value == "forward"


def norm_places(module: Module) -> tuple[Place, ...]:
    """Return the places of a module in source order; helpers of a class's `forward` count as that."""
    found = module.remembered.get("norm places")
    if not isinstance(found, tuple):
        found = module.remembered["norm places"] = tuple(_places(module))
    return found


def _places(module: Module) -> Iterator[Place]:
    owners = {id(function): info for info, _, function in module.methods()}
    seen: set[int] = set()
    for function in _functions(module.tree):
        centered = _Flow(function).norm()
        if centered is None:
            continue
        owner = owners.get(id(function))
        for place in _used_by(function, module) if owner is None else _read_by(function, owner, module):
            if id(place) not in seen:
                seen.add(id(place))
                yield Place(_where(place, module), place, owners.get(id(place)), centered)
    for info in module.classes.values():
        forward = info.methods.get("forward")
        if forward is not None and id(forward) not in seen and _divides_by_helper(forward, info, module):
            yield Place(f"{info.name}.forward", forward, info, centered=False)


def _divides_by_helper(forward: cst.FunctionDef, owner: ClassInfo, module: Module) -> bool:
    """Whether a `forward` divides by what a method or function of the file takes as the root of a mean of squares."""
    flow = _Flow(forward)
    for inside in filter(None, map(_inverted, flow.nodes)):
        for call in (node for node in flow.reached(inside) if isinstance(node, cst.Call)):
            name = self_attribute(call.func)
            helper = module.functions.get(dotted_end(call.func)) if name is None else module.method(owner, name)
            if helper is not None and helper is not forward and _Flow(helper).is_root():
                return True
    return False


def _functions(top: cst.CSTNode) -> Iterator[cst.FunctionDef]:
    """Yield every function of the file that stands in no other."""
    for part in parts(top):
        if isinstance(part, cst.FunctionDef):
            yield part
        elif not isinstance(part, (cst.BaseExpression, cst.SimpleStatementLine)):
            yield from _functions(part)


def _used_by(function: cst.FunctionDef, module: Module) -> list[cst.FunctionDef]:
    """Return the `forward`s in the place of a function of the file that they do little more than call."""
    name = function.name.value
    forwards = [(info, info.methods["forward"]) for info in module.classes.values() if "forward" in info.methods]
    calling = [(info, forward) for info, forward in forwards if name in names_in([forward.body])]
    norms = [forward for info, forward in calling if _is_computable(forward, info, module)]
    return norms if norms and len(norms) == len(calling) else [function, *norms]


def _is_computable(function: cst.FunctionDef, owner: ClassInfo, module: Module) -> bool:
    try:
        body(function, module, owner)
    except NotComputable:
        return False
    return True


def _read_by(function: cst.FunctionDef, owner: ClassInfo, module: Module) -> list[cst.FunctionDef]:
    """Return `forward` in the place of a helper that it calls; nothing for a method that nobody mentions any more."""
    forward = owner.methods.get("forward")
    if forward is not None and forward is not function and function in _helpers(forward, owner):
        return [forward]
    name = function.name.value
    heirs = (info for info in module.classes.values() if owner.name in info.bases and "forward" in info.methods)
    calling = [heir.methods["forward"] for heir in heirs if _calls(heir.methods["forward"], name)]
    if forward is None and calling:
        return calling
    if name != "forward" and not name.startswith("__") and not module.references.get(name):
        return []
    return [function]


def _helpers(function: cst.FunctionDef, owner: ClassInfo, depth: int = 3) -> list[cst.FunctionDef]:
    """Return the methods of the class that a method calls, and those that these call."""
    names = {self_attribute(call.func) for call in calls_in(function.body)}
    called = [method for name, method in owner.methods.items() if name in names and method is not function]
    return [*called, *(inner for method in called if depth for inner in _helpers(method, owner, depth - 1))]


def _calls(function: cst.FunctionDef, method: str) -> bool:
    return any(self_attribute(call.func) == method for call in calls_in(function.body))


def _where(function: cst.FunctionDef, module: Module) -> str:
    classes = [above.name.value for above in module.ancestors(function) if isinstance(above, cst.ClassDef)]
    return ".".join([*reversed(classes), function.name.value])


class _Flow:
    """The values of one function's names, whenever they are assigned."""

    def __init__(self, function: cst.FunctionDef):
        self.nodes = list(of_kind(function.body, *_RELEVANT))

    @cached_property
    def values(self) -> dict[str, list[cst.CSTNode]]:
        """Everything that the function assigns to each name."""
        found: dict[str, list[cst.CSTNode]] = {}
        for node in self.nodes:
            targets: list[cst.CSTNode] = []
            if isinstance(node, cst.Assign):
                targets = [target.target for target in node.targets]
            elif isinstance(node, (cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
                targets = [node.target]
            value = node.value if isinstance(node, _ASSIGNING) else None
            for name in (inner for target in targets for inner in walk(target) if isinstance(inner, cst.Name)):
                if value is not None:
                    found.setdefault(name.value, []).append(value)
        return found

    def norm(self) -> bool | None:
        """Return whether the squares are centered, None where nothing is divided by the root of their mean."""
        for node in self.nodes:
            inside = _inverted(node)
            if inside is None:
                continue
            reached = self.reached(inside)
            if _is_mean_of_squares(reached) and (_is_inverse_root(node) or any(map(_is_root, reached))):
                return any(map(_is_variance, reached)) or any(
                    _is_mean(inner) for n in reached for inner in self.reached(_subtracted(n))
                )
        return None

    def is_root(self) -> bool:
        """Whether a root of a mean of squares is taken, and nothing divided by it."""
        return any(_is_root(node) and _is_mean_of_squares(self.reached(node)) for node in self.nodes)

    def reached(self, start: cst.CSTNode | None) -> list[cst.CSTNode]:
        """Return every node that a value is computed from, as far as the function shows."""
        found: list[cst.CSTNode] = []
        names: set[str] = set()
        waiting = [start] if start is not None else []
        while waiting:
            for node in walk(waiting.pop()):
                found.append(node)
                if isinstance(node, cst.Name) and node.value not in names:
                    names.add(node.value)
                    waiting.extend(self.values.get(node.value, ()))
        return found


def _inverted(node: cst.CSTNode) -> cst.CSTNode | None:
    """Return what `node` divides by, or takes the inverse root of."""
    if _is_inverse_root(node):
        return node
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return node.right
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
        return node.value
    if isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") in _DIVISIONS and node.args:
        return node.args[-1].value
    if isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") == "reciprocal":
        return node
    return node if _power(node) in ("-1", "-1.0") else None


def _is_inverse_root(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") == "rsqrt":
        return True
    return _power(node) == "-0.5"


def _is_root(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") in ("sqrt", "norm", "vector_norm"):
        return True
    return _power(node) == "0.5"


def _power(node: cst.CSTNode) -> str:
    """Return the exponent of a power of something, as it is written."""
    exponent: cst.CSTNode | None = None
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Power):
        exponent = node.right
    elif isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") == "pow" and node.args:
        exponent = node.args[-1].value
    sign = ""
    if isinstance(exponent, cst.UnaryOperation) and isinstance(exponent.operator, cst.Minus):
        sign, exponent = "-", exponent.expression
    return f"{sign}{exponent.value}" if isinstance(exponent, (cst.Integer, cst.Float)) else ""


def _is_mean_of_squares(nodes: list[cst.CSTNode]) -> bool:
    """Whether among the parts of a value are squares and their mean, or a norm that is scaled."""
    calls = [dotted_end(node.func) for node in nodes if isinstance(node, cst.Call)]
    if "var" in calls or "var_mean" in calls:
        return True
    if "norm" in calls or "vector_norm" in calls:
        return any(_power(node) in ("0.5", "-0.5") for node in nodes) or "sqrt" in calls or "rsqrt" in calls
    divides = any(isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide) for node in nodes)
    return ("mean" in calls or ("sum" in calls and divides)) and any(map(_is_square, nodes))


def _is_square(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and dotted_end(node.func).rstrip("_") == "square":
        return True
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        return node.left.deep_equals(node.right)
    if isinstance(node, cst.Call) and dotted_end(node.func) in ("mul", "multiply") and node.args:
        other = node.func.value if isinstance(node.func, cst.Attribute) and len(node.args) == 1 else node.args[0].value
        return other.deep_equals(node.args[-1].value)
    return _power(node) in ("2", "2.0")


def _is_variance(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and dotted_end(node.func) in ("var", "var_mean")


def _is_mean(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and dotted_end(node.func) in _MEANS


def _subtracted(node: cst.CSTNode) -> cst.CSTNode | None:
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Subtract):
        return node.right
    if isinstance(node, cst.Call) and dotted_end(node.func) in ("sub", "subtract") and node.args:
        return node.args[-1].value
    return None
