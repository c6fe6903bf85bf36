"""Branches and comparisons."""

from __future__ import annotations

import libcst as cst

from ..evaluation import pure, trivial
from ..rewriting import Blocks, Expressions, Rewriting, guarded

_OPPOSITES = {
    cst.Equal: cst.NotEqual,
    cst.NotEqual: cst.Equal,
    cst.Is: cst.IsNot,
    cst.IsNot: cst.Is,
    cst.In: cst.NotIn,
    cst.NotIn: cst.In,
}
_MIRRORED = {
    cst.Equal: cst.Equal,
    cst.NotEqual: cst.NotEqual,
    cst.LessThan: cst.GreaterThan,
    cst.GreaterThan: cst.LessThan,
    cst.LessThanEqual: cst.GreaterThanEqual,
    cst.GreaterThanEqual: cst.LessThanEqual,
}


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """Return a test for the contrary, in the spelling that a person would choose."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        opposite = _OPPOSITES.get(type(test.comparisons[0].operator))
        if opposite in (cst.Is, cst.IsNot, cst.In, cst.NotIn, cst.Equal, cst.NotEqual):
            target = test.comparisons[0].with_changes(operator=opposite())
            return test.with_changes(comparisons=[target])
    return cst.UnaryOperation(cst.Not(), guarded(test))


class SwapBranches(Rewriting):
    """`if c: A else: B` → `if not c: B else: A`."""

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        orelse = updated_node.orelse
        above = self.module.parent(original_node)
        is_elif = isinstance(above, cst.If) and above.orelse is original_node
        if not isinstance(orelse, cst.Else) or is_elif:
            return updated_node
        self.places += 1
        return updated_node.with_changes(
            test=negated(updated_node.test),
            body=orelse.body,
            orelse=orelse.with_changes(body=updated_node.body),
            whitespace_before_test=cst.SimpleWhitespace(" "),
        )


class SwapConditionals(Expressions[cst.IfExp]):
    """`A if c else B` → `B if not c else A`."""

    kinds = (cst.IfExp,)

    def respelled(self, original: cst.IfExp, updated: cst.IfExp) -> cst.BaseExpression | None:
        if any("#" in cst.Module([]).code_for_node(part) for part in (updated.body, updated.orelse, updated.test)):
            return None
        body = guarded(updated.orelse) if isinstance(updated.orelse, (cst.IfExp, cst.Lambda)) else updated.orelse
        spaces = {name: cst.SimpleWhitespace(" ") for name in _SPACES}
        return updated.with_changes(body=body, orelse=updated.body, test=negated(updated.test), **spaces)


_SPACES = ("whitespace_before_if", "whitespace_after_if", "whitespace_before_else", "whitespace_after_else")


def _leaves(block: cst.BaseSuite) -> bool:
    """Whether a block always ends in a return."""
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        return isinstance(last.body[-1], cst.Return)
    if isinstance(last, cst.If) and isinstance(last.orelse, cst.Else):
        return _leaves(last.body) and _leaves(last.orelse.body)
    return False


class ElseAfterReturn(Blocks):
    """`if c: return a`, rest → `if c: return a`, `else:` rest."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result = list(body)
        for place in range(len(result) - 2, -1, -1):
            branch, rest = result[place], result[place + 1 :]
            if not isinstance(branch, cst.If) or branch.orelse is not None or not _leaves(branch.body):
                continue
            self.places += 1
            result[place:] = [branch.with_changes(orelse=cst.Else(cst.IndentedBlock(rest)))]
        return result


class EarlyReturn(Blocks):
    """`if c: return a`, `else:` rest → `if c: return a`, rest."""

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for statement in body:
            orelse = statement.orelse if isinstance(statement, cst.If) else None
            if not isinstance(statement, cst.If) or not isinstance(orelse, cst.Else) or not _leaves(statement.body):
                result.append(statement)
                continue
            if not isinstance(orelse.body, cst.IndentedBlock):
                result.append(statement)
                continue
            self.places += 1
            result += [statement.with_changes(orelse=None), *orelse.body.body]
        return result


class ReturnEarlyByNegation(Blocks):
    """`if c: x = f(x)`, `return x` → `if not c: return x`, `x = f(x)`, `return x`."""

    name = "return_by_negation"

    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        if len(body) < 2 or not isinstance(self.module.parent(original), cst.FunctionDef):
            return body
        branch, last = body[-2], body[-1]
        returns = isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[0], cst.Return)
        if not isinstance(branch, cst.If) or branch.orelse is not None or not returns:
            return body
        if not isinstance(branch.body, cst.IndentedBlock) or _leaves(branch.body):
            return body
        self.places += 1
        early = last.deep_clone()
        assert isinstance(early, cst.SimpleStatementLine)
        guard = branch.with_changes(
            test=negated(branch.test),
            body=cst.IndentedBlock([early.with_changes(leading_lines=[])]),
            whitespace_before_test=cst.SimpleWhitespace(" "),
        )
        return [*body[:-2], guard, *branch.body.body, last]


class FlipComparisons(Expressions[cst.Comparison]):
    """`n == 1` → `1 == n`, `a < b` → `b > a`."""

    kinds = (cst.Comparison,)

    def respelled(self, original: cst.Comparison, updated: cst.Comparison) -> cst.BaseExpression | None:
        if len(original.comparisons) != 1:
            return None
        target = updated.comparisons[0]
        mirrored = _MIRRORED.get(type(target.operator))
        sides = (original.left, original.comparisons[0].comparator)
        if mirrored is None or not all(trivial(s) or pure(s, self.module, self.file.tensors) for s in sides):
            return None
        turned = cst.ComparisonTarget(mirrored(), guarded(updated.left))
        return updated.with_changes(left=guarded(target.comparator), comparisons=[turned])
