"""How often a `while` turns that counts a time down from 1 to 0 in equal steps.

The loop of a flow-matching model (Euler's method):

    dt = -1.0 / n;  time = 1.0
    while time >= -dt / 2:  …;  time += dt

After k turns the time is 1 - k / n, so the test holds for k = 0 … n - 1 and fails at n, half a step away from either.
A sum of k fp32 steps is off by at most (k + 1) 2⁻²⁵, which is less than 1 / (2 n) for n ≤ 4095.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.syntax.module import Module, walk
from rewrite.analysis.syntax.nodes import bound_names

_ONE = m.Float() | m.Integer()


class NotBounded(Exception):
    """The number of turns is not known."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def turns(loop: cst.While, method: cst.FunctionDef, module: Module) -> cst.BaseExpression:
    """Return the expression of n.

    Raises:
        NotBounded: if a part of the proof is missing.
    """
    time, step = _test(loop.test, module)
    inside = [n for s in loop.body.body for n in walk(s)]
    if loop.orelse is not None or any(isinstance(n, (cst.Break, cst.Continue)) for n in inside):
        raise NotBounded("the loop can be left in another way")
    _check_body(loop, time, step, module)
    count = _count(step, loop, method, module)
    if not _is_one(_only_value(time, loop, method, module), module):
        raise NotBounded(f"{time} does not start at 1")
    written = set().union(*(bound_names(s) for s in loop.body.body))
    if {n.value for n in walk(count) if isinstance(n, cst.Name)} - {"self"} & written:
        raise NotBounded(f"{module.code(count)} changes in the loop")
    if any(isinstance(n, cst.AssignTarget) and module.code(n.target) == module.code(count) for n in inside):
        raise NotBounded(f"{module.code(count)} changes in the loop")
    return count


def _test(test: cst.BaseExpression, module: Module) -> tuple[str, str]:
    """Return time and step of `time >= -step / 2`."""
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1 and isinstance(test.left, cst.Name):
        target = test.comparisons[0]
        half = target.comparator
        if isinstance(target.operator, (cst.GreaterThanEqual, cst.GreaterThan)) and m.matches(
            half,
            m.BinaryOperation(
                left=m.UnaryOperation(operator=m.Minus(), expression=m.Name()),
                operator=m.Divide(),
                right=m.Integer("2") | m.Float("2.0"),
            ),
        ):
            return test.left.value, half.left.expression.value  # type: ignore[attr-defined]
    raise NotBounded(module.code(test))


def _check_body(loop: cst.While, time: str, step: str, module: Module) -> None:
    """The body changes the time once, by the step, and never the step."""
    steps = (f"{time} += {step}", f"{time} = {time} + {step}")
    changes = [s for s in loop.body.body if time in bound_names(s)]
    if len(changes) != 1 or " ".join(module.code(changes[0]).split("#")[0].split()) not in steps:
        raise NotBounded(f"{time} is not changed by {step} once a turn")
    if any(step in bound_names(s) for s in loop.body.body):
        raise NotBounded(f"{step} changes in the loop")


def _count(step: str, loop: cst.While, method: cst.FunctionDef, module: Module) -> cst.BaseExpression:
    """Return n of `step = -1.0 / n`, which may be put into a tensor afterwards."""
    for value in reversed(_values(step, loop, method, module)):
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide):
            top = value.left
            if isinstance(top, cst.UnaryOperation) and isinstance(top.operator, cst.Minus):
                if _is_one(top.expression, module):
                    return value.right
        if not _wraps(value, step, module):
            break
    raise NotBounded(f"{step} is not -1 / n")


def _only_value(name: str, loop: cst.While, method: cst.FunctionDef, module: Module) -> cst.BaseExpression:
    values = _values(name, loop, method, module)
    if len(values) != 1:
        raise NotBounded(f"{name} is assigned more than once before the loop")
    return values[0]


def _values(name: str, loop: cst.While, method: cst.FunctionDef, module: Module) -> list[cst.BaseExpression]:
    """Return what the statements of the loop's own block assign to a name before it; any other write is refused."""
    block = list(getattr(module.parent(loop), "body", ()))
    before = block[: next(i for i, s in enumerate(block) if s is loop)]
    values = []
    for statement in before:
        if name not in bound_names(statement):
            continue
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if not isinstance(small, cst.Assign) or module.code(small.targets[0].target) != name:
            raise NotBounded(f"{name} is written in another way")
        values.append(small.value)
    return values


def _wraps(value: cst.BaseExpression, name: str, module: Module) -> bool:
    """Whether `value` is `torch.tensor(name, …)` in fp32."""
    if not isinstance(value, cst.Call) or not module.qualified(value.func).startswith("torch."):
        return False
    return bool(value.args) and module.code(value.args[0].value) == name and _in_fp32(value, module)


def _is_one(value: cst.BaseExpression, module: Module) -> bool:
    if isinstance(value, cst.Call) and module.qualified(value.func) == "torch.tensor":
        return bool(value.args) and _is_one(value.args[0].value, module) and _in_fp32(value, module)
    return m.matches(value, _ONE) and float(module.code(value)) == 1.0


def _in_fp32(call: cst.Call, module: Module) -> bool:
    """A tensor of a Python float has the default dtype, which may be half; the proof is for fp32."""
    named = {a.keyword.value: module.code(a.value) for a in call.args if a.keyword is not None}
    return named.get("dtype") in ("torch.float32", "torch.float64", "torch.float", "torch.double")
