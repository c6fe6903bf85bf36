"""Under training mode or mixed precision `generate()` takes the graph's loop where they change nothing, only there."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from accelerate import Accelerator
from test_generation import GPU, MODELS, loops, pair, prompt, run, same
from test_replayed_loop import MOE
from torch import nn

from hf_rewrite_runtime.generate import generation
from hf_rewrite_runtime.generate.neutral_modes import without_modes

MODES = {"all": lambda model: model.train(), "a layer": lambda model: model.model.layers[1].train()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2", MOE])
def test_without_dropout_it_decodes_as_in_evaluation(name, mode):
    model, original = pair(name)
    for seed in (0, 1):
        for one in (model, original):
            MODES[mode](one)
        flags = [module.training for module in model.modules()]
        same(*(run(one, prompt(seed=seed), do_sample=True) for one in (model, original)))
        assert loops(model) == []
        assert [module.training for module in model.modules()] == flags


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA or ROCm device")
def test_a_captured_step_of_training():
    test_without_dropout_it_decodes_as_in_evaluation("llama", "all")


def test_another_thread_sees_the_modes_of_the_caller():
    model = nn.Linear(2, 2).train()
    inside, seen = threading.Event(), []

    def other():
        inside.wait(5)
        with without_modes(model) as modes:
            seen.append(bool(modes))

    thread = threading.Thread(target=other)
    thread.start()
    with without_modes(model):
        inside.set()
        thread.join(0.2)
        assert seen == []
    thread.join(5)
    assert seen == [True]
    assert model.training


class Drops(nn.Module):
    """Drops its input's numbers."""

    def forward(self, states):
        return nn.functional.dropout(states, 0.1, self.training)


class SkipsByPython(nn.Module):
    """Skips itself now and then, as layers of speech models do."""

    def forward(self, states):
        return states * 1.1 if self.training and random.random() < 0.5 else states


class Counts(nn.Module):
    """Counts the calls of training."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, states):
        self.calls += self.training
        return states


class Averages(nn.Module):
    """Keeps a mean of what it has seen in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, states):
        if self.training:
            self.mean.lerp_(states.mean().view(1), 0.1)
        return states


class Scales(nn.Module):
    """Computes something else in training."""

    def forward(self, states):
        return states * 1.001 if self.training else states


@pytest.mark.parametrize("kind", [Drops, SkipsByPython, Counts, Averages, Scales])
def test_what_training_changes_takes_the_original_loop(kind):
    model, original = pair()
    found = []
    for one in (model, original):
        one.model.norm = nn.Sequential(kind(), one.model.norm).to(one.device).train()
        random.seed(3)
        found.append((run(one, prompt(), do_sample=False, output_logits=True), random.getstate()))
    same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    for name, value in vars(original.model.norm[0]).items():
        if isinstance(value, int):
            assert getattr(model.model.norm[0], name) == value
    assert all(map(torch.equal, model.buffers(), original.buffers()))
    assert loops(model) == ["training"]
    model.eval()
    run(model, prompt(), do_sample=False)
    assert loops(model) == []


def test_dropout_that_is_set_later():
    model, original = pair(attention_dropout=0.0)
    wanted = {0.0: [], 0.2: ["training"]}
    for probability in (0.0, 0.2, 0.0):
        for one in (model, original):
            one.train()
            one.model.layers[1].self_attn.attention_dropout = probability
        same(*(run(one, prompt(), do_sample=False) for one in (model, original)), logits=False)
        assert loops(model) == wanted[probability]


def test_modes_that_were_tried_say_nothing_of_others():
    """A new module is in training mode for good, as an edit leaves it: then all of them are, with dropout."""
    model, original = pair()
    for one in (model, original):
        one.model.layers[1].self_attn.attention_dropout = 0.3
        one.model.norm.train()
    same(*(run(one, prompt(), do_sample=False) for one in (model, original)))
    assert loops(model) == []
    for one in (model, original):
        one.train()
    same(*(run(one, prompt(), do_sample=False) for one in (model, original)), logits=False)
    assert loops(model) == ["training"]


def test_checkpointing():
    """Some releases of transformers keep no cache then, without gradients too, and fail behind the prompt."""
    model, original = pair()
    for one in (model, original):
        one.gradient_checkpointing_enable()
        one.train()

    def said(one):
        try:
            return one.generate(**prompt(), do_sample=False, max_new_tokens=5).tolist()
        except RuntimeError as error:
            return str(error)

    assert said(model) == said(original)
    assert loops(model) in ([], ["training"])


def mixed(model):
    return Accelerator(mixed_precision="bf16", cpu=not GPU).prepare_model(model)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_mixed_precision_of_weights_in_its_dtype(name):
    plain, model = pair(name, torch.bfloat16)[0], mixed(pair(name, torch.bfloat16)[0])
    wrapped, model.starts_plainly, plain.starts_plainly = vars(model)["forward"], False, False
    for seed in (0, 1):
        mine, theirs = (run(one, prompt(seed=seed), do_sample=False, output_logits=True)[0] for one in (model, plain))
        assert torch.equal(mine.sequences, theirs.sequences)
        assert all(map(torch.equal, mine.logits, theirs.logits))
        assert loops(model) == []
        assert vars(model)["forward"] is wrapped


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mixed_precision_of_other_weights(name):
    models = [mixed(one) for one in pair(name)]
    same(*(run(one, prompt(), do_sample=False) for one in models), logits=False)
    assert loops(models[0]) == ["observed"]


def test_a_wrapper_around_that_of_mixed_precision():
    model = mixed(pair(dtype=torch.bfloat16)[0])
    calls, inner = [], model.forward
    model.forward = lambda *given, **named: calls.append(1) or inner(*given, **named)
    run(model, prompt(), do_sample=False, max_new_tokens=5)
    assert len(calls) == 5
    assert loops(model) == ["observed"]


def test_an_error_leaves_the_modes_as_they_were():
    model, _ = pair()
    model.train()

    def fails(ids, scores):
        raise KeyError("of the caller's")

    with pytest.raises(KeyError, match="of the caller's"):
        run(model, prompt(), do_sample=False, logits_processor=[fails])
    assert all(module.training for module in model.modules())


def test_a_mode_that_is_taken_for_nothing_shows(monkeypatch):
    """The planted fault: dropout that is left out."""
    monkeypatch.setattr(generation, "decodes_alike", lambda *given: True)
    model, original = pair()
    found = []
    for one in (model, original):
        one.model.norm = nn.Sequential(Drops(), one.model.norm).to(one.device).train()
        found.append(run(one, prompt(), do_sample=False, output_logits=True)[0].logits[0])
    assert not torch.allclose(*found, rtol=1e-3, atol=1e-3)


def test_the_models_of_the_tests_have_no_dropout():
    assert all(getattr(config, "attention_dropout", 0.0) == 0.0 for _, _, config in MODELS.values())
