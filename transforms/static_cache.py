"""Causal language models that generate against a cache of fixed addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.module import ClassInfo, Module, walk
from rewrite.analysis.replacement import name_is_free
from rewrite.analysis.syntax import parameters
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

_OWN_LOOP = ("generate", "_sample", "_prefill", "_prepare_cache_for_generation", "_update_model_kwargs_for_generation")
_OTHER_INPUTS = ("pixel", "image", "video", "audio", "speech", "input_features", "input_values", "codec", "codes")
_OTHER_STATES = (
    "update_conv_state", "update_recurrent_state", "get_linear_cache", "set_linear_cache", "update_indexer",
    "has_previous_state", "get_conv_state", "key_cache", "recurrent_states",
)  # fmt: skip


class StaticCache(Transform):
    """Generation without a growing cache.

    What it does:
        Puts `GraphGeneration` in the place of `GenerationMixin` in the bases of a causal language model. It is a
        `GenerationMixin` whose decode loop keeps keys and values in buffers of fixed size and replays one captured
        step a token.

    Why:
        A cache that grows has another address and another shape at every token: no step can be captured, and each
        concatenation copies the cache.

    What it needs:
        A class that decodes text with nothing but `past_key_values` for state.

    Numerics:
        Exact: `generate` gives the same tokens, and where the loop cannot run, transformers' own does.

    Known limits:
        Encoder-decoder models, models with recurrent or convolutional states, models that take images or sound and
        classes with a generation loop of their own keep `GenerationMixin`.
    """

    name = "static_cache"
    summary = "Generation keeps keys and values in buffers of fixed size and replays a captured step."
    numerics = Numerics.EXACT
    reasons: ClassVar[Mapping[str, str]] = {
        "encoder_decoder": "the model has an encoder, whose keys and values are a second cache",
        "no_kv_cache": "`forward` takes no `past_key_values`",
        "other_state": "the file keeps other states than keys and values in its cache",
        "own_cache": "the file makes a cache of a class of its own",
        "other_inputs": "`forward` takes images or sound beside tokens",
        "own_loop": "the class has a part of the generation loop of its own",
        "name_taken": "the file has a name `GraphGeneration` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class with `GenerationMixin` in its bases."""
        for info in module.classes.values():
            if _mixin(info, module) is not None:
                yield Candidate(info.node, info.name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the base, unless the class needs more than keys and values of one sequence."""
        info = module.classes[candidate.where]
        skip = _skip(info, module)
        if skip is not None:
            return skip
        base = _mixin(info, module)
        if base is None:
            raise TypeError(f"{info.name} has no GenerationMixin")
        return Found((Edit(base, (cst.Name("GraphGeneration"),)),), ("generation.GraphGeneration",))


def _mixin(info: ClassInfo, module: Module) -> cst.BaseExpression | None:
    bases = (base.value for base in info.node.bases)
    return next((base for base in bases if module.qualified(base).endswith(".GenerationMixin")), None)


def _skip(info: ClassInfo, module: Module) -> Skip | None:
    forward = module.method(info, "forward")
    names = parameters(forward) if forward is not None else []
    if any(name in ("decoder_input_ids", "encoder_outputs") for name in names):
        return Skip("encoder_decoder")
    if "past_key_values" not in names:
        return Skip("no_kv_cache")
    other = next((name for name in names if any(part in name for part in _OTHER_INPUTS)), None)
    if other is not None:
        return Skip("other_inputs", other)
    own = next((name for name in _OWN_LOOP if name in info.methods), None)
    if own is not None:
        return Skip("own_loop", own)
    if (cache := _own_cache(module)) is not None:
        return Skip("own_cache", cache)
    attributes = (node.attr.value for node in walk(module.tree) if isinstance(node, cst.Attribute))
    if (state := next((name for name in attributes if name in _OTHER_STATES), None)) is not None:
        return Skip("other_state", state)
    return None if name_is_free("GraphGeneration", module) else Skip("name_taken")


def _own_cache(module: Module) -> str | None:
    """Return the name of a class of this file that is a cache, or a layer of one."""
    for info in module.classes.values():
        if any("cache_utils." in base for base in info.bases):
            return info.name
    return None
