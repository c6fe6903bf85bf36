"""Residual adds that a norm reads: which statements take part, and who reads the sum afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.sites.norms import looks_like_norm, runtime_norm
from rewrite.analysis.syntax.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.syntax.nodes import bound_names, calls_in, single_argument

Add = cst.BinaryOperation


@dataclass(frozen=True)
class Pair:
    """An add and the call of the norm that reads the sum."""

    add: Add
    call: cst.Call
    norm: str
    """The attribute of `self` that holds the norm."""
    function: cst.FunctionDef
    line: cst.BaseStatement
    """The statement with the norm's call."""
    total: str = ""
    """The local that holds the sum; empty where the add is the call's argument."""
    assignment: cst.BaseStatement | None = None
    """`total = left + right`."""
    between: tuple[cst.BaseStatement, ...] = ()
    """The statements between the two, in source order."""
    same_block: bool = True
    in_place: bool = False

    @property
    def before_line(self) -> tuple[cst.BaseStatement, ...]:
        """The statements before that with the norm's call that take part."""
        return (*((self.assignment,) if self.assignment is not None else ()), *self.between)

    @property
    def copies(self) -> list[str]:
        """The names that statements between the two give the sum."""
        return [name for statement in self.between if (name := _copy_of(statement, self.total)) is not None]


def pairs(info: ClassInfo, function: cst.FunctionDef, module: Module) -> Iterator[Pair]:
    """Yield every call of a norm in a method that reads a sum of two tensors, in source order."""
    for call in calls_in(function.body):
        norm = self_attribute(call.func)
        argument = single_argument(call)
        if norm is None or argument is None or not norm_classes(info, norm, module):
            continue
        line = module.statement(call)
        if isinstance(argument, cst.BinaryOperation) and _adds_tensors(argument):
            yield Pair(argument, call, norm, function, line)
        elif isinstance(argument, cst.Name):
            started = Pair(Add(argument, cst.Add(), argument), call, norm, function, line)
            if (pair := _through_name(started, argument, module)) is not None:
                yield pair


def norm_classes(info: ClassInfo, attribute: str, module: Module) -> list[str | None]:
    """Return the classes that `self.<attribute>` may be of, None for one that is no norm; empty if none is a norm.

    A norm is `torch.nn.LayerNorm`, written out, or the name of a norm class of the file.
    """
    found = [_norm_class(choice, module) for value in module.assignments(info, attribute) for choice in choices(value)]
    return found if any(name is not None for name in found) else []


def is_fused(name: str, module: Module) -> bool:
    """Whether a norm is torch's own or a class of the file that calls the runtime's `rms_norm`.

    A class that calls `layer_norm` rounds as it did when it was written out, which is not how torch's own rounds.
    """
    if name not in module.classes:
        return True
    found = runtime_norm(module.classes[name], module)
    return found is not None and found[1].function == "rms_norm"


def is_read_after(name: str, line: cst.CSTNode, function: cst.FunctionDef, module: Module) -> bool:
    """Whether something may read the value that `name` has after `line`."""
    while line is not function:
        block = module.parent(line)
        following = _following(line, block)
        for statement in following:
            if name in names_read(statement):
                return True
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            if name in bound_names(statement) or isinstance(statement.body[-1], (cst.Return, cst.Raise)):
                return False
        line = module.parent(block) if isinstance(block, (cst.IndentedBlock, cst.Else)) else block
        if isinstance(line, (cst.For, cst.While, cst.Try, cst.With)):
            return True
        if isinstance(line, cst.Else):
            line = module.parent(line)
        while isinstance(line, cst.If) and isinstance(module.parent(line), cst.If):
            line = module.parent(line)
    return False


def _through_name(pair: Pair, argument: cst.Name, module: Module) -> Pair | None:
    """Complete `pair` with the statement that assigns the sum, looking back from the norm's call."""
    line, same_block = pair.line, True
    between: list[cst.BaseStatement] = []
    while True:
        for statement in reversed(_preceding(line, module.parent(line))):
            if argument.value in bound_names(statement):
                return _assigned(pair, statement, argument.value, between[::-1], same_block)
            between.append(statement)
        block = module.parent(line)
        above = module.parent(block) if isinstance(block, cst.IndentedBlock) else block
        if not same_block or not isinstance(above, cst.If):
            return None
        line, same_block = above, False


def _assigned(
    pair: Pair, statement: cst.BaseStatement, name: str, between: Sequence[cst.BaseStatement], same_block: bool
) -> Pair | None:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    in_place = isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign)
    if isinstance(small, cst.AugAssign) and in_place:
        add = Add(small.target, cst.Add(), small.value)
    elif isinstance(small, cst.Assign) and isinstance(small.value, cst.BinaryOperation) and len(small.targets) == 1:
        add = small.value
    else:
        return None
    if not _adds_tensors(add) or (isinstance(small, cst.Assign) and not isinstance(small.targets[0].target, cst.Name)):
        return None
    return Pair(
        add, pair.call, pair.norm, pair.function, pair.line, name, statement, tuple(between), same_block, in_place
    )


def _adds_tensors(node: cst.BinaryOperation) -> bool:
    if any(isinstance(inner, (cst.NamedExpr, cst.Await)) for inner in walk(node)):
        return False
    numbers = (cst.Integer, cst.Float, cst.SimpleString, cst.UnaryOperation, cst.List, cst.Tuple)
    return isinstance(node.operator, cst.Add) and not any(isinstance(n, numbers) for n in (node.left, node.right))


def _copy_of(statement: cst.CSTNode, name: str) -> str | None:
    """Return `x` of the statement `x = <name>`."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if not isinstance(small, cst.Assign) or len(small.targets) != 1 or not isinstance(small.value, cst.Name):
        return None
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Name) and small.value.value == name else None


def choices(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the values other than None that a conditional expression may have."""
    if isinstance(value, cst.IfExp):
        yield from choices(value.body)
        yield from choices(value.orelse)
    elif not (isinstance(value, cst.Name) and value.value == "None"):
        yield value


def _norm_class(value: cst.BaseExpression, module: Module) -> str | None:
    if not isinstance(value, cst.Call):
        return None
    name = module.qualified(value.func)
    if name == "torch.nn.LayerNorm":
        return name
    info = module.classes.get(name)
    if info is None:
        return None
    return name if runtime_norm(info, module) is not None or looks_like_norm(info) else None


def _statements(block: cst.CSTNode) -> Sequence[cst.BaseStatement]:
    body = getattr(block, "body", ())
    return [s for s in body if isinstance(s, cst.BaseStatement)] if isinstance(body, Sequence) else []


def _preceding(line: cst.CSTNode, block: cst.CSTNode) -> list[cst.BaseStatement]:
    statements = _statements(block)
    places = [place for place, statement in enumerate(statements) if statement is line]
    return list(statements[: places[0]]) if places else []


def _following(line: cst.CSTNode, block: cst.CSTNode) -> list[cst.BaseStatement]:
    statements = _statements(block)
    places = [place for place, statement in enumerate(statements) if statement is line]
    return list(statements[places[0] + 1 :]) if places else []


def names_read(node: cst.CSTNode) -> set[str]:
    """Return the names that stand below `node`, those left out that it only assigns."""
    targets = {
        id(name)
        for inner in walk(node)
        if isinstance(inner, (cst.AssignTarget, cst.For, cst.CompFor))
        for name in _assigned_names(inner.target)
    }
    return {inner.value for inner in walk(node) if isinstance(inner, cst.Name) and id(inner) not in targets}


def _assigned_names(target: cst.CSTNode) -> Iterator[cst.Name]:
    if isinstance(target, cst.Name):
        yield target
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _assigned_names(element.value)
