"""The halves of a tensor's last dimension and its neighbouring columns, in whatever way they are taken and joined.

Halves become `chunk` and `cat`, neighbours slices with a step of two and `stack`; casts come before what takes parts
and behind what joins them. Where the number of columns is odd, these ways fail or are `chunk`: what is computed is the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rewrite.analysis.terms.spelling import NONE, Term, constant, is_dtype, make

_LAST, _LAST_BUT_ONE, _TWO = constant(-1), constant(-2), constant(2)
_EVERY = Term("constant", (), "...")
_ALL = Term("slice", (NONE, NONE, NONE))
_LAYOUT = frozenset({"neg", "unflatten", "index", "chunk", "unbind", "unsqueeze", "transpose", "contiguous"})
"""What has the numbers of its first argument, in another place."""
PAIRS, HALVES = (_LAST, _TWO), (_TWO, _LAST)
"""Into what the last dimension is parted."""


def in_chunks(term: Term) -> Term:
    """Return a term in which parts of the last dimension are taken and joined in one way, but for plain slices."""
    inner = tuple(map(in_chunks, term.args))
    if inner != term.args:
        term = Term(term.op, inner, term.value)
    rule = _RULES.get(term.op)
    made = rule(term) if rule is not None else None
    return term if made is None else made


def _index(term: Term) -> Term | None:
    found = _taken(term)
    return None if found is None else make("index", make("chunk", found[0], _TWO, _LAST), constant(found[1]))


def _taken(term: Term) -> tuple[Term, int] | None:
    """Return what a term is a half of, and which one."""
    of, *items = term.args
    if len(items) == 1 and items[0] in (constant(0), constant(1)):
        whole = _parted(of)
        return None if whole is None else (whole, int(items[0].value))
    if len(items) == 3 and items[::2] == [_EVERY, _ALL] and items[1] in (constant(0), constant(1)):
        return (of.args[0], int(items[1].value)) if of.op == "unflatten" and of.args[1:] == HALVES else None
    if len(items) != 2 or items[0] != _EVERY or items[1].op != "slice":
        return None
    less = Term("neg", (_half(of),))
    ends = {(less, NONE, NONE): 1, (NONE, less, NONE): 0}
    return (of, ends[items[1].args]) if items[1].args in ends else None


def _neighbours(term: Term) -> Term | None:
    """`x.unflatten(-1, (-1, 2))[..., 0]`, and the same by `unbind`."""
    of, *items = term.args
    pairs = of.args[0] if of.op == "unbind" and of.args[1:] == (_LAST,) and len(items) == 1 else None
    pairs = of if len(items) == 2 and items[0] == _EVERY else pairs
    first = {constant(0): NONE, constant(1): constant(1)}.get(items[-1])
    if pairs is None or first is None or pairs.op != "unflatten" or pairs.args[1:] != PAIRS:
        return None
    return Term("index", (pairs.args[0], _EVERY, Term("slice", (first, NONE, _TWO))))


def _parted(parts: Term) -> Term | None:
    """Return what is parted into two halves of its last dimension."""
    if parts.op == "tensor_split" and parts.args[1:] == (_TWO, _LAST):
        return parts.args[0]
    if parts.op == "split" and parts.args[1:] == (_half(parts.args[0]), _LAST):
        return parts.args[0]
    if parts.op == "unbind" and parts.args[1:] == (_LAST_BUT_ONE,) and parts.args[0].op == "unflatten":
        return parts.args[0].args[0] if parts.args[0].args[1:] == HALVES else None
    return None


def _half(tensor: Term) -> Term:
    return make("floordiv", make("index", Term("shape", (_bare(tensor),)), _LAST), _TWO)


def _unflatten(term: Term) -> Term | None:
    """Parts of the last dimension, in whatever way: `unflatten(x, -1, 2)` stands for `x.unflatten(-1, (-1, 2))`."""
    whole, *sizes = _spread(term)
    if term.op == "unflatten" and sizes[:1] == [_LAST]:
        parts = sizes[1:]
    elif term.op != "unflatten" and (rest := _behind_leading(sizes, whole)) is not None:
        parts = rest
    else:
        return _flattened(term, whole, sizes)
    halves = {make("floordiv", size, _TWO) for size in _last_sizes(whole)}
    ways = [_LAST if part in halves else part for part in parts]
    return Term("unflatten", (whole, *ways)) if tuple(ways) in (PAIRS, HALVES) else _flattened(term, whole, sizes)


def _spread(term: Term) -> tuple[Term, ...]:
    """Return the arguments of a call that is given sizes one by one, or in a tuple."""
    *front, last = term.args
    return (*front, *last.args) if last.op == "tuple" else term.args


def _behind_leading(sizes: Sequence[Term], of: Term) -> list[Term] | None:
    """Return the sizes behind those that a tensor has in front of its last dimension, if they are these."""
    shape = Term("shape", (_bare(of),))
    front = Term("star", (Term("index", (shape, Term("slice", (NONE, _LAST, NONE)))),))
    if sizes and _asked(sizes[0]) == front:
        return [*sizes[1:]]
    one_by_one = [Term("index", (shape, constant(place))) for place in range(3)]
    four = [_asked(size) for size in sizes[:3]] == one_by_one and _LAST not in sizes  # which would take more of five
    return [*sizes[3:]] if four else None


def _last_sizes(of: Term) -> Iterator[Term]:
    """Yield the ways to say how many columns a tensor has, the last of four dimensions among them."""
    yield from (Term("index", (Term("shape", (_bare(of),)), place)) for place in (_LAST, constant(3)))


def _bare(term: Term) -> Term:
    """Return a tensor without what leaves its shape."""
    while term.op in ("cast", "neg", "contiguous"):
        term = term.args[0]
    return term


def _asked(size: Term) -> Term:
    """Return a size, or some, asked of the tensor itself; those in front are the same where its last one is parted."""
    if size.op == "star":
        return Term("star", (_asked(size.args[0]),))
    if size.op != "index" or size.args[0].op != "shape" or len(size.args) != 2:
        return size
    of, which = _bare(size.args[0].args[0]), size.args[1]
    if of.op == "unflatten":
        front = Term("slice", (NONE, _LAST_BUT_ONE, NONE))
        if which == front:
            which = Term("slice", (NONE, _LAST, NONE))
        elif which not in map(constant, range(3)):
            return size
        of = _bare(of.args[0])
    return Term("index", (Term("shape", (of,)), which))


def _flattened(term: Term, whole: Term, sizes: Sequence[Term]) -> Term | None:
    """Neighbours that were stacked, in the shape of what they are of: flattened from `None` on."""
    stacked = whole.args[0] if whole.op == "cast" else whole
    if stacked.op not in ("stack", "view_as_real") or (stacked.op == "stack" and stacked.args[1:] != (_LAST,)):
        return None
    for of in dict.fromkeys(_bare(inner.args[0]) for inner in _parts_of(stacked)):
        whole_shape = Term("shape", (of,))
        rest = _behind_leading(sizes, of)
        if sizes == [whole_shape] or (rest is not None and len(rest) == 1 and rest[0] in (_LAST, *_last_sizes(of))):
            alone = all(part.op in ("neg", "index") for part in stacked.args[0].args)
            return _joined(Term("flatten", (whole, _LAST_BUT_ONE if alone and stacked.op == "stack" else NONE)))
    return None


def _parts_of(term: Term) -> Iterator[Term]:
    """Yield the neighbours that a term is made of."""
    if (term.op == "index" and term.args[1:2] == (_EVERY,) and term.args[-1].op == "slice") or term.op == "unflatten":
        yield term
    else:
        for inner in term.args:
            yield from _parts_of(inner)


def _view_as(term: Term) -> Term | None:
    whole, like = term.args[0], term.args[-1]
    return _flattened(term, whole, [Term("shape", (_bare(like),))]) if len(term.args) == 2 else None


def _flatten(term: Term) -> Term | None:
    stacked = term.args[0]
    if term.args[1:] == (_LAST_BUT_ONE, _LAST):
        return in_chunks(Term("flatten", (stacked, _LAST_BUT_ONE)))
    if term.args[1:] == (_LAST_BUT_ONE,) and stacked.op == "stack" and stacked.args[1:] == (_LAST_BUT_ONE,):
        return make("cat", stacked.args[0], _LAST)
    return _joined(term)


def _joined(term: Term) -> Term | None:
    """Cast behind what joins, where every part is cast the same."""
    if term.op == "flatten":
        if term.args[0].op != "cast":
            return term
        inner, dtype = term.args[0].args
        return _rounded(Term("flatten", (inner, *term.args[1:])), dtype)
    parts = term.args[0].args if term.args[0].op == "tuple" else ()
    dtypes = {part.args[1] for part in parts if part.op == "cast"}
    if not parts or any(part.op != "cast" for part in parts) or len(dtypes) != 1:
        return None
    inner = Term("tuple", tuple(part.args[0] for part in parts))
    return _rounded(Term(term.op, (inner, *term.args[1:])), dtypes.pop())


def _rounded(term: Term, dtype: Term) -> Term:
    return make("to", term, dtype) if is_dtype(dtype) else Term("cast", (term, dtype))


def _cast(term: Term) -> Term | None:
    """Cast before what takes parts."""
    of, dtype = term.args
    if of.op == "index" and of.args[0].op == "chunk":
        chunk = of.args[0]
        return Term("index", (Term("chunk", (_rounded(chunk.args[0], dtype), *chunk.args[1:])), *of.args[1:]))
    if of.op == "index" and of.args[1:2] == (_EVERY,) and of.args[-1].op == "slice":
        return Term("index", (_rounded(of.args[0], dtype), *of.args[1:]))
    return None


def _dtype(term: Term) -> Term | None:
    of = term.args[0]
    while of.op in _LAYOUT:
        of = of.args[0]
    if of.op == "cast":
        return of.args[1]
    return Term("dtype", (of,)) if of != term.args[0] else None


def _written(term: Term) -> Term | None:
    """Two parts that are written into a tensor like another one: `woven` where they are neighbours, else `beside`."""
    inner, second, *there = term.args
    if inner.op != "written" or inner.args[0].op != "empty_like" or len(inner.args[0].args) != 1:
        return None
    first, here, of = inner.args[1], [*inner.args[2:]], inner.args[0].args[0]
    half = _half(of)
    for (one, at), (other, behind) in (((first, here), (second, there)), ((second, there), (first, here))):
        if at[:-1] != [_EVERY] or behind[:-1] != [_EVERY] or {at[-1].op, behind[-1].op} != {"slice"}:
            return None
        ends = (*at[-1].args, *behind[-1].args)
        if ends == (NONE, NONE, _TWO, constant(1), NONE, _TWO):
            return _rounded(Term("woven", (Term("tuple", (one, other)), _bare(of))), make(".dtype", of))
        if ends == (NONE, half, NONE, half, NONE, NONE):
            return _rounded(Term("beside", (Term("tuple", (one, other)), _bare(of))), make(".dtype", of))
    return None


def _shape(term: Term) -> Term | None:
    of = _bare(term.args[0])
    return Term("shape", (of,)) if of != term.args[0] else None


_RULES: dict[str, Callable[[Term], Term | None]] = {
    "index": lambda term: _index(term) or _neighbours(term),
    "unflatten": _unflatten,
    "reshape": _unflatten,
    "view": _unflatten,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "flatten": _flatten,
    "stack": _joined,
    "cat": _joined,
    "cast": _cast,
    "dtype": _dtype,
    "shape": _shape,
    "written": _written,
}
