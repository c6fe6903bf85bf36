"""Decoder layers hand norms and residuals to their blocks, which compute one new token with few kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.term_source import NotWritable, source
from rewrite.analysis.blocks.terms import NoStep
from rewrite.analysis.blocks.windows import stacked_in
from rewrite.analysis.decode.layer_methods import is_decoded, layer_methods
from rewrite.analysis.decode.layer_step import LayerStep, takes_cache
from rewrite.analysis.terms.spelling import Term, make
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.replacement import is_docstring
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform


class DecodeLayers(Transform):
    """Decoder layers compute one new token with few kernels.

    What it does:
        Edits `forward` in place. Attention and MLP take a norm and a residual by keyword, and the layer hands them on
        (`residual_block`): in a decode step a norm is the first stage of the product that reads it, and a residual the
        last of the one that is added to it. Queries, keys and values come of `qkv_rope_cache`: projections, their
        norms, the file's rotation and the cache are one kernel or two in a step. The attention function is told of
        the cache (`cached_attention`), of which it reads the valid slots in a step. Everywhere else these operators
        are the modules and functions that stood there, in their order.

        What cannot be written so has a second method for one token, `decode_residual`, which the layer's `decode`
        calls: latents that the cache holds (DeepSeek's multi-head latent attention), to which the queries are brought
        by the same weight as it lies; mixers that keep states; scores that are written out; layers in which several
        blocks read one norm or are summed; tests of attributes for which a step has no form.

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
        What else stands around the attention function stays as the file has it:
        gates and norms before the last projection, norms behind the rotation, normalised values, heads that lie one
        behind the other in one product, other rotations. Nothing but the function may read the keys and values that
        the cache gives back, or the weights of attention. Of a mixer, that its `forward` asks the cache for its
        states, masks nothing but padding, and ends in a product. What a test of attributes adds and no step has a
        form for (a norm for each head, say) is asked before a method `decode` is taken. Queries may be multiplied by a
        number, which becomes part of the scaling, and hidden states may lose their middle dimension, as OPT's.
        Blocks of another form than `down(act(gate(x)) * up(x))` or `down(act(up(x)))` are called as they stand.

    Numerics:
        Reordered: sums may be taken in another order, and what stays inside a kernel is not rounded.

    Known limits:
        Second methods are for evaluation: dropout is left out, and what a layer returns besides hidden states is not
        computed. Latents that are scaled, indexed or gated keep the original's way.
    """

    name = "decode_layers"
    summary = "Decoder layers hand norms and residuals on to their products; rotation and cache are one kernel."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    in_decode_loop = True
    after = (
        "fuse_experts", "fuse_gate_up", "fuse_gated_activation", "fuse_layer_norm", "fuse_qkv",
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
            if "forward" not in info.methods or is_decoded(info, module):
                continue
            if (stacked_in(info, module) or _is_checkpointed(info)) and takes_cache(info, module):
                yield Candidate(info.node, info.name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Read the layer and its attention, then write the methods."""
        info = module.classes[candidate.where]
        try:
            made = layer_methods(info, module)
        except NoStep as refusal:
            return Skip(refusal.reason, refusal.detail)
        except NotWritable as error:
            return Skip("other_layer", error.what)
        uses = {use for method in made.methods for use in method.uses}
        uses |= {use for block in made.blocks for use in block.uses}
        edits = [Edit(block.before, (block.after,)) for block in made.blocks]
        if made.in_place:
            return Found(tuple(edits), tuple(sorted(uses)))
        forward = made.layer.forward
        edits += [method.edit(module) for method in made.methods if method.after is not forward]
        own = next(method for method in made.methods if method.after is forward)
        edits.append(Edit(forward, (_guarded(made.layer, module), own.node(module))))
        return Found(tuple(edits), tuple(sorted(uses | {"is_decode_step"})))


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
