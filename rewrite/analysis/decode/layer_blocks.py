"""A layer's `forward` hands its norms and residuals on to the blocks that take them, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.terms import DROPOUT, is_built_from
from rewrite.analysis.decode.attention_text import augmented_by
from rewrite.analysis.decode.handed_on import Block, NotInPlace, Statement
from rewrite.analysis.decode.mixer_text import Replaced, bound_by, names_read, value_of, visited
from rewrite.analysis.patterns.residual import norm_classes
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import LINE_LENGTH, called_attribute, calls_in


@dataclass
class LayerBlocks:
    """Rewrites the statements of a layer around the calls of its blocks."""

    info: ClassInfo
    module: Module
    blocks: frozenset[str]
    """The attributes whose `forward` takes a norm and a residual."""
    handed: int = field(default=0, init=False)

    def block(self) -> Block:
        """Return the layer's `forward`.

        Raises:
            NotInPlace: if a block could take a norm that others read, too, or a sum of several blocks.
        """
        forward = self.info.methods["forward"]
        body = cst.ensure_type(forward.body, cst.IndentedBlock)
        after = forward.with_changes(body=body.with_changes(body=self._statements(body.body, ())))
        return Block(forward, after, ("residual_block",)) if self.handed else Block(forward, forward, ())

    def _statements(self, block: Sequence[Statement], behind: Sequence[Statement]) -> list[Statement]:
        """Return the statements of a block, behind which others are run."""
        found = list(block)
        place = 0
        while place < len(found):
            statement = found[place]
            if isinstance(statement, cst.SimpleStatementLine):
                place = self._called(found, place, behind)
            elif isinstance(statement, cst.If):
                found[place] = self._conditional(statement, [*found[place + 1 :], *behind])
            place += 1
        return found

    def _conditional(self, statement: cst.If, behind: Sequence[Statement]) -> cst.If:
        body = statement.body.with_changes(body=self._statements(statement.body.body, behind))
        other = statement.orelse
        if isinstance(other, cst.If):
            other = self._conditional(other, behind)
        elif other is not None:
            other = other.with_changes(body=other.body.with_changes(body=self._statements(other.body.body, behind)))
        return statement.with_changes(body=body, orelse=other)

    def _called(self, found: list[Statement], place: int, behind: Sequence[Statement]) -> int:
        """Hand on what stands around a block's call in one of some statements; return where the call is then."""
        statement = found[place]
        call = next((c for c in calls_in(statement) if called_attribute(c) in self.blocks), None)
        if call is None or not call.args or call.args[0].star:
            return place
        whole, residual = _added_to(statement, call)
        dropout: str | None = None
        result = _result(statement, whole)
        norm, normed = self._norm_inside(call)
        gone: list[int] = []
        target = result
        if norm is None and (before := self._norm_before(found, place, call, result, behind)) is not None:
            number, norm, normed = before
            gone.append(number)
        if norm is None and self._is_normed(found[:place], call.args[0].value):
            raise NotInPlace("more than one block reads a norm")
        if residual is None and result and (sum_ := self._sum_behind(found, place, result, behind)) is not None:
            number, residual, target, dropout = sum_
            if value_of(found[number], cst.Return) is None:
                gone.append(number)
            else:
                found[number] = _returning(found[number], result)
        elif residual is None and result and self._is_added([*found[place + 1 :], *behind], result):
            raise NotInPlace("more than one block is added")
        if norm is None and residual is None:
            return place
        length = len(self.module.tree.code_for_node(statement).split("\n")[0])
        added = {"norm": norm and f"self.{norm}", "residual": residual, "dropout": dropout and f"self.{dropout}"}
        made: cst.BaseExpression = self._handed(call, added, normed, length)
        if isinstance(whole, cst.BinaryOperation) and (subscript := _first_of(whole, call)) is not None:
            made = subscript.with_changes(value=made)
        new = visited(statement, Replaced(whole, made))
        if target and result and target != result:
            new = _bound_as(new, result, target)
        found[place] = _with_comments(new, [found[number] for number in gone], place, gone)
        for number in sorted(gone, reverse=True):
            del found[number]
        self.handed += 1
        return place - sum(number < place for number in gone)

    def _handed(self, call: cst.Call, added: Mapping[str, str | None], normed: str | None, length: int) -> cst.Call:
        """Return the call of a block with what stands around it."""
        given = "".join(f", {name}={value}" for name, value in added.items() if value is not None)
        function = f"residual_block(self.{called_attribute(call)}{given})"
        if length + len(given) > LINE_LENGTH - 24:
            function = f"residual_block(\n    self.{called_attribute(call)}{given}\n)"
        args = call.args if normed is None else [call.args[0].with_changes(value=cst.Name(normed)), *call.args[1:]]
        return call.with_changes(func=cst.parse_expression(function), args=args)

    def _norm_inside(self, call: cst.Call) -> tuple[str | None, str | None]:
        """Return the norm that is called in the place of a block's input, and what it normalises."""
        inner = call.args[0].value
        norm = called_attribute(inner)
        if norm is None or not isinstance(inner, cst.Call) or len(inner.args) != 1 or inner.args[0].star:
            return None, None
        classes, normed = norm_classes(self.info, norm, self.module), inner.args[0].value
        if not classes or None in classes or not isinstance(normed, cst.Name):
            return None, None
        return norm, normed.value

    def _is_normed(self, before: Sequence[Statement], hidden: cst.BaseExpression) -> bool:
        """Whether a block's input is what a norm returned."""
        names = {hidden.value} if isinstance(hidden, cst.Name) else set()
        for one in reversed(before):
            if names & bound_by(one):
                calls = [called_attribute(call) for call in calls_in(one)]
                return any(norm is not None and norm_classes(self.info, norm, self.module) for norm in calls)
        return False

    def _is_added(self, behind: Sequence[Statement], result: str) -> bool:
        """Whether what a block returns is a side of a sum, as it is."""
        for one in behind:
            for node in walk(one):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
                    if any(m.matches(side, m.Name(result)) for side in (node.left, node.right)):
                        return True
            if result in bound_by(one):
                return False
        return False

    def _norm_before(
        self,
        found: Sequence[Statement],
        place: int,
        call: cst.Call,
        result: str | None,
        behind: Sequence[Statement],
    ) -> tuple[int, str, str] | None:
        """Return which statement normalises a block's input for it alone, by which norm, and what it normalises."""
        hidden = call.args[0].value
        if not isinstance(hidden, cst.Name) or sum(name == hidden.value for name in names_read(found[place])) != 1:
            return None
        for number in range(place - 1, -1, -1):
            one = found[number]
            if hidden.value in bound_by(one) | augmented_by(one):
                break
            if hidden.value in {*names_read(one)} or not _is_plain(one):
                return None
        else:
            return None
        made = value_of(one, cst.Assign)
        norm = called_attribute(made) if made is not None else None
        if norm is None or not isinstance(made, cst.Call) or len(made.args) != 1 or made.args[0].star:
            return None
        normed, classes = made.args[0].value, norm_classes(self.info, norm, self.module)
        targets = _targets(one)
        if targets != [hidden.value] or not isinstance(normed, cst.Name) or None in classes or not classes:
            return None
        between = [name for other in found[number + 1 : place] for name in bound_by(other) | augmented_by(other)]
        if normed.value in between or (
            result != hidden.value and self._is_read(hidden.value, [*found[place + 1 :], *behind])
        ):
            return None
        return number, norm, normed.value

    def _sum_behind(
        self, found: Sequence[Statement], place: int, result: str, behind: Sequence[Statement]
    ) -> tuple[int, str, str, str | None] | None:
        """Return which statement adds a residual to what a block returns; residual, name of the sum, dropout."""
        if place + 1 >= len(found) or not result:
            return None
        one = found[place + 1]
        returned = value_of(one, cst.Return)
        total = value_of(one, cst.Assign) if returned is None else returned
        if not isinstance(total, cst.BinaryOperation) or not isinstance(total.operator, cst.Add):
            return None
        pairs = [self._undropped(side) for side in (total.left, total.right)]
        sides = [side.value for side, _ in pairs if isinstance(side, cst.Name)]
        dropout = next((name for side, name in pairs if m.matches(side, m.Name(result))), None)
        if any(name is not None and not m.matches(side, m.Name(result)) for side, name in pairs):
            return None
        bound = _targets(one) if returned is None else [result]
        if len(sides) != 2 or result not in sides or sides[0] == sides[1] or len(bound) != 1:
            return None
        residual, target = next(side for side in sides if side != result), bound[0]
        if target != result and self._is_read(result, [*found[place + 2 :], *behind]):
            return None
        if residual in bound_by(found[place]):
            return None
        return place + 1, residual, target, dropout

    def _undropped(self, side: cst.BaseExpression) -> tuple[cst.BaseExpression, str | None]:
        """Return what a dropout of the layer's is called with, and its attribute; anything else as it is."""
        name = called_attribute(side)
        if name is None or not isinstance(side, cst.Call) or len(side.args) != 1 or side.args[0].star:
            return side, None
        drops = is_built_from(name, DROPOUT, self.info, self.module)
        return (side.args[0].value, name) if drops else (side, None)

    def _is_read(self, name: str, statements: Sequence[Statement]) -> bool:
        """Whether statements read a name before they bind it."""
        for one in statements:
            if name in {*names_read(one)} | augmented_by(one):
                return True
            if isinstance(one, cst.SimpleStatementLine) and name in bound_by(one):
                return False
        return False


def _added_to(statement: Statement, call: cst.Call) -> tuple[cst.BaseExpression, str | None]:
    """Return the sum of a local and what a call returns first, and the local; the call and None for none."""
    for node in walk(statement):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(other, cst.Name) and (side is call or _is_first(side, call)):
                    return node, other.value
    return call, None


def _is_first(node: cst.BaseExpression, call: cst.Call) -> bool:
    first = m.Subscript(slice=[m.SubscriptElement(m.Index(m.Integer("0")))])
    return isinstance(node, cst.Subscript) and node.value is call and m.matches(node, first)


def _first_of(total: cst.BinaryOperation, call: cst.Call) -> cst.Subscript | None:
    return next((s for s in (total.left, total.right) if isinstance(s, cst.Subscript) and s.value is call), None)


def _result(statement: Statement, whole: cst.BaseExpression) -> str | None:
    """Return the local that holds what an expression gives first; empty where it is returned; None for another use."""
    returned = value_of(statement, cst.Return)
    value = value_of(statement, cst.Assign) if returned is None else returned
    if value is None or not (value is whole or (isinstance(whole, cst.Call) and _is_first(value, whole))):
        return None
    if returned is not None:
        return ""
    small = cst.ensure_type(cst.ensure_type(statement, cst.SimpleStatementLine).body[0], cst.Assign)
    target: cst.CSTNode = small.targets[0].target
    if isinstance(target, cst.Tuple) and value is whole and len(target.elements) > 1:
        target = target.elements[0].value
    elif isinstance(target, cst.Tuple):
        return None
    return target.value if isinstance(target, cst.Name) and len(small.targets) == 1 else None


def _with_comments(statement: Statement, gone: Sequence[Statement], place: int, places: Sequence[int]) -> Statement:
    """Return a statement with the comments of others that it stands for."""
    lines = [one for part in gone for one in part.leading_lines if one.comment is not None]
    trailing = [
        cst.EmptyLine(comment=node)
        for part in gone
        for node in walk(part.trailing_whitespace)
        if isinstance(node, cst.Comment)
    ]
    first = gone[0].leading_lines if gone and places[0] < place else ()
    blank = [one for one in first if one.comment is None][:1] if not statement.leading_lines else []
    return statement.with_changes(leading_lines=[*blank, *lines, *trailing, *statement.leading_lines])


def _returning(statement: Statement, name: str) -> Statement:
    """Return a return statement of a local."""
    line = cst.ensure_type(statement, cst.SimpleStatementLine)
    return line.with_changes(body=[line.body[0].with_changes(value=cst.Name(name))])


def _targets(statement: Statement) -> list[str]:
    small = statement.body[0]
    targets = [target.target for target in small.targets] if isinstance(small, cst.Assign) else []
    return [target.value for target in targets if isinstance(target, cst.Name)] if len(targets) == 1 else []


def _is_plain(statement: Statement) -> bool:
    """Whether a statement between a norm and its block only gives locals other names or values."""
    return value_of(statement, cst.Assign) is not None and not any(calls_in(statement))


def _bound_as(statement: Statement, name: str, target: str) -> Statement:
    """Return an assignment that binds `target` in the place of `name`."""
    if name == target:
        return statement
    small = statement.body[0]
    first = small.targets[0]
    if isinstance(first.target, cst.Name):
        new = cst.Name(target)
    else:
        elements = [first.target.elements[0].with_changes(value=cst.Name(target)), *first.target.elements[1:]]
        new = first.target.with_changes(elements=elements)
    return statement.with_changes(body=[small.with_changes(targets=[first.with_changes(target=new)])])
