"""What looks like a linear projection of some argument, in whatever form it is called: broad, for candidates."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute
from rewrite.analysis.tree.nodes import calls_in


@dataclass(frozen=True)
class LinearCall:
    """One use of the projection `self.<attribute>`."""

    attribute: str
    argument: cst.BaseExpression
    node: cst.Call
    statement: cst.BaseStatement
    plain: bool
    """Whether it is `self.<attribute>(argument)`, with a keyword or without."""


def linear_call(node: cst.Call, owner: ClassInfo, method: cst.FunctionDef, module: Module) -> LinearCall | None:
    """Return the projection that a call computes, None if it looks like something else."""
    found = _called(node, owner, method, module)
    if found is None:
        return None
    attribute, argument, plain = found
    return LinearCall(attribute, argument, node, module.statement(node), plain)


def linear_kind(attribute: str, owner: ClassInfo, module: Module) -> str:
    """Return what any value assigned to the attribute builds: `linear` for something called that, `convolution` for
    one that sees one place at a time, `""` for anything else.
    """
    values = module.assignments(owner, attribute)
    if any(_is_called(call, ("linear", "conv1d"), module) for value in values for call in calls_in(value)):
        return "linear"
    convolutions = (value for value in values if isinstance(value, cst.Call) and _is_called(value, "conv2d", module))
    return "convolution" if any(_sees_one_place(value) for value in convolutions) else ""


def _called(
    node: cst.Call, owner: ClassInfo, method: cst.FunctionDef, module: Module
) -> tuple[str, cst.BaseExpression, bool] | None:
    function = node.func
    if module.qualified(function) in ("torch.nn.functional.linear", "torch.functional.linear"):
        return _functional(node, owner, module)
    if isinstance(function, cst.Attribute) and function.attr.value == "forward":
        function = function.value
    if isinstance(function, cst.Name):
        function = effects_of(module).scope(method, owner).single.get(function.value, function)
    attribute = self_attribute(function)
    if attribute is None or not linear_kind(attribute, owner, module):
        return None
    argument = only_argument(node)
    if argument is None:
        return None
    return attribute, argument, function is node.func


def _functional(node: cst.Call, owner: ClassInfo, module: Module) -> tuple[str, cst.BaseExpression, bool] | None:
    """Read `F.linear(x, self.proj.weight, …)`."""
    given = {argument.keyword.value: argument.value for argument in node.args if argument.keyword is not None}
    plain = [argument.value for argument in node.args if argument.keyword is None and not argument.star]
    given |= dict(zip(("input", "weight", "bias"), plain, strict=False))
    weight = given.get("weight")
    if not isinstance(weight, cst.Attribute) or "input" not in given:
        return None
    attribute = self_attribute(weight.value)
    return (attribute, given["input"], False) if attribute and linear_kind(attribute, owner, module) else None


def only_argument(call: cst.Call) -> cst.BaseExpression | None:
    """Return the argument of a call with one, given by its place or as `input`."""
    if len(call.args) != 1 or call.args[0].star:
        return None
    keyword = call.args[0].keyword
    return call.args[0].value if keyword is None or keyword.value == "input" else None


def _is_called(call: cst.Call, ending: str | tuple[str, ...], module: Module) -> bool:
    return module.qualified(call.func).rsplit(".", 1)[-1].lower().endswith(ending)


def _sees_one_place(convolution: cst.Call) -> bool:
    by_name = {argument.keyword.value: argument.value for argument in convolution.args if argument.keyword is not None}
    third = convolution.args[2].value if len(convolution.args) > 2 else None
    size = by_name.get("kernel_size", third)
    return isinstance(size, cst.Integer) and size.value == "1"
