"""What a model's own loop gives its forward at every token, learnt by watching it for two of them.

B rows, n tokens so far.

Most models are given a token, a mask and a position. Others are given more: positions of several kinds, what an
encoder found, states under another name. Their `prepare_inputs_for_generation` is asked twice, for the token after the
prompt and for the one after that, without running the model. What is equal both times stays where it is, what is one
more is advanced on the device; with anything else a step cannot be repeated without the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from .eligibility import Unsupported
from .recurrent_state import argument_of_states

TOKENS = ("input_ids", "decoder_input_ids")
_HOST = (bool, int, float, str, torch.dtype, torch.device, type(None))


class StepInputs:
    """The arguments of every step's forward; tensors keep their addresses from call to call.

    Args:
        model: whose loop is watched.
        outputs: of the prompt.
        input_ids: `[B, n]` the prompt.
        model_kwargs: of the prompt, with its cache.
        cache: that holds the text.

    Raises:
        Unsupported: if the arguments of one token do not follow from those of the token before.
    """

    def __init__(self, model: Any, outputs: Any, input_ids: Tensor, model_kwargs: Mapping[str, Any], cache: Any):
        first, second = _two_steps(model, outputs, input_ids, dict(model_kwargs), cache)
        self.tokens = next((name for name in TOKENS if name in first), "")
        if first.keys() != second.keys() or not self.tokens or first[self.tokens].shape != (len(input_ids), 1):
            raise Unsupported("inputs")
        if not torch.equal(first[self.tokens], input_ids[:, -1:]):  # a pattern of the model's own says what is given
            raise Unsupported("inputs")
        self.cache = next((name for name, value in first.items() if isinstance(value, Cache)), "")
        self._cross: DynamicCache | None = None
        """What the tokens see of an encoder's output, layer by layer."""
        given: Any = first.get(self.cache)
        if isinstance(given, EncoderDecoderCache):
            self._cross = _own(given.cross_attention_cache)
            given = given.self_attention_cache
        states = argument_of_states(model)
        if given is not cache and not states:
            raise Unsupported("cache_unused")
        self.mask = ""
        """The name of a 2D mask over every column; empty if there is none."""
        self.seen: Tensor | None = None
        """What that mask says of the tokens so far, `[B, n]`."""
        self._advanced: list[Tensor] = []
        self.fixed: dict[str, Any] = {}
        """Everything but tokens and mask."""
        for name in sorted(
            first.keys() - {self.tokens, self.cache, states}
        ):  # in the same order in every call: `load`
            if _is_grown_mask(first[name], second[name], cache.length):
                if self.mask:
                    raise Unsupported("inputs")
                self.mask, self.seen = name, first[name][:, :-1]
            else:
                self.fixed[name] = self._kept(first[name], second[name])

    @property
    def key(self) -> Hashable:
        """Two calls with the same key can share a graph."""
        advanced = tuple(any(tensor is one for one in self._advanced) for tensor in _tensors(self.fixed))
        return self.tokens, self.mask, _shape(self.fixed), advanced, tuple(_shape(tensor) for tensor in self._seen())

    def sees(self, mask: Tensor | None) -> bool:
        """Return whether the model's loop gives its forward the mask `[B, n]` of the call, all ones by default."""
        if self.seen is None:
            return True
        return torch.equal(self.seen != 0, torch.ones_like(self.seen, dtype=torch.bool) if mask is None else mask != 0)

    def arguments(self, tokens: Tensor, mask: Tensor, cache: Any) -> dict[str, Any]:
        """Return what a step's forward is called with: the last tokens `[B, 1]`, a mask over all slots, the text."""
        given = {self.tokens: tokens} | ({self.mask: mask} if self.mask else {})
        held = cache if self._cross is None else EncoderDecoderCache(cache, self._cross)
        return {**self.fixed, **given} | ({self.cache: held} if self.cache else {})

    @property
    def heard(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of what an encoder made, which no step writes."""
        layers = [] if self._cross is None else self._cross.layers
        return [(layer.keys, layer.values) for layer in layers if layer.is_initialized]

    def _seen(self) -> list[Tensor]:
        return [tensor for both in self.heard for tensor in both]

    def _kept(self, first: Any, second: Any) -> Any:
        """Return an argument in memory of its own."""
        if isinstance(first, Tensor):
            if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
                raise Unsupported("inputs")
            with torch.inference_mode(False):
                own = torch.empty_like(first, memory_format=torch.contiguous_format)
            own.copy_(first)
            if first is not second and not torch.equal(first, second):
                if first.dtype.is_floating_point or not torch.equal(first + 1, second):
                    raise Unsupported("inputs")
                self._advanced.append(own)
            return own
        if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
            return type(first)(**{name: self._kept(first[name], second[name]) for name in first})
        if isinstance(first, _HOST) and type(first) is type(second) and first == second:
            return first
        raise Unsupported("inputs")

    def load(self, other: StepInputs) -> None:
        """Take over the contents of another call's, whose key is equal."""
        mine, theirs = [*_tensors(self.fixed), *self._seen()], [*_tensors(other.fixed), *other._seen()]
        for tensor, contents in zip(mine, theirs, strict=True):
            tensor.copy_(contents)

    def store(self, given: Any) -> None:
        """Make a cache of transformers' hold copies of what the tokens saw of an encoder's output."""
        if self._cross is not None and self._seen() and not any(given.is_updated.values()):
            given.cross_attention_cache.layers = _own(self._cross).layers
            given.is_updated = dict.fromkeys(range(len(self._cross.layers)), True)

    def advance(self) -> None:
        """Go on to the next token."""
        for tensor in self._advanced:
            tensor.add_(1)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leave everything as it is, however many steps are run inside."""
        copies = [tensor.clone() for tensor in self._advanced]
        try:
            yield
        finally:
            for tensor, before in zip(self._advanced, copies, strict=True):
                tensor.copy_(before)


def _two_steps(
    model: Any, outputs: Any, input_ids: Tensor, kwargs: dict[str, Any], cache: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the model's loop would give its forward for the next two tokens."""
    steps: list[dict[str, Any]] = []
    ids, length = input_ids, cache.length
    try:
        for _ in range(2):
            kwargs = model._update_model_kwargs_for_generation(
                outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder
            )
            ids = torch.cat([ids, ids[:, -1:]], dim=-1)
            steps.append(model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs))
            cache.grow(1)
    finally:
        cache.rewind(length)
    first, second = ({name: value for name, value in step.items() if value is not None} for step in steps)
    return first, second


def _is_grown_mask(first: Any, second: Any, length: int) -> bool:
    """Return whether a mask has a column for every token, and one more a token later."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dim() != 2:
        return False
    grown = first.shape[1] == length + 1 and second.shape[1] == length + 2
    return grown and bool((second[:, -1] == 1).all()) and torch.equal(first, second[:, :-1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)


def _shape(value: Any) -> Hashable:
    """Return what a graph depends on: shapes of tensors, and values of everything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple(sorted((name, _shape(inner)) for name, inner in value.items()))
    return str(value)


def _own(cross: Any) -> DynamicCache:
    """Return a cache like `cross` in memory of its own, which a later call may write."""
    if type(cross) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cross.layers):
        raise Unsupported("cache_kind")
    own = DynamicCache()
    with torch.inference_mode(False):
        for layer in cross.layers:
            own.layers.append(DynamicLayer())
            if not layer.is_initialized:  # no encoder was heard
                continue
            own.layers[-1].lazy_initialization(layer.keys, layer.values)
            own.layers[-1].keys, own.layers[-1].values = layer.keys.clone(), layer.values.clone()
    return own
