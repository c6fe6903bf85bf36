"""Blocks whose `forward` takes the norm before it and the residual behind it: in place, for every way of running it.

What a step fuses is written into the one `forward` that a class has. Its operators are the formula wherever nothing is
to be fused, so that there is no second method, and an edit is seen by training, prompts and steps alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.mlp_step import mlp_statements
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import (
    CACHE,
    DROPOUT,
    MAX_DEPTH,
    NoStep,
    cache_parameters,
    is_built_from,
    is_linear,
    run_step,
)
from rewrite.analysis.decode.attention_heads import HIDDEN, POSITIONS
from rewrite.analysis.decode.attention_step import AttentionStep, arguments
from rewrite.analysis.decode.latent_step import LatentStep
from rewrite.analysis.decode.mixer_step import MixerStep
from rewrite.analysis.decode.mixer_text import Renamed, Replaced, bound_by, names_read, value_of, visited
from rewrite.analysis.decode.placed_attention import PlacedAttention
from rewrite.analysis.decode.written_attention import Recording, WrittenAttention, only_attention
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.methods import MODULE, TENSOR, typed
from rewrite.analysis.tree.module import ClassInfo, Module, walk, without_runtime
from rewrite.analysis.tree.nodes import called_attribute, calls_in, parameters
from rewrite.analysis.tree.replacement import call_statement, is_docstring

Statement: TypeAlias = Any
"""A line of simple statements or a compound one: libcst has no class of what both have."""
TokenStep = AttentionStep | LatentStep | MixerStep | WrittenAttention | PlacedAttention
"""What a part of a layer that is given the cache computes for one token."""
GIVEN = {"norm": f"{MODULE} | None", "residual": f"{TENSOR} | None"}
"""What such a `forward` takes by keyword, and the types."""


class NotInPlace(Exception):
    """A `forward` is not written so that its operators can stand in it."""


@dataclass(frozen=True)
class Block:
    """A `forward` as it is to be, and what it calls of the runtime."""

    before: cst.FunctionDef
    after: cst.FunctionDef
    uses: tuple[str, ...]


def hands_on(info: ClassInfo) -> bool:
    """Whether the `forward` of a class takes a norm and a residual."""
    forward = info.methods.get("forward")
    return forward is not None and {*GIVEN} <= {*parameters(forward)}


def mlp_block(info: ClassInfo, module: Module) -> Block:
    """Return the `forward` of two products with an activation between, its norm and residual in them.

    Raises:
        NotInPlace: if it is something else, or does something in training that it does not in a step.
    """
    forward = free(info, module)
    found = mlp_statements(info, module)
    if found is None:
        raise NotInPlace("it is not two products with an activation between")
    statements, uses = found
    for one in forward.body.body:
        check_plain(one, info, module)
    taken = parameters(forward)[1]
    first, last = statements
    if taken != HIDDEN.value:
        call = cst.ensure_type(cst.ensure_type(first.body[0], cst.Assign).value, cst.Call)
        renamed = visited(call, Renamed({HIDDEN.value: taken}))
        first = first.with_changes(body=[first.body[0].with_changes(value=renamed)])
    kept = [one for one in forward.body.body[:1] if is_docstring(one)]
    lost = [one for one in forward.body.body if one not in kept]
    new = [*kept, first.with_changes(leading_lines=comments(lost)), last]
    return Block(forward, taking(forward, new, module), uses)


def attention_block(step: TokenStep, module: Module) -> Block:
    """Return the `forward` of an attention with its products, rotation and cache as one operator where they are one.

    Raises:
        NotInPlace: if its statements are not in that order, or do something that the operators do not.
    """
    if isinstance(step, WrittenAttention):
        if step.front is not None:
            with contextlib.suppress(NotInPlace):
                return _Attention(replace(step.front, window=step.window), module).block()
        return _Written(step, module).block()
    if isinstance(step, LatentStep):
        raise NotInPlace("a step attends to latents, of which no keys and values are made")
    if isinstance(step, MixerStep):
        raise NotInPlace("a step goes on with states that a prompt computes another way")
    if not isinstance(step, AttentionStep):
        raise NotInPlace("its attention is in place for another layer")
    return _Attention(step, module).block()


class _InPlace:
    """The statements of an attention's `forward`, and those that stand for them."""

    def __init__(self, step: AttentionStep | WrittenAttention, module: Module):
        self.module, self.info = module, step.info
        self.forward = free(step.info, module)
        self.hidden, self.cache = step.takes["hidden_states"], cache_parameters(self.forward)[0]
        self.layer_idx = source(step.layer_idx, module, ())
        self.window, self.told = step.window, arguments(step.call).get("sliding_window", NONE)
        self.uses = {"cached_attention", "linear"}
        self.attention = cst.Call(cst.Name("_"))
        """The call of the attention function."""

    @property
    def output(self) -> str:
        """The attribute that is the last product."""
        raise NotImplementedError

    def _behind(self, statements: Sequence[Statement]) -> list[Statement]:
        """Return the statements behind the cache, with the residual in the last product."""
        found: list[Statement] = []
        done = False
        given = [self.cache, self.layer_idx]
        if self.window != self.told:
            given.append(f"sliding_window={source(self.window, self.module, ())}")
        for one in statements:
            if (
                any(isinstance(node, cst.Call) and _drops_out(node, self.info, self.module) for node in walk(one))
                and done
            ):
                raise NotInPlace("dropout stands behind the last product")
            if any(node is self.attention for node in walk(one)):
                one, before = self._attending(one, given)
                found += before
            products = [call for call in calls_in(one) if called_attribute(call) == self.output]
            if products:
                if done or len(products) > 1 or len(products[0].args) != 1:
                    raise NotInPlace("the last product is not computed once")
                arg = self.module.tree.code_for_node(products[0].args[0].value)
                new = cst.parse_expression(f"linear({arg}, self.{self.output}, residual=residual)")
                one = visited(one, Replaced(products[0], new))
                done = True
            elif done and not self._only_returns(one):
                raise NotInPlace("something follows the last product")
            found.append(one)
        if not done:
            raise NotInPlace("the last product is not behind the cache")
        return found

    def _only_returns(self, one: Statement) -> bool:
        return value_of(one, cst.Return) is not None

    def _attending(self, one: Statement, given: list[str]) -> tuple[Statement, list[Statement]]:
        """Return the statement that attends, told of the cache."""
        function = self.attention.func
        name = function.value if isinstance(function, cst.Name) else ""
        if (
            name
            and name not in self.module.functions
            and name in {bound for line_ in self.forward.body.body for bound in bound_by(line_) | _annotated(line_)}
        ):
            told = call_statement(f"{name} = ", "cached_attention", [name, *given], self.module)
            lead = one.leading_lines
            return one.with_changes(leading_lines=lead), [told]
        code = self.module.tree.code_for_node(function)
        new = cst.parse_expression(f"cached_attention({code}, {', '.join(given)})")
        return visited(one, Replaced(function, new)), []


class _Attention(_InPlace):
    """Queries, keys and values are made by one operator."""

    def __init__(self, step: AttentionStep, module: Module):
        super().__init__(step, module)
        self.step = step
        self.positions = step.takes.get("position_embeddings", POSITIONS.value)
        if type(step) is not AttentionStep or step.unless or step.query.heads.scale is not None:
            raise NotInPlace("something stands between the products of attention and their rotation")
        others = (cst.NamedExpr, cst.Lambda, cst.Try, cst.While, cst.For)
        if any(isinstance(node, others) for node in walk(self.forward)):
            raise NotInPlace("attention is more than a sequence of statements")
        self.attention = self._attention()
        self.uses.add("qkv_rope_cache")

    @property
    def output(self) -> str:
        """The attribute that is the last product."""
        return str(self.step.output.value)

    def _attention(self) -> cst.Call:
        run = Recording(self.module, self.info, MAX_DEPTH)
        try:
            run_step(run, self.forward, {name: role for role, name in self.step.takes.items()})
            attention, term = only_attention(run.found, self.forward)
        except (NoStep, NotComputable) as error:
            raise NotInPlace(str(error)) from error
        if term != self.step.call:
            raise NotInPlace("attention calls none of the functions of transformers")
        return attention

    def block(self) -> Block:
        statements: list[Statement] = list(self.forward.body.body)
        place = self._update(statements)
        query, key, value = self._names(statements, place)
        new, removed = self._front(statements, place, (query, key, value))
        self._check_input([*new, *statements[place + 1 :]])
        lines = self._made(query, key, value, statements[place], removed)
        made: list[Statement] = [visited(one, Renamed(self._renaming)) for one in lines]
        blank = [one for one in statements[place].leading_lines if one.comment is None][:1]
        made[0] = made[0].with_changes(leading_lines=[*blank, *comments(removed)])
        rest = self._behind(statements[place + 1 :])
        return Block(self.forward, taking(self.forward, [*new, *made, *rest], self.module), tuple(sorted(self.uses)))

    @property
    def _renaming(self) -> dict[str, str]:
        return {HIDDEN.value: self.hidden, CACHE: self.cache, POSITIONS.value: self.positions}

    def _update(self, statements: Sequence[Statement]) -> int:
        """Return the number of the statement that writes the cache."""
        places = [n for n, one in enumerate(statements) if any(map(self._is_update, calls_in(one)))]
        if len(places) != 1:
            raise NotInPlace("the cache is not written in one statement")
        statement = statements[places[0]]
        if isinstance(statement, cst.If):
            tested = m.Comparison(
                left=m.Name(self.cache), comparisons=[m.ComparisonTarget(m.IsNot(), comparator=m.Name("None"))]
            )
            if statement.orelse is not None or not (
                m.matches(statement.test, tested) or m.matches(statement.test, m.Name(self.cache))
            ):
                raise NotInPlace("the cache is written under a condition")
        return places[0]

    def _is_update(self, call: cst.Call) -> bool:
        return m.matches(call.func, m.Attribute(value=m.Name(self.cache), attr=m.Name("update")))

    def _names(self, statements: Sequence[Statement], place: int) -> tuple[str, str, str]:
        """Return the locals that are the queries, keys and values of attention."""
        plain = [arg.value for arg in self.attention.args if arg.keyword is None and not arg.star]
        named = {arg.keyword.value: arg.value for arg in self.attention.args if arg.keyword is not None}
        values = [
            named.get(name, plain[n] if len(plain) > n else None)
            for n, name in enumerate(("query", "key", "value"), 1)
        ]
        names = [value.value for value in values if isinstance(value, cst.Name)]
        if len(names) != 3 or len({*names}) != 3:
            raise NotInPlace("attention is given no locals")
        bound = {name for one in statements[place + 1 :] for name in bound_by(one)} & {*names}
        if bound or not {*names[1:]} <= bound_by(statements[place]):
            raise NotInPlace("queries, keys or values change behind the cache")
        return names[0], names[1], names[2]

    def _front(
        self, statements: Sequence[Statement], place: int, made: tuple[str, str, str]
    ) -> tuple[list[Statement], list[Statement]]:
        """Return the statements before the cache that stay, and those that the operator stands for."""
        read = {self.hidden, self.cache, self.positions, *self._update_reads(statements[place])}
        for one in statements[place + 1 :]:
            read |= {*names_read(one)} - {*made}
        kept: list[Statement] = []
        removed: list[Statement] = [statements[place]]
        for one in reversed(statements[:place]):
            if is_docstring(one):
                kept.insert(0, one)
                continue
            bound = bound_by(one)
            if not bound:
                raise NotInPlace("a statement before the cache is written binds nothing")
            if not bound & read or bound <= {*made}:
                check_plain(one, self.info, self.module)
                removed.insert(0, one)
                continue
            if bound & {*made}:
                raise NotInPlace("a statement makes more than queries, keys and values")
            if not isinstance(one, cst.SimpleStatementLine) or {*names_read(one)} & {*made}:
                raise NotInPlace("queries, keys or values are read before they are attended to")
            kept.insert(0, one)
            read |= {*names_read(one)}
        if {self.hidden, self.cache, self.positions} & {name for one in kept for name in bound_by(one)}:
            raise NotInPlace("a parameter is bound anew")
        return kept, removed

    def _update_call(self, statement: Statement) -> cst.Call:
        return next(call for call in calls_in(statement) if self._is_update(call))

    def _update_reads(self, statement: Statement) -> set[str]:
        """Return the names in what the cache is given besides keys, values and the layer's number."""
        return {name for _, value in self._update_options(statement) for name in names_read(value)} - {"self"}

    def _update_options(self, statement: Statement) -> Iterator[tuple[str, cst.BaseExpression]]:
        plain = 0
        if isinstance(statement, cst.If) and len(statement.body.body) > 1:
            raise NotInPlace("more than the cache is written under its condition")
        for arg in self._update_call(statement).args:
            if arg.star:
                raise NotInPlace("the cache is given arguments by a mapping")
            if arg.keyword is not None:
                if arg.keyword.value not in ("key_states", "value_states", "layer_idx"):
                    yield arg.keyword.value, arg.value
                else:
                    plain += 1
                continue
            plain += 1
            if plain == 4:
                yield "cache_kwargs", arg.value

    def _made(
        self, query: str, key: str, value: str, update: Statement, removed: Sequence[Statement]
    ) -> list[cst.SimpleStatementLine]:
        """Return the statements that make queries, keys and values, in the names of roles."""
        step, module = self.step, self.module
        code = module.tree.code_for_node
        options = [f'"{name}": {code(given)}' for name, given in self._update_options(update)]
        target = f"{query}, {key}, {value}"
        more = [f"update={{{', '.join(options)}}}"] if options else []
        orders = {turned.heads.heads_first for turned in (step.query, step.key) if turned.heads.norm is not None}
        if len(orders) > 1:
            raise NotInPlace("queries and keys are normed in two orders")
        more += ["heads_first=True"] * (orders == {True})
        rotate = self._rotation(removed) if step.query.turns else None
        return step.query_statements(target, module, "norm", "qkv_rope_cache", more, rotate)

    def _rotation(self, removed: Sequence[Statement]) -> list[str] | None:
        """Return the file's function that rotates queries and keys, as arguments; None where it is written out."""
        calls = [call for one in removed for call in calls_in(one) if self._rotates(call)]
        if len(calls) != 1:
            return None
        plain = [arg.value for arg in calls[0].args if arg.keyword is None and not arg.star]
        stars = [arg for arg in calls[0].args if arg.star]
        given = [arg.keyword.value for arg in calls[0].args if arg.keyword is not None]
        tables = m.Assign(value=m.Name(self.positions))
        bound = [name for one in removed for node in walk(one) if m.matches(node, tables) for name in bound_by(node)]
        whole = [node.value for node in plain[2:] if isinstance(node, cst.Name)] if len(plain) == 4 else []
        starred = len(plain) == 2 and len(stars) == 1 and m.matches(stars[0].value, m.Name(self.positions))
        if not (starred or (len(whole) == 2 and {*whole} <= {*bound} and not stars)) or {*given} - {"unsqueeze_dim"}:
            return None
        if any(arg.keyword is not None and not m.matches(arg.value, m.Integer("1")) for arg in calls[0].args):
            return None
        name = self.module.tree.code_for_node(calls[0].func)
        joined = any(
            call for one in removed for call in calls_in(one) if self.module.qualified(call.func) == "torch.cat"
        )
        return [f"rotate={name}", *["partial=True"] * joined]

    def _rotates(self, call: cst.Call) -> bool:
        """Whether a call is of a function of the file that returns what `rotary` does."""
        function = self.module.functions.get(call.func.value) if isinstance(call.func, cst.Name) else None
        last = value_of(function.body.body[-1], cst.Return) if function is not None else None
        return isinstance(last, cst.Call) and without_runtime(self.module.qualified(last.func)) == "rotary"

    def _check_input(self, statements: Sequence[Statement]) -> None:
        """Refuse to hand the norm to the products where something else reads the input, too.

        Raises:
            NotInPlace: if it does.
        """
        for one in statements:
            if reads_input(one, self.hidden):
                raise NotInPlace("more than the first products reads the input")


class _Written(_InPlace):
    """The statements stay as the file has them, but for the cache that they attend to."""

    def __init__(self, step: WrittenAttention, module: Module):
        super().__init__(step, module)
        if step.unless or step.heads_first:
            raise NotInPlace("attention calls none of the functions of transformers")
        self.attention = step.attention

    @property
    def output(self) -> str:
        """The attribute that is the last product."""
        returned = [value_of(one, cst.Return) for one in self.forward.body.body]
        value = next((value for value in returned if value is not None), None)
        first = value.elements[0].value if isinstance(value, cst.Tuple) else value
        made = {name: one for one in self.forward.body.body for name in bound_by(one)}
        if isinstance(first, cst.Name) and first.value in made:
            first = value_of(made[first.value], cst.Assign)
        if (attribute := called_attribute(first) if first is not None else None) is None:
            raise NotInPlace("attention returns no product")
        return attribute

    def block(self) -> Block:
        if any(isinstance(node, cst.Return) for one in self.forward.body.body[:-1] for node in walk(one)):
            raise NotInPlace("attention returns in several places")
        statements = [one for one in self.forward.body.body if not is_docstring(one)]
        kept = [one for one in self.forward.body.body if is_docstring(one)]
        front = self._normed(statements)
        done = self._behind(front)
        return Block(self.forward, taking(self.forward, [*kept, *done], self.module), tuple(sorted(self.uses)))

    def _normed(self, statements: Sequence[Statement]) -> list[Statement]:
        """Return the statements with the norm in the first product, or before everything."""
        reading = [place for place, one in enumerate(statements) if reads_input(one, self.hidden)]
        if len(reading) == 1:
            one = statements[reading[0]]
            for call in calls_in(one):
                if call.args and m.matches(call.args[0].value, m.Name(self.hidden)):
                    made = self._product(call)
                    if made is not None and not reads_input(
                        visited(one, Replaced(call, made)), self.hidden, fused=True
                    ):
                        return [
                            *statements[: reading[0]],
                            visited(one, Replaced(call, made)),
                            *statements[reading[0] + 1 :],
                        ]
        text = f"if norm is not None:\n    {self.hidden} = norm({self.hidden})\n"
        return [cst.parse_statement(text, config=self.module.tree.config_for_parsing), *statements]

    def _product(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return a product of the input with the norm in it."""
        code = self.module.tree.code_for_node
        if without_runtime(self.module.qualified(call.func)) == "packed_linear":
            self.uses.add("packed_step")
            parts = ", ".join(code(arg.value) for arg in call.args)
            return cst.parse_expression(f"packed_step({parts}, norm=norm)")
        attribute = called_attribute(call)
        if attribute is None or len(call.args) != 1 or not is_linear_attribute(attribute, self.info, self.module):
            return None
        return cst.parse_expression(f"linear({self.hidden}, self.{attribute}, norm=norm)")


def is_linear_attribute(attribute: str, info: ClassInfo, module: Module) -> bool:
    """Whether an attribute is built as a plain `nn.Linear`."""
    return is_linear(Term("attribute", (), attribute), info, module)


def reads_input(statement: Statement, hidden: str, fused: bool = False) -> bool:
    """Whether a statement asks more of its input than its shape; `fused`, other than in a product with the norm."""
    asked = m.Attribute(value=m.Name(hidden), attr=m.OneOf(*(m.Name(name) for name in _ASKED)))
    product = m.Call(func=m.Name("linear") | m.Name("packed_step"), args=[m.Arg(m.Name(hidden)), m.AtLeastN(n=1)])
    mentions = sum(name == hidden for name in names_read(statement))
    mentions -= sum(1 for node in walk(statement) if m.matches(node, asked))
    if fused:
        mentions -= sum(1 for node in walk(statement) if m.matches(node, product))
    return mentions > 0


_ASKED = ("shape", "size", "dim", "dtype", "device", "ndim")
"""What a norm does not change of its input."""


def _annotated(one: Statement) -> set[str]:
    found = [node.target for node in walk(one) if isinstance(node, cst.AnnAssign)]
    return {node.value for node in found if isinstance(node, cst.Name)}


def check_plain(statement: Statement, info: ClassInfo, module: Module) -> None:
    """Refuse what an operator would not do: to drop out, or to ask more than the object's own attributes.

    Raises:
        NotInPlace: saying what it is.
    """
    for node in walk(statement):
        if isinstance(node, (cst.If, cst.IfExp)):
            training = m.findall(node.test, m.Attribute(value=m.Name("self"), attr=m.Name("training")))
            if {*names_read(node.test)} - {"self", "None"} or training:
                raise NotInPlace("what is computed depends on more than the object's attributes")
        if isinstance(node, cst.Call) and _drops_out(node, info, module):
            raise NotInPlace("something is dropped out")


def _drops_out(call: cst.Call, info: ClassInfo, module: Module) -> bool:
    attribute = called_attribute(call)
    if attribute is not None:
        return is_built_from(attribute, DROPOUT, info, module)
    return "dropout" in module.qualified(call.func)


def free(info: ClassInfo, module: Module) -> cst.FunctionDef:
    """Return the `forward` of a class, which can take a norm and a residual."""
    forward = info.methods.get("forward")
    if forward is None or not isinstance(forward.body, cst.IndentedBlock):
        raise NotInPlace("a block has no `forward` of its own")
    names = {*parameters(forward), *(name for one in forward.body.body for name in bound_by(one) | _annotated(one))}
    if names & {*GIVEN}:
        raise NotInPlace(f"a block has a local {sorted(names & {*GIVEN})[0]}")
    return forward


def comments(statements: Sequence[Statement]) -> list[cst.EmptyLine]:
    """Return the comments of statements as lines."""
    found = [node for one in statements for node in walk(one) if isinstance(node, cst.Comment)]
    return [cst.EmptyLine(comment=comment) for comment in found]


def taking(forward: cst.FunctionDef, statements: Sequence[Statement], module: Module) -> cst.FunctionDef:
    """Return a `forward` that takes a norm and a residual, with other statements."""
    params = forward.params
    apart = params.params[0].comma
    if not isinstance(apart, cst.Comma):
        raise NotInPlace("a block takes nothing")
    is_typed = forward.returns is not None or any(param.annotation is not None for param in params.params)
    made = [_keyword(name, kind if is_typed else "", module).with_changes(comma=apart) for name, kind in GIVEN.items()]
    last = (params.kwonly_params or params.params)[-1]
    if params.star_kwarg is None and not isinstance(params.star_arg, cst.Param):
        made[-1] = made[-1].with_changes(comma=last.comma)
    changes: dict[str, object] = {"kwonly_params": [*params.kwonly_params, *made]}
    if params.kwonly_params:
        others = [*params.kwonly_params[:-1], params.kwonly_params[-1].with_changes(comma=apart)]
        changes["kwonly_params"] = [*others, *made]
    elif not isinstance(params.star_arg, cst.Param):
        changes["params"] = [*params.params[:-1], params.params[-1].with_changes(comma=apart)]
        changes["star_arg"] = cst.ParamStar(comma=apart)
    block = cst.ensure_type(forward.body, cst.IndentedBlock)
    return forward.with_changes(params=params.with_changes(**changes), body=block.with_changes(body=[*statements]))


def _keyword(name: str, kind: str, module: Module) -> cst.Param:
    written = typed(name, kind, module) if kind else name
    default = " = None" if ":" in written else "=None"
    function = cst.ensure_type(cst.parse_statement(f"def f(*, {written}{default}): pass"), cst.FunctionDef)
    return function.params.kwonly_params[0]
