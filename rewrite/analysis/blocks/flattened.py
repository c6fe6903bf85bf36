"""Hidden states `[B, 1, H]` that a layer computes on as rows `[B, H]` for a while, as OPT does."""

from __future__ import annotations

from rewrite.analysis.blocks.terms import NoStep
from rewrite.analysis.terms.spelling import Term, constant

_RESHAPES = ("reshape", "view")
_ROW_BY_ROW = ("add", "call", "cast", "mul", "select", "tuple")
"""Operations of a layer whose result has the leading dimensions of what they read."""


def unflattened(output: Term) -> Term:
    """Return what a layer computes without its changes between `[B, 1, H]` and `[B, H]`.

    What a step computes in between, norms, products and sums, is the same for rows of any leading dimensions.

    Raises:
        NoStep: if the layer returns rows, or brings both forms together.
    """
    known: dict[Term, tuple[Term, bool]] = {}

    def read(term: Term) -> tuple[Term, bool]:
        """Return a term without the changes, and whether the layer has it as rows."""
        if term not in known:
            known[term] = _read(term)
        return known[term]

    def _read(term: Term) -> tuple[Term, bool]:
        if term.op in _RESHAPES and _flattens(term):
            return read(term.args[0])[0], True
        if term.op in _RESHAPES and len(term.args) == 2 and term.args[1].op == "shape":
            inner, flat = read(term.args[0])
            if flat and not read(term.args[1].args[0])[1]:
                return inner, False
        parts = [read(argument) for argument in term.args]
        flats = [flat for _, flat in parts]
        if not any(flats):
            return (Term(term.op, tuple(part for part, _ in parts), term.value) if parts else term), False
        tensors = flats[1:] if term.op in ("call", "select") else flats
        if term.op not in _ROW_BY_ROW or (term.op in ("add", "select") and not all(tensors)):
            raise NoStep("other_layer", "rows without their middle dimension meet others")
        return Term(term.op, tuple(part for part, _ in parts), term.value), True

    whole, flat = read(output)
    if flat:
        raise NoStep("other_layer", "it returns rows without their middle dimension")
    return whole


def _flattens(term: Term) -> bool:
    """Whether a term is `x.reshape(-1, x.shape[-1])`."""
    size = Term("index", (Term("shape", term.args[:1]), constant(-1)))
    return term.args[1:] == (constant(-1), size)
