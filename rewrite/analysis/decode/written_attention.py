"""Attention in a decode step with something around it that no operator of a step computes.

A norm behind the rotation, values that are normalised, heads that lie one behind the other in one product, a gate or a
norm before the last projection: what stands around the attention function is left as the file has it, as in a mixer
(`mixer_step`). What is proven is the attention function: that it is given what the cache gave back, the mask as it
comes, and nothing that the step's attention does not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import libcst as cst

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import MAX_DEPTH, NoStep, Step, cache_parameters, run_step
from rewrite.analysis.decode.attention_step import (
    MASK,
    PARAMETERS,
    AttentionStep,
    arguments,
    attended_with,
    cached_at,
    check_arguments,
    implementation,
    roles_of,
    step_from_heads,
)
from rewrite.analysis.decode.attention_text import AttentionText, NameTaken
from rewrite.analysis.decode.direct_attention import as_attention, is_direct
from rewrite.analysis.decode.mixer_step import check_plain
from rewrite.analysis.decode.mixer_text import NeedsNorm
from rewrite.analysis.terms.computation import Bindings, NotComputable, subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant
from rewrite.analysis.tree.methods import TABLES, TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import parameters

_QUERIES = ("query", "rotated_query")
"""Names for the query that `qkv_step` makes, the first that the file's statements do not have."""


@dataclass(frozen=True)
class WrittenAttention:
    """The attention of a class in one decode step, most of it as the file has it."""

    info: ClassInfo
    takes: Mapping[str, str]
    """Its parameters by what they are: `hidden_states`, `position_embeddings`, `attention_mask`."""
    layer_idx: Term
    window: Term
    attention: cst.Call
    """The call of the attention function."""
    call: Term
    """The same as a term, as a call of one of transformers' attention functions."""
    heads_first: bool
    """Whether it is one of torch's instead, and returns `[B, H, S, D]`."""
    positions: str
    """The type of `position_embeddings`, which may be positions, or numbers of another form than tables."""
    front: AttentionStep | None
    """How queries, keys and values are made, where the step's operators make them."""
    norms: tuple[str, ...] = ()
    """The attributes that normalise queries and keys in one kernel with the rotation."""
    unless: tuple[Term, ...] = ()
    """Tests of attributes that do not hold where this is what it computes."""

    @property
    def turns(self) -> bool:
        """Whether the layer has to be given what says where the tokens are."""
        return "position_embeddings" in self.takes

    def method(self, module: Module) -> Method:
        """Return its `decode_residual`.

        Raises:
            NoStep: if it cannot be written.
        """
        statements, uses = self._written(module)
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        forward, types = self.info.methods["forward"], ("PreallocatedCache",)
        taken = PARAMETERS | {"position_embeddings": self.positions}
        return Method(forward, NAME, taken, TENSOR, text, statements, tuple(sorted(uses)), types)

    def _written(self, module: Module) -> tuple[tuple[cst.BaseStatement, ...], set[str]]:
        for query in _QUERIES if self.front is not None else ("",):
            for norm_first in (False, True):
                with contextlib.suppress(NeedsNorm, NameTaken):
                    text = self._text(query, norm_first, module)
                    return text.write(), text.uses
        raise NoStep("name_taken", "query")

    def _text(self, query: str, norm_first: bool, module: Module) -> AttentionText:
        forward = self.info.methods["forward"]
        scale = None if self.front is None else self.front.query.heads.scale
        given = [source(self.layer_idx, module, ()), *attended_with(self.call, scale, self.window, module)]
        text = AttentionText(
            self.info, module, self.takes["hidden_states"], cache_parameters(forward)[0], norm_first,
            attention=self.attention, given=given, heads_first=self.heads_first,
            positions=self.takes.get("position_embeddings", ""), query=query,
        )  # fmt: skip
        if self.front is not None:
            text.front = [*self.front.query_statements(query, module, "None" if norm_first else "norm")]
            text.uses.add("qkv_step")
        return text


def written_attention(info: ClassInfo, module: Module) -> WrittenAttention:
    """Return what the attention class `info` computes in one decode step, around the attention function as written.

    Raises:
        NoStep: if that is not proven to be what the step's attention computes, or its text cannot be taken over.
    """
    forward = info.methods.get("forward")
    if forward is None:
        raise NoStep("other_attention", "no forward of its own")
    check_plain(info, forward, module)
    if any(isinstance(node, (cst.NamedExpr, cst.Lambda)) for node in walk(forward)):
        raise NoStep("other_attention", "it binds names inside of expressions")
    try:
        takes = _takes(info, forward, module)
        run = Recording(module, info, MAX_DEPTH)
        term = run_step(run, forward, {name: role for role, name in takes.items()})
    except NotComputable as error:
        raise NoStep("other_attention", error.what) from error
    attention, called = only_attention(run.found, forward)
    if called not in subterms(term):
        raise NoStep("other_attention", "what it returns does not depend on the attention function")
    _check_around(term.args[0] if term.op == "tuple" else term, called)
    heads_first = is_direct(called)
    call = as_attention(Term("transpose", (called, constant(1), constant(2)))) if heads_first else called
    given = {} if call is None else arguments(call)
    if call is None or not {"query", "key", "value", MASK} <= {*given} or given[MASK] != Term("parameter", (), MASK):
        raise NoStep("other_attention", "the mask is changed, or not given")
    layer_idx = cached_at(given)
    check_arguments(call, given, module)
    known = "position_embeddings" in roles_of(term, info, module) or "position_embeddings" not in takes
    step = WrittenAttention(
        info, takes, layer_idx, given.get("sliding_window", NONE), attention, call, heads_first,
        f"{TABLES} | None" if known else f"{TENSOR} | {TABLES} | None", None,
    )  # fmt: skip
    with contextlib.suppress(NoStep, NotComputable):
        front = step_from_heads(info, takes, call, layer_idx, NONE, module)
        norms = tuple(front.norms)
        fused = replace(step, front=front, norms=norms)
        fused.method(module)
        return fused
    step.method(module)
    return step


def _takes(info: ClassInfo, forward: cst.FunctionDef, module: Module) -> dict[str, str]:
    """Return the parameters by what they are; what is none of the others, and is read, says where the tokens are.

    Raises:
        NoStep: if the hidden states are not one of them.
    """
    run = Recording(module, info, MAX_DEPTH)
    term = run_step(run, forward, {})
    takes = roles_of(term, info, module)
    if "hidden_states" not in takes:
        raise NoStep("other_attention", "its hidden states are not told from others")
    only_attention(run.found, forward)
    mask = takes.get(MASK)
    if "position_embeddings" not in takes:
        read = {inner.value for inner in subterms(term) if inner.op == "parameter"} & {*parameters(forward)}
        gathered = forward.params.star_kwarg
        left = read - {takes["hidden_states"], mask, *cache_parameters(forward)}
        left -= {gathered.name.value} if gathered is not None else set()
        if len(left) == 1:
            takes["position_embeddings"] = left.pop()
    return takes


def _check_around(output: Term, called: Term) -> None:
    """Refuse what reads more of attention than its result: weights, or keys and values that a cache gave back.

    In a step those are all slots of the buffers, whatever lies in them.

    Raises:
        NoStep: saying what is read.
    """
    if Term("index", (called, constant(1))) in subterms(output):
        raise NoStep("other_attention", "the weights of attention are read")
    stack, seen = [output], {called}
    while stack:
        term = stack.pop()
        if term in seen:
            continue
        if term.op == "update":
            raise NoStep("other_attention", "keys or values are read behind the cache")
        seen.add(term)
        stack += term.args


def only_attention(found: Mapping[int, tuple[cst.Call, Term]], forward: cst.FunctionDef) -> tuple[cst.Call, Term]:
    """Return the one call of an attention function that stands in `forward`.

    Raises:
        NoStep: if there is another one, or none.
    """
    if len(found) != 1:
        raise NoStep("other_attention", "an attention function is not called in one place")
    (call, term), *_ = found.values()
    if not any(node is call for node in walk(forward)):
        raise NoStep("other_attention", "its attention function is called elsewhere")
    return call, term


@dataclass
class Recording(Step):
    """An execution that notes the calls of attention functions."""

    found: dict[int, tuple[cst.Call, Term]] = field(default_factory=dict)

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call."""
        term = super().call(node, environment)
        if is_direct(term) or (term.op == "call" and implementation(term.args[0]) is not None):
            if self.found.setdefault(id(node), (node, term))[1] != term:
                raise NotComputable("an attention function is called twice in one place")
        return term
