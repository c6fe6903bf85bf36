"""Caches of classes of a model's own file: states beside the layers, an object of states, layers that grow more."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import test_carried
import torch
from carrying_models import (
    BESIDE,
    DEVICE,
    GROWN,
    INSTALLED,
    OBJECT,
    alike,
    asked,
    asked_of,
    both,
    config,
    pair,
    reasons,
    run,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_rewrite_runtime.cache import custom_cache
from hf_rewrite_runtime.cache.cache_argument import argument_of, asked_with, given_back
from hf_rewrite_runtime.cache.custom_cache import OwnCache, own_attributes, own_like
from hf_rewrite_runtime.cache.extra_tensors import GrownLayer, grown_by, grows_in_layers
from hf_rewrite_runtime.cache.layers import CacheFull, PreallocatedLayer
from hf_rewrite_runtime.cache.nested_tensors import Nested, UnknownState
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.decode import eligibility
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.recurrent_state import CarriedStates, put_back
from hf_rewrite_runtime.decode.step_buffers import UnknownCache
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.decode.validation import StepFails

if not {BESIDE, OBJECT, GROWN} <= {*INSTALLED} or not eligibility.can_watch():
    pytest.skip("this transformers lacks one of the models", allow_module_level=True)


def test_rows_with_padding_of_a_model_that_chooses_blocks_without_a_mask_take_the_original_loop() -> None:
    models = pair(GROWN)
    both(models, asked(), ["attention_mask"])
    both(models, asked(padded=False))
    positions = {"position_ids": (torch.arange(7, device=DEVICE) // 2).expand(2, 7)}
    both(models, {**asked(padded=False), **positions}, ["attention_mask"])
    with pytest.raises(StepFails, match="padded rows"):
        DecodeGraph(models[0], 2, 16).prefill(**asked())


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
        alike(models, outputs)
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
    alike(models, outputs)


def test_a_cache_of_a_caller_begins_empty_or_of_transformers() -> None:
    models = pair(BESIDE)
    kind = models[0]._own_cache
    made = [{**asked(), asked_with(model): kind()} for model in models]
    outputs = [run(*one) for one in zip(models, made, strict=True)]
    assert reasons() == []
    alike(models, outputs)
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
    alike(models, outputs)
    with pytest.raises(StepFails, match="padded rows"):
        DecodeGraph(models[0], 2, 16).prefill(**asked())


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
MOVED = test_carried.test_a_text_moves_to_a_larger_cache
LEFT = test_carried.test_what_is_left_is_memory_that_no_later_call_writes
TOLD = test_carried.test_a_step_told_to_the_device_once_can_be_told_again_without_the_model
GROWS = test_a_layer_grows_what_it_is_given
PLANTED: dict[str, tuple[Any, str, Any, str, Any]] = {
    "states not taken along": (CarriedStates, "copy_from", _zeroed, BESIDE, MOVED),
    "states of an object not taken along": (CarriedStates, "copy_from", _zeroed, OBJECT, MOVED),
    "what grew not taken along": (GrownLayer, "take", PreallocatedLayer.take, GROWN, MOVED),
    "states lent": (custom_cache, "_copied", lambda attributes: attributes, BESIDE, LEFT),
    "layers of a text before": (OwnCache, "_next_layer", lambda self: PreallocatedLayer(self), BESIDE, TOLD),
    "what grew not reordered": (GrownLayer, "reorder_cache", FREE, "", GROWS),
    "what grew not forgotten": (GrownLayer, "rewind", PreallocatedLayer.rewind, "", GROWS),
    "what grew not spoilt": (GrownLayer, "spoil", PreallocatedLayer.spoil, "", GROWS),
}


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
