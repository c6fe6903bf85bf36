"""Calls whose tokens the host chooses: transformers' loop over replayed steps gives what it gives over the model."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from test_generation import DEVICE, EOS, GPU, V, pair, prompt, run, same
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_rewrite_runtime.cache.cache_argument import given_back, passed_on
from hf_rewrite_runtime.cache.layers import PreallocatedLayer
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.generate import call_graphs, loop_reasons, replayed_loop


class Alternating(LogitsProcessor):
    """Takes turns between even and odd tokens, by the last one, in place, and remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((tuple(input_ids.shape), scores.dtype))
        odd = torch.arange(scores.shape[1], device=scores.device) % 2 == 1
        scores[(input_ids[:, -1:] % 2 == 1) == odd] -= 5.0
        return scores


class EndsAt(StoppingCriteria):
    """Ends a row at a token below a limit, and remembers how many tokens and scores it was asked about."""

    def __init__(self, limit):
        self.limit, self.seen = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((tuple(input_ids.shape), None if scores is None else len(scores)))
        return input_ids[:, -1] < self.limit


HOST = "torch's grouped product asks the host where a group ends, but for bfloat16"
MOE = pytest.param("qwen3_moe", marks=pytest.mark.skipif(GPU, reason=HOST))
CALLS = {
    "processor": {"do_sample": False, "logits_processor": LogitsProcessorList([Alternating()])},
    "processor, drawn": {"do_sample": True, "logits_processor": LogitsProcessorList([Alternating()])},
    "words": {"do_sample": False, "bad_words_ids": [[70, 71], [72], [80, 81, 82]]},
    "eta": {"do_sample": True, "top_k": 0, "eta_cutoff": 3e-3},
    "criterion": {"do_sample": False, "stopping_criteria": StoppingCriteriaList([EndsAt(V // 8)])},
    "criterion, end": {
        "do_sample": True,
        "eos_token_id": EOS,
        "stopping_criteria": StoppingCriteriaList([EndsAt(V // 8)]),
    },
    "guidance": {"do_sample": False, "guidance_scale": 1.5},
    "one token": {"do_sample": False, "max_new_tokens": 1},
    "one token, drawn": {"do_sample": True, "max_new_tokens": 1},
    "2 beams": {"num_beams": 2, "do_sample": False},
    "4 beams": {"num_beams": 4, "do_sample": False, "num_return_sequences": 3, "eos_token_id": EOS},
    "short beams": {"num_beams": 3, "do_sample": False, "length_penalty": -1.0, "eos_token_id": EOS},
    "early beams": {"num_beams": 3, "do_sample": False, "early_stopping": True, "eos_token_id": EOS},
    "drawn beams": {"num_beams": 3, "do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "beams of a criterion": {"num_beams": 2, "do_sample": False, "stopping_criteria": [EndsAt(V // 8)]},
    "beams of one token": {"num_beams": 2, "do_sample": False, "max_new_tokens": 1},
}
REASONS = {"words": "logits_processor", "eta": "logits_processor", "guidance": "logits_processor"}


def reasons():
    """Return why loops were transformers' own, over eager steps and over replayed ones, and forget it."""
    found = Counter(backend.fallbacks())
    backend.reset_fallbacks()
    eager = [reason for operator, reason in found if operator == "generate"]
    return eager, [reason for operator, reason in found if operator == replayed_loop.OPERATOR]


def both(model, original, inputs, arguments):
    """Run both models on arguments of their own, and return their outputs and what observers saw."""
    found = []
    for one in (model, original):
        own = copy.deepcopy(arguments)
        output = run(one, copy.deepcopy(inputs), output_scores=True, output_logits=True, **own)
        observers = [*own.get("logits_processor", ()), *own.get("stopping_criteria", ())]
        found.append((output, [observer.seen for observer in observers]))
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("call", CALLS)
def test_equals_the_original(call, padded):
    model, original = pair()
    for seed in (0, 1):  # the second takes the graph of the first
        (mine, my_seen), (theirs, their_seen) = both(model, original, prompt(padded=padded, seed=seed), CALLS[call])
        same(mine, theirs)
        assert my_seen == their_seen
        for name in ("sequences_scores", "beam_indices"):
            if getattr(theirs[0], name, None) is not None:
                torch.testing.assert_close(getattr(mine[0], name), getattr(theirs[0], name), rtol=1e-3, atol=1e-3)
        word = call.split(",")[0].replace("processor", "logits_processor").replace("criterion", "stopping_criteria")
        wanted = "beams" if "beam" in call else REASONS.get(call, word.replace(" ", "_"))
        assert reasons() == ([], [wanted])
        assert wanted in loop_reasons.REASONS


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("call", ["processor", "criterion, end", "one token", "2 beams"])
def test_steps_that_are_captured(call):
    test_equals_the_original(call, padded=False)


@pytest.mark.parametrize("call", ["processor", "criterion, end", "4 beams"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3", MOE, "gpt2"])
def test_other_models(name, call):
    model, original = pair(name)
    (mine, my_seen), (theirs, their_seen) = both(model, original, prompt(length=11), CALLS[call])
    same(mine, theirs)
    assert my_seen == their_seen
    assert reasons()[0] == []


@pytest.mark.parametrize("call", ["processor", "4 beams"])
def test_the_cache_grows(call, monkeypatch):
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 3)
    monkeypatch.setattr("hf_rewrite_runtime.decode.graph_cache.ROUNDING", 8)
    model, original = pair()
    (mine, _), (theirs, _) = both(model, original, prompt(), CALLS[call] | {"max_new_tokens": 40})
    same(mine, theirs)
    assert reasons()[0] == []


def test_a_text_goes_on():
    model, original = pair()
    outputs = []
    for one in (model, original):
        arguments = copy.deepcopy(CALLS["processor"])
        first = run(one, prompt(padded=False), **arguments)[0]
        ids = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
        outputs.append(run(one, {"input_ids": ids, passed_on(): given_back(first)}, **arguments))
    same(*outputs)
    assert reasons() == ([], ["logits_processor"])


class Kept(BaseStreamer):
    def __init__(self):
        self.words = []

    def put(self, value):
        self.words.append(value.tolist())

    def end(self):
        self.words.append("end")


def test_streams_what_the_original_streams():
    model, original = pair()
    words = []
    for one in (model, original):
        streamer = Kept()
        run(one, prompt(batch=1), streamer=streamer, **copy.deepcopy(CALLS["criterion"]))
        words.append(streamer.words)
    assert words[0] == words[1]
    assert words[0][-1] == "end"
    assert reasons()[0] == []


class Raises(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 12:
            raise KeyError("of the caller's")
        return scores


def test_an_error_of_the_callers_is_the_callers():
    model, original = pair()
    with pytest.raises(KeyError, match="of the caller's"):
        run(model, prompt(), do_sample=False, logits_processor=LogitsProcessorList([Raises()]))
    same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))
    assert reasons() == ([], [])


class Generates(StoppingCriteria):
    """Asks the same model for a text of its own, at every token."""

    def __init__(self, model):
        self.model, self.texts = model, []

    def __call__(self, input_ids, scores, **kwargs):
        ids = input_ids[:, :5]
        self.texts.append(self.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def test_a_criterion_that_generates():
    outputs, texts = [], []
    for one in pair():
        criterion = Generates(one)
        outputs.append(run(one, prompt(padded=False), do_sample=False, stopping_criteria=[criterion]))
        texts.append(criterion.texts)
    same(*outputs)
    assert texts[0] == texts[1]
    assert reasons() == (["reentrant"], ["stopping_criteria"])


def test_rows_that_are_not_chosen_show(monkeypatch):
    """The planted fault: beams that go on with the rows where they lie."""
    monkeypatch.setattr(PreallocatedLayer, "reorder_cache", lambda layer, rows: None)
    model, original = pair()
    (mine, _), (theirs, _) = both(model, original, prompt(), CALLS["2 beams"])
    assert not torch.equal(mine[0].sequences, theirs[0].sequences)


def test_a_search_of_the_users_is_the_users():
    model, original = pair()
    kind = type(model)
    model.__class__ = type("Own", (kind,), {"_reorder_cache": lambda self, cache, rows: cache})
    assert not replayed_loop.may_reorder(model)
    model.__class__ = type("Own", (kind,), {"_beam_search": lambda self, *given, **named: "found"})
    assert not replayed_loop.may_reorder(model)
    model.__class__ = kind
    assert replayed_loop.may_reorder(model)
    assert not replayed_loop.may_reorder(original)


def test_the_prompt_of_one_token_needs_no_step(monkeypatch):
    monkeypatch.setattr("hf_rewrite_runtime.decode.step_graph.DecodeGraph.prove", None)
    model, original = pair()
    ids = prompt(padded=False)["input_ids"].to(DEVICE)
    found = [one.generate(ids, max_new_tokens=1, do_sample=False) for one in (model, original)]
    assert torch.equal(*found)
