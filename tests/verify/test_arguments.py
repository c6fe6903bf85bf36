"""What a `forward` takes is read from its signature and from what it hands its keywords on to."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.processing_utils import Unpack

from rewrite.verify import Options
from rewrite.verify.calls.argument_cases import CASES, cases_for
from rewrite.verify.calls.argument_checks import argument_checks, asked_alone
from rewrite.verify.calls.arguments import arguments_of
from rewrite.verify.calls.compiled import _prompts_read
from rewrite.verify.calls.observed import everything, fields_of
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.requested import Record
from rewrite.verify.judging.verdict import Asked, Verdict
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import Subject
from rewrite.verify.render import render, summary


class Keywords(TypedDict, total=False):
    listed: int


def loss(logits: Any, labels: Any, weight: float = 1.0, **kwargs: Any) -> Any:
    return inner(logits, 3, **kwargs)


def inner(source: Any, target: Any, smoothing: float = 0.0) -> Any:
    return source


class Inside(nn.Module):
    def forward(self, hidden: Any, scale: float = 1.0, **kwargs: Unpack[Keywords]) -> Any:
        return hidden


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside()
        self.loss_function = loss

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.inside(input_ids, **kwargs)
        return self.loss_function(hidden, labels=labels, **kwargs)


def test_keywords_are_followed_to_those_who_take_them() -> None:
    # `hidden`, `logits`, `source` and `target` are passed by the callers themselves
    assert arguments_of(Whole()) == ("input_ids", "labels", "scale", "listed", "weight", "smoothing")


def model_class(name: str) -> Any:
    folder, cls = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)


def built(name: str) -> Any:
    cls = model_class(name)
    return cls._from_config(small_variants(cls, name.endswith("CausalLM"), {})[0].config)


def test_a_causal_model_takes_its_loss_keywords() -> None:
    taken = arguments_of(built("llama.LlamaForCausalLM"))
    assert {"labels", "logits_to_keep", "num_items_in_batch", "shift_labels", "ignore_index"} <= set(taken)
    assert "vocab_size" not in taken
    assert {case.name for case in cases_for(taken)} >= {"shift_labels", "the cache that came back", "packed sequences"}


def test_a_case_is_for_those_who_take_all_it_gives() -> None:
    assert [case.name for case in cases_for(("input_ids",))] == ["the plain arguments"]
    assert [case.name for case in cases_for(("use_magic",))] == ["the plain arguments", "use_magic"]
    assert len({case.name for case in CASES}) == len(CASES)


@dataclass
class Result:
    loss: torch.Tensor | None
    states: tuple[Any, ...]


def test_caches_and_nested_tuples_are_opened() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    found = everything({"states": (torch.ones(2), (cache, 5)), "none": None})
    assert "output.states.0" in found
    assert int(found["output.states.1.1"]) == 5
    keys = [name for name in found if name.endswith(".keys")]
    assert len(keys) == 1
    assert "DynamicCache" in keys[0]
    assert found[keys[0]].shape == (1, 2, 3, 4)


def test_fields_of_a_result() -> None:
    assert fields_of(Result(None, (1,))) == {"loss": False, "states": True}
    assert fields_of({"loss": 1}) == {}


def test_what_was_not_asked_for_is_said() -> None:
    record = Record()
    record.expect("Model", ("input_ids", "labels", "odd"))
    record.gave("Model", ("input_ids", "unknown"), {"loss": False, "logits": True})
    record.gave("Model", ("labels",), {"loss": False, "logits": False})
    asked = record.asked()
    assert asked == (Asked("Model", "arguments", 3, ("odd",)), Asked("Model", "outputs", 2, ("loss",)))
    verdict = Verdict(True, None, None, "Model", (), None, "", {}, Options(), 1.0, asked=asked)
    assert "not verified: 1 of 3 arguments and 1 of 2 outputs" in summary(verdict)
    assert "not verified  Model: 1 of 3 arguments: odd" in render(verdict)
    assert verdict.to_json()["asked"][0]["missed"] == ["odd"]
    classes = (Asked("One", "arguments", 3, ("odd",)), Asked("Two", "arguments", 3, ("odd",)))
    assert "not verified  One, Two: 1 of 3 arguments: odd" in render(replace(verdict, asked=classes))
    quick = replace(verdict, model_class="One", asked=classes, options=Options(quick=True))
    assert "not verified  One: 1 of 3 arguments: odd" in render(quick)
    assert "not verified  1 other class: 1 arguments, which --quick leaves out" in render(quick)


def test_what_was_not_asked_for_is_one_line_where_something_failed() -> None:
    missed = tuple(f"argument_{number}" for number in range(40))
    asked = tuple(Asked(f"Model{number}", "arguments", 50, missed) for number in range(5))
    failed = Verdict(False, None, None, "Model0", (), None, "parity", {}, Options(), 1.0, asked=asked)
    lines = render(failed).splitlines()
    assert [line for line in lines if "not verified" in line] == [
        "not verified: 200 of 250 arguments (--json FILE lists them)"
    ]
    assert "argument_39" in render(failed, verbose=True)


def bench_of(name: str, rewritten: Any = None) -> Workbench:
    cls = model_class(name)
    subject = Subject(cls, rewritten or cls, name.endswith("CausalLM"))
    return Workbench(subject, small_variants(cls, subject.causal, {})[:1], Options(seeds=1))


def test_every_argument_of_llama_is_given_and_every_output_compared() -> None:
    bench = bench_of("llama.LlamaForCausalLM")
    failed = [
        result for check in argument_checks(bench, bench.base) if (result := run_check(check)).status == "failed"
    ]
    assert not failed
    assert [asked.missed for asked in bench.record.asked()] == [(), ()]


@pytest.mark.parametrize("name", ["bert.BertForNextSentencePrediction", "t5.T5ForConditionalGeneration"])
def test_every_argument_of_other_classes_is_given(name: str) -> None:
    bench = bench_of(name)
    assert int(asked_alone(bench)["cases"]) > 20
    assert [asked.missed for asked in bench.record.asked()] == [(), ()]


def test_an_argument_that_no_case_knows_is_missed() -> None:
    cls = model_class("llama.LlamaModel")

    class Odd(cls):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, oddity: Any = None, use_cache: Any = None) -> Any:
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    bench = Workbench(Subject(Odd, Odd, False), small_variants(cls, False, {})[:1], Options(seeds=1))
    asked_alone(bench)
    assert bench.record.asked()[0] == Asked("Odd", "arguments", 3, ("oddity",))


class Encoder(nn.Module):
    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (input_ids.float(),)


class Passing(nn.Module):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor]:
        assert kwargs == {"use_cache": False}
        return (input_ids.float(),)


class Decoder(nn.Module):
    def forward(self, input_ids: Tensor, use_cache: bool = True) -> tuple[Tensor]:
        assert not use_cache
        return (input_ids.float(),)


@pytest.mark.parametrize("kind", [Encoder, Passing, Decoder])
def test_reads_prompts(kind: type[nn.Module]) -> None:
    subject = Subject(kind, kind, causal=False)
    options = SimpleNamespace(device="cpu")
    bench: Any = SimpleNamespace(subject=subject, options=options, seed_for=lambda *names: 0)
    variant: Any = SimpleNamespace(vocab_size=7)
    found = _prompts_read(bench, variant)(kind())
    assert [*found] == ["logits#0", "logits#1", "logits#2"]
    assert all(isinstance(logits, torch.Tensor) for logits in found.values())
