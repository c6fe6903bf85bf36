"""Residual adds that a norm reads: which statements take part, and who reads the sum afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from rewrite.analysis.effects.name_bindings import dotted_end
from rewrite.analysis.patterns.mean_squares import norm_places
from rewrite.analysis.patterns.norm_patterns import runtime_norm
from rewrite.analysis.patterns.sums import Assigned, Sum, assigned_by, sum_of
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import bound_names, calls_in, parameters, single_assignments

TORCH_NORMS = ("torch.nn.LayerNorm", "torch.nn.RMSNorm")
_FUNCTIONS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class Pair:
    """An add and the call of the norm that reads the sum."""

    add: Sum
    call: cst.Call
    norm: str
    """The attribute of `self` that holds the norm; what is called, as it is written, where it is none."""
    function: cst.FunctionDef
    line: cst.BaseStatement
    """The statement with the norm's call."""
    total: str = ""
    """The local that holds the sum; empty where the add is the call's argument."""
    assignment: cst.BaseStatement | None = None
    """`total = left + right`."""
    others: tuple[str, ...] = ()
    """Further names that the same statement gives the sum."""
    between: tuple[cst.BaseStatement, ...] = ()
    """The statements between the two, in source order."""
    reason: str = ""
    """Why the two are not to be fused, a reason of the transform; empty if nothing is known to speak against it."""
    detail: str = ""
    copies: tuple[str, ...] = field(default=())
    """The names that statements between the two give the sum."""
    copying: int = 0
    """How many of the statements between the two only copy the sum."""

    @property
    def only_copied(self) -> bool:
        """Whether nothing but copies of the sum stands between the two."""
        return self.copying == len(self.between)

    def refused(self, reason: str, detail: str = "") -> Pair:
        """Return the pair with why it is not to be fused, unless another reason is known already."""
        return self if self.reason else replace(self, reason=reason, detail=detail)


def pairs(info: ClassInfo, function: cst.FunctionDef, module: Module) -> Iterator[Pair]:
    """Yield every call of something like a norm in a method that reads a sum of two tensors, in source order."""
    for call in calls_in(function.body):
        found = _called(call, info, function, module)
        arguments = [argument for argument in call.args if not argument.star]
        if found is None or not arguments:
            continue
        if len(call.args) != 1 or not _is_first(arguments[0], found.norm, info, module):
            found = found.refused("unknown_norm", f"{found.norm} is called with more than the sum")
        argument = arguments[0].value
        if (total := sum_of(argument, module)) is not None:
            yield replace(found, add=total).refused(total.reason, total.detail)
        elif isinstance(argument, cst.Name) and (pair := _through_name(found, argument.value, module)) is not None:
            yield pair


def _called(call: cst.Call, info: ClassInfo, function: cst.FunctionDef, module: Module) -> Pair | None:
    """Return a pair without a sum for the call of something that may be a norm."""
    norm = self_attribute(call.func)
    nothing = Sum(call, call)
    if norm is not None:
        known = norm_classes(info, norm, module) or _sounds_like_norm(info, norm, module)
        return Pair(nothing, call, norm, function, module.statement(call)) if known else None
    written = Pair(nothing, call, module.code(call.func), function, module.statement(call))
    if module.qualified(call.func).startswith("torch.") and dotted_end(call.func) in _FUNCTIONS:
        return written.refused("unknown_norm", f"{written.norm} is a function, no module")
    held = call.func.value if isinstance(call.func, cst.Subscript) else call.func
    if isinstance(held, cst.Name):
        held = single_assignments(function).get(held.value, held)
        held = held.value if isinstance(held, cst.Subscript) else held
    norm = self_attribute(held)
    if norm is None or not (norm_classes(info, norm, module) or _sounds_like_norm(info, norm, module)):
        return None
    return written.refused("unknown_norm", f"{written.norm} is no attribute of self")


def _sounds_like_norm(info: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether something that is made for an attribute is called a norm."""
    made = [call for value in module.assignments(info, attribute) for call in _calls_at(value)]
    return any("norm" in dotted_end(call.func).lower() for call in made)


def _calls_at(value: cst.BaseExpression) -> list[cst.Call]:
    return [node for node in walk(value) if isinstance(node, cst.Call)]


def _is_first(argument: cst.Arg, norm: str, info: ClassInfo, module: Module) -> bool:
    """Whether an argument is what every norm that the attribute may hold normalises."""
    if argument.keyword is None:
        return True
    firsts = set()
    for name in norm_classes(info, norm, module):
        forward = module.method(module.classes[name], "forward") if name in module.classes else None
        firsts.add(parameters(forward)[1] if forward is not None and len(parameters(forward)) > 1 else "input")
    return firsts == {argument.keyword.value}


def norm_classes(info: ClassInfo, attribute: str, module: Module) -> list[str | None]:
    """Return the classes that `self.<attribute>` may be of, None for one that is no norm; empty if none is a norm.

    A norm is `torch.nn.LayerNorm`, written out, or the name of a norm class of the file.
    """
    values = (choice for value in module.assignments(info, attribute) for choice in choices(value))
    found = [_norm_class(kind, module) for value in values for kind in _kinds(value, module)]
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


def _through_name(pair: Pair, name: str, module: Module) -> Pair | None:
    """Complete `pair` with the statement that assigns the sum, looking back from the norm's call through copies."""
    line: cst.BaseStatement | None = pair.line
    between: list[cst.BaseStatement] = []
    if isinstance(line, cst.SimpleStatementLine) and (before := _on_this_line(line, pair.call)):
        pair = pair.refused("order", "several statements on one line")
        if (given := assigned_by(cst.SimpleStatementLine(before), name, module)) is not None:
            return _completed(pair, given, line, [], name) if isinstance(given.value, Sum) else None
    while line is not None:
        for statement in reversed(_preceding(line, module.parent(line))):
            given = assigned_by(statement, name, module)
            if given is not None and isinstance(given.value, Sum):
                return _completed(pair, given, statement, between[::-1], name)
            if given is not None and given.value is None:
                return None
            between.append(statement)
            name = str(given.value) if given is not None else name
        pair = pair.refused("conditional", "the norm stands in another block than the sum")
        line = _above(line, module)
        if isinstance(line, (cst.For, cst.While)) and (given := assigned_by(line, name, module)) is not None:
            return _completed(pair, given, line, [], name) if isinstance(given.value, Sum) else None
        if line is pair.function or (isinstance(line, cst.FunctionDef) and name in parameters(line)):
            return None
    return None


def _on_this_line(line: cst.SimpleStatementLine, call: cst.Call) -> list[cst.BaseSmallStatement]:
    """Return the statements that stand before that of the call on its line."""
    place = next(i for i, small in enumerate(line.body) if any(node is call for node in walk(small)))
    return list(line.body[:place])


def _above(line: cst.BaseStatement, module: Module) -> cst.BaseStatement | None:
    """Return the statement that `line` stands in."""
    return next((above for above in module.ancestors(line) if isinstance(above, cst.BaseCompoundStatement)), None)


def _completed(
    pair: Pair, given: Assigned, statement: cst.BaseStatement, between: Sequence[cst.BaseStatement], name: str
) -> Pair:
    assert isinstance(given.value, Sum)
    aliases, copying = {name, *given.others}, 0
    copies: list[str] = []
    for line in between:
        if (copy := _copy_of(line, aliases)) is not None:
            aliases.add(copy)
            copies.append(copy)
            copying += 1
    whole = replace(
        pair, add=given.value, total=name, assignment=statement, others=given.others, between=tuple(between),
        copies=tuple(dict.fromkeys(copies)), copying=copying,
    )  # fmt: skip
    return whole.refused(given.value.reason, given.value.detail) if given.value.reason else whole


def _copy_of(statement: cst.CSTNode, names: set[str]) -> str | None:
    """Return `x` of the statement `x = y`, where y is one of `names`."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if not isinstance(small, cst.Assign) or len(small.targets) != 1 or not isinstance(small.value, cst.Name):
        return None
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Name) and small.value.value in names else None


def choices(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the values other than None that a conditional expression may have."""
    if isinstance(value, cst.IfExp):
        yield from choices(value.body)
        yield from choices(value.orelse)
    elif not (isinstance(value, cst.Name) and value.value == "None"):
        yield value


def _kinds(value: cst.BaseExpression, module: Module) -> list[cst.BaseExpression]:
    """Return what a value may be made by: several classes where a local or a table of the file has one for each case.

    Should it be made by another one after all, `add_norm` calls that as it stands.
    """
    if not isinstance(value, cst.Call):
        return [cst.Name("None")]  # what it is made by is not written here
    func = value.func
    around = next((above for above in module.ancestors(value) if isinstance(above, cst.FunctionDef)), None)
    if isinstance(func, cst.Name) and around is not None:
        func = single_assignments(around).get(func.value, func)
    table = func.value if isinstance(func, cst.Subscript) else None
    if isinstance(table, cst.Name):
        return [element.value for held in module.tables.get(table.value, ()) for element in held.elements] or [func]
    return list(choices(func))


def _norm_class(kind: cst.BaseExpression, module: Module) -> str | None:
    name = module.qualified(kind)
    if name in TORCH_NORMS:
        return name
    info = module.classes.get(name)
    if info is None:
        return None
    is_norm = any(place.owner is info and place.is_forward for place in norm_places(module))
    return name if is_norm or runtime_norm(info, module) is not None else None


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
