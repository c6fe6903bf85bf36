"""Writes what a decoder layer returns in a decode step as the statements of its `decode`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

import libcst as cst

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import NoStep
from rewrite.analysis.decode.layer_step import HIDDEN
from rewrite.analysis.patterns.residual import is_fused, norm_classes
from rewrite.analysis.terms.computation import subterms
from rewrite.analysis.terms.spelling import Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.nodes import LINE_LENGTH
from rewrite.analysis.tree.replacement import line


@dataclass
class LayerText:
    """Writes a layer's output as statements."""

    info: ClassInfo
    module: Module
    blocks: Mapping[str, tuple[str, ...]]
    """The attributes whose `decode_residual` may be called, and what it takes after `residual`."""
    inputs: Mapping[Term, Term]
    """The hidden states that each call of attention passes."""
    handed: frozenset[str] = frozenset()
    """Those of them whose `forward` takes norm and residual by keyword instead."""
    lines: list[cst.SimpleStatementLine] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    """What the statements call of the runtime."""

    def write(self, output: Term) -> tuple[cst.BaseStatement, ...]:
        """Return the body of `decode`.

        Raises:
            NotWritable: if something in it has no source.
        """
        if output.op == "select":
            return (self._choice(output),)
        if (choice := next(self._choices(output), None)) is not None:
            ways = (chosen(output, choice, way) for way in choice.args[1:])
            return (self._choice(Term("select", (choice.args[0], *ways))),)
        output = self._ordered(output)
        steps = self._steps(output)
        self._check_once(steps)
        names: dict[Term, str] = {HIDDEN: "hidden_states"}
        for number, step in enumerate(steps):
            later = {t for s in steps[number + 1 :] for t in self._reads(s, steps)}
            if (normed := self._normed(step, output)) is not None:
                name = self._name(step, {names[t] for t in later if t in names})
                self.lines.append(self._line(f"normed, {name} = ", self._add_norm(step, normed, names)))
                names = {t: n for t, n in names.items() if n != name} | {step: name, normed: "normed"}
                continue
            text = self._text(step, steps, names)
            if number == len(steps) - 1:
                if self._is_norm(step) and self._is_plain_sum(step.args[1], names):
                    text = f"{self._add_norm(step.args[1], step, names)}[0]"
                self.lines.append(self._line("return ", text))
                break
            name = self._name(step, {names[t] for t in later if t in names})
            self.lines.append(self._line(f"{name} = ", text))
            names = {t: n for t, n in names.items() if n != name} | {step: name}
        return tuple(self.lines)

    def _check_once(self, steps: list[Term]) -> None:
        """Refuse to call a block twice that may keep something of its call.

        Raises:
            NoStep: if it would be.
        """
        fused = [fused for step in steps if (fused := self._fused(step)) is not None]
        called = Counter((block, hidden) for block, _, hidden, _ in fused)
        if twice := [block for (block, _), count in called.items() if count > 1]:
            raise NoStep("other_layer", f"{twice[0]} would be called twice")

    def _choices(self, term: Term) -> Iterator[Term]:
        """Yield what is chosen from ways that are not the same block: what follows is written for each."""
        if term.op == "select":
            calls = [{t.args[0] for t in subterms(way) if self._alone(t) is not None} for way in term.args[1:]]
            if calls[0] != calls[1]:
                yield term
        for argument in term.args:
            yield from self._choices(argument)

    def _choice(self, output: Term) -> cst.If:
        test, yes, no = output.args
        branches = [
            LayerText(self.info, self.module, self.blocks, self.inputs, self.handed, uses=self.uses).write(part)
            for part in (yes, no)
        ]
        statement = cst.parse_statement(
            f"if {source(test, self.module, ())}:\n    pass\n", config=self.module.tree.config_for_parsing
        )
        if not isinstance(statement, cst.If):
            raise TypeError("not a condition")
        block, last = statement.body, branches[1][-1]
        other = cst.Else(body=block.with_changes(body=branches[1]))
        chained = isinstance(last, cst.If) and len(branches[1]) == 1
        return statement.with_changes(body=block.with_changes(body=branches[0]), orelse=last if chained else other)

    def _normed(self, step: Term, output: Term) -> Term | None:
        """Return the norm of a sum that a module reads which is called as it stands."""
        if step.op != "add" or step == output or self._fused(step) is not None:
            return None
        return next((t for t in self._order(output)[0] if self._is_norm(t) and t.args[1] == step), None)

    def _is_plain_sum(self, term: Term, names: Mapping[Term, str]) -> bool:
        return term.op == "add" and term not in names and self._fused(term) is None

    def _is_norm(self, term: Term) -> bool:
        """Whether `term` is the call of a norm that is fused with the add before it."""
        if term.op != "call" or len(term.args) != 2 or term.args[0].op != "attribute":
            return False
        names = norm_classes(self.info, term.args[0].value, self.module)
        return bool(names) and all(name is not None and self._adds(name) for name in names)

    def _adds(self, name: str) -> bool:
        info = self.module.classes.get(name)
        return info is None or is_fused(name, self.module)

    def _add_norm(self, step: Term, normed: Term, names: Mapping[Term, str]) -> str:
        """Return the call that adds and normalises, the residual behind what is added to it."""
        self.uses.add("add_norm")
        replaced = {t: Term("parameter", (), names[t]) for t in names}
        residual, added = sorted(step.args, key=lambda side: side not in names)
        sides = f"{self._expression(added, replaced)}, {self._expression(residual, replaced)}"
        return f"add_norm({sides}, self.{normed.args[0].value})"

    def _ordered(self, output: Term) -> Term:
        """Return the sum with the results of blocks last, so that each block adds to what was there before it."""
        parts = list(_addends(output))
        if len(parts) < 3:
            return output
        blocks = [part for part in parts if self._alone(part) is not None]
        if any(_sums(output) & {*subterms(part)} for part in parts):
            return output  # a sum of some of them is read again, and would have to be computed again
        first, *rest = _by_need([*(part for part in parts if part not in blocks), *blocks])
        return reduce(lambda total, part: make("add", total, part), rest, first)

    def _order(self, output: Term) -> tuple[list[Term], Counter[Term]]:
        """Return the terms that are evaluated, in order, and how often each is read."""
        uses: Counter[Term] = Counter()
        order: list[Term] = []
        seen: set[Term] = set()

        def visit(term: Term) -> None:
            uses[term] += 1
            if term in seen:
                return
            seen.add(term)
            for part in self._parts(term):
                visit(part)
            order.append(term)

        visit(output)
        return order, uses

    def _steps(self, output: Term) -> list[Term]:
        """Return the terms that get a statement of their own, in the order of evaluation; `output` is the last."""
        order, uses = self._order(output)
        own = (t for t in order if t.args and (uses[t] > 1 or self._fused(t) is not None) and t != output)
        return [*own, output]

    def _parts(self, term: Term) -> list[Term]:
        """Return the terms that the statement of `term` reads, the residual of a fused block first."""
        fused = self._fused(term)
        if fused is not None:
            _, _, hidden, residual = fused
            return [part for part in (hidden, residual) if part is not None]
        if term in self.inputs or (term.op == "index" and term.args[0] in self.inputs):
            raise NoStep("other_layer", "the attention's other results are read")
        return [a for a in term.args if a.op not in ("constant", "name", "attribute")]

    def _reads(self, step: Term, steps: list[Term]) -> set[Term]:
        """Return the named terms that the statement of `step` reads."""
        found: set[Term] = set()
        stack = self._parts(step)
        while stack:
            term = stack.pop()
            if term in steps or term == HIDDEN:
                found.add(term)
            else:
                stack.extend(self._parts(term))
        return found

    def _fused(self, term: Term) -> tuple[str, str, Term, Term | None] | None:
        """Read `residual + block(norm(hidden))`: the attribute, the norm's or None, hidden states and residual."""
        if term.op == "add":
            for block, rest in (term.args, term.args[::-1]):
                if (alone := self._alone(block)) is not None and HIDDEN in _leaves(rest):
                    return (*alone, rest)
        alone = self._alone(term)
        return None if alone is None else (*alone, None)

    def _alone(self, term: Term) -> tuple[str, str, Term] | None:
        call = term.args[0] if term.op == "index" and term.args[1:] == (constant(0),) else term
        if call.op != "call" or call.args[0].value not in self.blocks:
            return None
        hidden = self.inputs.get(call) or (call.args[1] if len(call.args) == 2 else None)
        if hidden is None:
            return None
        if hidden.op == "call" and len(hidden.args) == 2 and hidden.args[0].op == "attribute":
            if norm_classes(self.info, hidden.args[0].value, self.module):
                return call.args[0].value, f"self.{hidden.args[0].value}", hidden.args[1]
        return call.args[0].value, "None", hidden

    def _text(self, step: Term, steps: list[Term], names: Mapping[Term, str]) -> str:
        fused = self._fused(step)
        if fused is None:
            replaced = {t: Term("parameter", (), names[t]) for t in names}
            return self._expression(step, replaced)
        block, norm, hidden, residual = fused
        replaced = {t: Term("parameter", (), names[t]) for t in names}
        if block in self.handed:
            given = [self._expression(hidden, replaced)]
            given += [f"norm={norm}"] * (norm != "None")
            given += [] if residual is None else [f"residual={self._expression(residual, replaced)}"]
            return f"self.{block}({', '.join(given)})"
        arguments = [
            self._expression(hidden, replaced),
            norm,
            "None" if residual is None else self._expression(residual, replaced),
            *self.blocks[block],
        ]
        return f"self.{block}.{NAME}({', '.join(arguments)})"

    def _expression(self, term: Term, names: Mapping[Term, Term]) -> str:
        return source(_renamed(term, names), self.module, {name.value for name in names.values()} | {HIDDEN.value})

    def _line(self, target: str, text: str) -> cst.SimpleStatementLine:
        if 8 + len(target) + len(text) > LINE_LENGTH and text.endswith(")"):
            start, arguments = text[:-1].split("(", 1)
            text = f"{start}(\n    {arguments}\n)"
        return line(f"{target}{text}", self.module)

    def _name(self, step: Term, taken: set[str]) -> str:
        if "hidden_states" not in taken:
            return "hidden_states"
        fused = self._fused(step)
        wanted = "residual" if fused is None or fused[3] is not None else f"{fused[0].removeprefix('self_')}_output"
        while wanted in taken:
            wanted += "_"
        return wanted


def _sums(output: Term) -> set[Term]:
    """Return the sums that a sum is made of."""
    inner = {term for term in output.args if term.op == "add"} if output.op == "add" else set()
    return inner.union(*map(_sums, inner))


def _addends(term: Term) -> Iterator[Term]:
    if term.op == "add":
        for side in term.args:
            yield from _addends(side)
    else:
        yield term


def _by_need(parts: list[Term]) -> list[Term]:
    """Return terms in their order, but each behind those that it is computed from."""
    found: list[Term] = []
    while waiting := [part for part in parts if part not in found]:
        inside = {part: {*subterms(part)} - {part} for part in waiting}
        found.append(next(part for part in waiting if inside[part].isdisjoint(waiting)))
    return found


def _renamed(term: Term, names: Mapping[Term, Term]) -> Term:
    if term in names:
        return names[term]
    return Term(term.op, tuple(_renamed(a, names) for a in term.args), term.value) if term.args else term


def chosen(term: Term, choice: Term, way: Term) -> Term:
    """Return a term with one way in the place of a choice."""
    if term == choice or not term.args:
        return way if term == choice else term
    args = tuple(chosen(argument, choice, way) for argument in term.args)
    return make(term.op, *args) if term.commutes else Term(term.op, args, term.value)


def _leaves(term: Term) -> set[Term]:
    if not term.args:
        return {term}
    return set().union(*(_leaves(argument) for argument in term.args))
