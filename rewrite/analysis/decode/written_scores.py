"""Attention that a `forward` writes out, read as a call of an attention function.

    scores = q kᵀ * scaling + mask          weights = softmax(scores)          out = weights v

Products may be `matmul` or `einsum`, the scale a factor or a divisor. What the whole is read by is what reads the
`eager` function of a file (`eager_attention`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rewrite.analysis.blocks.terms import CACHE
from rewrite.analysis.decode.direct_attention import NUMBERS, without_math
from rewrite.analysis.decode.eager_attention import KEY, MASK, QUERY, SCALING, VALUE, reads_as_attention
from rewrite.analysis.terms.computation import subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make

_PRODUCTS = ("matmul", "grouped_matmul", "bmm")
_LAST_TWO = ({constant(2), constant(3)}, {constant(-1), constant(-2)})
_WHOLE = (Term("slice", (NONE, NONE, NONE)), Term("constant", (), "..."))
_FUNCTION = Term("name", (), "torch.nn.functional.scaled_dot_product_attention")


def masks_of(softmax: Term) -> set[str]:
    """Return the parameters that are added to the scores below a softmax, whole or cut to the number of keys."""
    sums = (term for term in subterms(softmax.args[0]) if term.op == "add")
    found = (_whole(side) for term in sums for side in term.args)
    return {mask.value for mask in found if mask.op == "parameter"}


def as_written(term: Term) -> Term | None:
    """Return softmax over scaled products with a mask, times values, `[B, S, H, D]`, as the call of an attention
    function with the same arguments; None for anything else.
    """
    term = _without_einsum(term, {})
    cached = [inner for inner in subterms(term) if inner.op == "index" and _is_of_cache(inner.args[0])]
    keys = next((inner for inner in cached if inner.args[1:] == (constant(0),)), None)
    values = next((inner for inner in cached if inner.args[1:] == (constant(1),)), None)
    products = {} if keys is None else dict.fromkeys(_scores(term, keys))
    if keys is None or values is None or len(products) != 1:
        return None
    (product,) = products
    scaled, scaling = _scaled(term, product)
    masks = {mask for inner in subterms(term) if inner.op == "softmax" for mask in masks_of(inner)}
    if len(masks) != 1 or not all(inner.op in NUMBERS for inner in subterms(scaling)):
        return None
    query, mask = product.args[0], Term("parameter", (), masks.pop())
    given = {query: QUERY, keys: KEY, values: VALUE, mask: MASK}
    plain = _swapped(term, {scaled: make("mul", _swapped(product, given), SCALING), **given})
    if not reads_as_attention(plain):
        return None
    words = {"dropout": constant(0), "scaling": scaling}
    keywords = (Term("keyword", (value,), name) for name, value in words.items())
    return Term("call", (_FUNCTION, Term("self"), query, keys, values, mask, *keywords))


def _is_of_cache(term: Term) -> bool:
    return term.op == "update" and term.args[0] == Term("parameter", (), CACHE)


def _scores(term: Term, keys: Term) -> Iterator[Term]:
    """Yield every product with the transposed keys."""
    for inner in subterms(term):
        if inner.op in _PRODUCTS and len(inner.args) >= 2 and inner.args[1].op == "transpose":
            turned = inner.args[1]
            if {*turned.args[1:]} in _LAST_TWO and keys in subterms(turned.args[0]):
                yield inner


def _scaled(term: Term, product: Term) -> tuple[Term, Term]:
    """Return the scores with their factor, and that; 1 where there is none."""
    for inner in subterms(term):
        if inner.op == "mul" and len(inner.args) == 2 and product in inner.args:
            factor = without_math(next(side for side in inner.args if side != product))
            if all(part.op in NUMBERS for part in subterms(factor)):
                return inner, factor
        if inner.op == "div" and inner.args[0] == product:
            divisor = without_math(inner.args[1])
            if all(part.op in NUMBERS for part in subterms(divisor)):
                return inner, make("div", constant(1), divisor)
    return product, constant(1.0)


def _whole(mask: Term) -> Term:
    """Return a mask before its last dimension is cut."""
    if mask.op == "index" and all(item in _WHOLE for item in mask.args[1:-1]):
        last = mask.args[-1]
        if len(mask.args) > 2 and last.op == "slice" and (last.args[0], last.args[2]) == (NONE, NONE):
            return mask.args[0]
    return mask


def _swapped(term: Term, given: Mapping[Term, Term]) -> Term:
    if term in given or not term.args:
        return given.get(term, term)
    args = tuple(_swapped(argument, given) for argument in term.args)
    return make(term.op, *args) if term.commutes else Term(term.op, args, term.value)


def _without_einsum(term: Term, known: dict[Term, Term]) -> Term:
    """Return a term whose products of heads are all `matmul`."""
    if not term.args:
        return term
    if term not in known:
        args = tuple(_without_einsum(argument, known) for argument in term.args)
        made = Term(term.op, args, term.value)
        known[term] = _product(args) or made if term.op == "einsum" and len(args) == 3 else made
    return known[term]


def _product(args: tuple[Term, ...]) -> Term | None:
    """Return the product of two tensors `[B, H, …]` or `[B, …, H, …]` that an equation says, None for another one."""
    equation = "".join(json.loads(args[0].value).split()) if args[0].op == "constant" else ""
    if equation.count("->") != 1 or equation.count(",") != 1 or "." in equation:
        return None
    given, out = equation.split("->")
    first, second = given.split(",")
    batch = [letter for letter in out if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in out]
    own = [[letter for letter in side if letter not in other] for side, other in ((first, second), (second, first))]
    if (len(batch), len(summed), *map(len, own)) != (2, 1, 1, 1) or {len(first), len(second), len(out)} != {4}:
        return None
    left = _as(args[1], first, [*batch, *own[0], *summed])
    right = _as(args[2], second, [*batch, *summed, *own[1]])
    if right is None and (turned := _as(args[2], second, [*batch, *own[1], *summed])) is not None:
        right = Term("transpose", (turned, constant(2), constant(3)))
    if left is None or right is None:
        return None
    return _as(Term("matmul", (left, right)), "".join([*batch, *own[0], *own[1]]), [*out])


def _as(term: Term, letters: str, wanted: list[str]) -> Term | None:
    """Return a tensor with its dimensions in another order: the same, or two of them exchanged; None for others."""
    if [*letters] == wanted:
        return term
    moved = [place for place, letter in enumerate(letters) if letter != wanted[place]]
    if moved != [1, 2]:
        return None
    exchanged = term.op == "transpose" and {*term.args[1:]} == {constant(1), constant(2)}
    return term.args[0] if exchanged else Term("transpose", (term, constant(1), constant(2)))
