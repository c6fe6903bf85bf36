"""Decoder layers get a method for one new token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.term_source import NotWritable, source
from rewrite.analysis.blocks.terms import NoStep
from rewrite.analysis.blocks.windows import stacked_in
from rewrite.analysis.decode.layer_methods import layer_methods
from rewrite.analysis.decode.layer_step import LayerStep, is_decoded, takes_cache
from rewrite.analysis.terms.spelling import Term, make
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.replacement import is_docstring
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform


class DecodeLayers(Transform):
    """Decoder layers compute one new token with few kernels.

    What it does:
        Gives a decoder layer a method `decode`, its attention and its MLP a method `decode_residual`, and its norms a
        method `prologue`. The layer's `forward` calls `decode` while a decode step against a `PreallocatedCache`
        runs. There, a norm is the first stage of the product that reads it, a residual the last of the one that is
        added to it, and query and key norms, rotary embedding and cache write are one kernel. Where keys and values
        are made of latents that the cache holds (DeepSeek's multi-head latent attention), the queries are brought to
        the latents instead, by the same weight as it lies: nothing is expanded. A
        mixer that keeps states gets a `decode_residual` too: its `forward` for one token, with the norm in its first
        products and the residual in its last one.

    Why:
        For one token a layer's time is reading its weights; every further kernel adds a launch and a trip to memory.

    What it needs:
        Attention of the usual form: projections, norms and rotation of queries and keys, cache, attention function,
        output projection; or the same with keys that join a part of one product of a latent with one rotated key of
        all heads, and values that are the rest of that product. Its mask is causal or has the window that the
        attention function is told. torch's `scaled_dot_product_attention` may be called in its place, with the mask
        as it comes or cut to the number of keys. What the file computes for `eager` attention is the softmax of scaled
        products, with soft cap and sinks as passed to it; so is what a `forward` writes out with `matmul` or `einsum`.
        A gate that is projected beside each query, and heads that are scaled by a number, are computed in between.
        What else stands around the attention function stays as the file has it, as statements of `decode_residual`:
        gates and norms before the last projection, norms behind the rotation, normalised values, heads that lie one
        behind the other in one product, other rotations. Nothing but the function may read the keys and values that
        the cache gives back, or the weights of attention. Of a mixer, that its `forward` asks the cache for its
        states, masks nothing but padding, and ends in a product. What a test of attributes adds and no step has a
        form for (a norm for each head, say) is asked before `decode` is taken. Queries may be multiplied by a number,
        which becomes part of the scaling, and hidden states may lose their middle dimension on the way, as OPT's.
        Blocks of another form than `down(act(gate(x)) * up(x))` or `down(act(up(x)))` are called as they stand.

    Numerics:
        Reordered: sums may be taken in another order, and what stays inside a kernel is not rounded.

    Known limits:
        Only in evaluation: dropout is left out. What a layer returns besides hidden states is not
        computed. Latents that are scaled, indexed or gated keep the original's way. Prompts are read by a step's
        functions where they make all of attention, and not beside statements of the file.
    """

    name = "decode_layers"
    summary = "Decoder layers get a method for one new token, with norms and residuals inside the products."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    in_decode_loop = True
    after = (
        "fuse_add_norm", "fuse_experts", "fuse_gate_up", "fuse_gated_activation", "fuse_layer_norm", "fuse_qkv",
        "fuse_rms_norm", "fuse_rope", "native_gqa",
    )  # fmt: skip
    reasons: ClassVar[Mapping[str, str]] = {
        "other_layer": "the layer does something that a step has no form for",
        "other_attention": "attention does something that a step has no form for",
        "other_projection": "queries, keys and values are not three products or one of them in this order",
        "other_heads": "heads are split or normalised in another way",
        "other_rotation": "queries and keys are rotated in another way",
        "not_linear": "a projection is not built as a plain nn.Linear",
        "window_differs": "the mask's window is not surely the one that the attention function is told",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class that another one stacks and whose `forward` takes a cache, or calls a part that does."""
        for info in module.classes.values():
            if "forward" not in info.methods or is_decoded(info):
                continue
            if (stacked_in(info, module) or _is_checkpointed(info)) and takes_cache(info, module):
                yield Candidate(info.node, info.name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Read the layer and its attention, then write the methods."""
        info = module.classes[candidate.where]
        try:
            methods, layer = layer_methods(info, module)
        except NoStep as refusal:
            return Skip(refusal.reason, refusal.detail)
        except NotWritable as error:
            return Skip("other_layer", error.what)
        uses = {use for method in methods for use in method.uses} | {"is_decode_step"}
        edits = [method.edit(module) for method in methods if method.after is not layer.forward]
        own = next(method for method in methods if method.after is layer.forward)
        return Found((*edits, Edit(layer.forward, (_guarded(layer, module), own.node(module)))), tuple(sorted(uses)))


def _is_checkpointed(info: ClassInfo) -> bool:
    """Whether a class says itself that it is a layer."""
    return any(base.endswith("GradientCheckpointingLayer") for base in info.bases)


def _asked(test: Term, module: Module) -> str:
    text = source(test, module)
    return f"({text})" if test.op in ("or", "select") else text


def _guarded(layer: LayerStep, module: Module) -> cst.FunctionDef:
    """Return the layer's `forward` with the way to `decode` before its first statement."""
    block = layer.forward.body
    statements = list(block.body)
    place = 1 if is_docstring(statements[0]) else 0
    returned = layer.returns.format(f"self.decode({', '.join(name or 'None' for name in layer.takes)})")
    asked = (make("not", test) for test in layer.unless)
    tests = [f"is_decode_step({layer.takes[-1]})", *(_asked(test, module) for test in asked)]
    guard = cst.parse_statement(
        f"if {' and '.join(tests)}:\n    return {returned}\n", config=module.tree.config_for_parsing
    )
    first = statements[place]
    if not getattr(first, "leading_lines", ()):
        statements[place] = first.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    new = [*statements[:place], guard, *statements[place:]]
    return layer.forward.with_changes(body=block.with_changes(body=new))
