"""Statements: temporaries, order, tuples."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.tree.module import names_in, parts, walk
from rewrite.analysis.tree.nodes import replace_nodes

from ..evaluation import TRIVIAL, evaluated, pure, trivial
from ..rewriting import Blocks, guarded


def _simple(statement: cst.BaseStatement) -> cst.BaseSmallStatement | None:
    """Return the one small statement of a line."""
    return statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None


def _assigned(statement: cst.BaseStatement) -> tuple[str, cst.BaseExpression] | None:
    """Return name and value of `name = value`."""
    small = _simple(statement)
    if isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.targets[0].target, cst.Name):
        return small.targets[0].target.value, small.value
    return None


def _value(statement: cst.BaseStatement) -> cst.BaseExpression | None:
    """Return what a line evaluates first: the value of an assignment, a return or an expression."""
    small = _simple(statement)
    if isinstance(small, (cst.Assign, cst.Return, cst.Expr, cst.AnnAssign)):
        return small.value
    return None


def _assignment(name: str, value: cst.BaseExpression) -> cst.SimpleStatementLine:
    broken = "\n" in cst.Module([]).code_for_node(value) and not isinstance(value, (cst.Tuple, cst.GeneratorExp))
    if broken and not value.lpar:  # it stood between the parentheses of something larger
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    elif not broken and not isinstance(value, (cst.Tuple, cst.GeneratorExp)):
        value = value.with_changes(lpar=[], rpar=[])
    return cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)])


def _lines(statement: cst.BaseStatement) -> tuple[cst.EmptyLine, ...]:
    return tuple(getattr(statement, "leading_lines", ()))


class _Temporaries(Blocks):
    """Takes calls out of the expression that they stand in, in the order in which they are evaluated."""

    def prepare(self) -> None:
        self.taken = {node.value for node in walk(self.module.tree) if isinstance(node, cst.Name)}
        self.made = 0

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for statement in body:
            value = _value(statement)
            inner = self._hoisted(value) if value is not None else []
            if inner:
                new = {id(node): (cst.Name(name),) for name, node in inner}
                before, lines = _lines_of(inner, new), _lines(statement)
                changed = replace_nodes(statement, new)
                assert isinstance(changed, cst.SimpleStatementLine)
                result += [before[0].with_changes(leading_lines=lines), *before[1:]]
                statement = changed.with_changes(leading_lines=[])
            result.append(statement)
        return result

    def _hoisted(self, value: cst.BaseExpression) -> list[tuple[str, cst.BaseExpression]]:
        found: list[tuple[str, cst.BaseExpression]] = []
        above = _above(value)
        order = list(evaluated(value))
        written = any(isinstance(n, cst.Call) and _writes(n) for n in order if n is not None)
        for node in order:
            if node is None or node is value or written:
                break
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "super":
                break
            if isinstance(node, cst.Call) and self.wanted(node, above):
                self.made += 1
                self.places += 1
                found.append((self._fresh(), node))
        return found

    def wanted(self, node: cst.Call, above: dict[int, cst.CSTNode]) -> bool:
        """Whether this call is to be taken out."""
        raise NotImplementedError

    def _fresh(self) -> str:
        name = f"intermediate_{self.made}"
        while name in self.taken:
            self.made += 1
            name = f"intermediate_{self.made}"
        return name


def _writes(call: cst.Call) -> bool:
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    return (name.endswith("_") and not name.endswith("__")) or any(
        a.keyword is not None and a.keyword.value in ("out", "inplace") for a in call.args
    )


def _above(top: cst.CSTNode) -> dict[int, cst.CSTNode]:
    return {id(child): node for node in walk(top) for child in parts(node)}


def _lines_of(
    inner: list[tuple[str, cst.BaseExpression]], new: dict[int, tuple[cst.Name]]
) -> list[cst.SimpleStatementLine]:
    """Return the assignments of temporaries, each of which reads those that were taken out of it."""
    result = []
    for name, node in inner:
        changed = replace_nodes(node, {key: value for key, value in new.items() if key != id(node)})
        assert isinstance(changed, cst.BaseExpression)
        result.append(_assignment(name, changed))
    return result


class IntroduceTemporaries(_Temporaries):
    """`f(g(x) * h(x))` → `a = g(x)`, `b = h(x)`, `f(a * b)`: every call that is an operand or an argument."""

    def wanted(self, node: cst.Call, above: dict[int, cst.CSTNode]) -> bool:
        return not _is_receiver(node, above)


class SplitChains(_Temporaries):
    """`f(x).view(s).transpose(1, 2)` → `a = f(x)`, `b = a.view(s)`, `b.transpose(1, 2)`, and other nested calls."""

    def wanted(self, node: cst.Call, above: dict[int, cst.CSTNode]) -> bool:
        return True


def _is_receiver(node: cst.CSTNode, above: dict[int, cst.CSTNode]) -> bool:
    return isinstance(above.get(id(node)), cst.Attribute)


class InlineTemporaries(Blocks):
    """`a = g(x)`, `y = f(a)` → `y = f(g(x))`, where nothing else reads `a` and nothing is evaluated before it."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        counts = _counts(function)
        result: list[cst.BaseStatement] = []
        for statement in body:
            while result and (merged := self._merged(result[-1], statement, counts)) is not None:
                result.pop()
                statement = merged
                self.places += 1
            result.append(statement)
        return result

    def _merged(
        self, first: cst.BaseStatement, second: cst.BaseStatement, counts: dict[str, int]
    ) -> cst.BaseStatement | None:
        found, value = _assigned(first), _value(second)
        if found is None or value is None or _comments(second):
            return None
        name, expression = found
        if counts.get(name) != 2:
            return None
        use = _first_use(value, name)
        if use is None or any(isinstance(node, cst.Await | cst.Yield) for node in walk(expression)):
            return None
        changed = replace_nodes(second, {id(use): (guarded(expression),)})
        assert isinstance(changed, cst.SimpleStatementLine)
        return changed.with_changes(leading_lines=_lines(first))


def _comments(statement: cst.BaseStatement) -> bool:
    return any(line.comment is not None for line in _lines(statement))


def _first_use(value: cst.BaseExpression, name: str) -> cst.Name | None:
    """Return the use of a local, if nothing but names and constants is evaluated before it."""
    for node in evaluated(value):
        if isinstance(node, cst.Name) and node.value == name:
            return node
        if node is None or not trivial(node):
            return None
    return None


def _counts(function: cst.FunctionDef) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in walk(function):
        if isinstance(node, cst.Name):
            counts[node.value] = counts.get(node.value, 0) + 1
    return counts


class ReorderStatements(Blocks):
    """`a = f(x)`, `b = g(x)` → `b = g(x)`, `a = f(x)`, for neighbours that are pure and independent."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result, before = list(body), original.body
        place = 0
        while place + 1 < len(result):
            if self._independent(before[place], before[place + 1]):
                result[place : place + 2] = [result[place + 1], result[place]]
                self.places += 1
                place += 1
            place += 1
        return result

    def _independent(self, first: cst.BaseStatement, second: cst.BaseStatement) -> bool:
        one, two = _assigned(first), _assigned(second)
        if one is None or two is None or _comments(first) or _comments(second):
            return False
        if one[0] == two[0] or one[0] in names_in([two[1]]) or two[0] in names_in([one[1]]):
            return False
        return all(pure(value, self.module, self.file.tensors) for _, value in (one, two))


class SplitTuples(Blocks):
    """`a, b = f(x), g(x)` → `a = f(x)`, `b = g(x)`; `a = b = x` → `b = x`, `a = b`."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for statement in body:
            pairs = _pairs(statement)
            if not pairs:
                result.append(statement)
                continue
            self.places += 1
            lines = [_assignment(name, value) for name, value in pairs]
            result += [lines[0].with_changes(leading_lines=_lines(statement)), *lines[1:]]
        return result


def _pairs(statement: cst.BaseStatement) -> list[tuple[str, cst.BaseExpression]]:
    """Return what a tuple assignment assigns, one by one, if no value reads a name that comes before."""
    small = _simple(statement)
    if not isinstance(small, cst.Assign):
        return []
    targets = [target.target for target in small.targets]
    if len(targets) == 2 and all(isinstance(target, cst.Name) for target in targets):
        first, second = (cst.ensure_type(target, cst.Name).value for target in targets)
        return [(first, small.value), (second, cst.Name(first))]
    if len(targets) != 1 or not isinstance(targets[0], cst.Tuple) or not isinstance(small.value, cst.Tuple):
        return []
    names = [element.value.value for element in targets[0].elements if isinstance(element.value, cst.Name)]
    values = [element.value for element in small.value.elements if isinstance(element, cst.Element)]
    if not len(names) == len(values) == len(targets[0].elements) == len(small.value.elements):
        return []
    early = (set(names[:place]) & names_in([value]) for place, value in enumerate(values))
    return [] if any(early) else list(zip(names, values, strict=True))


class JoinAssignments(Blocks):
    """`a = f(x)`, `b = g(x)` → `a, b = f(x), g(x)`, where the second reads nothing of the first."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for statement in body:
            joined = self._joined(result[-1], statement) if result else None
            if joined is None:
                result.append(statement)
            else:
                self.places += 1
                result[-1] = joined
        return result

    def _joined(self, first: cst.BaseStatement, second: cst.BaseStatement) -> cst.BaseStatement | None:
        one, two = _assigned(first), _assigned(second)
        if one is None or two is None or _comments(second) or one[0] == two[0] or one[0] in names_in([two[1]]):
            return None
        if any(isinstance(value, TRIVIAL) for value in (one[1], two[1])):
            return None
        targets = cst.Tuple([cst.Element(cst.Name(one[0])), cst.Element(cst.Name(two[0]))], lpar=[], rpar=[])
        values = cst.Tuple([cst.Element(guarded(one[1])), cst.Element(guarded(two[1]))], lpar=[], rpar=[])
        line = cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(targets)], values)])
        return line.with_changes(leading_lines=_lines(first))
