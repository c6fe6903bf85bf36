"""A term as Python source: over the attributes of `self`, the parameters of a method and constants."""

from __future__ import annotations

from collections.abc import Container

from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import Term, constant
from rewrite.analysis.tree.module import Module


def held(term: Term, attribute: str) -> Term:
    """Return a term over the attributes of a part as one over those of the object that holds it."""
    if term.op == "attribute":
        return Term("attribute", (), f"{attribute}.{term.value}")
    return Term(term.op, tuple(held(argument, attribute) for argument in term.args), term.value)


class NotWritable(NotComputable):
    """A term that has no source over the attributes of `self`."""


_INFIX = {
    "or": ("or", 1), "and": ("and", 2), "eq": ("==", 4), "ne": ("!=", 4), "is": ("is", 4), "isnot": ("is not", 4),
    "lt": ("<", 4), "le": ("<=", 4), "in": ("in", 4), "notin": ("not in", 4), "add": ("+", 5), "mul": ("*", 6),
    "div": ("/", 6), "floordiv": ("//", 6), "pow": ("**", 8),
}  # fmt: skip
"""How operations are written, and how closely they bind."""
_PREFIX = {"not": ("not ", 3), "neg": ("-", 7)}


def source(term: Term, module: Module, known: Container[str] | None = None) -> str:
    """Return Python source of a term over attributes of `self`, parameters and constants.

    Raises:
        NotWritable: if the term is something else, or has another parameter than those that are `known`.
    """
    if known is not None:
        for leaf in subterms(term):
            if leaf.op == "parameter" and leaf.value not in known:
                raise NotWritable(f"the parameter {leaf.value}")
    if term.op in ("attribute", "parameter", "constant"):
        return f"self.{term.value}" if term.op == "attribute" else term.value
    if term.op == "name":
        return _local_name(term.value, module)
    if term.op in _INFIX:
        sign, closeness = _INFIX[term.op]
        left, right = _readable(term)
        return f"{_within(left, closeness, module)} {sign} {_within(right, closeness + 1, module)}"
    if term.op in _PREFIX:
        sign, closeness = _PREFIX[term.op]
        return f"{sign}{_within(term.args[0], closeness, module)}"
    if term.op == "select":
        test, yes, no = (_within(part, 1, module) for part in term.args)
        return f"{yes} if {test} else {no}"
    if term.op == "math.sqrt" and len(term.args) == 1:
        return source(Term("pow", (term.args[0], constant(0.5))), module)
    if term.op == "getattr":
        return f"getattr({', '.join(source(argument, module) for argument in term.args)})"
    if term.op == "call" and len(term.args) == 2 and term.args[0].op == "attribute":
        return f"self.{term.args[0].value}({source(term.args[1], module)})"
    if term.op == "cast" and len(term.args) == 2:
        return f"{_within(term.args[0], 9, module)}.to({source(term.args[1], module)})"
    if term.op in ("shape", "dtype"):
        return f"{_within(term.args[0], 9, module)}.{term.op}"
    if term.op.startswith(".") and len(term.args) == 1:
        return f"{_within(term.args[0], 9, module)}{term.op}"
    if term.op == "index" and len(term.args) == 2 and term.args[1].op in ("constant", *_READ):
        return f"{_within(term.args[0], 9, module)}[{source(term.args[1], module)}]"
    raise NotWritable(str(term)[:60])


_READ = ("attribute", "parameter")


def _readable(term: Term) -> tuple[Term, Term]:
    """Return the operands, tensors before numbers: canonical terms have them in the order of their spelling."""
    left, right = term.args
    last = ("attribute", "constant")
    swap = term.commutes and (
        (left.op in last and right.op not in last) or (right.op == "parameter" and left.op not in ("parameter", *last))
    )
    return (right, left) if swap else (left, right)


def _within(term: Term, closeness: int, module: Module) -> str:
    """Return the source of an operand, in parentheses where it binds less closely than `closeness`."""
    own = {**_INFIX, **_PREFIX}.get(term.op, ("", 0 if term.op == "select" else 9))[1]
    return f"({source(term, module)})" if own < closeness else source(term, module)


def _local_name(name: str, module: Module) -> str:
    for local, qualified in module.imports.items():
        if name == qualified or name.startswith(f"{qualified}."):
            return local + name.removeprefix(qualified)
    if name.isidentifier() or name in ("None", "True", "False"):
        return name
    raise NotWritable(name)
