"""Latent attention in a decode step: keys and values that one projection makes of a cached latent.

With LATENT and KEY what the cache returns, the keys are `cat(up(LATENT)[:N], KEY of all heads)` and the values
`up(LATENT)[N:]`, head by head, where `up` is one linear module; see `runtime/attention/latent_attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.mlp_step import PARAMETERS as BLOCK_PARAMETERS
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import CACHE, LINEAR, NoStep, keyword, values_of
from rewrite.analysis.decode.attention_heads import HIDDEN
from rewrite.analysis.decode.latent_rotation import OPTIONS, UP_TO_LAST, Turned, sizes_of, turned
from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.residual import choices
from rewrite.analysis.terms.computation import subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make
from rewrite.analysis.tree.methods import TABLES, TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.replacement import call_statement, line


@dataclass(frozen=True)
class LatentStep:
    """The attention of a class in one decode step."""

    info: ClassInfo
    takes: Mapping[str, str]
    """Its parameters by what they are."""
    queries: Term
    """The call that makes the queries of the hidden states, or a choice of two."""
    down: Term
    norm: Term
    up: Term
    turned: Turned
    head_dims: tuple[Term, Term, Term]
    """Columns of a head: not rotated, rotated, of values."""
    layer_idx: Term
    call: Term
    """The call of the attention function."""
    output: Term
    """The last projection."""
    window: Term = NONE
    unless: tuple[Term, ...] = ()
    """Tests of attributes that do not hold where this is what it computes."""

    @property
    def norms(self) -> list[str]:
        """The attributes that normalise queries and latents."""
        between = (module for way in _ways(self.queries) for module in _modules(way)[1::2])
        return [norm.value for norm in (*between, self.norm)]

    @property
    def positions(self) -> str:
        """The type of `position_embeddings`."""
        return TENSOR if any(way.is_complex for way in self.turned.ways) else f"{TABLES} | None"

    def method(self, module: Module) -> Method:
        """Return its `decode_residual`."""
        forward = self.info.methods["forward"]
        before, tables = self._tables(module)
        down, norm, up = (source(part, module, ()) for part in (self.down, self.norm, self.up))
        sizes = ", ".join(source(size, module, ()) for size in self.head_dims)
        scaling = keyword(self.call, "scaling")
        assert scaling is not None
        arguments = [
            "hidden_states",
            self._queries(self.queries, module),
            f"({down}, {norm}, {up})",
            tables,
            CACHE,
            f"layer_idx={source(self.layer_idx, module, ())}",
            f"head_dims=({sizes})",
            f"scaling={source(scaling, module, ())}",
            "norm=norm",
            *self._options(module),
        ]
        attended = call_statement("attn_output = ", "latent_attention", arguments, module)
        last = call_statement(
            "return ", "linear", ["attn_output", source(self.output, module, ()), "residual=residual"], module
        )
        uses, types = ("latent_attention", "linear"), ("PreallocatedCache",)
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        taken = {**BLOCK_PARAMETERS, "position_embeddings": self.positions, CACHE: "PreallocatedCache"}
        return Method(forward, NAME, taken, TENSOR, text, (*before, attended, last), uses, types)

    def _queries(self, term: Term, module: Module) -> str:
        """Return the source of the modules that make queries of hidden states, in their order."""
        if term.op == "select":
            yes, no = (self._queries(way, module) for way in _ways(term))
            return f"{yes} if {source(term.args[0], module, ())} else {no}"
        modules = [source(called, module, ()) for called in _modules(term)]
        return f"({', '.join(modules)}{',' if len(modules) == 1 else ''})"

    def _tables(self, module: Module) -> tuple[list[cst.SimpleStatementLine], str]:
        """Return the statements before, and the argument, that hand over cosines and sines."""
        ways = self.turned.ways
        if not ways:
            return [], "None"
        if any(way.is_complex for way in ways):
            return [], "(position_embeddings.real, position_embeddings.imag)"
        if not any(way.halves for way in ways):
            return [], "position_embeddings"
        before = [
            line("cos, sin = position_embeddings", module),
            line("halves = (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2])", module),
        ]
        chosen = self._chosen([way.halves for way in ways], module)
        return before, "halves" if chosen == "True" else f"halves if {chosen} else position_embeddings"

    def _options(self, module: Module) -> list[str]:
        """Return the options of the rotation, by the test where the ways differ."""
        has = {name: [name in way.options for way in self.turned.ways] for name in OPTIONS}
        return [f"{name}={self._chosen(ways, module)}" for name, ways in has.items() if any(ways)]

    def _chosen(self, ways: list[bool], module: Module) -> str:
        """Return the source of what says that one of the ways with a property is gone."""
        if all(ways) or self.turned.test is None:
            return "True"
        return source(self.turned.test if ways[0] else make("not", self.turned.test), module, ())


def is_latent(key: Term) -> bool:
    """Whether keys are joined of something that a module makes of what a cache returns, and something else."""
    parts = _joined(key)
    if parts is None or parts[0].op != "index" or parts[0].args[0].op != "split":
        return False
    return any(inner.op == "update" for inner in subterms(parts[0])) and any(
        inner.op == "call" for inner in subterms(parts[0].args[0].args[0])
    )


def latent_step(
    info: ClassInfo,
    takes: Mapping[str, str],
    call: Term,
    given: Mapping[str, Term],
    output: Term,
    module: Module,
) -> LatentStep:
    """Return what attention computes whose `call` of the attention function is `given` keys made of latents.

    Raises:
        NoStep: with the reason why that is not what the step's operator computes.
    """
    if given.get("sliding_window", NONE) != NONE or given.get("softcap", NONE) != NONE or "s_aux" in given:
        raise NoStep("other_attention", "a window, a soft cap or sinks of latent attention")
    up, nope, value, update = _expanded(given["key"], given["value"])
    if update.args[0] != Term("parameter", (), CACHE) or any(more.op != "keyword" for more in update.args[4:]):
        raise NoStep("other_attention", "latents do not come from the cache")
    key = turned(update.args[2])
    down, norm, rope = _compressed(update.args[1], key.tensor)
    _check_width(given["key"], make("add", nope, rope))
    query, rotated = _query(given["query"], nope, rope, bool(key.ways))
    if (rotated.test, rotated.ways) != (key.test, key.ways):
        raise NoStep("other_rotation", "queries and keys are turned in two ways")
    step = LatentStep(
        info, takes, query, down, norm, up, key, (nope, rope, value), update.args[3], call, output
    )  # fmt: skip
    for part in (down, up, *(product for way in _ways(query) for product in _modules(way)[::2])):
        if not _is_linear(part, info, module):
            raise NoStep("not_linear", part.value)
    step.method(module)
    return step


def _joined(term: Term) -> tuple[Term, Term] | None:
    if term.op == "joined":
        return term.args[0], term.args[1]
    if term.op == "cat" and term.args[0].op == "tuple" and term.args[1:] == (constant(-1),):
        parts = term.args[0].args
        return (parts[0], parts[1]) if len(parts) == 2 else None
    return None


def _parts(term: Term) -> tuple[Term, Term, Term] | None:
    """Return the tensor and both sizes of a `split` in two of the last dimension."""
    if term.op != "split" or len(term.args) != 3 or term.args[2] != constant(-1) or term.args[1].op != "tuple":
        return None
    sizes = term.args[1].args
    return (term.args[0], sizes[0], sizes[1]) if len(sizes) == 2 else None


def _expanded(key: Term, value: Term) -> tuple[Term, Term, Term, Term]:
    """Read the keys and values: return `up`, N, V and the update of the cache.

    How many heads there are stands nowhere else than in `up`: a view and an expansion that say it have no choice.

    Raises:
        NoStep: if they are made in another way.
    """
    parts = _joined(key)
    whole = parts[0].args[0] if parts is not None and parts[0].args else key
    split = _parts(whole)
    if parts is None or split is None or (parts[0], value) != (_item(whole, 0), _item(whole, 1)):
        raise NoStep("other_attention", "keys and values are not the two parts of one product of the latents")
    heads, nope, width = split
    view = _heads_of(heads)
    if view is None or (product := view[0]).op != "call" or len(product.args) != 2:
        raise NoStep("other_heads", "the product of the latents is split into heads another way")
    latents = product.args[1]
    shape = Term("shape", (latents,))
    if view[1] != (_item(shape, 0), _item(shape, 2)):
        raise NoStep("other_heads", "the product of the latents is split into heads another way")
    update, shared = latents.args[0] if latents.args else latents, parts[1]
    if update.op != "update" or latents != _item(update, 0) or shared.op != "expand" or len(shared.args) != 5:
        raise NoStep("other_attention", "the rest of the keys is not one key of all heads")
    if (shared.args[0], shared.args[1], *shared.args[3:]) != (_item(update, 1), *3 * (constant(-1),)):
        raise NoStep("other_attention", "the rest of the keys is not one key of all heads")
    return product.args[0], nope, width, update


def _heads_of(term: Term) -> tuple[Term, tuple[Term, ...]] | None:
    """Return the tensor and the first two sizes of `x.view(b, s, h, d).transpose(1, 2)`."""
    view = sizes_of(term.args[0]) if term.op == "transpose" and term.args[1:] == (constant(1), constant(2)) else None
    return (view[0], view[1][:2]) if view is not None and len(view[1]) == 4 else None


def _check_width(key: Term, width: Term) -> None:
    """Refuse parts that are written into a tensor of another shape than theirs: they may be repeated there.

    Raises:
        NoStep: if the keys are such a tensor.
    """
    if key.op == "joined":
        heads, new = key.args[0].args[0].args[0], key.args[2]
        lead = Term("star", (Term("index", (Term("shape", (heads,)), UP_TO_LAST)),))
        if new.args != (heads, lead, width):
            raise NoStep("other_heads", "keys are written into a tensor of another shape")


def _item(term: Term, number: int) -> Term:
    return Term("index", (term, constant(number)))


def _compressed(latent: Term, key: Term) -> tuple[Term, Term, Term]:
    """Read what the cache is given: return the projection to latents and keys, the norm of the latents, and R."""
    viewed, own = sizes_of(latent), sizes_of(key)
    if viewed is None or own is None or viewed[0].op != "call" or len(viewed[0].args) != 2:
        raise NoStep("other_projection", "latents are not normalised and viewed as one head")
    norm, normed = viewed[0].args
    split = _parts(normed.args[0]) if normed.op == "index" else None
    if split is None or (normed, own[0]) != (_item(normed.args[0], 0), _item(normed.args[0], 1)):
        raise NoStep("other_projection", "latents and keys are not the two parts of one product")
    for sizes, last in ((viewed[1], split[1]), (own[1], split[2])):
        if len(sizes) != 4 or sizes[1] != constant(1) or sizes[3] != last or (sizes[0], sizes[2]) != _TOKENS:
            raise NoStep("other_heads", "latents or keys are not viewed as one head")
    product = split[0]
    if product.op != "call" or product.args[1:] != (HIDDEN,) or norm.op != "attribute":
        raise NoStep("other_projection", "latents are not a product of the hidden states")
    return product.args[0], norm, split[2]


_LEADING = Term("index", (Term("shape", (HIDDEN,)), UP_TO_LAST))
_TOKENS = (_item(_LEADING, 0), _item(_LEADING, 1))


def _query(query: Term, nope: Term, rope: Term, turns: bool) -> tuple[Term, Turned]:
    """Read the queries: return what is split into heads, and their rotation."""
    rotated = Turned(query, None, ())
    if turns:
        parts = _joined(query)
        if parts is None or parts[0].op != "index":
            raise NoStep("other_rotation", "queries are not joined of two parts as keys are")
        rotated = turned(parts[1])
        whole = parts[0].args[0]
        split = _parts(whole)
        if split is None or split[1:] != (nope, rope) or (parts[0], rotated.tensor) != (
            _item(whole, 0), _item(whole, 1),
        ):  # fmt: skip
            raise NoStep("other_heads", "queries are split in other parts than keys")
        query = split[0]
    view = _heads_of(query)
    if view is None or view[1] != _TOKENS:
        raise NoStep("other_heads", "queries are split into heads another way")
    for way in _ways(view[0]):
        if (count := len(_modules(way))) not in (1, 3):
            raise NoStep("other_projection", f"queries are made by {count} modules")
    return view[0], rotated


def _ways(queries: Term) -> tuple[Term, ...]:
    """Return the calls that may make the queries."""
    return queries.args[1:] if queries.op == "select" else (queries,)


def _modules(term: Term) -> list[Term]:
    """Return the modules that are called on one another's results, the first of them on the hidden states."""
    found: list[Term] = []
    while term != HIDDEN:
        if term.op != "call" or len(term.args) != 2 or term.args[0].op != "attribute":
            raise NoStep("other_projection", str(term)[:60])
        found.insert(0, term.args[0])
        term = term.args[1]
    return found


def _is_linear(term: Term, owner: ClassInfo, module: Module) -> bool:
    """Whether `term` is an attribute that holds a plain `nn.Linear`, or None where that is chosen."""
    names = effects_of(module).names
    values = [choice for value in values_of(term.value, owner, module) for choice in choices(value)]
    return bool(values) and all(names.resolved(getattr(value, "func", value)) in LINEAR for value in values)
