"""Queries, keys and values of an attention class: how they are projected, split into heads, normalised and rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rewrite.analysis.blocks.terms import NORMS, NoStep, is_built_from, is_linear, is_number, keyword
from rewrite.analysis.patterns.norm_patterns import runtime_norm
from rewrite.analysis.terms.spelling import NONE, Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module

HIDDEN = Term("parameter", (), "hidden_states")
POSITIONS = Term("parameter", (), "position_embeddings")
_EVERY = Term("constant", (), "...")


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values before rotation, `[B, H, 1, D]`."""

    projected: Term
    head_dim: Term
    norm: Term | None = None
    """The attribute that normalises them."""
    normed_if: Term | None = None
    """The test under which it does; None for always."""
    scale: Term | None = None
    """The attribute, a number, that they are multiplied by at last."""
    heads_first: bool = False
    """Whether the norm is given `[B, H, 1, D]`, and not `[B, 1, H, D]` or all heads of a token."""


@dataclass(frozen=True)
class Turned:
    """Heads after rotation."""

    heads: Heads
    turns: bool
    halves: bool = False
    """Whether only the first half of each table is read."""
    options: tuple[str, ...] = ()
    turned_if: Term | None = None


def turned_heads(term: Term, info: ClassInfo, module: Module) -> Turned:
    """Read queries or keys as the cache gets them.

    Raises:
        NoStep: if they are made in another way.
    """
    if (scaled := _scaled(term, info, module)) is not None:
        inner = turned_heads(scaled[1], info, module)
        return replace(inner, heads=_with_scale(inner.heads, scaled[0]))
    if term.op == "select":
        test, yes, no = _positive(term, lambda way: rotation_of(way) is not None)
        turned = turned_heads(yes, info, module) if rotation_of(yes) else None
        if turned is not None and turned.turned_if is None and turned.heads == split_heads(no, info, module):
            return replace(turned, turned_if=test)
    rotation = rotation_of(term)
    if rotation is None:
        return Turned(split_heads(term, info, module), False)
    call, number, partial = rotation
    count = 2 if call.op == "rotary" else 1
    tensor, (cos, sin) = call.args[number], call.args[count : count + 2]
    if partial is not None:
        tensor = _whole(tensor, partial)
    plain = [argument for argument in call.args[count + 2 :] if argument.op != "keyword"]
    unsqueeze_dim = plain[0] if plain else keyword(call, "unsqueeze_dim") or constant(1)
    if unsqueeze_dim == NONE:
        raise NoStep("other_rotation", "nothing says which dimension of the tables is that of the heads")
    if unsqueeze_dim != constant(1):
        raise NoStep("other_rotation", "heads are not the second dimension")
    halves = [is_half(table, number) for number, table in enumerate((cos, sin))]
    if halves[0] != halves[1]:
        raise NoStep("other_rotation", "one table is halved")
    return Turned(split_heads(tensor, info, module), True, halves[0], _options(call))


def _positive(choice: Term, wanted: Callable[[Term], bool]) -> tuple[Term, Term, Term]:
    """Return a choice with the way that is `wanted` first."""
    test, yes, no = choice.args
    return (make("not", test), no, yes) if wanted(no) and not wanted(yes) else (test, yes, no)


def _has_norm(term: Term, info: ClassInfo, module: Module) -> bool:
    """Whether a norm is on the way from the product to the heads."""
    while term.op in ("transpose", "view", "reshape"):
        term = term.args[0]
    return _norm_of(term, info, module) is not None


def _options(call: Term) -> tuple[str, ...]:
    names = [a.value for a in call.args if a.op == "keyword" and a.value != "unsqueeze_dim"]
    if "deinterleave" in names:
        raise NoStep("other_rotation", "rotated pairs are written apart")
    return tuple(f"{name}=True" for name in ("interleaved", "half_table", "in_fp32", "keep_dtype") if name in names)


def is_half(table: Term, number: int) -> bool:
    """Whether a table is the first half of the given one; all of it else."""
    given = Term("index", (POSITIONS, constant(number)))
    if table == given:
        return False
    size = Term("floordiv", (Term("index", (Term("shape", (given,)), constant(-1))), constant(2)))
    if table != Term("index", (given, _EVERY, Term("slice", (NONE, size, NONE)))):
        raise NoStep("other_rotation", "the tables are not those of `position_embeddings`")
    return True


def rotation_of(term: Term) -> tuple[Term, int, Term | None] | None:
    """Return the rotation that `term` is a result of, which one, and the part that passes if that is joined."""
    if term.op == "cat" and len(term.args) == 2 and term.args[0].op == "tuple" and term.args[1] == constant(-1):
        parts = term.args[0].args
        if len(parts) == 2 and (inner := rotation_of(parts[0])) is not None and inner[2] is None:
            return inner[0], inner[1], parts[1]
    if term.op == "rotary_single":
        return term, 0, None
    if term.op == "index" and term.args[0].op == "rotary" and term.args[1] in (constant(0), constant(1)):
        return term.args[0], int(term.args[1].value), None
    return None


def _whole(rotated: Term, passed: Term) -> Term:
    """Return the heads of which `rotated` are the first columns and `passed` the others."""
    if rotated.op == passed.op == "index" and rotated.args[0] == passed.args[0]:
        first, rest = rotated.args[-1], passed.args[-1]
        every = len(rotated.args) == len(passed.args) == 3 and rotated.args[1] == passed.args[1] == _EVERY
        if every and first.op == rest.op == "slice" and first.args == (NONE, rest.args[0], NONE):
            if rest.args[1:] == (NONE, NONE):
                return rotated.args[0]
    raise NoStep("other_rotation", "the passed part is not the rest of the rotated one")


Reader = Callable[[Term, ClassInfo, Module], Heads]


def split_heads(term: Term, info: ClassInfo, module: Module) -> Heads:
    """Read `view(projection(x), (…, -1, head_dim)).transpose(1, 2)`, normalised anywhere after the product.

    Raises:
        NoStep: if it is something else.
    """
    if (scaled := _scaled(term, info, module)) is not None:
        return _with_scale(split_heads(scaled[1], info, module), scaled[0])
    if term.op == "select" and (normed := _normed_if(term, split_heads, info, module)) is not None:
        return normed
    norm = _norm_of(term, info, module)
    if norm is not None:
        return replace(_with_norm(split_heads(term.args[1], info, module), norm), heads_first=True)
    if term.op == "transpose" and term.args[1:] in ((constant(1), constant(2)), (constant(2), constant(1))):
        return _split(term.args[0], info, module)
    raise NoStep("other_heads", str(term)[:60])


def _normed_if(term: Term, read: Reader, info: ClassInfo, module: Module) -> Heads | None:
    """Read heads that are normalised under a condition."""
    test, yes, no = _positive(term, lambda way: _has_norm(way, info, module))
    normed, plain = read(yes, info, module), read(no, info, module)
    if normed.norm is not None and normed.normed_if is None and plain == _without_norm(normed):
        return replace(normed, normed_if=test)
    return None


def _unpacked(size: Term) -> Sequence[Term]:
    """Return the sizes of a tuple, which may be given as it is or with a star."""
    inner = size.args[0] if size.op == "star" else size
    return inner.args if inner.op == "tuple" else (size,)


def _split(term: Term, info: ClassInfo, module: Module) -> Heads:
    """Read `view(projection(x), (…, -1, head_dim))`, normalised before or after."""
    if (scaled := _scaled(term, info, module)) is not None:
        return _with_scale(_split(scaled[1], info, module), scaled[0])
    norm = _norm_of(term, info, module)
    if norm is not None:
        return _with_norm(_split(term.args[1], info, module), norm)
    if term.op == "select" and (normed := _normed_if(term, _split, info, module)) is not None:
        return normed
    if term.op not in ("view", "reshape"):
        raise NoStep("other_heads", str(term)[:60])
    sizes = [size for given in term.args[1:] for size in _unpacked(given)]
    dimensions = [2 if size.op == "star" else 1 for size in sizes]
    if sum(dimensions) != 4 or dimensions[-1] != 1 or dimensions[-2] != 1:
        raise NoStep("other_heads", "heads are split another way")
    if (scaled := _scaled(term.args[0], info, module)) is not None:
        return Heads(scaled[1], sizes[-1], scale=scaled[0])
    norm = _norm_of(term.args[0], info, module)
    if norm is not None:
        if not _has_weight(norm, info, module):
            raise NoStep("other_heads", f"{norm.value} has no weight that tells what it normalises over")
        return Heads(term.args[0].args[1], sizes[-1], norm)
    return Heads(term.args[0], sizes[-1])


def _scaled(term: Term, info: ClassInfo, module: Module) -> tuple[Term, Term] | None:
    """Return the attribute that a tensor is multiplied by, surely a number, and the tensor."""
    for scale, heads in (term.args, term.args[::-1]) if term.op == "mul" and len(term.args) == 2 else ():
        if scale.op == "attribute" and is_number(scale.value, info, module):
            return scale, heads
    return None


def _with_scale(heads: Heads, scale: Term) -> Heads:
    if heads.scale is not None:
        raise NoStep("other_heads", "two factors")
    return replace(heads, scale=scale)


def _with_norm(heads: Heads, norm: Term) -> Heads:
    if heads.norm is not None:
        raise NoStep("other_heads", "two norms")
    if heads.scale is not None:
        raise NoStep("other_heads", "a factor before a norm")
    return Heads(heads.projected, heads.head_dim, norm)


def _without_norm(heads: Heads) -> Heads:
    return Heads(heads.projected, heads.head_dim)


def _norm_of(term: Term, info: ClassInfo, module: Module) -> Term | None:
    """Return the norm that `term` is a call of: torch's own or a class of the file, over one dimension of its size."""
    if term.op != "call" or len(term.args) != 2 or term.args[0].op != "attribute":
        return None
    attribute = term.args[0]
    if is_linear(attribute, info, module):
        return None
    for value in module.assignments(info, attribute.value):
        name = module.qualified(getattr(value, "func", value))
        known = name in NORMS or (name in module.classes and runtime_norm(module.classes[name], module))
        if not known:
            raise NoStep("other_heads", f"{attribute.value} is no norm that a step computes")
        if any(_is_several(argument.value) for argument in getattr(value, "args", ())):
            raise NoStep("other_heads", f"{attribute.value} has a weight of several dimensions")
    return attribute


def _is_several(value: object) -> bool:
    return type(value).__name__ in ("Tuple", "List")


def _has_weight(norm: Term, info: ClassInfo, module: Module) -> bool:
    if is_built_from(norm.value, NORMS, info, module):
        return True
    for value in module.assignments(info, norm.value):
        found = runtime_norm(module.classes[module.qualified(value.func)], module)  # type: ignore[attr-defined]
        if found is None or not found[1].arguments[0].startswith("self."):
            return False
    return True


def check_alike(query: Turned, key: Turned, values: Heads) -> None:
    """Refuse what one kernel cannot do to queries, keys and values together.

    Raises:
        NoStep: if they are rotated in two ways, of two sizes, or values are normalised.
    """
    if replace(query, heads=values) != replace(key, heads=values):
        raise NoStep("other_rotation", "queries and keys are turned in two ways")
    if len({query.heads.head_dim, key.heads.head_dim, values.head_dim}) != 1:
        raise NoStep("other_heads", "keys and values have two sizes")
    if values.norm is not None:
        raise NoStep("other_heads", "values are normalised")
    if key.heads.scale is not None or values.scale is not None:
        raise NoStep("other_heads", "keys or values are multiplied by a number")


def projections_of(heads: Sequence[Heads], info: ClassInfo, module: Module) -> tuple[tuple[Term, ...], Term | None]:
    """Return the projections of queries, keys and values, and Hk where there is one for all.

    Raises:
        NoStep: if they are projected in another way.
    """
    projected = [h.projected for h in heads]
    for term in projected:
        if term.op != "call" or term.args[1:] != (HIDDEN,):
            break
        if not is_linear(term.args[0], info, module):
            raise NoStep("not_linear", str(term.args[0].value))
    else:
        return tuple(term.args[0] for term in projected), None
    return _packed(projected, heads[0].head_dim, info, module)


def _packed(
    projected: Sequence[Term], head_dim: Term, info: ClassInfo, module: Module
) -> tuple[tuple[Term, ...], Term | None]:
    """Read three parts of the last dimension of one product: queries, then keys, then values."""
    if (parts := _parts(projected)) is not None:
        product, kv_size = parts
        if product.op != "call" or product.args[1:] != (HIDDEN,) or not is_linear(product.args[0], info, module):
            raise NoStep("other_projection", "one product is split another way")
        if kv_size is None:
            kv_size = make("floordiv", Term("attribute", (), f"{product.args[0].value}.out_features"), constant(3))
        return (product.args[0],), make("floordiv", kv_size, head_dim)
    if (
        any(term.op != "index" or len(term.args) != 3 for term in projected)
        or len({t.args[:2] for t in projected}) > 1
    ):
        raise NoStep("other_projection", "queries, keys and values are not projected each for itself")
    product, every = projected[0].args[:2]
    slices = [term.args[2] for term in projected]
    if every != _EVERY or any(part.op != "slice" or part.args[2] != NONE for part in slices):
        raise NoStep("other_projection", "one product is split another way")
    if product.op != "call" or product.args[1:] != (HIDDEN,) or not is_linear(product.args[0], info, module):
        raise NoStep("other_projection", "one product is split another way")
    (q_start, q_end), (k_start, k_end), (v_start, v_end) = (part.args[:2] for part in slices)
    if (q_start, v_end) != (NONE, NONE) or q_end != k_start or k_end != v_start or k_end.op != "add":
        raise NoStep("other_projection", "one product is split another way")
    size = [side for side in k_end.args if side != q_end]
    if len(size) == 1 and size[0].op == "mul" and head_dim in size[0].args:
        heads = [factor for factor in size[0].args if factor != head_dim]
        if len(heads) == 1:
            return (product.args[0],), heads[0]
    raise NoStep("other_projection", "the keys of one product are not `num_key_value_heads * head_dim` wide")


def _parts(projected: Sequence[Term]) -> tuple[Term, Term | None] | None:
    """Return what is split or chunked into queries, keys and values, and how wide the keys are; None for thirds.

    None for what is cut in another way. The width is an attribute, which is surely a number of the file's.
    """
    cut = projected[0].args[0] if projected[0].op == "index" else Term("none")
    if any(part != Term("index", (cut, constant(place))) for place, part in enumerate(projected)):
        return None
    if cut.op == "chunk" and cut.args[1:] == (constant(3), constant(-1)):
        return cut.args[0], None
    if cut.op not in ("split", "split_with_sizes") or len(cut.args) != 3 or cut.args[2] != constant(-1):
        return None
    sizes = cut.args[1].args if cut.args[1].op == "tuple" else ()
    return (cut.args[0], sizes[1]) if len(sizes) == 3 and sizes[1] == sizes[2] and sizes[1].op == "attribute" else None
