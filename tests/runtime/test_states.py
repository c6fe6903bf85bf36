"""States beside keys and values, and what a model's own loop gives a step: each by itself, without a model."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from hf_rewrite_runtime.cache import states
from hf_rewrite_runtime.cache.layer_factory import HybridLayer, StateLayer
from hf_rewrite_runtime.cache.layers import INDEXED, CacheFull, GrowsInStep, IndexedLayer, PreallocatedLayer
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache, preallocated_like
from hf_rewrite_runtime.decode import eligibility
from hf_rewrite_runtime.decode.eligibility import Unsupported
from hf_rewrite_runtime.decode.recorded_inputs import StepInputs

if states.LAYER is None or not eligibility.can_watch():
    pytest.skip("this transformers has no layers of states, or a loop that cannot be watched", allow_module_level=True)

from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

B, WIDTH, WINDOW, CAPACITY = 2, 5, 3, 8


def growing() -> DynamicCache:
    """A growing cache with keys and values, states, and both."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), LinearAttentionLayer(number_of_states=2), LinearAttentionAndFullAttentionLayer()]
    return cache


def fixed(capacity: int = CAPACITY) -> PreallocatedCache:
    cache = preallocated_like(growing(), B, capacity, "cpu")
    assert cache is not None
    return cache


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def fed(cache, tokens: int):
    """Give a cache's layers what a forward would; returns what they give back."""
    found = []
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            found += layer.update(drawn(B, 2, tokens, 4), drawn(B, 2, tokens, 4))
        if states.is_stateful(layer):
            for index in range(layer.number_of_states):
                found.append(
                    layer.update_conv_state(drawn(B, WIDTH, tokens), state_idx=index, conv_kernel_size=WINDOW)
                )
                found.append(layer.update_recurrent_state(drawn(B, 3, 4), state_idx=index))
    return found


def contents(cache) -> list[torch.Tensor]:
    held = [t for layer in cache.layers if hasattr(layer, "keys") for t in (layer.keys, layer.values)]
    return [tensor.clone() for tensor in (*held, *states.tensors(cache.layers))]


def flags(cache) -> list[dict[int, bool]]:
    return [dict(layer.has_previous_state) for layer in cache.layers if states.is_stateful(layer)]


def alike(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(mine, wanted)


def fed_alike(feed, *caches) -> None:
    """Feed caches the same random numbers; what they give back has to be the same."""
    seed = torch.seed()
    results = []
    for cache in caches:
        torch.manual_seed(seed)
        results.append(feed(cache))
    alike(*results)


def both(*tokens: int):
    """Both kinds of cache, fed the same."""
    mine, theirs = fixed(), growing()
    for count in tokens:
        fed_alike(lambda cache: fed(cache, count), mine, theirs)  # noqa: B023
    return mine, theirs


def test_every_kind_of_layer_has_its_like():
    cache = fixed()
    assert [type(layer) for layer in cache.layers] == [PreallocatedLayer, StateLayer, HybridLayer]
    assert cache.attention_layers == [cache.layers[0], cache.layers[2]]
    assert cache.stateful_layers == cache.layers[1:]
    assert preallocated_like(DynamicCache(), B, CAPACITY, "cpu") is None


@pytest.mark.parametrize("tokens", [(5,), (1,), (4, 1, 1), (2, 3)])
def test_updates_give_what_a_growing_cache_gives_and_hold_the_same(tokens):
    mine, theirs = both(*tokens)
    assert mine.length == theirs.get_seq_length() == sum(tokens)
    stored = growing()
    mine.store(stored, sum(tokens))
    alike(contents(stored), contents(theirs))
    assert flags(mine) == flags(theirs)


def test_what_is_stored_and_loaded_is_memory_of_its_own():
    mine, theirs = both(4, 1)
    stored = growing()
    mine.store(stored, 5)
    before = contents(stored)
    fed(mine, 1)
    alike(contents(stored), before)
    again = fixed()
    again.load(theirs)
    kept = contents(theirs)
    fed_alike(lambda cache: fed(cache, 1), again, copy.deepcopy(theirs))
    alike(contents(theirs), kept)
    assert again.length == 6


def test_a_cleared_cache_is_a_new_one_at_the_same_addresses():
    mine, _ = both(5, 1)
    addresses = [tensor.data_ptr() for tensor in (*mine.buffers, *states.tensors(mine.layers))]
    assert mine.is_initialized
    mine.clear()
    assert mine.length == 0
    assert not mine.is_initialized, "models ask whether a prompt is the first that a cache sees"
    assert not any(any(one.values()) for one in flags(mine))
    assert not any(tensor.any() for tensor in contents(mine))
    fed_alike(lambda cache: fed(cache, 2), mine, fixed())
    assert [tensor.data_ptr() for tensor in (*mine.buffers, *states.tensors(mine.layers))] == addresses


def test_a_larger_cache_takes_everything_over():
    mine, _ = both(5, 1)
    mine.position.fill_(6)
    larger = fixed(4 * CAPACITY)
    larger.copy_from(mine)
    assert (larger.length, int(larger.position)) == (6, 6)
    assert flags(larger) == flags(mine)
    alike(states.tensors(larger.layers), states.tensors(mine.layers))
    alike([b[:, :, :6] for b in larger.buffers], [b[:, :, :6] for b in mine.buffers])
    assert not {t.data_ptr() for t in states.tensors(larger.layers)} & {
        t.data_ptr() for t in states.tensors(mine.layers)
    }


def test_states_are_put_back_after_a_trial():
    mine, _ = both(4)
    before = [tensor.clone() for tensor in states.tensors(mine.layers)]
    with mine.step(), mine.states_held():
        mine.position.fill_(4)
        fed(mine, 1)
        assert not torch.equal(states.tensors(mine.layers)[0], before[0])
    alike(states.tensors(mine.layers), before)


def test_a_step_writes_keys_where_the_position_says_and_leaves_lengths_alone():
    mine, _ = both(4)
    mine.position.fill_(6)
    with mine.step():
        keys, *_ = fed(mine, 1)
        assert keys.shape[2] == CAPACITY
        assert mine.layers[2].is_compileable
    assert mine.length == 4
    assert keys[:, :, 6].any()
    assert not keys[:, :, 4:6].any()
    assert not keys[:, :, 7:].any()


def test_states_made_in_inference_mode_can_be_written_outside():
    mine = fixed()
    with torch.inference_mode():
        fed(mine, 4)
    fed(mine, 1)
    mine.clear()
    assert not any(tensor.is_inference() for tensor in (*mine.buffers, *states.tensors(mine.layers)))


def test_memory_is_counted_and_given_back():
    mine, _ = both(4)
    per_state = B * WIDTH * WINDOW + B * 3 * 4
    assert mine.nbytes == 4 * (3 * per_state + 4 * B * 2 * CAPACITY * 4)
    assert mine.is_written
    mine.free()
    assert (mine.nbytes, mine.is_written) == (0, False)
    fed(mine, 2)
    assert mine.length == 2


def test_a_layer_that_nothing_here_can_stand_for_has_no_like():
    class Other(LinearAttentionLayer):
        pass

    cache = growing()
    cache.layers.append(Other())
    assert preallocated_like(cache, B, CAPACITY, "cpu") is None


def test_a_cache_without_layers_gets_those_that_were_written():
    layers = [LinearAttentionLayer(), DynamicLayer(), LinearAttentionLayer(), DynamicLayer()]
    mine = PreallocatedCache(len(layers), B, CAPACITY, "cpu", layers)
    mine.update(drawn(B, 2, 5, 4), drawn(B, 2, 5, 4), 1)
    stored = DynamicCache()
    mine.store(stored, 4)
    assert [type(layer) for layer in stored.layers] == [DynamicLayer, DynamicLayer]
    assert stored.layers[0].keys is None
    assert torch.equal(stored.layers[1].keys, mine.layers[1].keys[:, :, :4])


indexed = pytest.mark.skipif(INDEXED is None, reason="this transformers has no layers with an indexer's keys")


def chosen(cache, layer: int, tokens: int, keyed: bool = True):
    """Feed a layer with an indexer, whose keys come first where the layer has no others."""
    found = []
    if keyed:
        found += cache.update(drawn(B, 1, tokens, 4), drawn(B, 1, tokens, 2), layer)
    return [*found, cache.update_indexer(drawn(B, tokens, 3), layer)]


def growing_indexed() -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [INDEXED(), INDEXED(), DynamicLayer()]
    return cache


def both_indexed(*tokens: int):
    """Both kinds of cache, fed the same; the second layer reads the keys of the first, and has an indexer's alone."""
    mine, theirs = preallocated_like(growing_indexed(), B, CAPACITY, "cpu"), growing_indexed()
    assert mine is not None

    def feed(cache, count):
        found = chosen(cache, 0, count) + chosen(cache, 1, count, keyed=False)
        return [*found, *cache.update(drawn(B, 2, count, 4), drawn(B, 2, count, 4), 2)]

    for count in tokens:
        fed_alike(lambda cache: feed(cache, count), mine, theirs)  # noqa: B023
    return mine, theirs


def keys_of(cache) -> list[torch.Tensor]:
    return [layer.indexer_keys for layer in cache.layers[:2]]


@indexed
@pytest.mark.parametrize("tokens", [(5,), (1,), (4, 1, 1), (2, 3)])
def test_an_indexer_s_keys_are_given_and_held_as_in_a_growing_cache(tokens):
    mine, theirs = both_indexed(*tokens)
    assert [type(layer) for layer in mine.layers] == [IndexedLayer, IndexedLayer, PreallocatedLayer]
    stored = growing_indexed()
    mine.store(stored, sum(tokens))
    alike(keys_of(stored), keys_of(theirs))
    assert torch.equal(stored.layers[0].values, theirs.layers[0].values)
    assert stored.layers[1].keys is None
    assert not {t.data_ptr() for t in keys_of(stored)} & {t.data_ptr() for t in keys_of(mine)}
    again = preallocated_like(growing_indexed(), B, CAPACITY, "cpu")
    again.load(stored)
    fed_alike(lambda cache: chosen(cache, 1, 1, keyed=False), again, theirs)


@indexed
def test_an_indexer_s_keys_are_written_where_the_position_says():
    mine, _ = both_indexed(4)
    mine.position.fill_(6)
    with mine.step():
        keys = chosen(mine, 0, 1)[-1]
    assert keys.shape == (B, CAPACITY, 3)
    assert keys.data_ptr() == mine.layers[0].indexer_keys.data_ptr()
    assert keys[:, 6].any()
    assert not keys[:, 4:6].any()
    assert not keys[:, 7:].any()
    mine.position.fill_(4)
    with mine.step(width=2):
        assert chosen(mine, 0, 2)[-1][:, 4:6].any()
    assert mine.layers[0].indexer_length == 4


@indexed
def test_an_indexer_s_keys_are_reordered_cropped_cleared_taken_over_and_counted():
    mine, theirs = both_indexed(5)
    rows = torch.tensor([1, 1])
    for cache in (mine, theirs):
        cache.layers[0].reorder_cache(rows)
    alike([mine.layers[0].indexer_keys[:, :5]], [theirs.layers[0].indexer_keys])
    alike([mine.layers[0].keys[:, :, :5]], [theirs.layers[0].keys])
    for cache in (mine, theirs):
        cache.layers[0].crop(-2)
    fed_alike(lambda cache: chosen(cache, 0, 1), mine, theirs)
    larger = preallocated_like(growing_indexed(), B, 4 * CAPACITY, "cpu")
    mine.rewind(4)
    larger.copy_from(mine)
    alike([keys[:, :4] for keys in keys_of(larger)], [keys[:, :4] for keys in keys_of(mine)])
    assert larger.layers[1].indexer_length == 4
    mine.layers[0].spoil(4, 7.0)
    assert bool((mine.layers[0].indexer_keys[:, 4:] == 7).all())
    address = mine.layers[1].indexer_keys.data_ptr()
    mine.clear()
    assert not any(keys.any() for keys in keys_of(mine))
    assert chosen(mine, 1, 2, keyed=False)[0].shape == (B, 2, 3)
    assert mine.layers[1].indexer_keys.data_ptr() == address
    with pytest.raises(CacheFull):
        chosen(mine, 1, CAPACITY, keyed=False)
    assert mine.nbytes == 4 * B * CAPACITY * (4 + 2 + 3 + 3 + 2 * 4 + 2 * 4)
    mine.free()
    assert (mine.nbytes, mine.layers[1].indexer_length) == (0, 0)


def positioned(cache, tokens: int) -> torch.Tensor:
    """Grow the positions of the first layer by some tokens, as Qwen4Exp does; returns all of them, `[3, B, n]`."""
    layer, new = cache.layers[0], drawn(3, B, tokens)
    held = layer.indexer_position_ids
    layer.indexer_position_ids = new if held is None else torch.cat([held, new], dim=-1)
    return layer.indexer_position_ids


@pytest.mark.skipif(
    INDEXED is None or not hasattr(INDEXED(), "indexer_position_ids"), reason="layers keep no positions before 5.24"
)
def test_an_indexer_s_positions_are_held_as_in_a_growing_cache_and_a_step_has_none():
    mine, theirs = both_indexed(5)
    rows = torch.tensor([1, 0])
    fed_alike(lambda cache: positioned(cache, 5), mine, theirs)
    for cache in (mine, theirs):
        cache.layers[0].reorder_cache(rows)
        cache.layers[0].crop(-2)
    kept = theirs.layers[0].indexer_position_ids
    assert kept.shape == (3, B, 3)
    assert torch.equal(mine.layers[0].indexer_position_ids, kept)
    stored, larger = growing_indexed(), preallocated_like(growing_indexed(), B, 4 * CAPACITY, "cpu")
    mine.store(stored, 3)
    again = preallocated_like(growing_indexed(), B, CAPACITY, "cpu")
    again.load(stored)
    mine.rewind(3)
    larger.copy_from(mine)
    for cache in (stored, again, larger):
        assert torch.equal(cache.layers[0].indexer_position_ids, kept)
        assert cache.layers[0].indexer_position_ids.data_ptr() != mine.layers[0].indexer_position_ids.data_ptr()
        assert cache.layers[1].indexer_position_ids is None
    mine.rewind(2)
    mine.grow(1)  # as behind a plain step
    assert torch.equal(mine.layers[0].indexer_position_ids, kept)
    with mine.step(), pytest.raises(GrowsInStep, match="indexer_position_ids"):
        positioned(mine, 1)
    assert torch.equal(mine.layers[0].indexer_position_ids, kept)
    mine.clear()
    larger.free()
    again.load(growing_indexed())
    assert [cache.layers[0].indexer_position_ids for cache in (mine, larger, again)] == [None] * 3


@indexed
def test_an_indexer_s_keys_made_in_inference_mode_can_be_written_outside():
    mine = preallocated_like(growing_indexed(), B, CAPACITY, "cpu")
    with torch.inference_mode():
        chosen(mine, 1, 4, keyed=False)
    chosen(mine, 1, 1, keyed=False)
    assert not mine.layers[1].indexer_keys.is_inference()


class Loop:
    """A model as far as its loop goes: `given(n)` is what a step's forward gets at length n."""

    def __init__(self, given, encodes: bool = False):
        self.given, self.config = given, SimpleNamespace(is_encoder_decoder=encodes)

    def _update_model_kwargs_for_generation(self, outputs, kwargs, is_encoder_decoder):
        assert is_encoder_decoder == self.config.is_encoder_decoder
        return kwargs

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length, **kwargs):
        assert next_sequence_length == 1
        return {"input_ids": input_ids[:, -1:], **kwargs, **self.given(input_ids.shape[1])}


LENGTH = 5
IDS = torch.arange(B * LENGTH).view(B, LENGTH)


def read(length: int = LENGTH) -> PreallocatedCache:
    cache = fixed(16)
    fed(cache, length)
    return cache


def watched(given, cache=None, held=None, encodes: bool = False) -> StepInputs:
    cache = read() if cache is None else cache
    return StepInputs(Loop(given, encodes), None, IDS, {"past_key_values": cache if held is None else held}, cache)


def mask(length: int) -> torch.Tensor:
    found = torch.ones(B, length, dtype=torch.long)
    found[0, :2] = 0
    return found


def test_what_is_constant_is_kept_and_what_is_one_more_is_advanced():
    constant = drawn(B, 3)
    cache = read()
    inputs = watched(
        lambda n: {
            "position_ids": torch.full((3, B, 1), n - 1),
            "encoder": constant,
            "attention_mask": mask(n),
            "nested": {"a": torch.tensor([n]), "b": constant},
            "use_cache": True,
            "nothing": None,
        },
        cache,
    )
    assert cache.length == LENGTH, "watching leaves the cache as it is"
    assert inputs.mask == "attention_mask"
    tokens, slots = IDS[:, :1], torch.ones(B, 16)
    for step in range(3):
        given = inputs.arguments(tokens, slots, cache)
        assert given.keys() == {"input_ids", "past_key_values", "attention_mask", "position_ids", "encoder", "nested",
                                "use_cache"}  # fmt: skip
        assert given["input_ids"] is tokens
        assert given["attention_mask"] is slots
        assert given["past_key_values"] is cache
        assert torch.equal(given["position_ids"], torch.full((3, B, 1), LENGTH + step))
        assert int(given["nested"]["a"]) == LENGTH + 1 + step
        assert torch.equal(given["encoder"], constant)
        with inputs.held():
            inputs.advance()
        inputs.advance()
    constant.zero_()
    assert given["encoder"].any(), "a later call may write what it gave before"


def test_arguments_of_one_shape_are_told_apart_by_name_and_by_whether_they_advance():
    moving, still = (lambda n: {"b": torch.tensor([n]), "a": torch.tensor([7])}), torch.tensor([7])
    first, again = watched(moving), watched(lambda n: {"a": torch.tensor([8]), "b": torch.tensor([n + 3])})
    assert first.key == again.key
    first.load(again)
    assert {name: int(first.fixed[name]) for name in "ab"} == {"a": 8, "b": LENGTH + 4}
    assert watched(lambda n: {"b": still, "a": torch.tensor([n])}).key != first.key


@pytest.mark.parametrize(
    "given",
    [
        lambda n: {"x": torch.arange(n).expand(B, n)},
        lambda n: {"x": torch.tensor([float(n)])},
        lambda n: {"x": torch.tensor([2 * n])},
        lambda n: {"x": torch.tensor([n, 3])},
        lambda n: {"x": torch.ones(2, dtype=torch.long if n % 2 else torch.int32)},
        lambda n: {"x": n},
        lambda n: {"x": {"y": n}},
        lambda n: {"x": object()},
        lambda n: {"x": 1 if n % 2 else None},
        lambda n: {"x": mask(n), "y": mask(n)},
        lambda n: {"attention_mask": torch.zeros(B, n, dtype=torch.long)},
        lambda n: {"input_ids": IDS[:, -2:]},
    ],
    ids=["longer", "fraction", "doubled", "one_of_two", "dtype", "number", "in_a_dict", "unknown", "comes_and_goes",
         "two_masks", "no_mask", "two_tokens"],
)  # fmt: skip
def test_what_does_not_follow_is_refused(given):
    cache = read()
    with pytest.raises(Unsupported) as raised:
        watched(given, cache)
    assert raised.value.reason == "inputs"
    assert cache.length == LENGTH


def test_another_cache_than_ours_is_refused():
    with pytest.raises(Unsupported) as raised:
        watched(lambda n: {"past_key_values": DynamicCache()})
    assert raised.value.reason == "cache_unused"


def test_calls_of_one_shape_share_a_graph_and_the_next_one_overwrites_the_last():
    def call(value: float, width: int = 3):
        return watched(lambda n: {"x": torch.full((B, width), value), "position_ids": torch.full((B, 1), n)})

    first, second = call(1.0), call(2.0)
    assert first.key == second.key
    assert first.key != call(1.0, width=4).key
    first.advance()
    address = first.fixed["x"].data_ptr()
    first.load(second)
    assert first.fixed["x"].data_ptr() == address
    assert torch.equal(first.fixed["x"], torch.full((B, 3), 2.0))
    assert int(first.fixed["position_ids"][0, 0]) == LENGTH + 1


def crossed(tokens: int = 6):
    """A cache of a text, with what it saw of an encoder's output."""
    cache, cross = read(), DynamicCache()
    for _ in range(2):
        cross.layers.append(DynamicLayer())
        cross.layers[-1].update(drawn(B, 2, tokens, 4), drawn(B, 2, tokens, 4))
    return cache, EncoderDecoderCache(cache, cross)


def given_nothing(n):
    return {}


def test_an_encoder_s_keys_and_values_are_of_their_call():
    (cache, held), (other, others), (longer, long) = crossed(), crossed(), crossed(7)
    inputs = watched(given_nothing, cache, held, encodes=True)
    arguments = inputs.arguments(IDS[:, :1], torch.ones(B, 16), cache)["past_key_values"]
    assert arguments.self_attention_cache is cache
    assert all(arguments.is_updated.values())
    mine = [t for layer in arguments.cross_attention_cache.layers for t in (layer.keys, layer.values)]
    theirs = [t for layer in held.cross_attention_cache.layers for t in (layer.keys, layer.values)]
    alike(mine, theirs)
    second = watched(given_nothing, other, others, encodes=True)
    assert second.key == inputs.key != watched(given_nothing, longer, long, encodes=True).key
    kept = [tensor.clone() for tensor in theirs]
    inputs.load(second)
    alike(mine, [t for layer in others.cross_attention_cache.layers for t in (layer.keys, layer.values)])
    alike(theirs, kept)


def test_a_caller_s_cache_gets_what_was_seen_of_an_encoder_but_once():
    cache, held = crossed()
    inputs = watched(given_nothing, cache, held, encodes=True)
    empty = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs.store(empty)
    assert list(empty.is_updated.values()) == [True, True]
    alike(
        [layer.values for layer in empty.cross_attention_cache.layers],
        [layer.values for layer in held.cross_attention_cache.layers],
    )
    layers = empty.cross_attention_cache.layers
    inputs.store(empty)
    assert empty.cross_attention_cache.layers is layers


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_values_of_another_dtype_than_the_keys_are_kept_as_transformers_keeps_them(kinds):
    ours, theirs = fixed(), growing()
    for tokens in (3, 1):
        keys, values = (drawn(B, 2, tokens, 4).to(kind) for kind in kinds)
        found, expected = (cache.layers[0].update(keys, values) for cache in (ours, theirs))
        for mine, other in zip(found, expected, strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
