"""Attention that calls torch's `scaled_dot_product_attention` itself, read as a call of an attention function."""

from __future__ import annotations

from rewrite.analysis.blocks.terms import CACHE
from rewrite.analysis.terms.computation import subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make

_CALLED = ("nn.functional.scaled_dot_product_attention", "grouped_attention")
"""The function, and what `native_gqa` has put in its place where heads are shared."""
_SIGNATURE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_GROUPS = ("enable_gqa", "key_groups", "value_groups")
"""How heads are shared, which the sizes of queries and keys say as well."""
NUMBERS = ("attribute", "constant", "pow", "mul", "div", "add", "neg")
"""What a scale is made of that is surely a number of the host's, as torch takes it."""
_EVERY = Term("slice", (NONE, NONE, NONE))
_ONE, _TRUE, _FALSE = constant(1), Term("name", (), "True"), Term("name", (), "False")
_LENGTH = (constant(-2), constant(2))


def is_direct(term: Term) -> bool:
    """Whether a term is a call of torch's attention."""
    return term.op in _CALLED


def mask_of(term: Term) -> Term:
    """Return the mask that a call is given, None's term for none."""
    return _uncut(_given(term).get("attn_mask", NONE), _given(term).get("key", NONE))


def as_attention(term: Term) -> Term | None:
    """Return `sdpa(q, k, v, …).transpose(1, 2)` as the call of an attention function with these arguments; else None.

    What tells torch that a prompt is causal has to be false of a single token.
    """
    if term.op != "transpose" or {*term.args[1:]} != {_ONE, constant(2)} or not is_direct(term.args[0]):
        return None
    given = _given(term.args[0])
    if not {"query", "key", "value"} <= {*given} <= {*_SIGNATURE, *_GROUPS}:
        return None
    if not _never_of_one(given.get("is_causal", _FALSE)):
        return None
    query, key, value = (_contiguous(given[name]) for name in _SIGNATURE[:3])
    scale = given.get("scale", NONE)
    scaling = _default_scale(query) if scale == NONE else without_math(scale)
    if scaling is None or not all(inner.op in NUMBERS for inner in subterms(scaling)):
        return None
    words = {"dropout": given.get("dropout_p", constant(0)), "scaling": scaling}
    keywords = (Term("keyword", (value,), name) for name, value in words.items())
    function = Term("name", (), f"torch.{_CALLED[0]}")
    return Term("call", (function, Term("self"), query, key, value, mask_of(term.args[0]), *keywords))


def without_math(scale: Term) -> Term:
    """Return a number without the root that `math` takes of another, as a power."""
    if scale.op == "math.sqrt" and len(scale.args) == 1:
        return make("pow", without_math(scale.args[0]), constant(0.5))
    return make(scale.op, *map(without_math, scale.args)) if scale.args and not scale.value else scale


def _given(term: Term) -> dict[str, Term]:
    plain = [argument for argument in term.args if argument.op != "keyword"]
    named = {argument.value: argument.args[0] for argument in term.args if argument.op == "keyword"}
    return dict(zip(_SIGNATURE, plain, strict=False)) | named


def _contiguous(term: Term) -> Term:
    """Return a tensor without what only changes how it lies, under a condition or not."""
    if term.op == "contiguous" and len(term.args) == 1:
        return _contiguous(term.args[0])
    if term.op == "select":
        ways = {_contiguous(way) for way in term.args[1:]}
        return ways.pop() if len(ways) == 1 else term
    return term


def _uncut(mask: Term, key: Term) -> Term:
    """Return a mask as it is given, before it is cut to the number of keys where there is one."""
    if mask.op == "select" and mask.args[0].op in ("is", "isnot") and NONE in mask.args[0].args:
        whole = next(side for side in mask.args[0].args if side != NONE)
        ways = mask.args[1:] if mask.args[0].op == "isnot" else mask.args[:0:-1]
        if ways[1] in (whole, NONE) and _uncut(ways[0], key) == whole:
            return whole
    if mask.op == "index" and len(mask.args) == 5 and mask.args[1:4] == (_EVERY,) * 3:
        last = mask.args[4]
        if last.op == "slice" and last.args[::2] == (NONE, NONE) and _is_length(last.args[1], key):
            return mask.args[0]
    return mask


def _is_length(size: Term, key: Term) -> bool:
    """Whether a size is the number of keys that the cache has given back."""
    shaped = size.op == "index" and size.args[0].op == "shape" and size.args[1] in _LENGTH
    if not shaped:
        return False
    of, own = (_contiguous(term) for term in (size.args[0].args[0], key))
    return of == own and own.op == "index" and own.args[0].op == "update" and own.args[0].args[0].value == CACHE


def _never_of_one(causal: Term) -> bool:
    """Whether a test does not hold of a single token."""
    if causal == _FALSE:
        return True
    if causal.op == "select":
        if causal.args[1:] == (_TRUE, _FALSE):
            return _never_of_one(causal.args[0])
        return False
    if causal.op in ("and", "or"):
        return (any if causal.op == "and" else all)(map(_never_of_one, causal.args))
    return causal.op == "lt" and causal.args[0] == _ONE and _is_tokens(causal.args[1])


def _is_tokens(size: Term) -> bool:
    """Whether a size is the number of tokens: of the hidden states `[B, S, H]`, or of heads `[B, H, S, D]`."""
    if size.op != "index" or size.args[0].op != "shape" or len(size.args) != 2:
        return False
    of = _contiguous(size.args[0].args[0])
    if of.op == "parameter":
        return of.value == "hidden_states" and size.args[1] in (_ONE, constant(-2))
    return size.args[1] in _LENGTH and _is_heads(of)


def _is_heads(term: Term) -> bool:
    """Whether a term is queries `[B, H, S, D]`, rotated or not."""
    if term.op == "index" and term.args[0].op == "rotary" and term.args[1] == constant(0):
        return _is_heads(term.args[0].args[0])
    return term.op == "transpose" and {*term.args[1:]} == {_ONE, constant(2)}


def _default_scale(query: Term) -> Term | None:
    """Return what torch multiplies the scores by where it is told nothing, by the size of a head."""
    while query.op in ("index", "rotary", "rotary_single", "transpose", "call", "contiguous", "cat"):
        query = query.args[1] if query.op == "call" and len(query.args) == 2 else query.args[0]
        if query.op == "tuple" and query.args:
            query = query.args[0]
    if query.op not in ("view", "reshape"):
        return None
    last = query.args[-1]
    last = last.args[-1] if last.op == "tuple" and last.args else last
    return make("pow", last, constant(-0.5)) if last.op in ("attribute", "constant") else None
