"""What a decode step decides of the tests in a mixer's `forward`: one token, in evaluation, states that are there."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects.bound import targets

_STATES = m.OneOf(m.Name("get_conv_state"), m.Name("get_recurrent_state"))
_TRAINING = m.Attribute(value=m.Name("self"), attr=m.Name("training"))


@dataclass
class Facts:
    """What is known of the locals of a method at a statement of it."""

    hidden: str
    cache: str
    gathered: str
    """The parameter that gathers what has no name of its own; empty for none."""
    is_input: bool = True
    """Whether `hidden` still is what the method was given."""
    known: dict[str, bool] = field(default_factory=dict)
    """Locals that are True or False."""
    single: set[str] = field(default_factory=set)
    """Locals that are the number of tokens, which is 1."""
    there: set[str] = field(default_factory=set)
    """Locals that are not None."""
    rebound: set[str] = field(default_factory=set)
    """Names that were given a value."""

    def __post_init__(self) -> None:
        self.there.add(self.cache)

    def copy(self) -> Facts:
        """Return facts that change apart from these."""
        return copy.deepcopy(self)

    def is_given(self, name: str) -> bool:
        """Whether a parameter still is what the method was given."""
        return name not in self.rebound

    def forget(self, name: str) -> None:
        """Know nothing of a local any more."""
        self.known.pop(name, None)
        self.single.discard(name)
        self.there.discard(name)
        self.rebound.add(name)
        self.is_input = self.is_input and name != self.hidden

    def assign(self, line: cst.Assign, value: cst.BaseExpression) -> None:
        """Learn what an assignment says of its targets."""
        same = m.matches(value, m.Name(self.hidden)) and self.is_input
        outcome, is_state = self.outcome(value), self._is_state(value)
        tokens = self._tokens(line, value)
        for name in (name for target in line.targets for name in targets(target.target)):
            if not (same and name == self.hidden):
                self.forget(name)
        for target in line.targets:
            if isinstance(target.target, cst.Name):
                name = target.target.value
                if outcome is not None:
                    self.known[name] = outcome
                if is_state:
                    self.there.add(name)
        self.single |= tokens

    def outcome(self, test: cst.BaseExpression) -> bool | None:
        """Return what a test is in a step, None where that is not known."""
        if isinstance(test, cst.Name):
            return {"True": True, "False": False}.get(test.value, self.known.get(test.value))
        if m.matches(test, _TRAINING) or m.matches(test, self._asks("is_recording_past")):
            return False
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            inner = self.outcome(test.expression)
            return None if inner is None else not inner
        if isinstance(test, cst.BooleanOperation):
            sides = [self.outcome(test.left), self.outcome(test.right)]
            decisive = isinstance(test.operator, cst.Or)
            return decisive if decisive in sides else None if None in sides else not decisive
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1 and isinstance(test.left, cst.Name):
            return self._compared(test.left.value, test.comparisons[0])
        return None

    def _compared(self, name: str, target: cst.ComparisonTarget) -> bool | None:
        nothing, one = m.matches(target.comparator, m.Name("None")), m.matches(target.comparator, m.Integer("1"))
        if name in self.there and nothing and isinstance(target.operator, (cst.Is, cst.IsNot)):
            return isinstance(target.operator, cst.IsNot)
        if name in self.single and one and isinstance(target.operator, (cst.Equal, cst.NotEqual, cst.GreaterThan)):
            return isinstance(target.operator, cst.Equal)
        return None

    def _asks(self, method: str) -> m.Call:
        return m.Call(func=m.Attribute(value=m.Name(self.cache), attr=m.Name(method)))

    def _is_state(self, value: cst.BaseExpression) -> bool:
        return m.matches(value, m.Call(func=m.Attribute(value=m.Name(self.cache), attr=_STATES)))

    def _tokens(self, line: cst.Assign, value: cst.BaseExpression) -> set[str]:
        """Return the locals that an assignment makes the number of tokens."""
        target = line.targets[0].target
        shape = m.Attribute(value=m.Name(self.hidden), attr=m.Name("shape"))
        second = m.SubscriptElement(slice=m.Index(value=m.Integer("1")))
        two = m.SubscriptElement(slice=m.Slice(lower=None, upper=m.Integer("2"), step=None))
        if not self.is_input or len(line.targets) != 1:
            return set()
        if isinstance(target, cst.Name) and m.matches(value, m.Subscript(value=shape, slice=[second])):
            return {target.value}
        whole = m.matches(value, shape) or m.matches(value, m.Subscript(value=shape, slice=[two]))
        if whole and isinstance(target, cst.Tuple) and len(target.elements) > 1:
            element = target.elements[1]
            plain = not any(isinstance(other, cst.StarredElement) for other in target.elements[:2])
            return {element.value.value} if plain and isinstance(element.value, cst.Name) else set()
        return set()


class Folded(cst.CSTTransformer):
    """Writes tests that a step decides as what they are."""

    def __init__(self, facts: Facts):
        super().__init__()
        self.facts = facts

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        """Return True or False where that is known."""
        outcome = self.facts.outcome(original_node)
        return updated_node if outcome is None else cst.Name(str(outcome))

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        """Return the way that is taken where that is known."""
        outcome = self.facts.outcome(original_node.test)
        if outcome is None:
            return updated_node
        return updated_node.body if outcome else updated_node.orelse

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """Return True or False for a local that is that."""
        outcome = self.facts.known.get(original_node.value)
        return updated_node if outcome is None else cst.Name(str(outcome))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        """Leave names of attributes alone."""
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Leave keywords alone."""
        return updated_node.with_changes(keyword=original_node.keyword)
