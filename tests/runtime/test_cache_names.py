"""A cache goes by the name of the installed transformers, by that of a model which is older or newer, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_generation import DEVICE, SIZES, loops, pair, prompt, run, same
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_rewrite_runtime.cache.cache_argument import (
    NAMES,
    argument_of,
    asked_with,
    given_back,
    keeps_states_alone,
    passed_on,
)
from hf_rewrite_runtime.generate.generation import GraphGeneration

OTHER = next(name for name in NAMES[:2] if name != passed_on())


class _OfAnotherRelease(LlamaForCausalLM):
    """Takes its cache by the name that transformers does not give it."""


def _forward(self: Any, cache: Any, *arguments: Any, **keywords: Any) -> Any:
    return LlamaForCausalLM.forward(self, *arguments, **{passed_on(): cache}, **keywords)


exec(  # the name of a parameter cannot be computed
    f"def forward(self, input_ids=None, attention_mask=None, position_ids=None, {OTHER}=None, **keywords):\n"
    f"    return _forward(self, {OTHER}, input_ids, attention_mask, position_ids, **keywords)\n",
    {"_forward": _forward},
    found := {},
)
_OfAnotherRelease.forward = found["forward"]


class Ours(GraphGeneration, _OfAnotherRelease):
    _step_without_graph = DEVICE.type == "cpu"


def test_the_name_is_that_of_the_parameter():
    model, _ = pair()
    assert argument_of(model) == asked_with(model) == passed_on()
    other = Ours(LlamaConfig(**SIZES))
    assert argument_of(other) == OTHER
    assert asked_with(other) == (NAMES[0] if passed_on() == NAMES[0] else OTHER)


def test_what_comes_back_is_found_by_any_name():
    model, _ = pair()
    with torch.no_grad():
        output = model(**prompt(), use_cache=True)
    assert given_back(output).get_seq_length() == 9
    assert given_back(BaseModelOutputWithPast()) is None
    assert given_back((1, 2)) is None
    assert not keeps_states_alone(given_back(output))


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_another_release_generates_in_the_loop(padded):
    torch.manual_seed(0)
    ours = Ours(LlamaConfig(**SIZES)).eval().to(DEVICE)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to(DEVICE)
    plain.load_state_dict(ours.state_dict())
    inputs = prompt(padded=padded)
    same(run(ours, inputs, do_sample=False), run(plain, inputs, do_sample=False))
    assert loops(ours) == []


def _told(model: Any, call: Callable[[Any], Any]) -> tuple[Any, list[str]]:
    """What a call of a model returns, or how it fails, and what it warns of, whatever the model's class is called."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = call(model)
        except (TypeError, ValueError) as error:
            result = str(error)
    return result, [str(one.message).replace(type(model).__name__, "Model") for one in said]


def _goes_on(name: str) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        ids = prompt(padded=False)["input_ids"]
        given = {name: DynamicCache(config=model.config)}
        with torch.no_grad():
            model(ids, use_cache=True, **given)
            return model(ids[:, :1], **given).logits

    return call


def _generates(name: str) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        inputs = {**prompt(padded=False), name: DynamicCache(config=model.config)}
        return model.generate(**inputs, do_sample=False, max_new_tokens=6)

    return call


@pytest.mark.skipif(passed_on() != NAMES[0], reason="this transformers has one name for a cache")
@pytest.mark.parametrize("calls", [_goes_on, _generates])
@pytest.mark.parametrize("name", NAMES)
def test_a_caller_may_use_either_name_and_is_told_what_the_original_tells(name, calls):
    ours, plain = pair()
    (found, ours_said), (expected, said) = _told(ours, calls(name)), _told(plain, calls(name))
    assert ours_said == said
    torch.testing.assert_close(found, expected)
    assert bool(said) == (name != NAMES[0] and (calls is _generates or name == NAMES[1]))
    assert loops(ours) == []


def test_no_call_of_ours_uses_a_name_that_goes():
    ours, plain = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for inputs, asked in (
            (prompt(), {"do_sample": False}),
            (prompt(), {"do_sample": True, "return_dict_in_generate": True}),
            (prompt(batch=1), {"do_sample": False, "prompt_lookup_num_tokens": 3}),
        ):
            same(run(ours, inputs, **asked), run(plain, inputs, **asked))
        ours.train()(**prompt(), labels=prompt()["input_ids"]).loss.backward()
    assert loops(ours) == []
