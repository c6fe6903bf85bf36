"""The halves of a tensor's last dimension, in whatever way they are taken and joined again, as `chunk` and `cat`.

Where the number of columns is odd, these ways fail or are `chunk`: what is computed is the same.
"""

from __future__ import annotations

from rewrite.analysis.terms.spelling import NONE, Term, constant, make

_LAST, _LAST_BUT_ONE, _TWO = constant(-1), constant(-2), constant(2)
_EVERY = Term("constant", (), "...")


def in_chunks(term: Term) -> Term:
    """Return a term in which halves are items of `chunk(2, -1)`, but for plain slices, and are joined by `cat`."""
    inner = tuple(map(in_chunks, term.args))
    if inner != term.args:
        term = Term(term.op, inner, term.value)
    if term.op == "index":
        found = _taken(term)
        return term if found is None else make("index", make("chunk", found[0], _TWO, _LAST), constant(found[1]))
    if term.op == "flatten" and term.args[1:] == (_LAST_BUT_ONE,):
        stacked = term.args[0]
        if stacked.op == "stack" and stacked.args[1:] == (_LAST_BUT_ONE,):
            return make("cat", stacked.args[0], _LAST)
    return term


def _taken(term: Term) -> tuple[Term, int] | None:
    """Return what a term is a half of, and which one."""
    of, *items = term.args
    if len(items) == 1 and items[0] in (constant(0), constant(1)):
        whole = _parted(of)
        return None if whole is None else (whole, int(items[0].value))
    if len(items) != 2 or items[0] != _EVERY or items[1].op != "slice":
        return None
    less = Term("neg", (_half(of),))
    ends = {(less, NONE, NONE): 1, (NONE, less, NONE): 0}
    return (of, ends[items[1].args]) if items[1].args in ends else None


def _parted(parts: Term) -> Term | None:
    """Return what is parted into two halves of its last dimension."""
    if parts.op == "tensor_split" and parts.args[1:] == (_TWO, _LAST):
        return parts.args[0]
    if parts.op == "split" and parts.args[1:] == (_half(parts.args[0]), _LAST):
        return parts.args[0]
    if parts.op == "unbind" and parts.args[1:] == (_LAST_BUT_ONE,) and parts.args[0].op == "unflatten":
        whole, dimension, *sizes = parts.args[0].args
        if dimension == _LAST and sizes in ([Term("tuple", (_TWO, _LAST))], [Term("tuple", (_TWO, _half(whole)))]):
            return whole
    return None


def _half(tensor: Term) -> Term:
    return make("floordiv", make("index", Term("shape", (tensor,)), _LAST), _TWO)
