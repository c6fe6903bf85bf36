"""Products with repeated heads, written for the tensor that was repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from rewrite.analysis.effects import Effect, Scope, union, why_not_move
from rewrite.analysis.patterns.expansion import NotAnExpansion, called_function, computed, inline
from rewrite.analysis.patterns.guarded_repeats import guarded, is_all_of
from rewrite.analysis.patterns.readers import Reads, held_by, operands, reads_of
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import walk
from rewrite.analysis.tree.nodes import block_of, names_bound_by, replace_nodes
from rewrite.analysis.tree.proposal import Edit, Found

_New = dict[int, tuple[cst.CSTNode, ...]]


@dataclass(frozen=True)
class Repeated:
    """An expression whose value is a tensor with every head repeated."""

    node: cst.Call
    scope: Scope
    compact: cst.BaseExpression
    """The tensor."""
    times: cst.BaseExpression
    """How often each of its heads is repeated."""
    heads: int
    """The dimension of its heads."""
    guard: cst.If | None = None
    """The condition on which x is repeated, where otherwise it is left as it is."""

    @property
    def line(self) -> cst.CSTNode:
        """The statement behind which the tensor is repeated, if it is."""
        return self.guard if self.guard is not None else self.scope.module.statement(self.node)

    @property
    def block(self) -> list[cst.CSTNode]:
        """The block of that statement."""
        return list(block_of(self.line, self.scope.module))

    @classmethod
    def by(cls, node: cst.Call, scope: Scope) -> Repeated:
        """Read an expression.

        Raises:
            NotAnExpansion: if it is not the repetition of heads.
        """
        given: dict[str, cst.BaseExpression] = {}
        if called_function(node, scope)[0] is None:
            found = inline(node, scope)
        else:
            found, given = computed(node, scope)
        compact, times = _written(found.tensor, given), _written(found.times, given)
        condition = guarded(node, scope, compact, times)
        if condition is not None:
            return cls(node, scope, compact, condition.times, found.heads, condition.guard)
        return cls(node, scope, compact, times, found.heads)


def grouped(repeated: Repeated) -> Found:
    """Return the edits by which every product reads the tensor before its heads were repeated.

    Raises:
        NotAnExpansion: if something else reads the repeated tensor, or the tensor may change before a product.
    """
    reads = reads_of(repeated.node, repeated.scope, repeated.heads)
    _only_products(reads, repeated)
    line = repeated.scope.module.statement(repeated.node)
    target = held_by(repeated.node, repeated.scope)
    compact = repeated.compact
    if reads.copied and (target is None or not isinstance(compact, cst.Name) or compact.value != target.value):
        raise NotAnExpansion("other_use", "it is a copy of itself on a condition, under another name")
    if target is not None and isinstance(compact, cst.Name) and is_all_of(repeated.node, line):
        if compact.value == target.value or not _bound_after(compact.value, repeated):
            _unchanged(reads, repeated, Effect() if compact.value == target.value else repeated.scope.of(compact))
            new: _New = {id(use): (cst.Name(compact.value),) for use in reads.first}
            return _commented(_found((_without(line, repeated),), reads, repeated, new), repeated)
    held = Effect(reads=frozenset({target.value})) if target is not None else Effect()
    if target is not None and reads.locals.count(target.value) > 1:
        held = Effect()  # it is bound anew by what is made of it, which reads it first
    _unchanged(reads, repeated, held)
    if not any(repeated.node in walk(product) for product in reads.products):
        return _found((Edit(repeated.node, (compact,)),), reads, repeated, {})
    return _found((), reads, repeated, {id(repeated.node): (compact,)})


def _without(line: cst.CSTNode, repeated: Repeated) -> Edit:
    """Return the edit that takes out a statement, with the condition on which it stood where that has no other."""
    guard = repeated.guard
    if guard is None:
        return Edit(line, ())
    rest = [other for other in guard.body.body if other is not line]
    if not rest:
        return Edit(guard, ())
    if isinstance(rest[0], cst.BaseStatement):
        rest[0] = _below(_comments(line), rest[0])
    return Edit(guard, (guard.with_changes(body=guard.body.with_changes(body=rest)),))


def _comments(node: cst.CSTNode) -> list[cst.EmptyLine]:
    """Return the comments of a statement that is taken out, each as a line of its own."""
    return [cst.EmptyLine(comment=inner) for inner in walk(node) if isinstance(inner, cst.Comment)]


def _below(comments: Sequence[cst.EmptyLine], statement: cst.BaseStatement) -> cst.BaseStatement:
    """Return a statement with comments above it; as it is, where there are none."""
    lines = getattr(statement, "leading_lines", ())
    return statement.with_changes(leading_lines=[*comments, *lines]) if comments else statement


def _commented(found: Found, repeated: Repeated) -> Found:
    """Return edits that take out a statement, with its comments above the one behind it."""
    removed = found.edits[0]
    comments = _comments(removed.old)
    block = repeated.block
    after = block[next(place for place, s in enumerate(block) if s is repeated.line) + 1 :][:1]
    if removed.new or not comments or not after or not isinstance(after[0], cst.BaseStatement):
        return found
    inside = {id(node) for node in walk(after[0])}
    inner: _New = {id(edit.old): edit.new for edit in found.edits if id(edit.old) in inside}
    changed = replace_nodes(after[0], inner) if inner else after[0]
    if not isinstance(changed, cst.BaseStatement):
        raise TypeError("not a statement")
    others = tuple(edit for edit in found.edits if id(edit.old) not in inside)
    return replace(found, edits=(*others, Edit(after[0], (_below(comments, changed),))))


def _found(edits: tuple[Edit, ...], reads: Reads, repeated: Repeated, new: _New) -> Found:
    """Return all edits: products of the compact tensor, and `new` in what is none of them."""
    products = {id(product): _product(product, reads, repeated, new) for product in reads.products}
    inside = {id(node) for product in reads.products for node in walk(product)}
    others = [node for node in reads.names if id(node) in new and id(node) not in inside]
    return Found(
        (
            *edits,
            *(Edit(product, (products[id(product)],)) for product in reads.products),
            *(Edit(node, new[id(node)]) for node in others),
        ),
        tuple(sorted({_called(made) for made in products.values()})),
    )


def _called(made: cst.Call) -> str:
    return made.func.value if isinstance(made.func, cst.Name) else ""


def _product(product: cst.Call | cst.BinaryOperation, reads: Reads, repeated: Repeated, new: _New) -> cst.Call:
    if isinstance(product, cst.Call) and id(product) in reads.sides:
        return _attention(product, reads.sides[id(product)], repeated, new)
    both = operands(product, repeated.scope)
    if both is None:
        raise TypeError("not a product")
    sides = [side if id(side) in new else replace_nodes(side, new) for side in both]
    given = [new[id(side)][0] if id(side) in new else side for side in sides]
    arguments = [cst.Arg(_bare(node)) for node in (*given, repeated.times)]
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    arguments[:-1] = [argument.with_changes(comma=comma) for argument in arguments[:-1]]
    return cst.Call(cst.Name("grouped_matmul"), arguments)


def _attention(call: cst.Call, side: str, repeated: Repeated, new: _New) -> cst.Call:
    """Return the attention that shares heads among queries itself, of keys or of values."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    args = []
    for argument in call.args:
        value = argument.value
        taken = new[id(value)][0] if id(value) in new else replace_nodes(value, new)
        args.append(argument.with_changes(value=_bare(taken)))
    if not isinstance(args[-1].comma, cst.Comma):
        args[-1] = args[-1].with_changes(comma=comma)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    args.append(cst.Arg(_bare(repeated.times), cst.Name(f"{side}_groups"), equal=equal))
    return call.with_changes(func=cst.Name("grouped_attention"), args=args)


def _bare(node: cst.CSTNode) -> cst.BaseExpression:
    """Return an expression without the parentheses around it, which an argument does not need."""
    if not isinstance(node, cst.BaseExpression):
        raise TypeError("not an expression")
    return node if isinstance(node, (cst.Tuple, cst.GeneratorExp)) else node.with_changes(lpar=[], rpar=[])


def _only_products(reads: Reads, repeated: Repeated) -> None:
    """Only products read the tensor, and they stand behind it in its block."""
    module, scope = repeated.scope.module, repeated.scope
    if reads.other is not None:
        raise NotAnExpansion("other_use", module.code(module.statement(reads.other)).splitlines()[0])
    if not reads.products:
        raise NotAnExpansion("other_use", "no matrix product reads it")
    block = repeated.block
    place = next(place for place, s in enumerate(block) if s is repeated.line)
    behind = {id(node) for statement in block[place:] for node in walk(statement)}
    outside = next((node for node in (*reads.products, *reads.names) if id(node) not in behind), None)
    if outside is not None:
        raise NotAnExpansion("other_use", module.code(module.statement(outside)).splitlines()[0])
    if any(inner is not one and inner in walk(one) for one in reads.products for inner in reads.products):
        raise NotAnExpansion("other_use", "a product within a product")
    for above in (a for node in (*reads.products, *reads.names) for a in module.ancestors(node)):
        if above is scope.function:
            break
        if isinstance(above, (cst.Lambda, cst.FunctionDef, cst.BaseComp)):
            raise NotAnExpansion("other_use", "code that runs later reads it")


def _unchanged(reads: Reads, repeated: Repeated, held: Effect) -> None:
    """What a product reads instead is the same there as where the heads were repeated."""
    scope, module = repeated.scope, repeated.scope.module
    own = scope.of(repeated.compact) | scope.of(repeated.times)
    if not own.is_pure:
        raise NotAnExpansion("other_use", own.anything or "its arguments do more than name something")
    if reads.again:
        raise NotAnExpansion("other_use", f"`{reads.again}` is bound again")
    if any(isinstance(above, (cst.For, cst.While)) for above in _above(repeated.node, scope)):
        raise NotAnExpansion("other_use", "it stands in a loop")
    block = repeated.block
    place = next(place for place, s in enumerate(block) if s is repeated.line)
    last = max(n for n, s in enumerate(block) if any(p is node for p in reads.products for node in walk(s)))
    own_line = module.statement(repeated.node)
    inside = [s for s in repeated.guard.body.body if s is not own_line] if repeated.guard is not None else []
    past = union(scope.of(statement) for statement in (*inside, *block[place + 1 : last + 1]))
    if last == place and not _is_direct(repeated, reads):
        raise NotAnExpansion("other_use", "its own statement reads it in another way")
    past = replace(past, leaves=frozenset())  # where the block is left, nobody misses what was not computed
    if why := why_not_move(scope, held | scope.of(repeated.times), past):
        raise NotAnExpansion("other_use", why)
    if scope.memory(past.writes) & scope.memory(own.reads):  # also where it has a name of its own, which was a copy's
        raise NotAnExpansion("other_use", "it is written in place before a product reads it")
    later = union(scope.of(statement) for statement in _behind(block[last], scope))
    if later.anything or scope.memory(later.writes) & scope.memory(own.reads):
        why = later.anything or "it is written in place afterwards"
        raise NotAnExpansion("other_use", f"{why}, and a gradient would read it, not a copy")


def _behind(line: cst.CSTNode, scope: Scope) -> Iterator[cst.BaseStatement]:
    """Yield the statements of the function that stand behind one, in its block and those around it."""
    node: cst.CSTNode = line
    for above in scope.module.ancestors(line):
        block = getattr(above, "body", ())
        if isinstance(above, cst.IndentedBlock) and isinstance(block, Sequence):
            yield from block[next(place for place, s in enumerate(block) if s is node) + 1 :]
        if above is scope.function:
            return
        node = above


def _is_direct(repeated: Repeated, reads: Reads) -> bool:
    """Whether the products are around the expression itself, in a statement that does nothing but compute."""
    line = repeated.scope.of(repeated.scope.module.statement(repeated.node))
    return not reads.locals and not (line.writes or line.anything or line.stores)


def _above(node: cst.CSTNode, scope: Scope) -> list[cst.CSTNode]:
    found = []
    for above in scope.module.ancestors(node):
        if above is scope.function:
            break
        found.append(above)
    return found


def _bindings(name: str, scope: Scope) -> list[cst.CSTNode]:
    """Return the statements that bind a local, in source order."""
    return [scope.module.statement(target) for target in walk(scope.function.body) if name in names_bound_by(target)]


def _bound_after(name: str, repeated: Repeated) -> bool:
    """Whether a statement behind the expression's own binds a local."""
    order = {id(node): place for place, node in enumerate(walk(repeated.scope.function.body))}
    own = repeated.scope.module.statement(repeated.node)
    return any(order[id(line)] > order[id(own)] for line in _bindings(name, repeated.scope))


def _written(term: Term, given: Mapping[str, cst.BaseExpression]) -> cst.BaseExpression:
    """Return the source of what is repeated, or of how often: a parameter's argument, an attribute, a number."""
    if term.op == "parameter":
        value = given.get(term.value, cst.Name(term.value) if not given else None)
        if value is None:
            raise NotAnExpansion("other_expansion", f"the argument of `{term.value}`")
        return value
    if term.op == "attribute":
        return cst.Attribute(cst.Name("self"), cst.Name(term.value))
    if term.op == "constant" and term.value.isdigit():
        return cst.Integer(term.value)
    if term.op == "floordiv":
        left, right = (_written(side, given) for side in term.args)
        if isinstance(right, cst.BinaryOperation) and not right.lpar:
            right = right.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return cst.BinaryOperation(left, cst.FloorDivide(), right)
    if term.op.startswith(".") and len(term.args) == 1:
        return cst.Attribute(_written(term.args[0], given), cst.Name(term.op[1:]))
    raise NotAnExpansion("other_expansion", f"`{term}`")
