"""What `explain` prints, and that it is of the model that it is asked about."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.explanation import Explanation, explain
from hf_rewrite_runtime.forward.captured import CapturedForward
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.norms.rms_norm import rms_norm

COUNTED = "rms_norm: eps_is_a_tensor"
FAST = "every operator took its fast form"


class Norm(nn.Module):
    """Steps aside in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eps", torch.tensor(1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.eps)  # type: ignore[arg-type]


class Model(CapturedForward, nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or Norm()

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = True


def x() -> Tensor:
    return torch.randn(2, 8)


def test_modules_that_differ_in_numbers_share_a_line() -> None:
    modules = {f"layers.{index}.mlp": "rms_norm: dtype" for index in range(12)}
    said = Explanation("auto", {"rms_norm: dtype": 24}, {**modules, "layers.3.norm": "rms_norm: dtype", "": "x: y"})
    assert str(said).splitlines() == [
        "backend: auto",
        "      24 × rms_norm: dtype",
        "model: x: y",
        "layers.*.mlp (12): rms_norm: dtype",
        "layers.3.norm: rms_norm: dtype",
    ]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_fresh_model_is_told_nothing_of_others(mode: Any) -> None:
    first, second = Model(), Model()
    with mode():
        for _ in range(3):
            first(x())
        assert explain(first).fallbacks == {COUNTED: 3}
        said = explain(second)
        assert (said.fallbacks, said.modules, said.outside) == ({}, {}, {})
        assert FAST in str(said)
        second.eval()(x())
    assert (explain(first).fallbacks, explain(second).fallbacks) == ({COUNTED: 3}, {COUNTED: 1})
    assert explain().fallbacks == {COUNTED: 4}
    backend.reset_fallbacks()
    assert explain(first).fallbacks == explain().fallbacks == {}


def test_a_model_in_a_wrapper_or_another_model_counts_for_both() -> None:
    inner, other = Model(), Model()
    outer = Model(inner)
    nn.Sequential(outer)(x())
    assert [explain(one).fallbacks for one in (inner, outer, nn.Sequential(outer))] == [{COUNTED: 1}] * 3
    assert explain(other).fallbacks == {}


def test_what_runs_outside_of_a_model_is_of_the_process() -> None:
    model = Model()
    model.norm(x())
    said = explain(model)
    assert (said.fallbacks, said.outside, explain().fallbacks) == ({}, {COUNTED: 1}, {COUNTED: 1})
    assert str(said).splitlines()[1:3] == ["outside of any model's call, in this process:", f"       1 × {COUNTED}"]
    assert FAST not in str(said)


def test_what_is_counted_at_a_module_is_of_those_that_hold_it() -> None:
    """Whichever model is under way, and where none is."""
    block, other = nn.Sequential(nn.Linear(1, 1)), Model()
    backend.count_fallback("linear", "dtype", block[0])
    with backend.Inside(other):
        backend.count_fallback("linear", "dtype", block[0])
    assert explain(block).fallbacks == {"linear: dtype": 2}
    assert explain(block).modules == {"0": "linear: dtype"}
    assert (explain(other).fallbacks, explain(other).outside) == ({}, {})


def test_a_call_that_raises_is_over() -> None:
    model = Model(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        model(x())
    rms_norm(x(), None, torch.tensor(1e-5))  # type: ignore[arg-type]
    assert (explain(model).fallbacks, explain(model).outside) == ({}, {COUNTED: 1})


def test_threads_have_models_of_their_own() -> None:
    both_inside = threading.Barrier(2)

    class Waits(Norm):
        def forward(self, x: Tensor) -> Tensor:
            both_inside.wait(10)
            return super().forward(x)

    models = [Model(Waits()), Model(Waits())]

    def calls(model: Model) -> None:
        for _ in range(3):
            model(x())

    threads = [threading.Thread(target=calls, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [explain(model).fallbacks for model in models] == [{COUNTED: 3}] * 2
    assert explain(models[0]).outside == {}


def test_a_generation_is_of_its_model() -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, attention_dropout=0.5,
    )  # fmt: skip
    first, second = Llama(config).train(), Llama(config).eval()
    first.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    assert explain(first).fallbacks["generate: training"] == 1
    assert (explain(second).fallbacks, explain(second).modules) == ({}, {})
    first.eval().generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, num_beams=2, do_sample=False)
    second.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    assert explain(first).fallbacks["tokens: beams"] == 1
    assert not [what for what in explain(second).fallbacks if what.startswith("generate: ")]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_compiler_goes_through(mode: Any) -> None:
    model, given = Model().eval(), x()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with mode():
        assert torch.equal(compiled(given), model.norm(given))
    assert explain(model).fallbacks == {}


def test_no_model_is_kept_alive() -> None:
    model = Model()
    model(x())
    there, kept = weakref.ref(model), len(backend._fallbacks_of)
    del model
    gc.collect()
    assert there() is None
    assert len(backend._fallbacks_of) == kept - 1
