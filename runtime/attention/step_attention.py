"""Attention of a step by whoever calls torch's: it knows what lay in the cache before, and writes the token itself.

A kernel that starts before those ahead of it have ended may load what none of them writes: in a step all slots of a
layer but one, and everything that an encoder made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..cache.preallocated import PreallocatedCache
from ..cache.token import Write
from ..guards.tensor_version import version_of
from ..lazy.pointwise_fusion import computed_once
from ..lazy.step_products import StepProducts
from .masked_attention import masked_attention
from .padded_heads import padded, unpadded


class StepAttention:
    """What a step runs in place of torch's `scaled_dot_product_attention`.

    Args:
        cache: of the step, which writes one slot of each of its layers.
        others: keys and values that the step does not write, two by two.
    """

    def __init__(self, cache: PreallocatedCache, others: Iterable[tuple[Tensor | None, Tensor | None]] = ()):
        self._position = cache.position
        written = [(layer.keys, layer.values) for layer in cache.attention_layers] if cache.width == 1 else []
        self._written = {keys.data_ptr(): _Held(keys, values) for keys, values in written if keys is not None}
        self._others = {keys.data_ptr(): _Held(keys, values) for keys, values in others if keys is not None}

    def __call__(
        self, step: StepProducts, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any
    ) -> Tensor | None:
        """Attend, and write the token where it has not been written; None where that is not possible."""
        args = tuple(computed_once(step, one) if isinstance(one, Tensor) else one for one in args)
        given = {name: computed_once(step, one) if isinstance(one, Tensor) else one for name, one in given.items()}
        heads, count = unpadded(step, query, key, value)
        if count:
            scale = given.get("scale")
            given["scale"] = query.shape[-1] ** -0.5 if scale is None else scale
            out = self(step, *heads, *args, **given)
            return None if out is None else padded(step, out, count)
        write = step.at(key)
        if not isinstance(write, Write) or step.at(value) is not write:
            for tensor in (query, key, value, *args, *given.values()):
                if isinstance(tensor, Tensor):
                    step.settle(tensor)
            return self.plain(query, key, value, *args, **given)
        for tensor in (query, *write.reads, *args, *given.values()):
            if isinstance(tensor, Tensor):
                step.settle(tensor)
        out = masked_attention(query, key, value, *args, **given, newest=self.newest(key, value), write=write)
        if out is not None:
            step.forget(key, value)
        return out

    def plain(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Tensor | None:
        """Attend as `masked_attention` does."""
        return masked_attention(query, key, value, *args, **given, newest=self.newest(key, value))

    def newest(self, key: Tensor, value: Tensor) -> Tensor | str | None:
        """Return the slot that this step writes, `"none"` where it writes none, None where that is not known."""
        at = key.data_ptr()
        if at in self._written and self._written[at].are(key, value):
            return self._position
        return "none" if at in self._others and self._others[at].are(key, value) else None


class _Held:
    """Keys and values as they lay when the step began."""

    def __init__(self, keys: Tensor, values: Tensor | None):
        self._tensors = (keys, keys if values is None else values)
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def are(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are slots of them, and no function of torch has written there since."""
        same = all(
            held.data_ptr() == given.data_ptr() and held.stride() == given.stride() and held.dtype == given.dtype
            for held, given in zip(self._tensors, (key, value), strict=True)
        )
        return same and self._versions == [version_of(tensor) for tensor in self._tensors]
