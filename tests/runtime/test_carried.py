"""States that a model carries from call to call without a cache: kept by modules, or handed on with the outputs."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import transformers
from carrying_models import (
    DEVICE,
    DRAWN,
    GPU,
    HANDS,
    INSTALLED,
    KEEPS,
    OBJECT,
    alike,
    asked,
    both,
    config,
    left_by,
    pair,
    reasons,
    run,
    tensors_in,
)
from told_again import replays
from torch import nn

from hf_rewrite_runtime.cache.cache_argument import argument_of, asked_with, given_back
from hf_rewrite_runtime.cache.nested_tensors import Nested, UnknownState
from hf_rewrite_runtime.decode import eligibility, graph_cache, recurrent_state
from hf_rewrite_runtime.decode.eligibility import Call, assists
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.recurrent_state import CarriedStates, keeps_states, put_back
from hf_rewrite_runtime.decode.step_graph import DecodeGraph, Program
from hf_rewrite_runtime.forward import capture_trial, captured, forward_settings
from hf_rewrite_runtime.forward.captured import CapturedForward
from hf_rewrite_runtime.generate import call_graphs

if not eligibility.can_watch():
    pytest.skip("this transformers has a loop that cannot be watched", allow_module_level=True)


@pytest.mark.parametrize("name", INSTALLED)
def test_texts_one_after_another_of_any_number_of_rows(name: str) -> None:
    models = pair(name)
    for inputs in (
        asked(), asked(3, 5, 1), asked(1, 9, 2), asked(seed=3, padded=False), asked(),
        asked(1, 1, 4),
    ):  # fmt: skip
        both(models, inputs)
    both(models, asked(3, 6, 5), **DRAWN)
    assert len(store_of(models[0]).graphs) == 3


@pytest.mark.parametrize(
    ("name", "wanted"),
    [*((name, True) for name in INSTALLED), (KEEPS, False), (HANDS, False)],
    ids=[*INSTALLED, f"{KEEPS}, not returned", f"{HANDS}, not returned"],
)
def test_states_are_those_of_the_last_token_where_a_text_ends_inside_of_a_chunk(name: str, wanted: bool) -> None:
    models = pair(name)
    free = run(models[1], asked(1), **DRAWN).sequences[0].tolist()
    ends = {"eos_token_id": free[-4], "pad_token_id": 0, "return_dict_in_generate": wanted, **DRAWN}
    outputs = [run(model, asked(1), **ends) for model in models]
    assert reasons() == []
    if wanted:
        alike(models, outputs)
        assert outputs[0].sequences.shape[1] < len(free)
    else:
        assert torch.equal(*outputs)
        for one, other in zip(*(left_by(model, None).values() for model in models), strict=True):
            torch.testing.assert_close(one, other)
    both(models, asked(1, 1, 7))  # of a single token RecurrentGemma takes the window of the text before


@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_left_is_memory_that_no_later_call_writes(name: str) -> None:
    model = pair(name)[0]
    left = tensors_in(left_by(model, run(model, asked())))
    before = {key: value.clone() for key, value in left.items()}
    run(model, asked(seed=1))
    assert all(torch.equal(left[key], value) for key, value in before.items())
    assert reasons() == []


@pytest.mark.parametrize("name", INSTALLED)
def test_states_have_the_dtypes_of_the_original(name: str) -> None:
    """Some are in fp32 where the model is in bf16."""
    models = pair(name, torch.bfloat16)
    outputs = [run(model, asked(), max_new_tokens=4) for model in models]
    assert reasons() == []
    left = [tensors_in(left_by(*one)) for one in zip(models, outputs, strict=True)]
    dtypes = [[value.dtype for value in one.values()] for one in left]
    assert dtypes[0] == dtypes[1]
    if name in (KEEPS, HANDS):
        assert {*dtypes[0]} == {torch.bfloat16, torch.float32}
        (graph,) = store_of(models[0]).graphs.values()
        assert [buffer.dtype for buffer in graph.carried.buffers] == dtypes[0]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_text_moves_to_a_larger_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 3)
    models = pair(name)
    both(models, asked(), max_new_tokens=20)
    both(models, asked(seed=1), max_new_tokens=20)


def test_beams_and_the_next_call() -> None:
    """Rows of states that modules keep, or hand on, are the original loop's."""
    models = pair(KEEPS)
    outputs = [run(model, asked(), num_beams=2, output_logits=False).sequences for model in models]
    assert reasons() == ["beams"]
    assert torch.equal(*outputs)
    both(models, asked(seed=1))


@pytest.mark.parametrize("name", INSTALLED)
def test_no_drafts_for_states_that_cannot_go_back(name: str) -> None:
    model, other = pair(name)[0], pair(name)[0]
    assert not assists(other, model, True)
    call = Call(asked(1)["input_ids"], [], [], copy.deepcopy(model.generation_config), None, False, {})
    call.config.prompt_lookup_num_tokens = 3
    assert eligibility.lookup_of(model, call) == "drafts_for_states"


@pytest.mark.parametrize("name", INSTALLED)
def test_the_graph_by_hand_equals_the_model(name: str) -> None:
    model, original = pair(name)
    graph = DecodeGraph(model, 2, 20)
    for seed in range(3):
        inputs = asked(seed=seed, padded=False)["input_ids"]
        wanted = run(original, {"input_ids": inputs}, max_new_tokens=6)
        found = [graph.prefill(inputs), *(graph.step(token) for token in wanted.sequences[:, 7:-1].T)]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)
    assert graph.nbytes > 0
    graph.release()
    assert graph.nbytes == 0


@pytest.mark.parametrize("name", INSTALLED)
def test_a_step_told_to_the_device_once_can_be_told_again_without_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "replay", replays)
    models = pair(name)
    for seed in range(3):
        both(models, asked(seed=seed))
    (graph,) = store_of(models[0]).graphs.values()
    assert len(graph._programs) == 1


def test_a_cache_is_continued_beside_what_the_modules_keep() -> None:
    models = pair(KEEPS)
    outputs = both(models, asked(padded=False))
    for turn in range(2):
        ids = torch.cat([outputs[0].sequences, asked(seed=turn)["input_ids"][:, -2:]], 1)
        more = [
            {"input_ids": ids, asked_with(model): given_back(out)} for model, out in zip(models, outputs, strict=True)
        ]
        outputs = [run(*one) for one in zip(models, more, strict=True)]
        assert reasons() == []
        alike(models, outputs)


def test_states_that_a_caller_gives_are_continued_and_written_as_in_the_original() -> None:
    models = pair(HANDS)
    outputs = both(models, asked())
    for length in (1, 4):
        given = [[tensor.clone() for tensor in given_back(out)] for out in outputs]
        before = [tensor.clone() for tensor in given[0]]
        inputs = [{"input_ids": asked(2, length, 3, padded=False)["input_ids"], "state": state} for state in given]
        outputs = [run(*one) for one in zip(models, inputs, strict=True)]
        assert reasons() == []
        alike(models, outputs)
        assert (given_back(outputs[0]) is given[0]) == (given_back(outputs[1]) is given[1])
        assert any(not torch.equal(*one) for one in zip(given[0], before, strict=True))
        for one, other in zip(*given, strict=True):
            torch.testing.assert_close(one, other)


def test_a_cache_of_the_callers_without_layers_takes_the_original_loop() -> None:
    models = pair(KEEPS)
    for model in models:
        model.set_attn_implementation("eager")  # its masks of one step are none that torch 2.11 takes on a card
    made = [{**asked(), asked_with(model): transformers.DynamicCache()} for model in models]
    outputs = [run(*one) for one in zip(models, made, strict=True)]
    assert reasons() == ["cache_kind"]
    alike(models, outputs)
    made = [{**asked(), asked_with(model): transformers.DynamicCache(config=model.config)} for model in models]
    alike(models, [run(*one) for one in zip(models, made, strict=True)])
    assert reasons() == []


class Grows(nn.Module):
    """A mixer whose state has another shape, or another dtype, after each call."""

    def __init__(self, inner: nn.Module, how: str):
        super().__init__()
        self.inner, self.how = inner, how
        self.recurrent_states: Any = None

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        found = self.inner(*arguments, **keywords)
        state = torch.zeros(len(found), 1) if self.recurrent_states is None else self.recurrent_states
        self.recurrent_states = {
            "longer": lambda: torch.cat([state, state], 1),
            "wider": lambda: state.double() if state.dtype == torch.float32 else state.float(),
            "none": lambda: None,
            "number": lambda: 3,
        }[self.how]()
        return found


@pytest.mark.parametrize(("how", "reason"), [
    ("longer", "step_fails"), ("wider", "step_fails"), ("none", "carried_state"), ("number", "carried_state"),
])  # fmt: skip
def test_a_state_without_a_fixed_form_takes_the_original_loop_from_where_the_call_began(how: str, reason: str) -> None:
    models = pair(KEEPS)
    for model in models:
        model.model.final_norm = Grows(model.model.final_norm, how)
    both(models, asked(), expected=None)
    for model in models:
        model.model.layers[0].temporal_block.conv1d_state.fill_(3)
    outputs = [run(model, asked(1, 1)) for model in models]
    assert reasons() == [reason]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    held = [model.model.final_norm.recurrent_states for model in models]
    assert type(held[0]) is type(held[1])
    assert not isinstance(held[0], torch.Tensor) or (held[0].shape, held[0].dtype) == (held[1].shape, held[1].dtype)


def test_states_are_put_back_where_a_block_raises() -> None:
    model = pair(KEEPS)[0]
    run(model, asked())
    block = model.model.layers[0].temporal_block
    kept, given = block.conv1d_state, [torch.ones(2)]
    before = kept.clone()

    def fails() -> None:
        with put_back(model, given):
            kept.add_(1)
            given[0].zero_()
            block.conv1d_state = None
            raise KeyError("any")

    with pytest.raises(KeyError):
        fails()
    assert block.conv1d_state is kept
    assert torch.equal(kept, before)
    assert given[0].tolist() == [1, 1]
    with put_back(model, given):
        block.conv1d_state = None
    assert block.conv1d_state is None


def test_a_state_that_is_a_part_of_what_it_was_is_read_before_it_is_written() -> None:
    one, two = nn.Module(), nn.Module()
    one.state, two.state = torch.arange(4.0), torch.zeros(4)  # type: ignore[assignment]
    model = keeps_states("state")(type("Model", (nn.Module,), {}))()
    model.one, model.two = one, two
    own = CarriedStates(model)
    assert recurrent_state.carries(model)
    own.load({})
    first, second = own.buffers
    one.state, two.state = second, first  # type: ignore[assignment]
    own.advance({})
    assert (first.tolist(), second.tolist()) == ([0, 0, 0, 0], [0, 1, 2, 3])
    two.state = second.flip(0)  # type: ignore[assignment]
    with own.held():
        one.state = torch.ones(4)  # type: ignore[assignment]
        own.advance({})
    assert (first.tolist(), second.tolist()) == ([0, 0, 0, 0], [0, 1, 2, 3])
    assert one.state is first
    assert two.state is second
    two.state = torch.ones(5)  # type: ignore[assignment]
    with pytest.raises(UnknownState, match=r"\(5,\)"):
        own.advance({})
    assert not CarriedStates(nn.Linear(1, 1))
    gone = weakref.ref(one)
    del model, one
    assert gone() is None
    with pytest.raises(ReferenceError):
        own.advance({})


def test_an_attribute_that_the_user_sets_is_read_by_the_steps_of_the_next_call() -> None:
    models = pair(HANDS)
    both(models, asked())
    for eps in (0.5, 0.1):
        for model in models:
            model.rwkv.ln_out.eps = eps
        outputs = [run(model, asked()) for model in models]
        assert reasons() == []
        alike(models, outputs)


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("name", [KEEPS, HANDS])
def test_no_forward_of_a_text_tries_to_be_captured_by_itself(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try runs a prompt many times, and a graph of it would hold every token's kernels."""
    monkeypatch.setattr(CapturedForward, "_forward_without_graph", not GPU)
    tried: list[str] = []

    def attempt(model: Any, *others: Any) -> Any:
        tried.append(type(model).__name__)
        return capture_trial.attempt(model, *others)

    monkeypatch.setattr(captured, "attempt", attempt)
    models = pair(name)
    for part in (models[0], models[0].base_model):
        part.__class__ = type(type(part).__name__, (CapturedForward, type(part)), {})
    with forward_settings.use_forward_graphs(mode):
        for seed in range(4):
            both(models, asked(seed=seed))
        if name == KEEPS:
            run(models[0], asked(), num_beams=2)
    assert tried == []
    with forward_settings.use_forward_graphs(mode), torch.no_grad():
        for _ in range(2):
            models[0](**asked(), use_cache=False)
    assert tried, "no call is tried at all"


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
    assert Nested(config(OBJECT)).tensors == []


def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_from = CarriedStates.copy_from

    def zeroed(self: Any, other: Any) -> None:
        copy_from(self, other)
        for buffer in self.buffers:
            buffer.zero_()

    monkeypatch.setattr(CarriedStates, "copy_from", zeroed)
    with pytest.raises(AssertionError):
        test_a_text_moves_to_a_larger_cache(OBJECT, monkeypatch)
