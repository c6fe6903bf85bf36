"""The rotation of queries and of the one key of latent attention, as a decode step's operator has it."""

from __future__ import annotations

from dataclasses import dataclass

from rewrite.analysis.blocks.terms import NoStep, keyword
from rewrite.analysis.decode.attention_heads import POSITIONS, is_half, rotation_of
from rewrite.analysis.terms.computation import subterms
from rewrite.analysis.terms.spelling import FLOAT32, NONE, Term, constant

UP_TO_LAST = Term("slice", (NONE, constant(-1), NONE))
OPTIONS = ("interleaved", "half_table", "deinterleave", "in_fp32", "keep_dtype")
"""What `latent_attention` knows of `rotary`."""


@dataclass(frozen=True)
class Turning:
    """How queries and keys are rotated."""

    call: Term
    """The rotation, its tensor left out."""
    options: tuple[str, ...]
    halves: bool = False
    """Whether only the first half of each table is read."""
    is_complex: bool = False
    """Whether cosines and sines are one complex table."""


@dataclass(frozen=True)
class Turned:
    """A tensor and its rotation: one, one of two by a test, or none."""

    tensor: Term
    test: Term | None
    ways: tuple[Turning, ...]


def complex_tables(term: Term) -> list[Term]:
    """Return the table of each product with a complex tensor that is made of pairs of columns."""
    products = (inner.args for inner in subterms(term) if inner.op == "mul" and len(inner.args) == 2)
    written = [_table(a) for args in products for a, b in (args, args[::-1]) if b.op == "view_as_complex"]
    calls = (inner.args for inner in subterms(term) if inner.op in ("rotary", "rotary_single"))
    return written + [_table(args[args.index(NONE) - 1]) for args in calls if NONE in args[2:4]]


def _table(term: Term) -> Term:
    while term.op == "unsqueeze" or (term.op == "to" and term.args[1].op == ".device"):
        term = term.args[0]
    return term


def sizes_of(term: Term, name: str = "view") -> tuple[Term, tuple[Term, ...]] | None:
    """Return the tensor and the sizes of a view."""
    if term.op not in (name, "reshape"):
        return None
    sizes = term.args[1].args if len(term.args) == 2 and term.args[1].op == "tuple" else term.args[1:]
    return term.args[0], tuple(sizes)


def turned(term: Term) -> Turned:
    """Read a tensor that is rotated, in one of two ways by a test, or not at all.

    Raises:
        NoStep: if it is rotated by tables or in a way that the operator does not have.
    """
    if term.op == "select":
        yes, no = (turned(way) for way in term.args[1:])
        if yes.tensor == no.tensor and len(yes.ways) == len(no.ways) == 1:
            return Turned(yes.tensor, term.args[0], (*yes.ways, *no.ways))
        raise NoStep("other_rotation", "a rotation under a test")
    if (found := _complex(term)) is not None:
        return found
    rotation = rotation_of(term)
    if rotation is None:
        return Turned(term, None, ())
    call, number, partial = rotation
    count = 2 if call.op == "rotary" else 1
    if call.args[count + 1] == NONE and partial is None:
        return Turned(call.args[number], None, (_of_one_table(call, call.args[count]),))
    rest = [a for a in call.args[count + 2 :] if a.op != "keyword"]
    names = [a.value for a in call.args if a.op == "keyword" and a.value != "unsqueeze_dim"]
    dimension = rest[0] if rest else keyword(call, "unsqueeze_dim") or constant(1)
    if partial is not None or dimension != constant(1) or not {*names} <= {*OPTIONS}:
        raise NoStep("other_rotation", ", ".join(names) or "heads are not the second dimension")
    halves = [is_half(table, n) for n, table in enumerate(call.args[count : count + 2])]
    if halves[0] != halves[1]:
        raise NoStep("other_rotation", "one table is halved")
    way = Turning(Term(call.op, call.args[count:]), tuple(names), halves[0])
    return Turned(call.args[number], None, (way,))


_FUSED = frozenset({"unsqueeze_dim", "interleaved", "half_table", "in_fp32", "flatten_from"})


def _of_one_table(call: Term, table: Term) -> Turning:
    """Read a rotation by complex numbers that is one call."""
    names = {argument.value for argument in call.args if argument.op == "keyword"}
    placed = keyword(call, "unsqueeze_dim") == NONE and _table(table) == POSITIONS and _unsqueezed(table)
    if not placed or names - {"flatten_from"} != _FUSED - {"flatten_from"}:
        raise NoStep("other_rotation", "a table of complex numbers that is placed otherwise")
    return Turning(Term("complex"), ("interleaved", "half_table", "in_fp32"), is_complex=True)


def _complex(term: Term) -> Turned | None:
    """Read the product of neighbouring columns, as complex numbers in fp32, with a table of them."""
    rounded = term.op == "cast" and term.args[1].op == "dtype"
    flat = term.args[0] if rounded else term
    if flat.op != "flatten" or flat.args[1:] not in ((constant(3),), (constant(-2),)) or not rounded:
        return None
    real = flat.args[0]
    if real.op != "view_as_real" or real.args[0].op != "mul":
        return None
    for table, pairs in (real.args[0].args, real.args[0].args[::-1]):
        view = sizes_of(pairs.args[0], "reshape") if pairs.op == "view_as_complex" else None
        if view is None or view[0].op != "cast" or view[0].args[1] != FLOAT32:
            continue
        tensor = view[0].args[0]
        lead = Term("star", (Term("index", (Term("shape", (tensor,)), UP_TO_LAST)),))
        if view[1] != (lead, constant(-1), constant(2)) or term.args[1] != Term("dtype", (tensor,)):
            continue
        if _table(table) == POSITIONS and _unsqueezed(table):
            way = Turning(Term("complex"), ("interleaved", "half_table", "in_fp32"), is_complex=True)
            return Turned(tensor, None, (way,))
    return None


def _unsqueezed(table: Term) -> bool:
    """Whether a table gets its dimension of heads as the second one, and no other."""
    found = [inner for inner in subterms(table) if inner.op == "unsqueeze"]
    return len({*found}) == 1 and found[0].args[1] == constant(1)
