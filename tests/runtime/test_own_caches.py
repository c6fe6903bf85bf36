"""Caches of classes of a model's own file: states beside the layers, an object of states, layers that grow more."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from told_again import replays
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_rewrite_runtime.cache import custom_cache
from hf_rewrite_runtime.cache.cache_argument import argument_of, asked_with, given_back
from hf_rewrite_runtime.cache.custom_cache import OwnCache, keeps_own_cache, own_attributes, own_like
from hf_rewrite_runtime.cache.extra_tensors import GrownLayer, grown_by, grows_in_layers
from hf_rewrite_runtime.cache.layers import CacheFull, PreallocatedLayer
from hf_rewrite_runtime.cache.nested_tensors import Nested, UnknownState
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode import eligibility, graph_cache
from hf_rewrite_runtime.decode.eligibility import Call
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.recurrent_state import CarriedStates, hands_on_states, put_back
from hf_rewrite_runtime.decode.step_buffers import UnknownCache
from hf_rewrite_runtime.decode.step_graph import DecodeGraph, Program
from hf_rewrite_runtime.decode.validation import StepFails
from hf_rewrite_runtime.generate import call_graphs
from hf_rewrite_runtime.generate.generation import GraphGeneration

KINDS = {
    "MiniMaxForCausalLM": "minimax.modeling_minimax",
    "xLSTMForCausalLM": "xlstm.modeling_xlstm",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl.modeling_minimax_m3_vl",
}
BESIDE, OBJECT, GROWN = KINDS
if not all(hasattr(transformers, name) for name in KINDS) or not eligibility.can_watch():
    pytest.skip("this transformers lacks one of the models", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
V = 64
ENDS = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DRAWN = {"do_sample": True, "top_k": 0, "temperature": 2.0}
FULL, LINEAR = "full_attention", "linear_attention"


def config(name: str, linear_first: bool = False) -> Any:
    kind: Any = importlib.import_module(f"transformers.models.{KINDS[name]}")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    if name == BESIDE:
        kinds = [LINEAR, FULL] if linear_first else [FULL, LINEAR]
        return kind.MiniMaxConfig(**sizes, **heads, **ENDS, block_size=4, layer_types=kinds * 2)
    if name == OBJECT:
        return kind.xLSTMConfig(
            hidden_size=128, embedding_dim=128, num_hidden_layers=2, num_blocks=2, num_heads=4, **ENDS
        )
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2}
    return kind.MiniMaxM3VLTextConfig(
        **sizes, **heads, **ENDS, **index, dense_intermediate_size=48, shared_intermediate_size=48, rotary_dim=8,
        layer_types=[FULL, "minimax_m3_sparse"] * 2, mlp_layer_types=["dense", "sparse"] * 2,
    )  # fmt: skip


def mark(name: str) -> Callable[[type], type]:
    kind: Any = importlib.import_module(f"transformers.models.{KINDS[name]}")
    if name == BESIDE:
        return keeps_own_cache(kind.MiniMaxCache)
    if name == OBJECT:
        return hands_on_states(argument_of(kind.xLSTMForCausalLM), kind.xLSTMCache)
    return grows_in_layers(kind.MiniMaxM3VLSparseCacheLayer, update_index=("idx_keys", -2))


def pair(name: str, dtype: torch.dtype = torch.float32, linear_first: bool = False) -> Any:
    """A model with the loop and the original, with the same weights."""
    original = getattr(transformers, name)
    ours = mark(name)(type(name, (GraphGeneration, original), {"_step_without_graph": not GPU}))
    torch.manual_seed(0)
    models: Any = [kind(config(name, linear_first)).eval().to(DEVICE, dtype) for kind in (ours, original)]
    for parameter in models[0].parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    models[1].load_state_dict(models[0].state_dict())
    backend.reset_fallbacks()
    return models


def asked_of(name: str, *arguments: Any, padded: bool = True, **keywords: Any) -> dict[str, torch.Tensor]:
    return asked(*arguments, padded=padded and name != GROWN, **keywords)


def asked(rows: int = 2, length: int = 7, seed: int = 0, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, V, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[0, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def run(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    torch.manual_seed(5)
    given = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **given | settings)


def reasons() -> list[str]:
    found = [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    backend.reset_fallbacks()
    return found


def held(cache: Any) -> dict[str, Any]:
    """Everything that a cache holds, by name; tensors for comparing, and what is none."""
    kind = type(cache)
    found = Nested({name: value for name, value in vars(cache).items() if name not in PLAIN}, kind)
    tensors = {f"own {number}": tensor for number, tensor in enumerate(found.tensors)}
    for place, layer in enumerate(getattr(cache, "layers", ())):
        own = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{place} {name}": value for name, value in own.items()}
    return {"type": kind, "form": str(found.form), **tensors}


PLAIN = (*vars(DynamicCache()), "_is_user_defined", "config")


def alike(outputs: Any, tolerance: float = 1e-3) -> None:
    mine, wanted = outputs
    assert torch.equal(mine.sequences, wanted.sequences)
    for one, other in zip(mine.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    left = [held(given_back(output)) for output in outputs]
    assert left[0].keys() == left[1].keys()
    assert any(isinstance(value, torch.Tensor) for value in left[0].values()), "nothing was compared"
    for one, other in zip(left[0].values(), left[1].values(), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


def both(models: Any, inputs: dict[str, Any], expected: list[str] | None = None, **settings: Any) -> Any:
    outputs = [run(model, {k: v.clone() for k, v in inputs.items()}, **settings) for model in models]
    assert reasons() == (expected or [])
    alike(outputs)
    return outputs


def test_rows_with_padding_of_a_model_that_chooses_blocks_without_a_mask_take_the_original_loop() -> None:
    models = pair(GROWN)
    both(models, asked(), ["attention_mask"])
    both(models, asked(padded=False))
    positions = {"position_ids": (torch.arange(7, device=DEVICE) // 2).expand(2, 7)}
    both(models, {**asked(padded=False), **positions}, ["attention_mask"])
    with pytest.raises(StepFails, match="padded rows"):
        DecodeGraph(models[0], 2, 16).prefill(**asked())


@pytest.mark.parametrize("name", KINDS)
def test_texts_one_after_another_of_any_number_of_rows(name: str) -> None:
    models = pair(name)
    asks = [
        asked_of(name), asked_of(name, 3, 5, 1), asked(1, 9, 2), asked(seed=3, padded=False), asked_of(name),
        asked(1, 1, 4),
    ]  # fmt: skip
    for inputs in asks:
        both(models, inputs)
    both(models, asked_of(name, 3, 6, 5), **DRAWN)
    assert len(store_of(models[0]).graphs) == 3


@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_the_last_token_where_a_text_ends_inside_of_a_chunk(name: str) -> None:
    models = pair(name)
    free = run(models[1], asked_of(name, 1), **DRAWN).sequences[0].tolist()
    outputs = both(models, asked_of(name, 1), **DRAWN, eos_token_id=free[-4])
    assert outputs[0].sequences.shape[1] < len(free)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_left_is_memory_that_no_later_call_writes(name: str) -> None:
    model = pair(name)[0]
    left = held(given_back(run(model, asked_of(name))))
    before = {key: value.clone() for key, value in left.items() if isinstance(value, torch.Tensor)}
    run(model, asked_of(name, seed=1))
    assert all(torch.equal(left[key], value) for key, value in before.items())
    assert reasons() == []


@pytest.mark.parametrize("name", KINDS)
def test_a_text_moves_to_a_larger_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 3)
    models = pair(name)
    both(models, asked_of(name), max_new_tokens=20)
    both(models, asked_of(name, seed=1), max_new_tokens=20)


@pytest.mark.parametrize("name", [BESIDE, GROWN])
def test_a_cache_that_came_back_is_continued_and_is_the_callers(name: str) -> None:
    models = pair(name)
    outputs = both(models, asked_of(name))
    mask = asked_of(name)["attention_mask"]
    for turn in range(2):
        ids = torch.cat([outputs[0].sequences, asked_of(name, seed=turn)["input_ids"][:, -2:]], 1)
        seen = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
        caches = [given_back(output) for output in outputs]
        more = [
            {"input_ids": ids, "attention_mask": seen, asked_with(model): cache}
            for model, cache in zip(models, caches, strict=True)
        ]
        outputs = [run(*one) for one in zip(models, more, strict=True)]
        assert reasons() == []
        alike(outputs)
        assert all(given_back(output) is cache for output, cache in zip(outputs, caches, strict=True))
    if name == BESIDE:
        with pytest.raises(RuntimeError):
            given_back(outputs[0]).crop(-1)
        for output in outputs:
            given_back(output).batch_select_indices(torch.tensor([1, 0, 1], device=DEVICE))
    else:
        for output in outputs:
            given_back(output).crop(-2)
            given_back(output).reorder_cache(torch.tensor([1, 0], device=DEVICE))
    alike(outputs)


def test_a_cache_of_a_caller_begins_empty_or_of_transformers() -> None:
    models = pair(BESIDE)
    kind = models[0]._own_cache
    made = [{**asked(), asked_with(model): kind()} for model in models]
    outputs = [run(*one) for one in zip(models, made, strict=True)]
    assert reasons() == []
    alike(outputs)
    with pytest.raises(ValueError, match="cache"):
        run(models[0], {**asked(), asked_with(models[0]): DynamicCache()})
    assert reasons() == ["cache_kind"]


def test_an_object_of_a_caller_is_written_into() -> None:
    models = pair(OBJECT)
    kind, argument = models[0]._held_by, argument_of(models[0])
    states = [kind(model.config, 2, dtype=torch.float32, device=DEVICE) for model in models]
    kept = [state.rnn_state[0][0] for state in states]
    with torch.no_grad():
        graph = DecodeGraph(models[0], 2, 32)
        inputs = asked(padded=False)["input_ids"]
        wanted = models[1](inputs, **{argument: states[1]}, use_cache=True).logits[:, -1]
        torch.testing.assert_close(graph.prefill(inputs), wanted)
    with put_back(models[0], states[0]), torch.no_grad():
        models[0](inputs, **{argument: states[0]}, use_cache=True)
    assert torch.equal(kept[0], kept[1])

    def fails() -> None:
        with put_back(models[0], states[0]), torch.no_grad():
            models[0](inputs, **{argument: states[0]}, use_cache=True)
            states[0].rnn_state[0] = ()
            states[0].more = 1
            raise KeyError("any")

    with pytest.raises(KeyError):
        fails()
    assert not hasattr(states[0], "more")
    assert states[0].rnn_state[0][0] is kept[0]
    assert torch.equal(kept[0], kept[1])


def test_the_first_layer_that_keeps_no_tokens_tells_no_length() -> None:
    """The masks of the original are of the new token alone then: what it does with padding, its own loop does."""
    models = pair(BESIDE, linear_first=True)
    both(models, asked(padded=False))
    both(models, asked(), ["attention_mask"])
    outputs = both(models, asked(1, 5))
    ids = torch.cat([outputs[0].sequences, asked(1, 2)["input_ids"]], 1)
    more = [{"input_ids": ids, asked_with(m): given_back(o)} for m, o in zip(models, outputs, strict=True)]
    outputs = [run(*one) for one in zip(models, more, strict=True)]
    assert reasons() == ["cache_contents"]
    alike(outputs)
    with pytest.raises(StepFails, match="padded rows"):
        DecodeGraph(models[0], 2, 16).prefill(**asked())


@pytest.mark.parametrize("name", KINDS)
def test_beams_take_the_original_loop_and_the_next_call_does_not(name: str) -> None:
    models = pair(name)
    if name != OBJECT:  # whose states transformers does not reorder
        outputs = [run(model, asked_of(name), num_beams=2, output_logits=False).sequences for model in models]
        assert reasons() == ["beams"]
        assert torch.equal(*outputs)
    both(models, asked_of(name, seed=1))


@pytest.mark.parametrize("name", [BESIDE, OBJECT])
def test_no_drafts_for_states_that_cannot_go_back(name: str) -> None:
    model = pair(name)[0]
    call = Call(asked(1)["input_ids"], [], [], copy.deepcopy(model.generation_config), None, False, {})
    call.config.prompt_lookup_num_tokens = 3
    assert eligibility.lookup_of(model, call) == "drafts_for_states"


@pytest.mark.parametrize("name", KINDS)
def test_the_graph_by_hand_equals_the_model(name: str) -> None:
    model, original = pair(name)
    graph = DecodeGraph(model, 2, 20)
    for seed in range(3):
        inputs = asked_of(name, seed=seed, padded=False)["input_ids"]
        wanted = run(original, {"input_ids": inputs}, max_new_tokens=6)
        found = [graph.prefill(inputs), *(graph.step(token) for token in wanted.sequences[:, 7:-1].T)]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)
    assert graph.nbytes > 0
    graph.release()
    assert graph.nbytes == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_step_told_to_the_device_once_can_be_told_again_without_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "replay", replays)
    models = pair(name)
    for seed in range(3):
        both(models, asked_of(name, seed=seed))
    (graph,) = store_of(models[0]).graphs.values()
    assert len(graph._programs) == 1


@pytest.mark.parametrize("name", KINDS)
def test_states_have_the_dtypes_of_the_original(name: str) -> None:
    models = pair(name, torch.bfloat16)
    outputs = [run(model, asked_of(name), max_new_tokens=4) for model in models]
    assert reasons() == []
    left = [held(given_back(output)) for output in outputs]
    dtypes = [[value.dtype for value in one.values() if isinstance(value, torch.Tensor)] for one in left]
    assert dtypes[0] == dtypes[1]


def test_no_cache_is_kept_alive_by_what_stands_for_it() -> None:
    model = pair(BESIDE)[0]
    run(model, asked(1))
    (graph,) = store_of(model).graphs.values()
    cache = weakref.ref(graph.cache)
    store_of(model).release()
    del graph
    gc.collect()
    assert cache() is None


class Notes(DynamicCache):
    """One that a user wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []


def test_a_cache_that_stands_for_another_is_one() -> None:
    cache = own_like(Notes, 1, 8, "cpu")
    assert isinstance(cache, OwnCache)
    assert isinstance(cache, Notes)
    assert cache.knows_length
    key = torch.randn(1, 2, 3, 4)
    cache.update(key, key, 1)
    assert len(cache) == 2
    assert cache.length == 3
    assert cache.get_seq_length(0) == 0
    assert not cache.knows_length
    first, cache.notes = cache.layers[1], [[], torch.ones(2)]
    grown = Notes()
    cache.store(grown, 3)
    assert grown.notes[1].equal(torch.ones(2))
    assert grown.notes[1] is not cache.notes[1]
    cache.clear()
    assert (len(cache), cache.notes, cache.length) == (0, [], 0)
    cache.load(grown)
    assert cache.layers[1] is first
    assert cache.notes[1].equal(torch.ones(2))
    assert cache.notes[1] is not grown.notes[1]
    assert torch.equal(cache.layers[1].keys[:, :, :3], key)
    larger = own_like(Notes, 1, 16, "cpu")
    assert larger is not None
    larger.copy_from(cache)
    assert larger.length == 3
    assert torch.equal(larger.layers[1].keys[:, :, :3], key)
    cache.free()
    assert cache.nbytes == 0


@pytest.mark.parametrize("name", ["store", "update", "position", "__getattr__", "get_seq_length", "_made", "own"])
def test_no_cache_stands_for_one_whose_methods_would_meet_another(name: str) -> None:
    odd = type("Odd", (Notes,), {name: lambda self, *arguments: None})
    assert own_like(odd, 1, 8, "cpu") is None
    assert (
        own_like(type("Fine", (Notes,), {"crop": None, "noted": odd, "__doc__": "Its own."}), 1, 8, "cpu") is not None
    )


def test_no_cache_stands_for_one_of_which_something_is_unknown() -> None:
    def made_with(value: Any, name: str = "notes") -> type[DynamicCache]:
        def begin(self: Any) -> None:
            Notes.__init__(self)
            vars(self)[name] = value

        return type("Odd", (Notes,), {"__init__": begin})

    def wants(self: Any, rows: int) -> None:
        Notes.__init__(self)

    assert own_like(made_with({"a": [None, 1.5]}), 1, 8, "cpu") is not None
    assert own_like(made_with({"a": object()}), 1, 8, "cpu") is None
    assert own_like(made_with(1, "capacity"), 1, 8, "cpu") is None
    assert own_like(made_with([DynamicLayer()], "layers"), 1, 8, "cpu") is None
    assert own_like(type("Odd", (Notes,), {"__init__": wants}), 1, 8, "cpu") is None
    model = pair(BESIDE)[0]
    type(model)._own_cache = made_with({"a": object()})
    with pytest.raises(UnknownCache):
        DecodeGraph(model, 1, 8)


def test_what_holds_tensors_is_taken_apart_and_put_together() -> None:
    class Box:
        def __init__(self, *inside: Any):
            self.second, self.first = inside

    one, two, three = torch.zeros(1), torch.ones(2), torch.ones(3)
    box = Box([one, (two, None, 3)], {"b": three, "a": "text"})
    nested = Nested(box, Box)
    assert [tensor.numel() for tensor in nested.tensors] == [3, 1, 2]
    new = [tensor + 1 for tensor in nested.tensors]
    other = nested.filled(new)
    assert Nested(other, Box).tensors == new
    assert Nested(other, Box).form == nested.form
    assert other.second[1][1:] == (None, 3)
    assert box.second[0] is one
    other.second[1] = (two, None, 4)
    assert Nested(other, Box).form != nested.form
    box._is_user_defined = True  # type: ignore[attr-defined]
    assert Nested(box, Box).form == nested.form
    for odd in (box, [object()], {one}, [Box(1, 2)]):
        with pytest.raises(UnknownState):
            Nested(odd)
    assert Nested(config(BESIDE)).tensors == []


class Tracks(DynamicLayer):
    """A layer that a user wrote, with keys by which it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.small: torch.Tensor | None = None

    def add_small(self, small: torch.Tensor) -> torch.Tensor:
        self.small = small if self.small is None else torch.cat([self.small, small], dim=1)
        return self.small


def grown_cache(capacity: int = 8) -> tuple[PreallocatedCache, Any]:
    grows_in_layers(Tracks, add_small=("small", 1))
    cache = PreallocatedCache(1, 2, capacity, "cpu", [Tracks()])
    assert isinstance(cache.layers[0], GrownLayer)
    return cache, cache.layers[0]


def test_a_layer_grows_what_it_is_given() -> None:
    (cache, layer), theirs = grown_cache(), Tracks()
    for count in (3, 2):
        keys, small = torch.randn(2, 2, count, 4), torch.randn(2, count, 5)
        for one in (layer, theirs):
            found = (*one.update(keys, keys), one.add_small(small))
        assert all(torch.equal(*both) for both in zip(found, (theirs.keys, theirs.values, theirs.small), strict=True))
        assert torch.equal(layer.add_small(small[:, :0]), theirs.small)
    cache.position.fill_(5)
    with cache.step():
        found = layer.add_small(torch.ones(2, 1, 5))
    assert found.shape == (2, 8, 5)
    assert found[:, 5].eq(1).all()
    assert found[:, 6:].eq(0).all()
    layer.spoil(5, 7.0)
    assert found[:, 5:].eq(7).all()
    assert layer.nbytes if hasattr(layer, "nbytes") else len(layer.buffers) == 3
    cache.rewind(4)
    assert torch.equal(layer.add_small(torch.zeros(2, 1, 5))[:, :4], theirs.small[:, :4])
    with pytest.raises(CacheFull):
        layer.add_small(torch.zeros(2, 4, 5))
    cache.rewind(5)
    larger, wider = grown_cache(16)
    larger.copy_from(cache)
    assert torch.equal(wider.add_small(torch.zeros(2, 0, 5)), layer.beside["add_small"][:, :5])
    growing = DynamicCache()
    growing.layers.append(Tracks())
    larger.store(growing, 5)
    assert growing.layers[0].small.shape == (2, 5, 5)
    again, loaded = grown_cache()
    again.load(growing)
    assert torch.equal(loaded.add_small(torch.zeros(2, 0, 5)), growing.layers[0].small)
    layer.reorder_cache(torch.tensor([1, 1]))
    rows = layer.beside["add_small"]
    assert torch.equal(rows[0], rows[1])
    cache.clear()
    assert all(not buffer.any() for buffer in layer.buffers)
    assert torch.equal(layer.add_small(small), small)
    cache.free()
    assert layer.buffers == []


def test_a_layer_of_the_original_file_is_known_by_its_code() -> None:
    grown_cache()
    same = {name: value for name, value in vars(Tracks).items() if callable(value)}
    assert grown_by(type("Tracks", (DynamicLayer,), dict(same))) == {"add_small": ("small", 1)}
    assert grown_by(type("Other", (DynamicLayer,), dict(same))) is None
    assert grown_by(type("Tracks", (Tracks,), dict(same))) is None
    assert grown_by(type("Tracks", (DynamicLayer,), {**same, "add_small": lambda self, small: small})) is None
    assert grown_by(type("Tracks", (DynamicLayer,), {**same, "reset": Tracks.reset})) is None
    assert grown_by(DynamicLayer) is None


def test_what_a_growing_cache_keeps_of_its_own() -> None:
    cache = Notes()
    cache._is_user_defined = True  # type: ignore[attr-defined]
    assert own_attributes(cache) == {"notes": []}


def _zeroed(self: Any, other: Any) -> None:
    COPY_FROM(self, other)
    for buffer in self.buffers:
        buffer.zero_()


COPY_FROM, FREE = CarriedStates.copy_from, PreallocatedLayer.reorder_cache
PLANTED: dict[str, tuple[Any, str, Any, str, Any]] = {
    "states not taken along": (CarriedStates, "copy_from", _zeroed, BESIDE, test_a_text_moves_to_a_larger_cache),
    "states of an object not taken along": (
        CarriedStates, "copy_from", _zeroed, OBJECT, test_a_text_moves_to_a_larger_cache,
    ),
    "what grew not taken along": (
        GrownLayer, "take", PreallocatedLayer.take, GROWN, test_a_text_moves_to_a_larger_cache,
    ),
    "states lent": (
        custom_cache, "_copied", lambda attributes: attributes, BESIDE,
        test_what_is_left_is_memory_that_no_later_call_writes,
    ),
    "layers of a text before": (
        OwnCache, "_next_layer", lambda self: PreallocatedLayer(self), BESIDE,
        test_a_step_told_to_the_device_once_can_be_told_again_without_the_model,
    ),
    "what grew not reordered": (GrownLayer, "reorder_cache", FREE, "", test_a_layer_grows_what_it_is_given),
    "what grew not forgotten": (
        GrownLayer, "rewind", PreallocatedLayer.rewind, "", test_a_layer_grows_what_it_is_given,
    ),
    "what grew not spoilt": (GrownLayer, "spoil", PreallocatedLayer.spoil, "", test_a_layer_grows_what_it_is_given),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, model, check = PLANTED[bug]
    monkeypatch.setattr(owner, name, wrong)
    given = [model] if model else []
    if "monkeypatch" in check.__code__.co_varnames[: check.__code__.co_argcount]:
        given.append(monkeypatch)  # type: ignore[arg-type]
    torch.manual_seed(0)  # random numbers may hide a bug
    with pytest.raises((AssertionError, CacheFull)):
        check(*given)
