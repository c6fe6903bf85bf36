"""Source text of terms that say one thing only: parameters, their parts and sizes, numbers, tests of them."""

from __future__ import annotations

from rewrite.analysis.terms.spelling import FLOAT32, NONE, Term

_COMPARED = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "is": "is",
    "isnot": "is not",
    "in": "in",
    "notin": "not in",
}
_ASKED = ("cos", "sin", "dim", "contiguous")
"""Methods without arguments."""


def source_of(term: Term) -> str | None:
    """Return an expression that computes `term`, None where it may be another to the last bit, or is none at all."""
    found = _source(term)
    return found[1:-1] if found is not None and found.startswith("(") and found.endswith(")") else found


def _source(term: Term) -> str | None:
    if term.op in ("parameter", "constant"):
        return term.value
    if term.op == "attribute":
        return f"self.{term.value}"
    if term == NONE:
        return "None"
    given = [_item(argument) if term.op == "index" else _source(argument) for argument in term.args]
    parts = [part for part in given if part is not None]
    if not parts or len(parts) != len(given):
        return None if term.op != "cast" else _cast(term)
    first, *rest = parts
    if term.op in _COMPARED and len(parts) == 2:
        return f"({first} {_COMPARED[term.op]} {rest[0]})"
    if term.op == "index":
        return f"{first}[{', '.join(rest)}]"
    if term.op in ("neg", "not") and not rest:
        return f"(-{first})" if term.op == "neg" else f"(not {first})"
    if term.op == "floordiv" and len(parts) == 2:
        return f"({first} // {rest[0]})"
    if term.op == "shape" and not rest:
        return f"{first}.shape"
    if term.op == "unsqueeze" and len(rest) == 1:
        return f"{first}.unsqueeze({rest[0]})"
    return f"{first}.{term.op}()" if term.op in _ASKED and not rest else None


def _cast(term: Term) -> str | None:
    whole = _source(term.args[0])
    return f"{whole}.float()" if whole is not None and term.args[1] == FLOAT32 else None


def _item(term: Term) -> str | None:
    """Return what stands between brackets."""
    if term.op != "slice":
        return source_of(term)
    ends = ["" if end == NONE else source_of(end) for end in term.args]
    if any(end is None for end in ends):
        return None
    text = ":".join(str(end) for end in ends)
    return text.removesuffix(":") if ends[2] == "" else text
