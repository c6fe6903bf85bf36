"""What a caller's cache is after a call, by field, and what can be done with it then: as after the original's loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from hf_rewrite_runtime.cache import states
from hf_rewrite_runtime.cache.cache_argument import passed_on
from hf_rewrite_runtime.cache.layer_factory import has_like
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode.graph_cache import release_graphs
from hf_rewrite_runtime.generate.generation import GraphGeneration

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
WINDOW, V, B, NEW = 12, 97, 2, 6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GEMMA = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **_GEMMA)),
}
if states.LAYER is not None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    _LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    MODELS["lfm2"] = (Lfm2ForCausalLM, Lfm2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, **_LFM2))


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """Return a model with the graph's loop and the original with the same weights; both have answered once."""
    original, config = MODELS[name]
    torch.manual_seed(0)
    theirs = original(copy.deepcopy(config)).eval().to(DEVICE)
    kind = type(original.__name__, (GraphGeneration, original), {"_step_without_graph": not GPU})
    mine = kind(copy.deepcopy(config)).eval().to(DEVICE)
    mine.load_state_dict(theirs.state_dict())
    for batch in (1, B):
        for model in (mine, theirs):
            model.generate(prompt(batch), max_new_tokens=NEW, do_sample=False)
    return mine, theirs


def prompt(batch: int, tokens: int = 9, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, V, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# caches ------------------------------------------------------------------------------------------------------------


class Halved(DynamicLayer):
    """A layer of the caller's, which keeps half of every value."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states * 0.5, *args, **kwargs)


class Window(DynamicSlidingWindowLayer):
    """One that keeps to a window likewise."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states * 0.5, *args, **kwargs)


class Counting(DynamicCache):
    """A cache of the caller's."""

    asked = 0

    def update(self, *args, **kwargs):
        self.asked += 1
        return super().update(*args, **kwargs)


def _recording(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def _halved(config: Any) -> Any:
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = Halved
        elif type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = Window
    return cache


def _one_halved(config: Any) -> Any:
    cache = DynamicCache(config=config)
    number = next(number for number, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer))
    cache.layers[number] = Halved()
    return cache


def _halved_later(config: Any) -> Any:
    cache = DynamicCache()
    cache.layer_class_to_replicate = Halved
    return cache


def _patched_layer(config: Any) -> Any:
    cache = DynamicCache(config=config)
    layer = next(layer for layer in cache.layers if isinstance(layer, DynamicLayer))
    update = layer.update
    layer.update = lambda keys, values, *a, **k: update(keys, values * 0.5, *a, **k)
    return cache


def _patched_cache(config: Any) -> Any:
    cache = DynamicCache(config=config)
    update = cache.update
    cache.update = lambda keys, values, *a, **k: update(keys, values * 0.5, *a, **k)
    return cache


def _narrow(config: Any) -> Any:
    """Its layers forget more than the model's masks hide."""
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(5) for _ in range(config.num_hidden_layers)]
    cache.layer_class_to_replicate = None
    return cache


def _early(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.early_initialization(B, config.num_key_value_heads, 8, torch.float32, DEVICE)
    return cache


def _marked(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.note = "mine"
    return cache


def _fp16(config: Any) -> Any:
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            shape = B, config.num_key_value_heads, 4, 8
            layer.update(*torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).half().to(DEVICE))
    return cache


def _other_heads(config: Any) -> Any:
    """Another model's."""
    cache = DynamicCache()
    for number in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, B, 1, 4, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE), number)
    return cache


def _one_empty(config: Any) -> Any:
    """The second of its layers has forgotten what the others know."""
    cache = DynamicCache()
    for number in (0, 2):
        cache.update(*torch.randn(2, B, 2, 4, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE), number)
    return cache


def _both(*kinds: Any) -> Any:
    return lambda config: EncoderDecoderCache(*(kind(config=config) for kind in kinds))


CACHES: dict[str, Any] = {
    "none": lambda config: None,
    "plain": lambda config: DynamicCache(),
    "DynamicCache": lambda config: DynamicCache(config=config),
    "recording": _recording,
    "marked": _marked,
    "early": _early,
    "narrow": _narrow,
    "fp16": _fp16,
    "other heads": _other_heads,
    "one layer empty": _one_empty,
    "layers of the caller's": _halved,
    "a layer of the caller's": _one_halved,
    "layers of the caller's later": _halved_later,
    "a layer patched": _patched_layer,
    "patched": _patched_cache,
    "of the caller's": lambda config: Counting(config=config),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=64),
    "EncoderDecoderCache": _both(DynamicCache, DynamicCache),
}
if hasattr(cache_utils, "MtpCache"):
    CACHES["MtpCache"] = lambda config: cache_utils.MtpCache(config=config)
    CACHES["DFlashCache"] = lambda config: cache_utils.DFlashCache(config=config)
if "fp8" in (cache_utils.QuantizedCache.__doc__ or ""):
    CACHES["QuantizedCache"] = lambda config: cache_utils.QuantizedCache("fp8", config)
if GPU:
    CACHES["offloaded"] = lambda config: DynamicCache(config=config, offloading=True)


# what is done with them --------------------------------------------------------------------------------------------


def _pickled(cache: Any) -> Any:
    written = io.BytesIO()
    torch.save(cache, written)
    written.seek(0)
    return torch.load(written, weights_only=False)


def _each(what: Any) -> Any:
    def done(cache: Any) -> Any:
        what(cache)
        return cache

    return done


def _forget_recording(cache: Any) -> None:
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


CHANGES: dict[str, Any] = {
    "nothing": _each(lambda cache: None),
    "crop": _each(lambda cache: cache.crop(-3)),
    "crop nothing": _each(lambda cache: cache.crop(0)),
    "repeat": _each(lambda cache: cache.batch_repeat_interleave(2)),
    "select": _each(lambda cache: cache.batch_select_indices(torch.tensor([1, 1], device=DEVICE))),
    "reorder": _each(lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))),
    "reset": _each(lambda cache: cache.reset()),
    "record": _each(lambda cache: cache.activate_past_recording()),
    "record no more": _each(_forget_recording),
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
}
TURNS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


# comparison ---------------------------------------------------------------------------------------------------------


def differ(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the fields in which two values differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        form = (one.shape, one.dtype, one.device, one.requires_grad)
        if form != (other.shape, other.dtype, other.device, other.requires_grad):
            return [f"{path}: {tuple(one.shape)} {one.dtype}, not {tuple(other.shape)} {other.dtype}"]
        close = torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-3, equal_nan=True)
        return [] if close else [f"{path}: by {(one.float() - other.float()).abs().max()}"]
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__}, not {type(other).__name__}"]
    if isinstance(one, Mapping):
        names = [*dict.fromkeys([*one, *other])]
        return [f for name in names for f in differ(one.get(name, ...), other.get(name, ...), f"{path}.{name}")]
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{path}: {len(one)}, not {len(other)}"]
        return found + [
            f for n, both in enumerate(zip(one, other, strict=False)) for f in differ(*both, f"{path}[{n}]")
        ]
    if isinstance(one, (Cache, cache_utils.CacheLayerMixin, *_OTHER_LAYERS)):
        said = (
            [f"{path} says {one.get_seq_length()}, not {other.get_seq_length()}"]
            if _lengths_differ(one, other)
            else []
        )
        return said + differ(vars(one), vars(other), path)
    if callable(one) or isinstance(one, torch.Stream):
        return []
    return [] if one == other else [f"{path}: {one}, not {other}"]


_OTHER_LAYERS = tuple(
    vars(cache_utils)[name] for name in ("DummyLayer", "LinearAttentionLayer") if name in vars(cache_utils)
)


def _lengths_differ(one: Any, other: Any) -> bool:
    lengths = []
    for side in (one, other):
        try:
            lengths.append(int(side.get_seq_length()))
        except (AttributeError, ValueError, AssertionError):
            lengths.append(-1)
    return lengths[0] != lengths[1]


def turn(model: Any, cache: Any, ids: torch.Tensor, **settings: Any) -> Any:
    torch.manual_seed(5)
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, **settings}
    output = model.generate(ids, **{passed_on(): cache}, **settings)
    used = cache if cache is not None else output[passed_on()]
    return {"sequences": output.sequences, "scores": output.scores if settings.get("num_beams") is None else ()}, used


def told(
    model: Any, make: Any, changes: Sequence[str], first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[Any]:
    """Return what two turns give, and the cache after each thing that was done, or what was raised."""
    found: list[Any] = []
    looks_up = "prompt_lookup_num_tokens" in {**first, **second}
    try:
        ids = prompt(1 if looks_up else B)  # the original takes no more
        cache = make(model.config.get_text_config(decoder=True))
        output, cache = turn(model, cache, ids, **first)
        found += [output, copy.deepcopy(cache)]
        for change in changes:
            cache = CHANGES[change](cache)
            found.append(copy.deepcopy(cache))
        rows = 1 if looks_up else 2 * B if "repeat" in changes else B
        past = int(cache.get_seq_length())
        ids = torch.cat([output["sequences"][:1, :past].expand(rows, -1), prompt(rows, 3, seed=7)], 1)
        output, cache = turn(model, cache, ids, **second)
        found += [output, cache]
    except Exception as error:
        found.append(type(error).__name__)
    return found


def judged(name: str, make: Any, changes: Sequence[str], first: str = "greedy", second: str = "greedy") -> list[str]:
    """Return where the two sides differ."""
    mine, theirs = (told(model, make, changes, TURNS[first], TURNS[second]) for model in pair(name))
    return [f"{first}, {changes}, {second}: {where}" for where in differ(mine, theirs)]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_is_what_the_original_leaves(name, kind):
    found: list[str] = []
    for change in CHANGES:
        found += judged(name, CACHES[kind], [change])
    for second in ("drawn", "beams"):
        found += judged(name, CACHES[kind], [], second=second)
    for first in ("drawn", "beams", "looked up"):
        found += judged(name, CACHES[kind], ["crop"], first=first)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", ["plain", "DynamicCache", "recording"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_is_looked_up_goes_on_with_a_cache(name, kind):
    """transformers' own would read the whole text once more behind a cache that is continued."""
    found = []
    for model, second in zip(pair(name), ("looked up", "greedy"), strict=True):
        cache = CACHES[kind](model.config)
        output, cache = turn(model, cache, prompt(1), **TURNS["looked up"])
        ids = torch.cat([output["sequences"], prompt(1, 3, seed=7)], 1)
        found.append(turn(model, cache, ids, **TURNS[second])[0])
    assert not differ(*found)


TAKEN = {"none", "plain", "DynamicCache", "recording", "early"}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_the_loop_takes_what_it_knows(name, kind):
    """Both turns of a cache that holds nothing else; neither of another."""
    model = pair(name)[0]
    known = kind in (TAKEN - {"plain", "recording"} if name == "lfm2" else TAKEN)
    try:
        cache = CACHES[kind](model.config)
        backend.reset_fallbacks()
        output, cache = turn(model, cache, prompt(B), **TURNS["greedy"])
        turn(model, cache, torch.cat([output["sequences"], prompt(B, 3, seed=7)], 1), **TURNS["greedy"])
    except (AttributeError, IndexError, RuntimeError, ValueError):  # in the original too
        assert not known
        return
    reasons = {reason for (operator, reason), _ in backend.fallbacks().items() if operator == "generate"}
    if known:
        assert not reasons
    else:
        assert reasons <= {"cache_kind", "cache_contents", "window"}
        assert reasons or kind == "narrow"


def test_every_class_of_transformers_is_among_them():
    """Those of caches above; a layer is one of a known class, or its cache is refused."""
    kinds = [kind for kind in vars(cache_utils).values() if isinstance(kind, type) and issubclass(kind, Cache)]
    assert {kind.__name__ for kind in kinds} - {"Cache"} <= set(CACHES)
    bases = (cache_utils.CacheLayerMixin, *_OTHER_LAYERS)
    layers = {kind for kind in vars(cache_utils).values() if isinstance(kind, type) and issubclass(kind, bases)}
    assert {kind.__name__ for kind in layers if not inspect.isabstract(kind) and has_like(kind)} <= {
        "DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer", "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
    }  # fmt: skip


@pytest.mark.parametrize("method", ["update", "crop", "get_mask_sizes"])
@pytest.mark.parametrize("kind", [DynamicCache, DynamicLayer, cache_utils.CacheLayerMixin, Cache])
def test_a_method_that_somebody_replaced_is_the_caller_s(kind, method, monkeypatch):
    before = vars(kind).get(method)
    if before is None:
        pytest.skip("it has none")
    model, _ = pair("llama")
    monkeypatch.setattr(kind, method, lambda *a, **k: before(*a, **k))
    backend.reset_fallbacks()
    model.generate(prompt(B), max_new_tokens=NEW, do_sample=False)
    assert backend.fallbacks() == {("generate", "cache_kind"): 1}


@pytest.mark.parametrize("kind", ["plain", "other heads", "one layer empty", "narrow", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_does_not_fit_leaves_the_next_call_alone(name, kind):
    """The first call of a model makes a graph of the layers that it is given."""
    model, original = pair(name)
    release_graphs(model)
    for one in (model, original):
        with contextlib.suppress(AttributeError, IndexError, RuntimeError, ValueError):
            turn(one, CACHES[kind](one.config), prompt(B), **TURNS["greedy"])
    backend.reset_fallbacks()
    mine, theirs = (turn(one, None, prompt(B), **TURNS["greedy"]) for one in (model, original))
    assert not differ(mine, theirs)
    assert not backend.fallbacks()
