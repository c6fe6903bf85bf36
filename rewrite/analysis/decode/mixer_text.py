"""Writes the `forward` of a mixer for one token: what a step decides is decided, first and last product are fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.step_tests import Facts, Folded
from rewrite.analysis.blocks.terms import CACHE, NoStep, is_linear
from rewrite.analysis.decode.attention_step import PARAMETERS
from rewrite.analysis.effects.bound import targets
from rewrite.analysis.terms.computation import NotComputable, Run, body, unify
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk, without_runtime
from rewrite.analysis.tree.nodes import LINE_LENGTH, called_attribute, calls_in, parameters

HIDDEN = "hidden_states"
_ASKED = ("shape", "size", "dim", "dtype", "device", "ndim")
"""What a norm does not change of its input."""


class NeedsNorm(Exception):
    """More than products reads the input, so that the norm has to be called."""


@dataclass
class MixerText:
    """Writes a mixer's `decode_residual` as statements."""

    info: ClassInfo
    module: Module
    hidden: str
    """The parameter of `forward` that is the hidden states."""
    cache: str
    norm_first: bool = False
    """Whether the norm is called before everything else, and in no product."""
    uses: set[str] = field(default_factory=set)
    front: list[cst.CSTNode] = field(default_factory=list, kw_only=True)
    """Statements before all others, in the names of the method."""
    facts: Facts = field(init=False)

    def write(self) -> tuple[cst.BaseStatement, ...]:
        """Return the body.

        Raises:
            NeedsNorm: if something reads the input that the norm would have to be computed for.
            NoStep: if it cannot be written.
        """
        forward = self.info.methods["forward"]
        gathers = forward.params.star_kwarg
        self.facts = Facts(self.hidden, self.cache, gathers.name.value if gathers is not None else "")
        block = [line for line in forward.body.body if not _is_docstring(line)]
        lines = self.last(self.needed(self.statements(block)))
        self._check(lines, forward)
        lines = [*self.front, *(visited(line, Renamed(self.renaming)) for line in lines)]
        if self.norm_first:
            test = "if norm is not None:\n    hidden_states = norm(hidden_states)\n"
            lines.insert(0, cst.parse_statement(test, config=self.module.tree.config_for_parsing))
        return tuple(line for line in lines if isinstance(line, cst.BaseStatement))

    @property
    def renaming(self) -> dict[str, str]:
        """What the method calls the parameters of `forward` that it has too."""
        return {self.hidden: HIDDEN, self.cache: CACHE}

    def needed(self, lines: list[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return the statements without those that a step has no need of."""
        return needed(lines)

    def statements(self, block: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return what a step runs of a block."""
        found: list[cst.CSTNode] = []
        for statement in block:
            if isinstance(statement, cst.If):
                known = self.facts.outcome(statement.test)
                if known is None:
                    found.append(self._kept(statement))
                else:
                    found += self.statements(_taken(statement, known))
            elif isinstance(statement, cst.SimpleStatementLine):
                if (line := self.line(statement)) is not None:
                    found.append(line)
            else:
                raise NoStep("other_layer", f"{self.info.name} has a {type(statement).__name__}")
            if found and returns(found[-1]):
                break
        return found

    def _kept(self, statement: cst.If) -> cst.If:
        """Return a conditional statement that a step does not decide; nothing is known of what it binds."""
        if any(isinstance(node, cst.Return) for node in walk(statement)):
            raise NoStep("other_layer", f"{self.info.name} returns under a condition")
        test = self.expression(statement.test)
        self.check_input(test)
        before = self.facts.copy()
        body = self._block(statement.body)
        self.facts, other = before.copy(), statement.orelse
        if isinstance(other, cst.If):
            other = self._kept(other)
        elif other is not None:
            other = other.with_changes(body=self._block(other.body))
        self.facts = before
        for name in bound_by(statement):
            self.facts.forget(name)
        return statement.with_changes(test=test, body=body, orelse=other)

    def _block(self, block: cst.BaseSuite) -> cst.BaseSuite:
        lines = self.statements(block.body)
        return block.with_changes(body=lines or [cst.parse_statement("pass")])

    def line(self, statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
        """Return a line of simple statements, None for nothing."""
        if len(statement.body) != 1:
            raise NoStep("other_layer", f"{self.info.name} has several statements on a line")
        small = statement.body[0]
        if isinstance(small, cst.Assign):
            value = self.expression(small.value)
            if len(small.targets) == 1 and small.targets[0].target.deep_equals(value):
                return None
            self.check_input(value)
            self.facts.assign(small, value)
            small = small.with_changes(value=value)
        elif isinstance(small, (cst.Return, cst.Expr)) and small.value is not None:
            small = small.with_changes(value=self.expression(small.value))
            self.check_input(small.value)
        else:
            raise NoStep("other_layer", f"{self.info.name} has a {type(small).__name__}")
        return statement.with_changes(body=[small], leading_lines=())

    def expression(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return an expression as a step computes it."""
        made = visited(visited(value, _Calls(self)), Folded(self.facts))
        if not isinstance(made, cst.BaseExpression):
            raise TypeError("not an expression")
        return made

    def check_input(self, value: cst.CSTNode | None) -> None:
        """Refuse to ask more of the input than its shape and the products that have the norm.

        Raises:
            NeedsNorm: if the norm has to be called for it.
        """
        if not self.facts.is_input or self.norm_first or value is None:
            return
        asked = m.Attribute(value=m.Name(self.hidden), attr=m.OneOf(*(m.Name(name) for name in _ASKED)))
        fused = m.Call(
            func=m.Name("linear") | m.Name("packed_step"), args=[m.Arg(m.Name(self.hidden)), m.AtLeastN(n=1)]
        )
        mentions = sum(1 for node in walk(value) if m.matches(node, m.Name(self.hidden)))
        mentions -= sum(1 for node in walk(value) if m.matches(node, m.Arg(keyword=m.Name(self.hidden))))
        allowed = sum(1 for node in walk(value) if m.matches(node, asked) or m.matches(node, fused))
        if mentions > allowed:
            raise NeedsNorm

    def stands_for(self, original: cst.Call, node: cst.Call) -> cst.BaseExpression:
        """Return what stands for a call of the file in a step; `node` is it with other arguments."""
        return self.call(node)

    def call(self, node: cst.Call) -> cst.BaseExpression:
        """Return what stands for a call in a step."""
        node = self._without_gathered(node)
        if (inner := self._unmasked(node)) is not None:
            return inner
        if m.matches(node.func, m.Attribute(value=m.Name(self.facts.gathered), attr=m.Name("pop") | m.Name("get"))):
            return node.args[1].value if len(node.args) == 2 else cst.Name("None")
        if self.norm_first or not self.facts.is_input or not node.args:
            return node
        if not m.matches(node.args[0], m.Arg(m.Name(self.hidden))):
            return node
        attribute = called_attribute(node)
        if attribute is not None and len(node.args) == 1 and self._is_linear(attribute):
            return self._product("linear", f"{self.hidden}, self.{attribute}")
        if without_runtime(self.module.qualified(node.func)) == "packed_linear":
            parts = [self_attribute(arg.value) for arg in node.args[1:]]
            if all(part is not None and self._is_linear(part) for part in parts):
                return self._product("packed_step", ", ".join([self.hidden, *(f"self.{part}" for part in parts)]))
        return node

    def decay(self, node: cst.BinaryOperation) -> cst.BaseExpression:
        """Return the call of an operator for how much of a state stays; anything else as it is."""
        given = {*names_read(node)} - {"self", *self.module.imports, *self.module.functions, *self.module.classes}
        environment = {name: Term("parameter", (), name) for name in given}
        try:
            term = Run(self.module, self.info, 0).expression(node, environment)
        except NotComputable:
            return node
        found = next(unify(_decay(), term, {}), None)
        if found is None:
            return node
        self.uses.add("log_decay")
        arguments = [found["x"].value, f"self.{found['RATES'].value}", f"self.{found['BIAS'].value}"]
        return cst.parse_expression(f"log_decay({', '.join(arguments)})")

    def _product(self, function: str, arguments: str) -> cst.BaseExpression:
        self.uses.add(function)
        text = f"{arguments}, norm=norm"
        long = len(text) > LINE_LENGTH - 40
        return cst.parse_expression(f"{function}(\n    {text}\n)" if long else f"{function}({text})")

    def _is_linear(self, attribute: str) -> bool:
        return is_linear(Term("attribute", (), attribute), self.info, self.module)

    def _without_gathered(self, node: cst.Call) -> cst.Call:
        """Return a call without what the method's caller gives besides what it names."""
        args = [arg for arg in node.args if arg.star != "**" or not m.matches(arg.value, m.Name(self.facts.gathered))]
        if args and len(args) < len(node.args):
            last = node.args[-1]
            args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return node.with_changes(args=args)

    def _unmasked(self, node: cst.Call) -> cst.BaseExpression | None:
        """Return `x` of `mask(x, padding)`: a token of a step is none, and such a function returns it as it is."""
        name = node.func.value if isinstance(node.func, cst.Name) else ""
        function = self.module.functions.get(name)
        if function is None or len(node.args) != 2 or any(arg.keyword is not None or arg.star for arg in node.args):
            return None
        first, second = node.args
        own = parameters(self.info.methods["forward"])
        if not isinstance(second.value, cst.Name) or second.value.value not in own or len(parameters(function)) != 2:
            return None
        return first.value if _only_masks(function, self.module) and self.facts.is_given(second.value.value) else None

    def last(self, lines: list[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return the statements with the residual inside the last product.

        Raises:
            NoStep: if they do not end with a product.
        """
        returned = lines[-1] if lines else None
        value = value_of(returned, cst.Return)
        if isinstance(value, cst.Name) and len(lines) > 1 and (made := value_of(lines[-2], cst.Assign)) is not None:
            target = assigned(lines[-2])[0]
            if target.deep_equals(value):
                lines, value = [*lines[:-2], lines[-1]], made
        attribute = called_attribute(value) if value is not None else None
        call = value if isinstance(value, cst.Call) else None
        if call is None or attribute is None or len(call.args) != 1 or not self._is_linear(attribute):
            raise NoStep("other_layer", f"what {self.info.name} returns is no projection")
        self.uses.add("linear")
        given = self.module.tree.code_for_node(call.args[0].value)
        text = f"return linear({given}, self.{attribute}, residual=residual)"
        return [*lines[:-1], cst.parse_statement(text, config=self.module.tree.config_for_parsing)]

    def _check(self, lines: Sequence[cst.CSTNode], forward: cst.FunctionDef) -> None:
        """Refuse what reads more than a step has, or binds the names that it has."""
        bound = {name for line in lines for name in bound_by(line)}
        read = {name for line in lines for name in names_read(line)}
        given = {*self.renaming}
        if left := sorted(read & {*parameters(forward), self.facts.gathered} - given - {"self"} - bound):
            raise NoStep("other_layer", f"{self.info.name} reads {left[0]}")
        own = {*PARAMETERS} - {HIDDEN} | ({HIDDEN} if self.hidden != HIDDEN else set())
        if taken := sorted((bound | read) & (own - given - {"norm", "residual"}) | bound & {"norm", "residual"}):
            raise NoStep("name_taken", f"{self.info.name} has a local {taken[0]}")


def visited(node: cst.CSTNode, transformer: cst.CSTTransformer) -> cst.CSTNode:
    """Return what a transformer makes of a node, which is one node."""
    made = node.visit(transformer)
    if not isinstance(made, cst.CSTNode):
        raise TypeError("not a node")
    return made


class _Calls(cst.CSTTransformer):
    def __init__(self, text: MixerText):
        super().__init__()
        self.text = text

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        return self.text.stands_for(original_node, updated_node)

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        return self.text.decay(updated_node)


_DECAY = """
import torch
from torch.nn import functional as F

class Mixer:
    def forward(self, x):
        return -self.RATES.float().exp() * F.softplus(x.float() + self.BIAS)
"""


@cache
def _decay() -> Term:
    """Return what `log_decay` computes."""
    module = Module(cst.parse_module(_DECAY))
    return body(module.classes["Mixer"].methods["forward"], module, module.classes["Mixer"])


class Renamed(cst.CSTTransformer):
    """Gives locals other names; attributes and keywords keep theirs."""

    def __init__(self, names: dict[str, str]):
        super().__init__()
        self.names = names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        """Give a name that is a local's its new one."""
        return updated_node.with_changes(value=self.names.get(updated_node.value, updated_node.value))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        """Leave the attribute's own name."""
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Leave the keyword."""
        return updated_node.with_changes(keyword=original_node.keyword)


class Replaced(cst.CSTTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: cst.CSTNode, new: cst.CSTNode):
        super().__init__()
        self.old, self.new = old, new

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        """Return what stands for a node."""
        return self.new if original_node is self.old else updated_node


def bound_by(node: cst.CSTNode) -> set[str]:
    """Return the names that the assignments in a statement bind."""
    found: set[str] = set()
    for inner in walk(node):
        if isinstance(inner, cst.Assign):
            found |= {name for target in inner.targets for name in targets(target.target)}
        elif isinstance(inner, cst.AnnAssign) and inner.value is not None:
            found |= {*targets(inner.target)}
    return found


def names_read(node: cst.CSTNode) -> Iterator[str]:
    """Yield every name that is read, names of attributes and keywords left out."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Attribute):
        yield from names_read(node.value)
    elif isinstance(node, cst.AssignTarget) and isinstance(node.target, (cst.Name, cst.Tuple)):
        return
    elif isinstance(node, cst.Arg):
        yield from names_read(node.value)
    else:
        for child in node.children:
            yield from names_read(child)


def needed(lines: list[cst.CSTNode]) -> list[cst.CSTNode]:
    """Return the statements without the assignments of plain values that nothing reads any more."""
    read: set[str] = set()
    kept: list[cst.CSTNode] = []
    for line in reversed(lines):
        made = value_of(line, cst.Assign)
        idle = made is not None and not any(calls_in(made)) and not bound_by(line) & read
        if not idle or any(isinstance(node, cst.Subscript) for node in assigned(line)):
            kept.insert(0, line)
            read |= {*names_read(line)}
    return kept


def assigned(line: cst.CSTNode) -> list[cst.BaseAssignTargetExpression]:
    """Return the targets of the assignments in a statement."""
    return [target.target for node in walk(line) if isinstance(node, cst.Assign) for target in node.targets]


def value_of(line: cst.CSTNode | None, kind: type[cst.BaseSmallStatement]) -> cst.BaseExpression | None:
    """Return the value of a line that is one statement of a kind."""
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    return small.value if isinstance(small, kind) and isinstance(small, (cst.Assign, cst.Return)) else None


def returns(line: cst.CSTNode) -> bool:
    """Whether a line is a return."""
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Return)


def _taken(statement: cst.If, known: bool) -> Sequence[cst.CSTNode]:
    if known:
        return statement.body.body
    other = statement.orelse
    return [other] if isinstance(other, cst.If) else () if other is None else other.body.body


def _is_docstring(line: cst.CSTNode) -> bool:
    return m.matches(line, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString() | m.ConcatenatedString())]))


def _only_masks(function: cst.FunctionDef, module: Module) -> bool:
    """Whether a function returns its first argument, times its second where that is not None."""
    try:
        term = body(function, module)
    except NotComputable:
        return False
    x, mask = (Term("parameter", (), name) for name in parameters(function))
    if term.op != "select" or term.args[:2] != (Term("is", (mask, NONE)), x):
        return False
    product = term.args[2].args[0] if term.args[2].op == "cast" else term.args[2]
    return product.op == "mul" and x in product.args
