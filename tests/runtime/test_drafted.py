"""Tokens that were looked up in the text and are checked several at a time are those of plain greedy search."""

from __future__ import annotations

import functools

import pytest
import torch
from test_generation import GPU, Doubled, gpu, loops, pair, prompt, run, same, tokenizer
from test_other_models import pair as other_pair
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_rewrite_runtime.cache.cache_argument import given_back, passed_on
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode import graph_cache
from hf_rewrite_runtime.decode.eligibility import makes_cache_position
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.policy import GraphPolicy
from hf_rewrite_runtime.generate import call_graphs, drafting
from hf_rewrite_runtime.sampling.prompt_lookup import look_up
from hf_rewrite_runtime.sampling.sampling import Lookup, StepState
from hf_rewrite_runtime.speculative import draft_model as assisting
from hf_rewrite_runtime.speculative import left_pad_rows, verify_step
from hf_rewrite_runtime.speculative.speculative_loop import Worth
from hf_rewrite_runtime.speculative.verify_step import Window

DEVICE = torch.device("cuda" if GPU else "cpu")
LOOKUP = {"do_sample": False, "prompt_lookup_num_tokens": 4}
GREEDY = {"do_sample": False}

__all__ = ["tokenizer"]

if makes_cache_position(pair()[0]):
    pytest.skip("this transformers does not say which cache is whose in assisted decoding", allow_module_level=True)


def repeating(length: int = 40, words: int = 7, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
    """A prompt of few different tokens: whatever comes was there before."""
    inputs = prompt(batch, length, seed=seed)
    inputs["input_ids"] = inputs["input_ids"] % words + 60
    return inputs


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many tokens each step of several gave to each row."""
    counts: list[list[int]] = []
    replay = Window.replay

    def counted(program: Window) -> None:
        replay(program)
        graph = program._decode()
        assert graph is not None
        counts.append(graph.state.taken.tolist())

    monkeypatch.setattr(Window, "replay", counted)
    return counts


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are checked however often they were wrong."""
    monkeypatch.setattr(
        Worth, "pays", lambda self, matched, ragged=True, besides=0.0: any(matched) and (ragged or all(matched))
    )


def plant(monkeypatch: pytest.MonkeyPatch, text: torch.Tensor, right: float) -> None:
    """Draft the tokens of a known text `[1, n]`, each replaced by another with a probability of `1 - right`."""
    plant_rows(monkeypatch, text, [right])


def plant_rows(monkeypatch: pytest.MonkeyPatch, text: torch.Tensor, right: list[float]) -> None:
    """Draft the tokens of known texts `[B, n]`, as many of them wrong as each row says."""
    wrong = torch.rand(text.shape, generator=torch.Generator().manual_seed(3)) > torch.tensor(right)[:, None]
    beyond = torch.zeros(len(text), 64, dtype=torch.int64)
    known = torch.cat([text.cpu().masked_fill(wrong, 61), beyond], dim=1).to(DEVICE)

    def planted(state: StepState, lookup: Lookup, eos: torch.Tensor | None) -> None:
        at = state.position - state.behind + 1 + torch.arange(lookup.tokens, device=DEVICE)
        state.drafts[:, : lookup.tokens] = known.gather(1, at.clamp(0, known.shape[1] - 1))
        state.drafted.fill_(lookup.tokens)
        state.matched.fill_(1)

    for module in (left_pad_rows, drafting, verify_step):
        monkeypatch.setattr(module, "look_up", planted)
    monkeypatch.setattr("hf_rewrite_runtime.sampling.greedy.look_up", planted)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_equals_transformers_own_and_plain_greedy(name: str, taken: list[list[int]]) -> None:
    model, original = pair(name, initializer_range=0.05)
    for seed in (0, 1):  # the second call finds the graphs of the first
        inputs, wanted = repeating(seed=seed), {"output_logits": True, "output_scores": True, "max_new_tokens": 30}
        theirs = run(original, inputs, **LOOKUP, **wanted)
        same(run(model, inputs, **LOOKUP, **wanted), theirs)
        assert torch.equal(theirs[0].sequences, run(original, inputs, **GREEDY, **wanted)[0].sequences)
    assert loops(model) == []
    assert max(map(max, taken)) == 5
    (graph,) = store_of(model).graphs.values()
    assert len(graph._programs) == 2


def test_a_cache_is_continued() -> None:
    outputs = []
    model, original = pair("mistral")
    for one, arguments in ((model, LOOKUP), (original, GREEDY)):
        inputs = repeating()
        first, _ = run(one, inputs, **arguments, max_new_tokens=20)
        ids = torch.cat([first.sequences, inputs["input_ids"][:, :5]], dim=1)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), passed_on(): given_back(first)}
        outputs.append(run(one, again, **arguments))
    same(*outputs)
    assert loops(model) == []


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("eos", [None, [3, 5]], ids=["endless", "eos"])
def test_drafts_are_those_of_transformers(ngram: int, eos: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(ngram)
    ends = None if eos is None else torch.tensor(eos, device=DEVICE)
    for length in [*range(1, 12), 30, 60]:
        for words in (3, 9, 40):
            text = torch.randint(words, (1, length), generator=generator).to(DEVICE)
            theirs = PromptLookupCandidateGenerator(ends, 4, ngram, 1000).get_candidates(text)[0][0, length:]
            state = StepState(1, 64, torch.tensor([length - 1], device=DEVICE))
            state.sequence.fill_(int(text[0, -1]))
            state.sequence[:, :length] = text
            look_up(state, Lookup(4, ngram), ends)
            assert state.drafts[0, : int(state.drafted)].tolist() == theirs.tolist()
            assert int(state.drafted) == 0 or 1 <= int(state.matched) <= ngram


def test_without_a_match_there_is_no_step_of_several(monkeypatch: pytest.MonkeyPatch, taken: list[list[int]]) -> None:
    model, original = pair()
    monkeypatch.setattr(drafting, "look_up", lambda state, lookup, eos: state.drafted.zero_())
    monkeypatch.setattr("hf_rewrite_runtime.sampling.greedy.look_up", lambda state, lookup, eos: state.drafted.zero_())
    same(run(model, prompt(1), **LOOKUP), run(original, prompt(1), **GREEDY))
    assert taken == []


def test_what_does_not_pay_is_left_out_but_for_one_try_in_so_many(
    monkeypatch: pytest.MonkeyPatch, taken: list[list[int]]
) -> None:
    worth = Worth()
    tried = 0
    for _ in range(200):
        if worth.pays([1]):
            tried += 1
            worth.learn(1, 0)
    assert 6 <= tried <= 9
    assert worth.pays([2])
    for _ in range(9):
        worth.learn(1, 4)
    assert worth.pays([1])
    model, original = pair()
    theirs = run(original, prompt(1), **GREEDY, max_new_tokens=44)
    plant(monkeypatch, theirs[0].sequences, 0.0)
    same(run(model, prompt(1), **LOOKUP, max_new_tokens=44), theirs)
    assert 0 < len(taken) <= 8


REFUSED = {
    "drafts_for_processor": {"repetition_penalty": 1.3},
    "logits_processor": {"logits_processor": LogitsProcessorList([Doubled()])},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_takes_the_original_loop(reason: str) -> None:
    model, original = pair()
    ours, theirs = (run(m, repeating(), **{**LOOKUP, **REFUSED[reason]}) for m in (model, original))
    assert torch.equal(ours[0].sequences, theirs[0].sequences)
    assert loops(model) == [reason]


@pytest.mark.parametrize("right", [True, False])
def test_another_model_drafts_as_long_as_it_pays(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    assistant, _ = pair() if right else pair(seed=1, num_hidden_layers=1)
    monkeypatch.setattr(assisting, "nbytes", lambda each: 1 if each is assistant else 10)
    rounds = []
    draft = assisting.Assistant.draft
    monkeypatch.setattr(assisting.Assistant, "draft", lambda self, graph: rounds.append(draft(self, graph)))
    same(run(model, prompt(1), **GREEDY, assistant_model=assistant, max_new_tokens=60),
         run(original, prompt(1), **GREEDY, max_new_tokens=60))  # fmt: skip
    assert len(rounds) == (10 if right else assisting.TRIED)


def test_graphs_of_both_models_are_those_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    assistant, _ = pair(seed=1, num_hidden_layers=1)
    forward, packed = type(model).forward, []

    @functools.wraps(forward)
    def packs(self, *arguments, **keywords):
        """The first forward moves the weights, as packing does."""
        for parameter in self.parameters() if self not in packed else ():
            parameter.data = parameter.data.clone()
        packed.append(self)
        return forward(self, *arguments, **keywords)

    monkeypatch.setattr(type(model), "forward", packs)
    graphs = []
    for _ in range(2):
        run(model, prompt(1), **GREEDY, assistant_model=assistant, max_new_tokens=16)
        graphs.append([graph for one in (model, assistant) for graph in store_of(one).graphs.values()])
    assert len(graphs[0]) == 2
    assert all(first is second for first, second in zip(*graphs, strict=True))


def test_weights_that_a_later_first_step_moves_leave_no_graph_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    run(model, prompt(1), **GREEDY, max_new_tokens=4)
    (before,) = store_of(model).graphs.values()
    forward = type(model).forward

    @functools.wraps(forward)
    def moves(self, *arguments, **keywords):
        """A forward of other rows that packs what the first did not."""
        if self.model.norm.weight.data_ptr() == place:
            self.model.norm.weight.data = self.model.norm.weight.data.clone()
        return forward(self, *arguments, **keywords)

    place = model.model.norm.weight.data_ptr()
    kept = model.model.norm.weight.data  # so that no other memory gets its address
    monkeypatch.setattr(type(model), "forward", moves)
    run(model, prompt(3), **GREEDY, max_new_tokens=4)
    (after,) = store_of(model).graphs.values()
    assert kept.data_ptr() == place != model.model.norm.weight.data_ptr()
    assert (before.cache.batch_size, after.cache.batch_size) == (1, 3)


def test_drafts_of_another_model_end_where_the_cache_does(
    monkeypatch: pytest.MonkeyPatch, taken: list[list[int]]
) -> None:
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 12)
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    model, original = pair()
    assistant, _ = pair()
    same(run(model, prompt(1), **GREEDY, assistant_model=assistant, max_new_tokens=40),
         run(original, prompt(1), **GREEDY, max_new_tokens=40))  # fmt: skip
    assert set(map(max, taken)) == {6}
    assert loops(model) == []


def test_drafts_of_a_model_without_the_loop_are_left_to_transformers() -> None:
    model, original = pair()
    _, assistant = pair(seed=1)
    for one in (model, original):
        one.generation_config.pad_token_id = 0
    ours, theirs = (run(m, prompt(1), **GREEDY, assistant_model=assistant) for m in (model, original))
    assert torch.equal(ours[0].sequences, theirs[0].sequences)
    assert loops(model) == ["drafted"]
    with pytest.raises(ValueError, match="batch_size"):
        model.generate(**prompt(2), **GREEDY, assistant_model=assistant)
    assert loops(model) == ["drafted"]


def test_states_cannot_go_back() -> None:
    model, original = other_pair("Lfm2ForCausalLM")
    inputs = {name: tensor % 90 for name, tensor in prompt(1).items()}
    ours, theirs = (run(m, inputs, **LOOKUP) for m in (model, original))
    assert torch.equal(ours[0].sequences, theirs[0].sequences)
    assert loops(model) == ["drafts_for_states"]


def test_steps_that_round_otherwise_check_nothing_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    monkeypatch.setattr(type(model), "graph_policy", GraphPolicy(fewest_tokens=2))
    ours, theirs = (run(m, repeating(), **LOOKUP) for m in (model, original))
    assert torch.equal(ours[0].sequences, theirs[0].sequences)
    assert loops(model) == ["drafts_for_rounding"]


def blind(model: torch.nn.Module, act: object) -> None:
    """Let a model do something else for several tokens of a step."""
    inner = type(model.model)

    class Other(inner):
        def forward(self, *args, **kwargs):
            past = kwargs[passed_on()]
            if getattr(past, "stepping", False) and past.width > 1:
                kwargs = act(past, kwargs)
            return super().forward(*args, **kwargs)

    model.model.__class__ = Other


def unmasked(past, kwargs):
    width = past.width
    seen = (
        torch.arange(past.capacity, device=DEVICE) <= past.position + width
    )  # one slot too many, and all of each other
    mask = torch.zeros(1, 1, width, past.capacity, device=DEVICE).masked_fill(~seen, -torch.inf)
    return {**kwargs, "attention_mask": mask}


def counting(past, kwargs):
    raise TypeError("an integer is required")


@pytest.mark.parametrize(("reason", "act"), [("drafts_differ", unmasked), ("drafts_fail", counting)])
def test_a_step_of_several_that_is_not_the_model_s_own_is_noticed(reason: str, act: object) -> None:
    model, original = pair()
    blind(model, act)
    for _ in range(2):
        ours, theirs = (run(m, repeating(), **LOOKUP) for m in (model, original))
        assert torch.equal(ours[0].sequences, theirs[0].sequences)
        assert loops(model) == [reason]
    assert "no graph" in str(explain(model))
    same(run(model, repeating(), **GREEDY), run(original, repeating(), **GREEDY))
    assert loops(model) == []


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_replays_equal_plain_calls(name: str, dtype: torch.dtype, taken: list[list[int]]) -> None:
    model, _ = pair(name, dtype, initializer_range=0.05)
    outputs = []
    for without in (True, False):
        model._step_without_graph = without
        outputs.append(run(model, repeating(), **LOOKUP, max_new_tokens=60, output_logits=True)[0])
    plain, replayed = outputs
    assert torch.equal(plain.sequences, replayed.sequences)
    for wanted, got in zip(plain.logits, replayed.logits, strict=True):
        if name == "qwen3_moe":  # a library chooses another form for its experts in fp32 where it is captured
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(got, wanted)
    assert max(map(max, taken)) > 1
    assert loops(model) == []
