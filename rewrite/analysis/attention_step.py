"""Attention in a decode step: the parts of the usual `forward`, and the `decode` that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.computation import NotComputable
from rewrite.analysis.methods import Method
from rewrite.analysis.module import ClassInfo, Module
from rewrite.analysis.norms import runtime_norm
from rewrite.analysis.replacement import call_statement, line
from rewrite.analysis.spelling import NONE, Term, constant
from rewrite.analysis.step import CACHE, computed_in_step, is_built_from, is_linear, keyword, source

PARAMETERS = ("hidden_states", "norm", "residual", "position_embeddings", "past_key_values")
HIDDEN, CACHE_PARAMETER = Term("parameter", (), "hidden_states"), Term("parameter", (), CACHE)
POSITIONS = Term("parameter", (), "position_embeddings")

_KEYWORDS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "output_attentions",
             "cache_position", "use_cache", "is_causal"}  # fmt: skip
"""What the attention functions of transformers take and a step can do; a name that is missing here is a refusal."""
_EVERY = Term("constant", (), "...")
_TORCH_NORMS = ("torch.nn.LayerNorm", "torch.nn.RMSNorm")


class NoStep(Exception):
    """The attention is not of the form that a decode step has operators for."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values before rotation, `[B, H, 1, D]`."""

    projected: Term
    head_dim: Term
    norm: Term | None = None
    """The attribute that normalises them."""
    normed_if: Term | None = None
    """The test under which it does; None for always."""


@dataclass(frozen=True)
class Turned:
    """Heads after rotation."""

    heads: Heads
    turns: bool
    halves: bool = False
    """Whether only the first half of each table is read."""
    options: tuple[str, ...] = ()
    turned_if: Term | None = None


@dataclass(frozen=True)
class AttentionStep:
    """The attention of a class in one decode step."""

    info: ClassInfo
    projections: tuple[Term, ...]
    query: Turned
    key: Turned
    layer_idx: Term
    head_dim: Term
    num_key_value_heads: Term | None
    call: Term
    """The call of the attention function."""
    output: Term
    """The last projection."""
    window: Term
    """The window that the attention function is given; None's term for none."""

    @property
    def norms(self) -> list[str]:
        """The attributes that normalise queries and keys."""
        return [t.heads.norm.value for t in (self.query, self.key) if t.heads.norm is not None]

    def method(self, module: Module) -> Method:
        """Return its `decode`."""
        forward = self.info.methods["forward"]
        layer_idx, projections = source(self.layer_idx, module), [source(p, module) for p in self.projections]
        packed = ", ".join(projections) + ("," if len(projections) == 1 else "")
        before, positions = self._positions(module)
        query = call_statement(
            "query = ",
            "qkv_step",
            ["hidden_states", f"({packed})", positions, CACHE, layer_idx, *self._options(module)],
            module,
        )
        window = self.window
        if window.op == "select" and window.args[0].op == "eq":
            before.append(line(f"is_sliding = {source(window.args[0], module)}", module))
            window = Term("select", (Term("parameter", (), "is_sliding"), *window.args[1:]))
        attended = call_statement(
            "attn_output = ", "decode_attention", ["query", CACHE, layer_idx, *self._attention(window, module)], module
        )
        last = call_statement(
            "return ", "linear", ["attn_output", source(self.output, module), "residual=residual"], module
        )
        uses = ("qkv_step.qkv_step", "decode_attention.decode_attention", "linear.linear")
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        return Method(forward, "decode", PARAMETERS, text, (*before, query, attended, last), uses)

    def _positions(self, module: Module) -> tuple[list[cst.SimpleStatementLine], str]:
        """Return the statements before, and the argument, that hand over cosines and sines."""
        if not self.query.turns:
            return [], "None"
        before: list[cst.SimpleStatementLine] = []
        tables = "position_embeddings"
        if self.query.halves:
            before = [
                line("cos, sin = position_embeddings", module),
                line("halves = (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2])", module),
            ]
            tables = "halves"
        test = self.query.turned_if
        return before, tables if test is None else f"{tables} if {source(test, module)} else None"

    def _options(self, module: Module) -> list[str]:
        options = [f"head_dim={source(self.head_dim, module)}"]
        if self.num_key_value_heads is not None:
            options.append(f"num_key_value_heads={source(self.num_key_value_heads, module)}")
        options.append("norm=norm")
        for name, turned in (("q_norm", self.query), ("k_norm", self.key)):
            if (norm := turned.heads.norm) is not None:
                test = turned.heads.normed_if
                condition = "" if test is None else f" if {source(test, module)} else None"
                options.append(f"{name}={source(norm, module)}{condition}")
        return [*options, *self.query.options]

    def _attention(self, window: Term, module: Module) -> list[str]:
        given = [
            ("scaling", keyword(self.call, "scaling")),
            ("sliding_window", window),
            ("softcap", self._unless_sdpa("softcap", module)),
            ("sinks", self._unless_sdpa("s_aux", module)),
        ]
        return [f"{name}={source(value, module)}" for name, value in given if value is not None and value != NONE]

    def _unless_sdpa(self, name: str, module: Module) -> Term | None:
        """Return an argument that torch's attention function leaves out, where a model may use that."""
        value, chosen = keyword(self.call, name), _implementation(self.call.args[0])
        if value is None or value == NONE or chosen is None or _refuses_sdpa(module):
            return value
        return Term("select", (Term("ne", (chosen, Term("constant", (), '"sdpa"'))), value, NONE))


def _refuses_sdpa(module: Module) -> bool:
    """Whether models of the file never use torch's attention function."""
    refusal = m.Assign(targets=[m.AssignTarget(m.Name("_supports_sdpa"))], value=m.Name("False"))
    lines = (line for info in module.classes.values() for line in info.node.body.body)
    return any(m.matches(line, m.SimpleStatementLine(body=[refusal])) for line in lines)


def attention_step(info: ClassInfo, module: Module) -> AttentionStep:
    """Return what the attention class `info` computes in one decode step.

    Raises:
        NoStep: with the reason why that is not what the step's operators compute.
    """
    forward = info.methods.get("forward")
    if forward is None:
        raise NoStep("other_attention", "no forward of its own")
    try:
        return _read(computed_in_step(forward, module, info), info, module)
    except NotComputable as error:
        raise NoStep("other_attention", error.what) from error


def _read(term: Term, info: ClassInfo, module: Module) -> AttentionStep:
    output = term.args[0] if term.op == "tuple" else term
    if output.op != "call" or len(output.args) != 2 or output.args[0].op != "attribute":
        raise NoStep("other_attention", "what is returned is no projection")
    if not is_linear(output.args[0], info, module):
        raise NoStep("not_linear", output.args[0].value)
    call = _attention_call(output.args[1])
    query, key, value = call.args[2:5]
    update = key.args[0] if key.op == "index" else key
    if update.op != "update" or update.args[0] != CACHE_PARAMETER or len(update.args) < 4:
        raise NoStep("other_attention", "keys do not come from the cache")
    if (key, value) != (Term("index", (update, constant(0))), Term("index", (update, constant(1)))):
        raise NoStep("other_attention", "keys or values change after the cache")
    turned_query, turned_key = _turned(query, info, module), _turned(update.args[1], info, module)
    values = _heads(update.args[2], info, module)
    _check_alike(turned_query, turned_key, values)
    projections, kv_heads = _projections((turned_query.heads, turned_key.heads, values), info, module)
    if keyword(call, "scaling") is None:
        raise NoStep("other_attention", "the scaling is not given")
    for argument in call.args[6:]:
        if argument.op == "keyword" and argument.value not in _KEYWORDS:
            raise NoStep("attention_argument", argument.value)
    window = keyword(call, "sliding_window") or NONE
    step = AttentionStep(
        info, projections, turned_query, turned_key, update.args[3], values.head_dim, kv_heads, call,
        output.args[0], window,
    )  # fmt: skip
    step.method(module)
    return step


def _attention_call(term: Term) -> Term:
    """Return the call of the attention function whose heads `term` merges."""
    while term.op in ("contiguous", "reshape", "view", "flatten"):
        term = term.args[0]
    call = term.args[0] if term.op == "index" and term.args[1:] == (constant(0),) else term
    if call.op != "call" or len(call.args) < 6 or _implementation(call.args[0]) is None:
        raise NoStep("other_attention", "what is projected is not the result of an attention function")
    return call


def _implementation(term: Term) -> Term | None:
    """Return the name by which `term` is chosen among transformers' attention functions, None if it is not."""
    if term.op == "native_gqa":
        term = term.args[0]
    if term.op == "select":
        return next((found for choice in term.args[1:] if (found := _implementation(choice)) is not None), None)
    if term.op == "index" and term.args[0].op == "name" and term.args[0].value.endswith(".ALL_ATTENTION_FUNCTIONS"):
        return term.args[1]
    return term.args[0] if term.op.endswith(".ALL_ATTENTION_FUNCTIONS.get_interface") and term.args else None


def _turned(term: Term, info: ClassInfo, module: Module) -> Turned:
    if term.op == "select":
        test, yes, no = term.args
        turned = _turned(yes, info, module) if _rotation_of(yes) else None
        if turned is not None and turned.turned_if is None and turned.heads == _heads(no, info, module):
            return replace(turned, turned_if=test)
    rotation = _rotation_of(term)
    if rotation is None:
        return Turned(_heads(term, info, module), False)
    call, number, partial = rotation
    count = 2 if call.op == "rotary" else 1
    tensor, (cos, sin) = call.args[number], call.args[count : count + 2]
    if partial is not None:
        tensor = _whole(tensor, partial)
    plain = [argument for argument in call.args[count + 2 :] if argument.op != "keyword"]
    unsqueeze_dim = plain[0] if plain else keyword(call, "unsqueeze_dim") or constant(1)
    if unsqueeze_dim != constant(1):
        raise NoStep("other_rotation", "heads are not the second dimension")
    halves = [_is_half(table, number) for number, table in enumerate((cos, sin))]
    if halves[0] != halves[1]:
        raise NoStep("other_rotation", "one table is halved")
    return Turned(_heads(tensor, info, module), True, halves[0], _options(call))


def _options(call: Term) -> tuple[str, ...]:
    names = [a.value for a in call.args if a.op == "keyword" and a.value != "unsqueeze_dim"]
    if "deinterleave" in names:
        raise NoStep("other_rotation", "rotated pairs are written apart")
    return tuple(f"{name}=True" for name in ("interleaved", "half_table", "in_fp32", "keep_dtype") if name in names)


def _is_half(table: Term, number: int) -> bool:
    """Whether a table is the first half of the given one; all of it else."""
    given = Term("index", (POSITIONS, constant(number)))
    if table == given:
        return False
    size = Term("floordiv", (Term("index", (Term("shape", (given,)), constant(-1))), constant(2)))
    if table != Term("index", (given, _EVERY, Term("slice", (NONE, size, NONE)))):
        raise NoStep("other_rotation", "the tables are not those of `position_embeddings`")
    return True


def _rotation_of(term: Term) -> tuple[Term, int, Term | None] | None:
    """Return the rotation that `term` is a result of, which one, and the part that passes if that is joined."""
    if term.op == "cat" and len(term.args) == 2 and term.args[0].op == "tuple" and term.args[1] == constant(-1):
        parts = term.args[0].args
        if len(parts) == 2 and (inner := _rotation_of(parts[0])) is not None and inner[2] is None:
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


def _heads(term: Term, info: ClassInfo, module: Module) -> Heads:
    if term.op == "select" and (heads := _normed_if(term, _heads, info, module)) is not None:
        return heads
    norm = _norm_of(term, info, module)
    if norm is not None:
        return _with_norm(_heads(term.args[1], info, module), norm)
    if term.op == "transpose" and term.args[1:] in ((constant(1), constant(2)), (constant(2), constant(1))):
        return _split(term.args[0], info, module)
    raise NoStep("other_heads", str(term)[:60])


def _normed_if(term: Term, read: Reader, info: ClassInfo, module: Module) -> Heads | None:
    """Read heads that are normalised under a condition."""
    test, yes, no = term.args
    normed, plain = read(yes, info, module), read(no, info, module)
    if normed.norm is not None and normed.normed_if is None and plain == _without_norm(normed):
        return replace(normed, normed_if=test)
    return None


def _split(term: Term, info: ClassInfo, module: Module) -> Heads:
    """Read `view(projection(x), (…, -1, head_dim))`, normalised before or after."""
    norm = _norm_of(term, info, module, any_class=True)
    if norm is not None:
        return _with_norm(_split(term.args[1], info, module), norm)
    if term.op == "select" and (heads := _normed_if(term, _split, info, module)) is not None:
        return heads
    if term.op not in ("view", "reshape"):
        raise NoStep("other_heads", str(term)[:60])
    sizes = term.args[1].args if len(term.args) == 2 and term.args[1].op == "tuple" else term.args[1:]
    dimensions = [2 if size.op == "star" else 1 for size in sizes]
    if sum(dimensions) != 4 or dimensions[-1] != 1 or dimensions[-2] != 1:
        raise NoStep("other_heads", "heads are split another way")
    norm = _norm_of(term.args[0], info, module, any_class=True)
    if norm is not None:
        if not _has_weight(norm, info, module):
            raise NoStep("other_heads", f"{norm.value} has no weight that tells what it normalises over")
        return Heads(term.args[0].args[1], sizes[-1], norm)
    return Heads(term.args[0], sizes[-1])


def _with_norm(heads: Heads, norm: Term) -> Heads:
    if heads.norm is not None:
        raise NoStep("other_heads", "two norms")
    return Heads(heads.projected, heads.head_dim, norm)


def _without_norm(heads: Heads) -> Heads:
    return Heads(heads.projected, heads.head_dim)


def _norm_of(term: Term, info: ClassInfo, module: Module, any_class: bool = False) -> Term | None:
    """Return the norm that `term` is a call of: torch's own or a class of the file, over one dimension of its size."""
    if term.op != "call" or len(term.args) != 2 or term.args[0].op != "attribute":
        return None
    attribute = term.args[0]
    if is_linear(attribute, info, module):
        return None
    for value in module.assignments(info, attribute.value):
        name = module.qualified(getattr(value, "func", value))
        known = name in _TORCH_NORMS or (name in module.classes and runtime_norm(module.classes[name], module))
        if not known:
            raise NoStep("other_heads", f"{attribute.value} is no norm that a step computes")
        if any(_is_several(argument.value) for argument in getattr(value, "args", ())):
            raise NoStep("other_heads", f"{attribute.value} has a weight of several dimensions")
    return attribute


def _is_several(value: object) -> bool:
    return type(value).__name__ in ("Tuple", "List")


def _has_weight(norm: Term, info: ClassInfo, module: Module) -> bool:
    if is_built_from(norm.value, _TORCH_NORMS, info, module):
        return True
    for value in module.assignments(info, norm.value):
        found = runtime_norm(module.classes[module.qualified(value.func)], module)  # type: ignore[attr-defined]
        if found is None or not found[1].arguments[0].startswith("self."):
            return False
    return True


def _check_alike(query: Turned, key: Turned, values: Heads) -> None:
    if replace(query, heads=values) != replace(key, heads=values):
        raise NoStep("other_rotation", "queries and keys are turned in two ways")
    if len({query.heads.head_dim, key.heads.head_dim, values.head_dim}) != 1:
        raise NoStep("other_heads", "keys and values have two sizes")
    if values.norm is not None:
        raise NoStep("other_heads", "values are normalised")


def _projections(heads: Sequence[Heads], info: ClassInfo, module: Module) -> tuple[tuple[Term, ...], Term | None]:
    """Return the projections of queries, keys and values, and Hk where there is one for all."""
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
    """Read three slices of the last dimension of one product: queries, then keys, then values."""
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
