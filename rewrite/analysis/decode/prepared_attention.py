"""Attention in a decode step with something behind its products: a gate beside each query, or scaled heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from rewrite.analysis.blocks.mlp_step import NAME
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import CACHE, NoStep, is_linear, is_number
from rewrite.analysis.decode.attention_step import PARAMETERS, AttentionStep, attention_term, step_of
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import Term, constant
from rewrite.analysis.tree.methods import TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.replacement import call_statement, line

_SPLIT = (constant(2), constant(-1))
_NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class PreparedAttention(AttentionStep):
    """The attention of a class in one decode step, with something between its products and the rotation."""

    gated: bool = False
    """Whether the output is times the sigmoid of a gate, which each head of the first product has behind its query."""
    scales: tuple[tuple[int, Term], ...] = ()
    """The products that are times an attribute, by number."""

    def method(self, module: Module) -> Method:
        """Return its `decode_residual`."""
        layer_idx, head_dim = source(self.layer_idx, module, ()), source(self.head_dim, module, ())
        projections = [source(p, module, ()) for p in self.projections]
        before, positions = self._positions(module)
        product = call_statement(
            f"{', '.join(_NAMES)} = ", "packed_step", ["hidden_states", *projections, "norm=norm"], module
        )
        packed = list(_NAMES)
        for number, scale in self.scales:
            packed[number] += f" * {source(scale, module, ())}"
        opened, apart = [], []
        if self.gated:
            apart = [line(f"query, gate = query.unflatten(-1, (-1, 2 * {head_dim})).chunk(2, dim=-1)", module)]
            packed[0] = packed[0].replace("query", "query.flatten(-2)")
            opened = [line("attn_output = attn_output * torch.sigmoid(gate.flatten(-2))", module)]
        joined = line(f"packed = torch.cat([{', '.join(packed)}], dim=-1)", module)
        options = [option for option in self._options(module) if option != "norm=norm"]
        options.insert(1, f"num_key_value_heads=key.shape[-1] // {head_dim}")
        query = call_statement("query = ", "projected_step", ["packed", positions, CACHE, layer_idx, *options], module)
        given = ["query", CACHE, layer_idx, *self.attended_with(self.window, module)]
        attended = call_statement("attn_output = ", "decode_attention", given, module)
        last = call_statement(
            "return ", "linear", ["attn_output", source(self.output, module, ()), "residual=residual"], module
        )
        uses = ("packed_step", "projected_step", "decode_attention", "linear")
        text = "Returns `residual + self(norm(hidden_states))` for one token a row, against a preallocated cache."
        statements = (product, *apart, joined, *before, query, attended, *opened, last)
        types = ("PreallocatedCache",)
        return Method(self.info.methods["forward"], NAME, PARAMETERS, TENSOR, text, statements, uses, types)


def prepared_attention(info: ClassInfo, module: Module) -> PreparedAttention | None:
    """Return what an attention class with a gate or scaled heads computes in one decode step, None for another one.

    Raises:
        NoStep: with the reason why the rest of it is not what the step's operators compute.
    """
    try:
        term, takes = attention_term(info, module)
    except NotComputable:
        return None
    output = term.args[0] if term.op == "tuple" else term
    if output.op != "call" or len(output.args) != 2:
        return None
    plain, head_dim = _without_gate(output, info, module)
    scaled = dict(_scaled(plain, info, module))
    for product, (_, heads) in scaled.items():
        plain = _replaced(plain, product, heads)
    if plain == output:
        return None
    step = step_of(plain, takes, info, module)
    if len(step.projections) != 3 or step.window.op == "select":
        raise NoStep("other_projection", "queries, keys and values are not three products")
    if head_dim is not None and step.head_dim != head_dim:
        raise NoStep("other_projection", "queries and gates are not as wide as a head each")
    scales = tuple((step.projections.index(_projection(heads)), scale) for scale, heads in scaled.values())
    own = {f.name: getattr(step, f.name) for f in fields(step)}
    return PreparedAttention(**own, gated=head_dim is not None, scales=scales)


def _without_gate(output: Term, info: ClassInfo, module: Module) -> tuple[Term, Term | None]:
    """Return the output as if it had no gate, and the head_dim of what has one; else the output itself and None."""
    inner = output.args[1]
    for attended, opened in (inner.args, inner.args[::-1]) if inner.op == "mul" else ():
        if opened.op == "sigmoid" and (split := _split_of(opened.args[0], info, module)) is not None:
            product, head_dim = split
            whole = _replaced(Term("call", (output.args[0], attended)), _half(product, 0), product.args[0].args[0])
            if any(inner.op == "chunk" for inner in subterms(whole)):
                raise NoStep("other_projection", "the gate is read by more than the product with its sigmoid")
            return whole, head_dim
    return output, None


def _scaled(term: Term, info: ClassInfo, module: Module) -> Iterator[tuple[Term, tuple[Term, Term]]]:
    """Yield heads that are times an attribute right behind their product, with the attribute and the heads alone."""
    for found in {inner for inner in subterms(term) if inner.op == "mul"}:
        for scale, heads in (found.args, found.args[::-1]):
            if scale.op == "attribute" and is_number(scale.value, info, module):
                if heads.op == "transpose" and is_linear(_projection(heads), info, module):
                    yield found, (scale, heads)


def _projection(heads: Term) -> Term:
    """Return what heads are projected by, anything else where they are not."""
    while heads.op in ("transpose", "view", "reshape"):
        heads = heads.args[0]
    return heads.args[0] if heads.op == "call" and len(heads.args) == 2 else heads


def _split_of(gate: Term, info: ClassInfo, module: Module) -> tuple[Term, Term] | None:
    """Return the `chunk` whose second half a gate is, `[…, H, 2 D]` of a product, and D."""
    while gate.op in ("reshape", "view", "flatten", "contiguous"):
        gate = gate.args[0]
    chunk = gate.args[0] if gate.op == "index" and gate.args[1:] == (constant(1),) else gate
    if chunk.op != "chunk" or chunk.args[1:] != _SPLIT or chunk.args[0].op not in ("view", "reshape"):
        return None
    product, *sizes = chunk.args[0].args
    sizes = [*sizes[0].args] if len(sizes) == 1 and sizes[0].op == "tuple" else sizes
    if product.op != "call" or len(product.args) != 2 or not is_linear(product.args[0], info, module):
        return None
    wide = sizes[-1]
    if len(sizes) != 3 or sizes[0].op != "star" or wide.op != "mul" or constant(2) not in wide.args:
        return None
    return chunk, next(side for side in wide.args if side != constant(2))


def _half(chunk: Term, number: int) -> Term:
    return Term("index", (chunk, constant(number)))


def _replaced(term: Term, old: Term, new: Term) -> Term:
    if term == old:
        return new
    return Term(term.op, tuple(_replaced(a, old, new) for a in term.args), term.value) if term.args else term
