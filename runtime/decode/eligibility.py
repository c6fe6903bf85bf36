"""Whether a call of `generate()` can take the graph's loop, and why not."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.generation import GenerationMixin
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..cache import cache_argument, states
from ..cache.fields import is_known, is_whole
from ..core import backend
from ..core.process import is_watched
from ..core.sharded_models import is_local
from ..guards.observers import only_records
from ..guards.provenance import home_of, is_runtime, is_written, plain, stands
from ..sampling.sampling import MOST_DRAFTS, Lookup
from .device_map import is_spread
from .policy import policy_of
from .recurrent_state import are_handed_on, argument_of_states, carries, class_of_states

MOST_DRAFTED_ROWS = 8
"""Rows for which tokens are drafted: of more, a step of several tokens is bound by arithmetic. Not measured."""
MOST_ASSISTED = 5
"""Tokens that another model drafts at a time, at most: each is a step of its own. Not measured."""

_Class = TypeVar("_Class")

_KNOWN_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria, EosTokenCriteria)
_KNOWN_INPUTS = {"attention_mask", "position_ids"}
_GIVEN_TO_ANY = {"use_cache", "logits_to_keep"}
_NOT_FOR_THE_MODEL = {"tokenizer", "assistant_tokenizer", "assistant_model", "inputs_tensor"}
_OWN_INPUTS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_LOOP = {"_prefill"} | {
    name
    for name in inspect.unwrap(GenerationMixin._sample).__code__.co_names
    if name[:2] != "__" and callable(getattr(GenerationMixin, name, None))
} - {*_OWN_INPUTS}  # fmt: skip
"""Methods that the loop here stands for, beside those that say what a step is given."""
_DRAFTS = ("_assisted_decoding", "_get_candidate_generator")
_GROWING = {
    (kind, name): getattr(kind, name) if stands(kind, name) else None
    for kind in (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
    for name in ("update", "get_seq_length", "get_mask_sizes")
}
"""What transformers' growing cache does, for which buffers stand."""
_HOME = GenerationMixin.__module__
_MIXIN = vars(GenerationMixin)
_written: set[tuple[str, Any]] = set()
"""Functions that are transformers' own methods, with their names."""


def recomputes_at_switch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `prepare_inputs_for_generation` that is transformers' but for one thing, and return it.

    It forgets the cache when the text grows beyond the original context, so that keys are computed anew with other
    rotary frequencies. The loop here does not run where frequencies change, and else the keys would be the same.
    """
    method._recomputes_at_switch = True  # type: ignore[attr-defined]
    return method


def within_window(model_class: type[_Class]) -> type[_Class]:
    """Mark a class whose masks have no window, though its cache may keep to one, and return it.

    A buffer keeps every token, so that the loop here does not run where a text grows beyond the window.
    """
    model_class._within_window = True  # type: ignore[attr-defined]
    return model_class


class Unsupported(Exception):
    """A call cannot take the graph's loop; it is taken back before anything was generated."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass
class Call:
    """The arguments of one `_sample`."""

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    synced_gpus: bool
    model_kwargs: dict[str, Any]
    made_cache: bool = False
    """Whether the cache was made here, because transformers leaves that to the model (5.0)."""
    without: Call | None = None
    """The call as it was made, without a cache, where the one it has is not to be seen."""

    @classmethod
    def of_keywords(cls, input_ids: Tensor, keywords: Mapping[str, Any]) -> Call:
        """Return the call of a loop that was given all but the tokens by name."""
        own = ("logits_processor", "stopping_criteria", "generation_config", "streamer", "synced_gpus")
        given = {name: value for name, value in keywords.items() if name not in (*own, *_NOT_FOR_THE_MODEL)}
        processors, criteria, config = (keywords[name] for name in own[:3])
        streamer, synced_gpus = keywords.get("streamer"), keywords.get("synced_gpus", False)
        return cls(input_ids, processors, criteria, config, streamer, synced_gpus, given)

    @property
    def steps(self) -> int:
        """Most tokens that it will generate."""
        limits = [c.max_length for c in self.criteria if isinstance(c, MaxLengthCriteria)]
        return max(1, min(limits) - self.input_ids.shape[1])

    @property
    def ends(self) -> list[Tensor]:
        """The ids that end a row, of every criterion that has some."""
        return [c.eos_token_id.view(-1) for c in self.criteria if isinstance(c, EosTokenCriteria)]

    @property
    def has_stop_strings(self) -> bool:
        """Whether a row may end at a string."""
        return any(isinstance(c, StopStringCriteria) for c in self.criteria)

    @property
    def keeps(self) -> bool:
        """Whether the logits or scores of every step are wanted."""
        wanted = self.config.output_scores or self.config.output_logits
        return bool(self.config.return_dict_in_generate and wanted)

    @functools.cached_property
    def is_unpadded(self) -> bool:
        """Whether every column of the prompt is a token, at its own position; the host waits for that once a call."""
        mask, position_ids = (self.inputs.get(name) for name in ("attention_mask", "position_ids"))
        plain = []
        if mask is not None:
            plain.append((mask == 1).all())
        if position_ids is not None:
            places = torch.arange(self.input_ids.shape[1], device=position_ids.device)
            plain.append((position_ids == places).all())
        return all(map(bool, plain)) if len(plain) < 2 else bool(torch.logical_and(*plain))

    @property
    def ahead(self) -> int:
        """By how many positions the row that is furthest counts more tokens than there are, as the caller may say."""
        position_ids = self.inputs.get("position_ids")
        if position_ids is None or position_ids.dim() != 2 or self.is_unpadded:
            return 0
        return max(0, int(position_ids[:, -1].max()) + 1 - length_of(self.cache) - self.input_ids.shape[1])

    @property
    def inputs(self) -> dict[str, Any]:
        """What goes to the model besides the tokens."""
        given = self.model_kwargs.items()
        return {name: value for name, value in given if value is not None and name not in _NOT_FOR_THE_MODEL}

    @property
    def cache_name(self) -> str:
        """Under which name the model takes its cache."""
        return next(
            (name for name in cache_argument.NAMES if self.inputs.get(name) is not None), cache_argument.passed_on()
        )

    @property
    def cache(self) -> Any:
        """The cache of the text, apart from what the tokens see of an encoder's output."""
        given = self.inputs.get(self.cache_name)
        return given.self_attention_cache if isinstance(given, EncoderDecoderCache) else given

    @property
    def mask(self) -> Tensor | None:
        """The mask of the text, `[B, n]`."""
        encodes = isinstance(self.inputs.get(self.cache_name), EncoderDecoderCache)
        return self.inputs.get("decoder_attention_mask" if encodes else "attention_mask")


def assists(assistant: Any, model: Any, without_graph: bool) -> bool:
    """Return whether the loop here can let `assistant` draft for `model`, whose tokens have to be the same ones."""
    same = assistant is not model and assistant.device == model.device
    vocabularies = {_text_config(one).vocab_size for one in (model, assistant)}
    split = getattr(assistant, "_tp_size", None)
    return (
        same
        and not own_steps(assistant)
        and not split
        and not carries(assistant)
        and len(vocabularies) == 1
        and (_unfit_model(assistant, without_graph) or unfit_modules(assistant)) is None
    )


def lookup_of(model: Any, call: Call, assistant: Any = None) -> Lookup | str:
    """Return how a call drafts tokens, or why the loop here does not, a key of `loop_reasons.REASONS`.

    Args:
        model: of the call.
        call: its arguments.
        assistant: another model with this loop, which drafts where the call does not look tokens up in the text.
    """
    config = call.config
    wanted, ngram = config.prompt_lookup_num_tokens, getattr(config, "max_matching_ngram_size", None) or 2
    if wanted is None and assistant is not None:
        wanted, ngram = min(assistant.generation_config.num_assistant_tokens or MOST_ASSISTED, MOST_ASSISTED), 0
    others = ("assistant_early_exit", "assistant_ensemble_weight", "use_mtp")
    if not wanted or wanted < 0 or ngram < 0 or any(getattr(config, name, None) for name in others):
        return "drafted"
    if call.input_ids.shape[0] > MOST_DRAFTED_ROWS:
        return "drafts_for_rows"
    if carries(model):
        return "drafts_for_states"
    if any(states.is_stateful(layer) for layer in getattr(call.cache, "layers", ())):
        return "drafts_for_states"
    if any(_overrides(model, name) for name in _DRAFTS):
        return "drafted"
    if has_own_inputs(model, call):
        return "drafts_for_inputs"
    if policy_of(model).fewest_tokens > 1:
        return "drafts_for_rounding"
    return Lookup(min(wanted, MOST_DRAFTS), ngram)


def can_watch() -> bool:
    """Return whether transformers is of a release whose loop can be watched: it says how many tokens to give."""
    return "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


def own_steps(model: Any) -> bool:
    """Return whether a model, its class or transformers' has another way from one step's inputs to the next."""
    return any(_overrides(model, name) for name in _OWN_INPUTS)


def has_own_inputs(model: Any, call: Call) -> bool:
    """Return whether a step is given more than tokens, a 2D mask and position ids, or in a way of the model's own."""
    given = {*call.inputs} - {call.cache_name, *_GIVEN_TO_ANY}
    return (
        own_steps(model)
        or call.cache_name != cache_argument.passed_on()
        or not given <= _KNOWN_INPUTS
        or not given <= _named(type(model).forward)  # which hands them on among its keywords
    )


@functools.cache
def _named(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters, which takes too long to ask at each call."""
    return frozenset(inspect.signature(forward).parameters)


def unsupported_reason(
    model: Any, call: Call, without_graph: bool, ranks: Any = None, fits: bool = False
) -> str | None:
    """Return why `call` cannot take the graph's loop, a key of `loop_reasons.REASONS`; None if it can try.

    Args:
        model: a model for generation, whose modules hold this rank's tensors if there are several ranks.
        call: its arguments.
        without_graph: whether a CPU will do.
        ranks: the `Ranks` that share the model; why they cannot go on, a key of `loop_reasons.REASONS`; None for a
            model that is not dealt.
        fits: whether the modules were looked through, as they are now.
    """
    if isinstance(ranks, str):
        return ranks
    if ranks is None and getattr(model, "_tp_size", None):
        return "several_devices"
    if ranks is not None and any(isinstance(criterion, MaxTimeCriteria) for criterion in call.criteria):
        return "clocks"
    reason = _unfit_model(model, without_graph) or (None if fits else unfit_modules(model))
    return reason or _unfit_call(model, call) or _unfit_inputs(model, call)


def _unfit_model(model: Any, without_graph: bool) -> str | None:
    if model.device.type != "cuda" and not without_graph:
        return "cpu"
    if model.training:
        return "training"
    if torch.is_grad_enabled():
        return "gradient"
    if backend.autocasts(model.device.type):
        return "autocast"
    if torch.compiler.is_compiling() or model._compiled_call_impl is not None:
        return "compiled"
    if is_watched():
        return "watched"
    if torch.nn.modules.module._has_any_global_hook():
        return "observed"
    if any(getattr(kind, name) is not written for (kind, name), written in _GROWING.items()):
        return "cache_kind"
    return None


def unfit_modules(model: Any) -> str | None:
    """Return why a model speaks against a graph, as long as it is what it is; None if it does not.

    Its modules are looked through one by one, which takes longer than to compare it with what it was.
    """
    if is_spread(model):
        return "several_devices"
    if not _is_of_mixin("_sample", _MIXIN["_sample"]):  # a class with one of its own calls this one if it wants
        return "own_loop"
    if any(_overrides(model, name) for name in _LOOP) or (not can_watch() and own_steps(model)):
        return "own_loop"
    if _makes_cache(model):
        return "own_loop"
    if argument_of_states(model) and not are_handed_on(model):
        return "states_stay"
    if _text_config(model)._attn_implementation not in ("eager", "sdpa"):
        return "attention_implementation"
    if any(_depends_on_length(module) for module in model.modules()):
        return "rope_depends_on_length"
    return "observed" if any(_watched(module) for module in model.modules()) else None


def _unfit_call(model: Any, call: Call) -> str | None:
    config = call.config
    if config.is_assistant:
        return "assistant"
    if call.synced_gpus:
        return "synced_gpus"
    if config.compile_config is not None:
        return "compile_config"
    if not config.use_cache:
        return "no_cache"
    if config.cache_implementation not in (None, "dynamic"):
        return "cache_implementation"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "outputs"
    if not any(isinstance(criterion, MaxLengthCriteria) for criterion in call.criteria):
        return "no_max_length"
    if call.ends and config._pad_token_tensor is None:
        return "no_pad_token"
    return None


def host_reason(call: Call) -> str | None:
    """Return why the host chooses a call's tokens, a key of `loop_reasons.REASONS`; None where a graph may do so."""
    if any(type(criterion) not in _KNOWN_CRITERIA for criterion in call.criteria):
        return "stopping_criteria"
    if call.has_stop_strings and call.input_ids.shape[0] > 1 and (call.keeps or keeps_cache(call)):
        return "stop_strings"
    return "one_token" if call.steps == 1 else None


def _unfit_inputs(model: Any, call: Call) -> str | None:
    own = has_own_inputs(model, call)
    if (own and not can_watch()) or call.input_ids.dim() != 2 or call.input_ids.shape[1] == 0:
        return "inputs"
    if call.input_ids.device != model.device:
        return "input_device"
    if (reason := _unfit_cache(model, call)) is not None:
        return reason
    past = length_of(call.cache)
    if _is_odd_mask(call, {call.input_ids.shape[1], past + call.input_ids.shape[1]}):
        return "attention_mask"
    position_ids = call.inputs.get("position_ids")
    if not own and position_ids is not None and (position_ids.dim() != 2 or repeats_given_positions(model)):
        return "position_ids"
    return None


def _unfit_cache(model: Any, call: Call) -> str | None:
    cache, batch = call.cache, call.input_ids.shape[0]
    kind = class_of_states(model)
    if argument_of_states(model) and (cache is None or (type(cache) is DynamicCache and not length_of(cache))):
        return None  # nothing is in it
    if kind is not None and isinstance(cache, kind):
        return None  # it goes to the model as it is
    given = call.inputs.get(call.cache_name)
    if type(cache) is not DynamicCache or not is_known(given):
        return "cache_kind"
    if isinstance(given, EncoderDecoderCache) and not knows_both(model):
        return "cache_kind"
    if not cache.layers and carries(model):
        return "cache_kind"  # its first layer would be one that the model does not write
    if any(getattr(layer, "sliding_window", None) == 1 for layer in cache.layers):
        return "cache_kind"  # of nothing: transformers' keeps all (`keys[:, :, -0:]`)
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    lengths = {layer.get_seq_length() for layer in layers}
    held = [tensor for layer in layers if layer.keys is not None for tensor in (layer.keys, layer.values)]
    held += states.tensors(cache.layers)
    rows = {len(tensor) for tensor in held if tensor.numel()}
    if len(lengths - {0}) > 1 or rows - {batch} or not all(map(is_whole, layers)):
        return "cache_contents"
    if any(type(tensor) is not Tensor or tensor.device != model.device for tensor in held):
        return "cache_contents"
    seen = length_of(cache) + call.input_ids.shape[1] + call.steps - 1
    return "window" if seen > unmasked_window(model, cache, seen) else None


def unmasked_window(model: Any, cache: DynamicCache, seen: int = 0) -> float:
    """Return how many tokens a cache may hold until it forgets some that no mask of the model would hide.

    Args:
        model: whose masks hide what its configuration says.
        cache: of the model, or of its caller.
        seen: tokens that no window hides if it is as wide; they are not asked for what the masks do.
    """
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    if not getattr(model, "_within_window", False):
        masked = _masked_windows(model) if any(window and window < seen for window in windows) else windows
        windows = [window for window, hidden in zip_longest(windows, masked) if window != hidden]
    return min((window for window in windows if window is not None), default=math.inf)


def _masked_windows(model: Any) -> list[int | None]:
    """Return the window of each layer that the configuration gives one to."""
    try:
        layers = DynamicCache(config=_text_config(model)).layers
    except AttributeError:  # a model of several stacks has no single number of layers
        return []
    return [getattr(layer, "sliding_window", None) for layer in layers]


def length_of(cache: Any) -> int:
    """Return how many tokens a cache holds, as far as its layers tell; 0 where there is none, or it has no layers."""
    layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, CacheLayerMixin)]
    return max((layer.get_seq_length() for layer in layers), default=0)


def knows_both(model: Any) -> bool:
    """Return whether the file of a model knows caches that also hold what an encoder found."""
    kinds = (kind for kind in type(model.base_model).__mro__ if issubclass(kind, PreTrainedModel))
    return any("EncoderDecoderCache" in vars(sys.modules[kind.__module__]) for kind in kinds)


def keeps_cache(call: Call) -> bool:
    """Return whether the cache outlives the call: because it is returned, or because the caller made it."""
    if call.without is not None:
        return False
    if call.config.return_dict_in_generate:
        return True
    if call.made_cache:
        return False
    cache = call.inputs.get(call.cache_name)
    # Releases before 5.17 do not say whose cache it is.
    says = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names
    return bool(getattr(cache, "_is_user_defined", not says))


def with_cache(model: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with a growing cache where transformers leaves it to the model to make one (release 5.0)."""
    wanted = makes_cache_position(model) and model_kwargs.get("use_cache") and model._supports_default_dynamic_cache()
    if not wanted or model_kwargs.get(cache_argument.passed_on()) is not None:
        return model_kwargs
    return {**model_kwargs, cache_argument.passed_on(): DynamicCache(config=_text_config(model))}


def makes_cache_position(model: Any) -> bool:
    """Return whether transformers is of a release that passes `cache_position` (5.0 to 5.3)."""
    return hasattr(model, "_get_initial_cache_position")


def repeats_given_positions(model: Any) -> bool:
    """Return whether every token gets the last of the positions that `generate()` was given (transformers 5.0, 5.1).

    From 5.2 on it counts them up, and makes them itself where none are given.
    """
    return makes_cache_position(model) and not hasattr(model, "_prepare_position_ids_for_generation")


def _watched(module: nn.Module) -> bool:
    if not backend.observed(module) or is_local(module):
        return False
    return torch.nn.modules.module._has_any_global_hook() or not only_records(module)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _overrides(model: Any, name: str) -> bool:
    """Return whether a method of transformers' loop is another one: the instance's, its class's, the mixin's own."""
    mixin = _MIXIN.get(name)
    if mixin is None:
        return False
    own = vars(model).get(name)
    found = plain(getattr(type(model), name) if own is None else own)
    if (name, mixin) in _written and (name, found) in _written:
        return False
    if not _is_of_mixin(name, mixin):
        return True
    ours = isinstance(found, FunctionType) and is_runtime(home_of(found)) and "__wrapped__" not in vars(found)
    return not (ours or _is_of_mixin(name, found) or getattr(found, "_recomputes_at_switch", False))


def _is_of_mixin(name: str, function: Any) -> bool:
    """Return whether a function is the one that is written in transformers' mixin, or ours around it."""
    if not is_written(function, _HOME, f"{GenerationMixin.__name__}.{name}"):
        return False
    _written.add((name, function))
    return True


def _makes_cache(model: Any) -> bool:
    """Return whether a model makes its cache in a way that is not transformers' with something added."""
    name = "_prepare_cache_for_generation"
    if not _overrides(model, name):
        return False
    used = getattr(inspect.getattr_static(model, name, None), "__code__", None)
    return used is None or name in vars(model) or not {"super", name} <= {*used.co_names}


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _is_odd_mask(call: Call, lengths: set[int]) -> bool:
    """Return whether a mask is not ones behind the padding of each row, over all columns."""
    mask = call.mask
    if mask is None:
        return False
    if mask.dim() != 2 or mask.shape[0] != call.input_ids.shape[0] or mask.shape[1] not in lengths:
        return True
    if mask is call.inputs.get("attention_mask") and call.is_unpadded:
        return False
    visible = mask != 0
    return not bool(visible[:, -1].all() & (visible[:, 1:] >= visible[:, :-1]).all() & (visible == mask).all())
