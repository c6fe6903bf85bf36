"""Tokens that are drafted for one row or several and checked together are those of plain search, row by row."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from test_drafted import DEVICE, GREEDY, LOOKUP, always, plant_rows, repeating, taken
from test_generation import EOS, MODELS, Sink, V, gpu, loops, pair, prompt, run, same, tokenizer
from transformers import WhisperConfig, WhisperForCausalLM

from hf_rewrite_runtime.cache.cache_argument import given_back
from hf_rewrite_runtime.decode import graph_cache
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.generate import call_graphs
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.sampling.sampling import Lookup, Sampling, StepState
from hf_rewrite_runtime.speculative import verify_step
from hf_rewrite_runtime.speculative.draft_model import Assistant
from hf_rewrite_runtime.speculative.left_pad_rows import Alignment, align, fall_in, tables_of
from hf_rewrite_runtime.speculative.speculative_loop import DraftedLoop, Worth
from hf_rewrite_runtime.speculative.verify_step import RaggedWindow

__all__ = ["always", "taken", "tokenizer"]

TOKENS = {"max_new_tokens": 30, "pad_token_id": 0}
RIGHT = [0.0, 0.9, 0.5, 0.7]
"""How many of the drafts are right, by row."""


def ragged(model: torch.nn.Module) -> bool:
    """Whether steps let each row keep its own."""
    forms = {key[1][0] for graph in store_of(model).graphs.values() for key in graph._programs}
    return RaggedWindow in forms


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "qwen3_moe", "gpt2"])
def test_rows_are_those_of_plain_search(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    model, original = pair(name)
    inputs = prompt(4, padded=padded)
    for eos in (None, EOS):
        theirs = original.generate(**inputs, **GREEDY, **TOKENS, eos_token_id=eos)
        with monkeypatch.context() as planting:
            plant_rows(planting, theirs, RIGHT)
            assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS, eos_token_id=eos), theirs)
    assert loops(model) == []
    assert ragged(model)
    assert any(max(counts) - min(counts) > 2 for counts in taken)


@pytest.mark.parametrize("batch", [2, 8])
def test_the_text_is_looked_up_row_by_row(batch: int, taken: list[list[int]], always: None) -> None:
    model, original = pair(initializer_range=0.05)
    for seed in (0, 1):  # the second call finds the graphs of the first
        inputs = repeating(seed=seed, batch=batch)
        theirs = original.generate(**inputs, **GREEDY, **TOKENS)
        assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS), theirs)
    assert loops(model) == []
    assert max(map(max, taken)) == 5
    (graph,) = store_of(model).graphs.values()
    assert len(graph._programs) == 3


@pytest.mark.parametrize("right", [0.0, 0.8])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_keep_pace_where_logits_or_the_cache_are_wanted(
    rows: int, right: float, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    model, original = pair("gemma2")
    inputs, given = prompt(rows), {"max_new_tokens": 30, "eos_token_id": EOS, "output_logits": True}
    for wanted in (given, {**given, "eos_token_id": None, "output_logits": False}):
        theirs = run(original, inputs, **GREEDY, **wanted)
        with monkeypatch.context() as planting:
            plant_rows(planting, theirs[0].sequences, [right] * rows)
            same(run(model, inputs, **LOOKUP, **wanted), theirs)
    assert loops(model) == []
    assert not ragged(model)
    assert all(len(set(counts)) == 1 for counts in taken)
    assert (max(map(max, taken)) > 2) == (right > 0)


@pytest.mark.parametrize("at", [5, 12, 14])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_end_by_themselves(
    rows: int, at: int, monkeypatch: pytest.MonkeyPatch, always: None, tokenizer: object
) -> None:
    model, original = pair()
    inputs, sinks = prompt(rows), [Sink(), Sink()]
    free = original.generate(**inputs, **GREEDY, **TOKENS)
    plant_rows(monkeypatch, free, [1.0, 0.2, 0.8, 0.5][:rows])
    ends = [int(free[row, 9 + at + 2 * row]) for row in range(rows)]
    ways = (
        {"eos_token_id": ends},
        {"eos_token_id": ends[:2]},
        {"stop_strings": [f"w{token}" for token in ends], "tokenizer": tokenizer},
        {"stop_strings": f"w{ends[-1]}", "tokenizer": tokenizer, "eos_token_id": ends[0]},
        {"max_length": 9 + at, "max_new_tokens": None},
    )
    for way in ways:
        given = {**TOKENS, "return_dict_in_generate": rows == 1, **way}  # several keep pace where a cache is wanted
        ours, theirs = (
            m.generate(**inputs, **arguments, **given, streamer=sink)
            for m, arguments, sink in ((model, LOOKUP, sinks[0]), (original, GREEDY, sinks[1]))
        )
        if rows == 1:
            assert given_back(ours).get_seq_length() == given_back(theirs).get_seq_length()
            ours, theirs = ours.sequences, theirs.sequences
        assert torch.equal(ours, theirs), way
        got, wanted = ([value.flatten().tolist() for value in sink.tokens] for sink in sinks)
        assert got == wanted
    assert [sink.ended for sink in sinks] == [5, 5]
    assert loops(model) == []
    assert ragged(model) == (rows > 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_processors_that_know_the_length_see_each_row_s(
    rows: int, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    model, original = pair()
    inputs = prompt(rows)
    for more in (
        {"min_new_tokens": 30, "eos_token_id": EOS},
        {"min_new_tokens": 12, "eos_token_id": EOS},
        {"forced_eos_token_id": EOS[0], "eos_token_id": EOS[0]},
        {"sequence_bias": {(7,): -9.0, (11,): 3.5}, "suppress_tokens": [5, 6]},
    ):
        theirs = original.generate(**inputs, **GREEDY, **more, **TOKENS)
        with monkeypatch.context() as planting:
            plant_rows(planting, theirs, RIGHT[1 : rows + 1])
            assert torch.equal(model.generate(**inputs, **LOOKUP, **more, **TOKENS), theirs)
    assert loops(model) == []
    assert ragged(model) == (rows > 1)
    assert max(map(max, taken)) == 5


@pytest.mark.parametrize("level", [False, True], ids=["ragged", "level"])
def test_drawn_rows_have_the_distribution_of_plain_sampling(level: bool) -> None:
    """Two rows with fixed distributions of their own, whose drafts are likely or not: the tokens drawn first."""
    torch.manual_seed(0)
    odds = torch.tensor(
        [[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], [[0.2, 0.7, 0.1], [0.3, 0.3, 0.4], [0.6, 0.2, 0.2]]],
        device=DEVICE,
    )
    draws = 2000
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    state = StepState(2, 32, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    sampling = Sampling([], True, None, None, lookup=Lookup(2, 0))
    for _ in range(draws):
        state.restore(StepState(2, 32, torch.zeros(1, dtype=torch.int64, device=DEVICE)).copy())
        made: list[list[int]] = [[], []]
        while min(map(len, made)) < 3:
            at = torch.tensor([min(len(row), 2) for row in made], device=DEVICE)[:, None]
            at = (at + torch.arange(3, device=DEVICE)).clamp_max(2)  # each place of a row has its own distribution
            state.drafts[:, :2] = torch.tensor([[0, 1], [1, 2]], device=DEVICE).gather(1, at[:, :2].clamp_max(1))
            verify_step.check(odds.gather(1, at[..., None].expand(-1, -1, 3)).log(), state, sampling, not level)
            for row, count in enumerate(state.taken.tolist()):
                made[row] += state.chosen[row, :count].tolist()
        for row in range(2):
            counts[row][tuple(made[row][:3])] += 1
    for row, each in enumerate(odds.tolist()):
        for text in [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]:
            probability = each[0][text[0]] * each[1][text[1]] * each[2][text[2]]
            deviation = (probability * (1 - probability) / draws) ** 0.5
            assert abs(counts[row][text] / draws - probability) < 4 * deviation, (row, text)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_draws_the_same_rows_and_another_seed_others(rows: int, taken: list[list[int]]) -> None:
    model, _ = pair(initializer_range=0.05)
    assistant, _ = pair(initializer_range=0.05)
    for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        given = {"do_sample": True, "temperature": 0.05, "top_k": 20, "pad_token_id": 0, **drafts}
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(model.generate(**repeating(batch=rows), **given, max_new_tokens=12))
        assert torch.equal(texts[0], texts[1])
        assert not torch.equal(texts[0], texts[2])
    assert max(map(max, taken)) > 1
    assert loops(model) == []


@pytest.mark.parametrize("rows", [1, 4])
def test_near_the_end_of_the_cache_and_beyond(
    rows: int, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 6)
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    model, original = pair("mistral")
    inputs = prompt(rows)
    theirs = original.generate(**inputs, **GREEDY, **TOKENS)
    plant_rows(monkeypatch, theirs, RIGHT[-rows:])
    assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS), theirs)
    assert loops(model) == []
    assert max(capacity for _, capacity in store_of(model).graphs) > 24
    assert max(map(max, taken)) == 5
    assert rows == 1 or any(max(counts) - min(counts) > 2 for counts in taken)


class Whisper(GraphGeneration, WhisperForCausalLM):
    _step_without_graph = DEVICE.type == "cpu"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_no_position_beyond_the_model_s_is_read(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    sizes = {"vocab_size": V, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    small = WhisperConfig(**sizes, init_std=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    monkeypatch.setitem(MODELS, "whisper", (Whisper, WhisperForCausalLM, small))
    model, original = pair(name, **{"n_positions" if name == "gpt2" else "max_target_positions": 40})
    for length in (12, 20, 37):
        inputs, given = prompt(rows, length), {"max_length": 40, "max_new_tokens": None, "pad_token_id": 0}
        theirs = original.generate(**inputs, **GREEDY, **given)
        with monkeypatch.context() as planting:
            plant_rows(planting, theirs, RIGHT[-rows:])
            assert torch.equal(model.generate(**inputs, **LOOKUP, **given), theirs)
    assert loops(model) == []
    assert taken


def test_a_call_after_rows_have_moved_begins_where_it_should(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    model, original = pair("gemma2")
    inputs = prompt(4, padded=False)
    theirs = original.generate(**inputs, **GREEDY, **TOKENS)
    with monkeypatch.context() as planting:
        plant_rows(planting, theirs, RIGHT)
        assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS), theirs)
    other = prompt(4, 11, padded=False, seed=3)
    same(run(model, other, **GREEDY), run(original, other, **GREEDY))
    assert loops(model) == []


def test_a_model_that_takes_the_slot_for_the_position_lets_rows_keep_pace(
    monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], always: None
) -> None:
    model, original = pair("gpt2")
    inner = type(model.transformer)

    class BySlot(inner):
        def forward(self, *args, **kwargs):
            kwargs.pop("position_ids", None)
            return super().forward(*args, **kwargs)

    model.transformer.__class__ = original.transformer.__class__ = BySlot
    inputs = prompt(3, padded=False)
    theirs = original.generate(**inputs, **GREEDY, **TOKENS)
    plant_rows(monkeypatch, theirs, RIGHT[:3])
    assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS), theirs)
    assert loops(model) == []
    assert not ragged(model)
    assert all(len(set(counts)) == 1 for counts in taken)


def test_rows_of_the_cache_end_at_one_slot(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    model, original = pair(initializer_range=0.05)
    inputs = prompt(4)
    theirs = original.generate(**inputs, **GREEDY, **TOKENS)
    plant_rows(monkeypatch, theirs, RIGHT)
    seen = []
    replay = Alignment.replay

    def looked_at(program: Alignment) -> None:
        graph = program._decode()
        before, shift = graph.cache.layers[1].keys.clone(), graph.state.shift.tolist()
        text = graph.state.sequence.clone()
        starts, end = graph.cache.starts.tolist(), int(graph.state.position)
        replay(program)
        assert (graph.cache.starts <= graph.state.position).all()  # a row that has ended sees a slot, too
        for row, far in enumerate(shift):
            if graph.state.finished[row]:
                continue
            first = starts[row] + far
            assert int(graph.cache.starts[row]) == first
            moved = graph.cache.layers[1].keys[row, :, first:end]
            assert torch.equal(moved, before[row, :, starts[row] : end - far])
            assert torch.equal(graph.state.sequence[row, first : end + 1], text[row, starts[row] : end - far + 1])
            assert graph.buffers.attention_mask[row].tolist() == [
                int(slot >= first) for slot in range(graph.cache.capacity)
            ]
        seen.append(shift)

    monkeypatch.setattr(Alignment, "replay", looked_at)
    assert torch.equal(model.generate(**inputs, **LOOKUP, **TOKENS), theirs)
    assert any(far > 0 for shift in seen for far in shift)
    assert any(far < 0 for shift in seen for far in shift)


def test_the_position_is_that_of_the_first_of_the_rows_that_go_on() -> None:
    state = StepState(3, 32, torch.tensor([10], device=DEVICE))
    state.most.fill_(20)
    fall_in(state, torch.tensor([1, 5, 3], device=DEVICE))
    assert (int(state.position), state.shift.tolist()) == (15, [4, 0, 2])
    assert state.behind[:, 0].tolist() == [4, 0, 2]
    fall_in(state, torch.tensor([6, 4, 1], device=DEVICE))  # the second row is complete
    assert state.finished.tolist() == [False, True, False]
    assert (int(state.position), state.shift.tolist()) == (17, [-4, 0, 1])
    assert state.behind[:, 0].tolist() == [0, 0, 3]
    fall_in(state, torch.tensor([2, 0, 0], device=DEVICE))  # and so is the one that was ahead
    assert (int(state.position), state.shift.tolist()) == (14, [0, 0, -3])
    assert state.position_ids[:, 0].tolist() == [0, 0, 4]


def test_a_row_that_has_ended_sees_a_slot() -> None:
    model, _ = pair()
    graph = DecodeGraph(model, 2, 32)
    graph.prefill(**prompt(2))
    graph.state.position.fill_(12)
    graph.cache.starts.copy_(torch.tensor([20, 2]))
    graph.state.shift.copy_(torch.tensor([0, 3]))
    graph.state.finished[0] = True
    align(graph, tables_of(graph))
    assert graph.cache.starts.tolist() == [12, 5]


@pytest.mark.parametrize(
    ("ragged", "end", "taken", "last"),
    [(True, 3, [3, 0, 3], [3, 9, 0]), (True, 2, [2, 0, 2], [2, 9, 2]), (False, 2, [2, 2, 2], [2, 7, 2])],
)
def test_a_row_that_has_ended_takes_nothing_more(ragged: bool, end: int, taken: list[int], last: list[int]) -> None:
    logits = torch.eye(5, device=DEVICE)[torch.tensor([[1, 2, 3], [4, 2, 4], [1, 2, 0]], device=DEVICE)]
    state = StepState(3, 16, torch.tensor([4], device=DEVICE))
    state.input_ids.fill_(9)
    state.drafts[:, :2] = torch.tensor([1, 2], device=DEVICE)
    state.finished[1] = True
    ids = [torch.tensor([token], device=DEVICE) for token in (end, 7)]
    verify_step.check(logits, state, Sampling([], False, *ids, lookup=Lookup(2, 0)), ragged)
    assert state.taken.tolist() == taken
    assert state.input_ids[:, 0].tolist() == last
    assert state.finished.tolist() == [True, True, end == 2]


@pytest.mark.parametrize("seed", [0, 1], ids=["right", "wrong"])
@pytest.mark.parametrize(("rows", "padded"), [(1, False), (4, False), (4, True)], ids=["one", "full", "padded"])
def test_another_model_drafts_for_rows(
    rows: int, padded: bool, seed: int, taken: list[list[int]], tokenizer: object
) -> None:
    model, original = pair("mistral")
    for layer in (1, 2) if seed == 0 else ():  # what the two models have in common decides most tokens
        model.model.layers[layer].mlp.down_proj.weight.data.mul_(0.01)
    original.load_state_dict(model.state_dict())
    assistant, _ = pair("mistral", seed=seed, num_hidden_layers=3 if seed == 0 else 1)
    if seed == 0:
        assistant.load_state_dict(model.state_dict())
        assistant.model.layers[2].mlp.down_proj.weight.data.mul_(0.5)
    inputs = prompt(rows, padded=padded)
    free = original.generate(**inputs, **GREEDY, **TOKENS)
    ends = [int(free[row % rows, 14 + 3 * row]) for row in range(3)]
    for way in ({}, {"eos_token_id": ends}, {"stop_strings": f"w{int(free[-1, -5])}", "tokenizer": tokenizer}):
        ours = model.generate(**inputs, **GREEDY, **TOKENS, **way, assistant_model=assistant)
        assert torch.equal(ours, original.generate(**inputs, **GREEDY, **TOKENS, **way))
    for way in ({}, {"eos_token_id": ends}):
        wanted = {**GREEDY, **way, "output_logits": True, "max_new_tokens": 30}
        same(run(model, inputs, **wanted, assistant_model=assistant), run(original, inputs, **wanted))
    assert loops(model) == []
    assert ragged(model) == (rows > 1)
    mean = sum(map(sum, taken)) / sum(map(len, taken))
    assert mean > 2.5 if seed == 0 else mean < 2


def test_rows_of_the_assistant_s_cache_lie_where_the_model_s_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    model.model.layers[2].mlp.down_proj.weight.data.mul_(0.01)  # what the two have in common decides most tokens
    original.load_state_dict(model.state_dict())
    assistant, _ = pair()
    assistant.load_state_dict(model.state_dict())
    assistant.model.layers[1].mlp.down_proj.weight.data.mul_(0.5)
    align, seen = DraftedLoop._align, []

    def looked_at(self: DraftedLoop, graph: DecodeGraph) -> None:
        align(self, graph)
        own = self._assistant._graph
        going_on = ~graph.state.finished
        assert torch.equal(own.cache.starts[going_on], graph.cache.starts[going_on])
        assert torch.equal(own.state.finished, graph.state.finished)
        seen.append(graph.state.shift.tolist())

    monkeypatch.setattr(DraftedLoop, "_align", looked_at)
    monkeypatch.setattr(Assistant, "pays", lambda *given: True)
    inputs = prompt(4)
    free = original.generate(**inputs, **GREEDY, **TOKENS)
    ends = [int(free[row, 14 + 3 * row]) for row in range(3)]
    for way in ({}, {"eos_token_id": ends}):
        ours = model.generate(**inputs, **GREEDY, **TOKENS, **way, assistant_model=assistant)
        assert torch.equal(ours, original.generate(**inputs, **GREEDY, **TOKENS, **way))
    assert any(far > 0 for shift in seen for far in shift)
    assert any(far < 0 for shift in seen for far in shift)


def test_whether_it_pays_is_a_matter_of_all_rows() -> None:
    worth = Worth()
    assert worth.pays([2, 2, 0])
    assert not worth.pays([2, 0, 0])
    worth.learn(2, 1)
    assert worth.pays([2, 2, 2])
    assert not worth.pays([2, 2, 2], besides=0.5)
    assert worth.pays([1, 1, 1], besides=0.5)  # not tried yet
    assert not worth.pays([2, 2, 0], ragged=False)
    assert worth.pays([2, 2, 2], ragged=False)
    for _ in range(9):
        worth.learn(2, 8)
    assert worth.pays([2, 0, 0, 0, 0, 0, 0])
    assert not worth.pays([])
    for _ in range(60):
        worth.learn(1, 0)
    assert not worth.pays([1, 2, 2], ragged=False)


def test_more_rows_than_eight_raise_as_in_transformers() -> None:
    model, _ = pair()
    with pytest.raises(ValueError, match="batch_size"):
        model.generate(**prompt(9), **LOOKUP, **TOKENS)
    assert loops(model) == ["drafts_for_rows"]


REFUSED = {
    "drafts_for_processor": {"repetition_penalty": 1.3},
    "drafts_for_inputs": {"output_hidden_states": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_raises_as_in_transformers(reason: str) -> None:
    model, original = pair()
    for one in (model, original):
        with pytest.raises(ValueError, match="batch_size"):
            one.generate(**repeating(batch=2), **{**LOOKUP, **TOKENS, **REFUSED[reason]})
    assert loops(model) == [reason]
    for one in (model, original):
        with pytest.raises((RuntimeError, ValueError), match="cache"):
            one.generate(**repeating(batch=2), **LOOKUP, **TOKENS, use_cache=False)
    assert loops(model) == ["no_cache"]


def test_beams_and_several_sequences_of_a_prompt_are_transformers_own() -> None:
    model, original = pair()
    for way in ({"num_return_sequences": 2}, {"num_beams": 2}):
        outcomes = []
        for one in (model, original):
            given = {**LOOKUP, **TOKENS, **way, **({"do_sample": True} if "num_beams" not in way else {})}
            try:
                torch.manual_seed(0)
                outcomes.append(one.generate(**prompt(2), **given).tolist())
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_replays_equal_plain_calls(name: str, dtype: torch.dtype, taken: list[list[int]]) -> None:
    model, _ = pair(name, dtype, initializer_range=0.05)
    assistant, _ = pair(name, dtype, initializer_range=0.05)
    ways = ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant})
    for seed, drafts in itertools.product((0, 1), ways):  # with the first the rows of a Llama are right alike
        texts = []
        for without in (True, False):
            model._step_without_graph = assistant._step_without_graph = without
            texts.append(
                model.generate(**repeating(batch=4, seed=seed), **GREEDY, **drafts, **{**TOKENS, "max_new_tokens": 60})
            )
        assert torch.equal(*texts)
    assert any(len(set(counts)) > 1 for counts in taken)
    assert loops(model) == []
