"""Attention in a decode step: the parts of the usual `forward`, and the method that is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.mlp_step import PARAMETERS as BLOCK_PARAMETERS
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import (
    CACHE,
    MAX_DEPTH,
    Assuming,
    NoStep,
    affirmed,
    computed_in_step,
    decided,
    is_linear,
    keyword,
    of_the_object,
    run_step,
)
from rewrite.analysis.decode.attention_heads import (
    HIDDEN,
    POSITIONS,
    Turned,
    check_alike,
    projections_of,
    split_heads,
    turned_heads,
)
from rewrite.analysis.decode.direct_attention import as_attention, is_direct, mask_of
from rewrite.analysis.decode.eager_attention import check_eager_attention
from rewrite.analysis.decode.latent_rotation import complex_tables
from rewrite.analysis.decode.latent_step import LatentStep, is_latent, latent_step
from rewrite.analysis.decode.written_scores import as_written, masks_of
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make
from rewrite.analysis.tree.methods import TABLES, TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.replacement import call_statement, line

PARAMETERS = {**BLOCK_PARAMETERS, "position_embeddings": f"{TABLES} | None", CACHE: "PreallocatedCache"}
CACHE_PARAMETER = Term("parameter", (), CACHE)
MASK = "attention_mask"

_SIGNATURE = ("module", "query", "key", "value", MASK)
"""What every attention function takes first."""

KEYWORDS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "output_attentions",
             "cache_position", "use_cache", "is_causal"}  # fmt: skip
"""What the attention functions of transformers take and a step can do; a name that is missing here is a refusal."""
TOLD = frozenset({"position_ids", "output_attentions", "cache_position", "use_cache"})
"""Of these, what changes nothing of what a step computes, so that a layer may pass it on without a name for it."""


@dataclass(frozen=True)
class AttentionStep:
    """The attention of a class in one decode step."""

    info: ClassInfo
    takes: Mapping[str, str]
    """Its parameters by what they are: `hidden_states`, `position_embeddings`, `attention_mask`."""
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
    unless: tuple[Term, ...] = ()
    """Tests of attributes that do not hold where this is what it computes."""

    @property
    def norms(self) -> list[str]:
        """The attributes that normalise queries and keys."""
        return [t.heads.norm.value for t in (self.query, self.key) if t.heads.norm is not None]

    @property
    def positions(self) -> str:
        """The type of `position_embeddings`."""
        return f"{TABLES} | None"

    def method(self, module: Module) -> Method:
        """Return its `decode_residual`."""
        forward = self.info.methods["forward"]
        layer_idx = source(self.layer_idx, module, ())
        before = self.query_statements("query", module)
        window = self.window
        if window.op == "select" and window.args[0].op == "eq":
            before.insert(-1, line(f"is_sliding = {source(window.args[0], module, ())}", module))
            window = Term("select", (Term("parameter", (), "is_sliding"), *window.args[1:]))
        attended = call_statement(
            "attn_output = ",
            "decode_attention",
            ["query", CACHE, layer_idx, *self.attended_with(window, module)],
            module,
        )
        last = call_statement(
            "return ", "linear", ["attn_output", source(self.output, module, ()), "residual=residual"], module
        )
        uses = ("qkv_step", "decode_attention", "linear")
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        types = ("PreallocatedCache",)
        return Method(forward, NAME, PARAMETERS, TENSOR, text, (*before, attended, last), uses, types)

    def query_statements(
        self,
        name: str,
        module: Module,
        norm: str = "norm",
        function: str = "qkv_step",
        more: Sequence[str] = (),
        rotate: Sequence[str] | None = None,
    ) -> list[cst.SimpleStatementLine]:
        """Return the statements that write a token's key and value and give its rotated query a name.

        Args:
            name: of the query.
            module: the file.
            norm: the argument that is the norm.
            function: that is called.
            more: arguments that it is given besides.
            rotate: those that say by which function of the file it rotates; None for options that say how.
        """
        layer_idx, projections = source(self.layer_idx, module, ()), [source(p, module, ()) for p in self.projections]
        packed = ", ".join(projections) + ("," if len(projections) == 1 else "")
        before, positions = self._positions(module, rotate is not None)
        options = self._options(module, norm, rotate)
        given = ["hidden_states", f"({packed})", positions, CACHE, layer_idx, *options, *more]
        return [*before, call_statement(f"{name} = ", function, given, module)]

    def _positions(self, module: Module, whole: bool = False) -> tuple[list[cst.SimpleStatementLine], str]:
        """Return the statements before, and the argument, that hand over cosines and sines: all, or what is read."""
        if not self.query.turns:
            return [], "None"
        before: list[cst.SimpleStatementLine] = []
        tables = "position_embeddings"
        if self.query.halves and not whole:
            before = [
                line("cos, sin = position_embeddings", module),
                line("halves = (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2])", module),
            ]
            tables = "halves"
        test = self.query.turned_if
        return before, tables if test is None else f"{tables} if {source(test, module, (POSITIONS.value,))} else None"

    def _options(self, module: Module, norm: str = "norm", rotate: Sequence[str] | None = None) -> list[str]:
        options = [f"head_dim={source(self.head_dim, module, ())}"]
        if self.num_key_value_heads is not None:
            options.append(f"num_key_value_heads={source(self.num_key_value_heads, module, ())}")
        options.append(f"norm={norm}")
        for name, turned in (("q_norm", self.query), ("k_norm", self.key)):
            if (of_heads := turned.heads.norm) is not None:
                test = turned.heads.normed_if
                condition = "" if test is None else f" if {source(test, module, ())} else None"
                options.append(f"{name}={source(of_heads, module, ())}{condition}")
        return [*options, *(self.query.options if rotate is None else rotate)]

    def attended_with(self, window: Term, module: Module) -> list[str]:
        """Return what the step's attention is given by keyword."""
        return attended_with(self.call, self.query.heads.scale, window, module)


def attended_with(call: Term, scale: Term | None, window: Term, module: Module) -> list[str]:
    """Return what a step's attention is given by keyword in the place of a call of an attention function.

    Args:
        call: the call.
        scale: what queries are multiplied by, which becomes part of the scaling; None for nothing.
        window: the window.
        module: the file.
    """
    given = [
        ("scaling", _scaling(call, scale)),
        ("sliding_window", window),
        ("softcap", _unless_sdpa(call, "softcap", module)),
        ("sinks", _unless_sdpa(call, "s_aux", module)),
    ]
    return [
        f"{name}={source(value, module, ('is_sliding',))}"
        for name, value in given
        if value is not None and value != NONE
    ]


def _scaling(call: Term, scale: Term | None) -> Term | None:
    """Return the factor of the scores, that of the queries taken in."""
    scaling = keyword(call, "scaling")
    if scaling is None or scale is None:
        return scaling
    return scale if scaling in (constant(1), constant(1.0)) else make("mul", scaling, scale)


def _unless_sdpa(call: Term, name: str, module: Module) -> Term | None:
    """Return an argument that torch's attention function leaves out, where a model may use that."""
    value, chosen = keyword(call, name), implementation(call.args[0])
    if value is None or value == NONE or chosen is None or _refuses_sdpa(module):
        return value
    return Term("select", (Term("ne", (chosen, Term("constant", (), '"sdpa"'))), value, NONE))


def _refuses_sdpa(module: Module) -> bool:
    """Whether models of the file never use torch's attention function."""
    refusal = m.Assign(targets=[m.AssignTarget(m.Name("_supports_sdpa"))], value=m.Name("False"))
    lines = (line for info in module.classes.values() for line in info.node.body.body)
    return any(m.matches(line, m.SimpleStatementLine(body=[refusal])) for line in lines)


def attention_step(info: ClassInfo, module: Module) -> AttentionStep | LatentStep:
    """Return what the attention class `info` computes in one decode step.

    Raises:
        NoStep: with the reason why that is not what the step's operators compute.
    """
    forward = info.methods.get("forward")
    if forward is None:
        raise NoStep("other_attention", "no forward of its own")
    try:
        run = Assuming(module, info, MAX_DEPTH)
        as_named = run_step(run, forward, {})
        takes = roles_of(as_named, info, module)
        names = {name: role for role, name in takes.items()}
        if all(map(eq, names, names.values())):
            term = as_named
        else:
            term = run_step(Assuming(module, info, MAX_DEPTH), forward, names)
        step, assumed = _read_assuming(term, takes, info, module)
        return replace(step, unless=(*run.assumed, *assumed))
    except NotComputable as error:
        raise NoStep("other_attention", error.what) from error


def attention_term(info: ClassInfo, module: Module) -> tuple[Term, dict[str, str]]:
    """Return what an attention class computes in one decode step, and its parameters by what they are.

    Raises:
        NotComputable: if it has no canonical form.
    """
    forward = info.methods["forward"]
    takes = roles_of(computed_in_step(forward, module, info), info, module)
    return computed_in_step(forward, module, info, {name: role for role, name in takes.items()}), takes


def step_of(term: Term, takes: dict[str, str], info: ClassInfo, module: Module) -> AttentionStep:
    """Return the attention that a term is of.

    Raises:
        NoStep: with the reason why that is not what the step's operators compute.
    """
    step = _read(term, takes, info, module)
    if not isinstance(step, AttentionStep):
        raise NoStep("other_attention", "latents with something behind their products")
    return step


def roles_of(term: Term, info: ClassInfo, module: Module) -> dict[str, str]:
    """Return the parameters that are projected, rotate, and mask, by what they are."""
    found: dict[str, set[str]] = {HIDDEN.value: set(), POSITIONS.value: set(), MASK: set()}
    for inner in set(subterms(term)):
        if inner.op == "call" and len(inner.args) == 2 and is_linear(inner.args[0], info, module):
            found[HIDDEN.value] |= _parameter(inner.args[1])
        elif inner.op in ("rotary", "rotary_single"):
            tables = inner.args[2 if inner.op == "rotary" else 1 :]
            found[POSITIONS.value] |= {name for table in tables[:2] for name in _tables(table)}
        elif inner.op == "view_as_real":
            found[POSITIONS.value] |= set().union(*map(_parameter, complex_tables(inner.args[0])))
        elif inner.op == "call" and implementation(inner.args[0]) is not None:
            mask = arguments(inner).get(MASK)
            found[MASK] |= _parameter(mask) if mask is not None else set()
        elif is_direct(inner):
            found[MASK] |= _parameter(mask_of(inner))
        elif inner.op == "softmax":
            found[MASK] |= masks_of(inner)
    return {role: names.pop() for role, names in found.items() if len(names) == 1}


def _parameter(term: Term) -> set[str]:
    return {term.value} if term.op == "parameter" and term.value != CACHE else set()


def _tables(term: Term) -> set[str]:
    """Return the parameters that a table is an item of."""
    items = (inner.args[0] for inner in subterms(term) if inner.op == "index")
    return set().union(*map(_parameter, items))


def arguments(call: Term) -> dict[str, Term]:
    """Return what the call of an attention function passes, by the names that those functions have for it."""
    plain = [argument for argument in call.args[1:] if argument.op != "keyword"]
    named = {argument.value: argument.args[0] for argument in call.args[1:] if argument.op == "keyword"}
    return dict(zip(_SIGNATURE, plain, strict=False)) | named


def _read_assuming(
    term: Term, takes: dict[str, str], info: ClassInfo, module: Module
) -> tuple[AttentionStep | LatentStep, tuple[Term, ...]]:
    """Read a term, if need be with one test of the object's attributes taken for granted; return what may not hold."""
    try:
        return _read(term, takes, info, module), ()
    except NoStep as refusal:
        tests = {affirmed(inner.args[0]) for inner in subterms(term) if inner.op == "select"}
        for test in sorted(filter(of_the_object, tests), key=str):
            for holds in (False, True):
                with contextlib.suppress(NoStep):
                    step = _read(decided(term, test, holds), takes, info, module)
                    return step, (make("not", test) if holds else test,)
        raise refusal


def _read(term: Term, takes: dict[str, str], info: ClassInfo, module: Module) -> AttentionStep | LatentStep:
    output = term.args[0] if term.op == "tuple" else term
    if output.op != "call" or len(output.args) != 2 or output.args[0].op != "attribute":
        raise NoStep("other_attention", "what is returned is no projection")
    if not is_linear(output.args[0], info, module):
        raise NoStep("not_linear", output.args[0].value)
    call = _attention_call(output.args[1])
    given = arguments(call)
    if not {"query", "key", "value", MASK} <= {*given} or given[MASK] != Term("parameter", (), MASK):
        raise NoStep("other_attention", f"the mask is changed: {given.get(MASK, NONE)}"[:90])
    if is_latent(given["key"]):
        check_arguments(call, given, module)
        return latent_step(info, takes, call, given, output.args[0], module)
    layer_idx = cached_at(given)
    step = step_from_heads(info, takes, call, layer_idx, output.args[0], module)
    step.method(module)
    return step


def cached_at(given: Mapping[str, Term]) -> Term:
    """Return the number of the layer in whose cache an attention function's keys and values are.

    Raises:
        NoStep: if they are not what an update of the cache gave back.
    """
    key, value = given["key"], given["value"]
    update = key.args[0] if key.op == "index" else key
    if update.op != "update" or update.args[0] != CACHE_PARAMETER or len(update.args) < 4:
        raise NoStep("other_attention", "keys do not come from the cache")
    if (key, value) != (Term("index", (update, constant(0))), Term("index", (update, constant(1)))):
        raise NoStep("other_attention", "keys or values change after the cache")
    return update.args[3]


def step_from_heads(
    info: ClassInfo, takes: Mapping[str, str], call: Term, layer_idx: Term, output: Term, module: Module
) -> AttentionStep:
    """Return the step of an attention whose queries, keys and values are made as its operators make them.

    Raises:
        NoStep: if they are made in another way.
    """
    given = arguments(call)
    query, update = given["query"], given["key"].args[0]
    turned_query, turned_key = turned_heads(query, info, module), turned_heads(update.args[1], info, module)
    values = split_heads(update.args[2], info, module)
    check_alike(turned_query, turned_key, values)
    projections, kv_heads = projections_of((turned_query.heads, turned_key.heads, values), info, module)
    check_arguments(call, given, module)
    return AttentionStep(
        info, takes, projections, turned_query, turned_key, layer_idx, values.head_dim, kv_heads, call, output,
        given.get("sliding_window", NONE),
    )  # fmt: skip


def check_arguments(call: Term, given: Mapping[str, Term], module: Module) -> None:
    """Refuse a call of an attention function that a step cannot stand for."""
    if "scaling" not in given:
        raise NoStep("other_attention", "the scaling is not given")
    if given.get("dropout", constant(0)) != constant(0):
        raise NoStep("other_attention", "dropout that is not only for training")
    if unknown := sorted({*given} - {*_SIGNATURE, *KEYWORDS}):
        raise NoStep("other_attention", unknown[0])
    check_eager_attention(call.args[0], given, module)


def _attention_call(term: Term) -> Term:
    """Return the call of the attention function whose heads `term` merges."""
    while term.op in ("contiguous", "reshape", "view", "flatten"):
        term = term.args[0]
    if (direct := as_attention(term) or as_written(term)) is not None:
        return direct
    call = term.args[0] if term.op == "index" and term.args[1:] == (constant(0),) else term
    if call.op != "call" or implementation(call.args[0]) is None:
        raise NoStep("other_attention", "what is projected is not the result of an attention function")
    return call


def implementation(term: Term) -> Term | None:
    """Return the name by which `term` is chosen among transformers' attention functions, None if it is not."""
    if term.op == "native_gqa":
        term = term.args[0]
    if term.op == "select":
        return next((found for choice in term.args[1:] if (found := implementation(choice)) is not None), None)
    if term.op == "index" and term.args[0].op == "name" and term.args[0].value.endswith(".ALL_ATTENTION_FUNCTIONS"):
        return term.args[1]
    return term.args[0] if term.op.endswith(".ALL_ATTENTION_FUNCTIONS.get_interface") and term.args else None
