"""Rotations that are written as a product of complex numbers (RoFormer, §3.2.2; Meta's Llama)."""

from __future__ import annotations

from rewrite.analysis.terms.spelling import FLOAT32, NONE, Term, constant

_BUT_LAST = Term("slice", (NONE, constant(-1), NONE))
_PAIRS = (constant(-1), constant(2))


def complex_rotation(term: Term) -> tuple[str, str, str] | None:
    """Return the tensor and the table of a rotation of pairs in fp32, and the dimension at which the table is unsqueezed.

    The table is of complex numbers, as many as there are pairs; `None` is the dimension of one that comes as it is.
    None for any other computation.
    """
    if term.op != "cast" or term.args[1].op != "dtype" or term.args[1].args[0].op != "parameter":
        return None
    tensor = term.args[1].args[0]
    product = _joined(term.args[0], tensor)
    if product is None or product.op != "mul":
        return None
    for pairs, table in (product.args, product.args[::-1]):
        placed = _placed(table)
        if placed is not None and pairs.op == "view_as_complex" and _are_pairs(pairs.args[0], tensor):
            name, place = placed
            return None if name == tensor.value else (tensor.value, name, place)
    return None


def _joined(term: Term, tensor: Term) -> Term | None:
    """Return the complex numbers whose parts are made the columns of a tensor like `tensor`."""
    parts, *how = term.args or (Term(""),)
    if parts.op != "view_as_real":
        return None
    whole = term.op in ("reshape", "view", "view_as", "reshape_as") and how in (
        [Term("shape", (tensor,))],
        [Term("star", (Term("shape", (tensor,)),))],
        [tensor],
    )
    flat = term.op == "flatten" and how in ([constant(-2)], [constant(3)], [constant(-2), constant(-1)])
    return parts.args[0] if whole or flat else None


def _are_pairs(term: Term, tensor: Term) -> bool:
    """Whether a term is a tensor in fp32 with its columns two by two."""
    wide = Term("cast", (tensor, FLOAT32))
    if not term.args or term.args[0] != wide:
        return False
    how = term.args[1:]
    if term.op == "unflatten":
        return how == (constant(-1), Term("tuple", _PAIRS))
    if term.op not in ("reshape", "view"):
        return False
    if len(how) == 1 and how[0].op == "tuple":
        how = how[0].args
    shapes = (Term("index", (Term("shape", (of,)), _BUT_LAST)) for of in (tensor, wide))
    return how[1:] == _PAIRS and any(how[0] == Term("star", (shape,)) for shape in shapes)


def _placed(table: Term) -> tuple[str, str] | None:
    """Return the parameter that is the table, and where it gets a dimension."""
    if table.op == "parameter":
        return table.value, "None"
    if table.op == "unsqueeze" and table.args[0].op == "parameter" and table.args[1].op == "constant":
        return table.args[0].value, table.args[1].value
    return None
