"""Writes the `forward` of an attention for one token, as the file has it but for the attention function itself.

Queries, keys and values are left to the statements of the file, or made by those of `qkv_step` where that is what the
file's compute; then the statements that only they need are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.terms import DROPOUT, NoStep, complains, is_built_from
from rewrite.analysis.decode.attention_heads import POSITIONS
from rewrite.analysis.decode.mixer_text import MixerText, bound_by, names_read, value_of
from rewrite.analysis.tree.module import self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in
from rewrite.analysis.tree.replacement import call_statement

_FIRST = m.Subscript(slice=[m.SubscriptElement(m.Index(m.Integer("0")))])


@dataclass
class AttentionText(MixerText):
    """Writes an attention's `decode_residual` as statements."""

    attention: cst.Call = field(kw_only=True)
    """The call of the attention function in `forward`."""
    given: Sequence[str] = field(kw_only=True)
    """What `attend_step` is given behind the query and the cache."""
    heads_first: bool = field(kw_only=True)
    """Whether the call returns `[B, H, S, D]`, and not that of the tokens first and the weights."""
    positions: str = field(default="", kw_only=True)
    """The parameter of `forward` that says where the tokens are; empty for none."""
    query: str = field(default="", kw_only=True)
    """What the rotated query is called where `qkv_step` makes it, in `front`; empty where the file does."""
    left_out: set[str] = field(default_factory=set, kw_only=True)
    """Names of the weights of attention, which a step does not compute."""

    @property
    def renaming(self) -> dict[str, str]:
        """What the method calls the parameters of `forward` that it has too."""
        return super().renaming | ({self.positions: POSITIONS.value} if self.positions else {})

    def statements(self, block: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return what a step runs of a block, those statements left out that only complain."""
        return super().statements([statement for statement in block if not complains(statement)])

    def line(self, statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
        """Return a line of simple statements, None for nothing: attention alone, without its weights."""
        small = statement.body[0]
        if isinstance(small, cst.AnnAssign):
            if small.value is None:
                return None
            small = cst.Assign([cst.AssignTarget(small.target)], small.value)
        if isinstance(small, cst.AugAssign):
            return self._augmented(statement, small)
        if isinstance(small, cst.Return) and isinstance(small.value, cst.Tuple):
            small = small.with_changes(value=small.value.elements[0].value)
        if isinstance(small, cst.Assign) and not self.heads_first:
            small = self._attended(small)
        return super().line(statement.with_changes(body=[small, *statement.body[1:]]))

    def _attended(self, line: cst.Assign) -> cst.Assign:
        """Return an assignment of what the attention function returns as one of its first result."""
        value = line.value.value if m.matches(line.value, _FIRST) else line.value  # type: ignore[attr-defined]
        if value is not self.attention:
            return line
        if value is line.value:
            pair = line.targets[0].target
            if len(line.targets) != 1 or not isinstance(pair, cst.Tuple) or len(pair.elements) != 2:
                raise NoStep("other_attention", "its result is not taken apart where it is called")
            self.left_out |= {*names_read(pair.elements[1].value)}
            first = pair.elements[0].value
            if not isinstance(first, cst.Name):
                raise NoStep("other_attention", "its result is put somewhere else than in a local")
            line = line.with_changes(targets=[cst.AssignTarget(first)])
        return line.with_changes(value=value)

    def _augmented(self, statement: cst.SimpleStatementLine, small: cst.AugAssign) -> cst.SimpleStatementLine:
        if not isinstance(small.target, cst.Name) or small.target.value in (self.hidden, self.cache, self.positions):
            raise NoStep("other_attention", "an operation in place")
        self.facts.forget(small.target.value)
        value = self.expression(small.value)
        self.check_input(value)
        return statement.with_changes(body=[small.with_changes(value=value)], leading_lines=())

    def stands_for(self, original: cst.Call, node: cst.Call) -> cst.BaseExpression:
        """Return what stands for a call of the file: the step's attention, and nothing for dropout."""
        if original is self.attention:
            self.uses.add("attend_step")
            query = self.query or self.module.tree.code_for_node(_query_of(node, 0 if self.heads_first else 1))
            call = call_statement("", "attend_step", [query, self.cache, *self.given], self.module).body[0]
            made = cst.ensure_type(cst.ensure_type(call, cst.Expr).value, cst.Call)
            transposed = cst.Call(cst.Attribute(made, cst.Name("transpose")), list(map(_argument, ("1", "2"))))
            return transposed if self.heads_first else made
        attribute = self_attribute(node.func)
        if attribute is not None and len(node.args) == 1 and is_built_from(attribute, DROPOUT, self.info, self.module):
            return node.args[0].value
        args = [arg for arg in node.args if arg.keyword is None or not self._is_gathered(arg.value)]
        if args and len(args) < len(node.args):
            args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return super().stands_for(original, node.with_changes(args=args))

    def _is_gathered(self, value: cst.BaseExpression) -> bool:
        return m.matches(value, m.Name(self.facts.gathered)) if self.facts.gathered else False

    def needed(self, lines: list[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return the statements that the result depends on, and those that call something for its effect.

        Where `qkv_step` makes the query, nothing else is called for its effect: the cache is written by that.
        """
        read: set[str] = set()
        kept: list[cst.CSTNode] = []
        function = {name.value for name in walk(self.attention.func) if isinstance(name, cst.Name)}
        for line in reversed(lines):
            bound = bound_by(line) | augmented_by(line)
            may_go = self.query or not any(calls_in(line)) or bound <= function
            if bound and not bound & read and may_go:
                continue
            line = self._fewer(self._only_written(line, read), read)
            kept.insert(0, line)
            read |= {*names_read(line)}
        if self.query and self.query in {name for line in kept for name in bound_by(line)}:
            raise NameTaken
        if left := sorted(self.left_out & read):
            raise NoStep("other_attention", f"{left[0]} is read")
        return kept

    def _only_written(self, line: cst.CSTNode, read: set[str]) -> cst.CSTNode:
        """Return an update of the cache without the names of what it returns, where nothing reads them."""
        made = value_of(line, cst.Assign)
        written = m.Call(func=m.Attribute(value=m.Name(self.cache), attr=m.Name("update")))
        if made is None or not m.matches(made, written) or bound_by(line) & read:
            return line
        return cst.ensure_type(line, cst.SimpleStatementLine).with_changes(body=[cst.Expr(made)])

    def _fewer(self, line: cst.CSTNode, read: set[str]) -> cst.CSTNode:
        """Return several products in one without those that nothing reads any more."""
        made = value_of(line, cst.Assign)
        if not self.query or not m.matches(made or cst.Name("_"), m.Call(func=m.Name("packed_step"))):
            return line
        small = cst.ensure_type(cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.Assign)
        names, call = small.targets[0].target, cst.ensure_type(made, cst.Call)
        parts = [arg for arg in call.args if self_attribute(arg.value) is not None]
        if not isinstance(names, cst.Tuple) or len(names.elements) != len(parts):
            return line
        pairs = zip((element.value for element in names.elements), parts, strict=True)
        left = [
            (name, part.value) for name, part in pairs if not m.matches(name, m.Name()) or {*names_read(name)} & read
        ]
        texts = [(self.module.tree.code_for_node(name), self.module.tree.code_for_node(part)) for name, part in left]
        function = "packed_step" if len(left) > 1 else "linear"
        self.uses.add(function)
        target = f"{', '.join(name for name, _ in texts)} = "
        arguments = [self.hidden, *(part for _, part in texts), "norm=norm"]
        return call_statement(target, function, arguments, self.module)


class NameTaken(Exception):
    """A local of the file has the name that the query would get."""


def _query_of(call: cst.Call, place: int) -> cst.BaseExpression:
    """Return the query that an attention function is given."""
    named = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == "query"]
    plain = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    if not named and (len(plain) <= place or any(arg.star == "*" for arg in call.args)):
        raise NoStep("other_attention", "its arguments are not told apart")
    return named[0] if named else plain[place]


def _argument(number: str) -> cst.Arg:
    return cst.Arg(cst.Integer(number))


def augmented_by(line: cst.CSTNode) -> set[str]:
    """Return the locals that a statement changes by an operator and an assignment in one."""
    nodes = (node.target for node in walk(line) if isinstance(node, cst.AugAssign))
    return {node.value for node in nodes if isinstance(node, cst.Name)}
