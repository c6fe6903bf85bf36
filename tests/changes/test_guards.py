"""What the guards of a captured step compare: each that is left out shows, and what they say of code is right."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers.generation import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_rewrite_runtime.core import backend, process
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode import eligibility, validator
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.guards import code_guard, provenance, snapshot
from hf_rewrite_runtime.tensor_parallel import shards
from hf_rewrite_runtime.tensor_parallel.forwards import SummedForward

from .calls import call, prompt
from .change import patched
from .families import Side, side
from .test_changes import SEEN, named, row

PLANTED: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "other methods are not told apart": (
        provenance,
        "stands",
        lambda kind, name: True,
        ("class, method: LlamaMLP.forward", "class, method: LlamaAttention.forward"),
    ),
    "other functions are not told apart": (
        provenance,
        "is_own",
        lambda value, holder, name: True,
        ("entry: ALL_ATTENTION_FUNCTIONS['sdpa']",),
    ),
    "code is not compared": (
        code_guard.CodeGuard,
        "is_current",
        lambda self: True,
        ("elsewhere: nn.functional.scaled_dot_product_attention", "entry: ALL_ATTENTION_FUNCTIONS['sdpa']"),
    ),
    "attributes are not compared": (
        snapshot.Snapshot,
        "is_current",
        lambda self: self.code.is_current(),
        ("new field: is_causal = False",),  # of modules, `side_effects.Kept` knows as well
    ),
    "addresses are not compared": (
        snapshot.Snapshot,
        "is_mapped",
        lambda self: True,
        (".data swapped: model.layers.*.self_attn.o_proj",),
    ),
    "settings are not compared": (process, "settings", tuple, ("default dtype float64", "default device cpu")),
    "methods of the instance are not looked at": (
        eligibility,
        "_overrides",
        lambda model, name: False,
        ("method, instance: prepare_inputs_for_generation, other embeddings",),
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_guard_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A wrong token, or a graph of the former model that was kept."""
    owner, attribute, instead, names = PLANTED[what]
    for name in names:
        with monkeypatch.context() as patch:
            for one in homes_of(owner, attribute):
                patch.setattr(one, attribute, instead)
            trust_every_step(patch)
            ours = side("llama", True, "cpu")
            call(ours)
            before = graphs_of(ours)
            with named(name).made(ours):
                call(ours)
                kept = [graph for graph in graphs_of(ours) if graph in before]
            assert kept or row(name).wrong, name


def homes_of(owner: Any, name: str) -> list[Any]:
    """Return a class, or the files of the runtime that know a function of another one by its name."""
    if isinstance(owner, type):
        return [owner]
    function = getattr(owner, name)
    files = [file for path, file in sys.modules.items() if path.startswith("hf_rewrite_runtime.")]
    return [file for file in files if vars(file).get(name) is function]


def trust_every_step(patch: pytest.MonkeyPatch) -> None:
    """Let no proof find out what a guard does not."""
    patch.setattr(validator, "compared", lambda *given: (0.0, True))


def graphs_of(ours: Side) -> list[Any]:
    return list(store_of(ours.model).graphs.values())


@pytest.mark.parametrize("name", [name for name in SEEN if "function mode" not in name and "DynamicLayer" not in name])
def test_a_captured_forward_would_not_be_replayed(name: str) -> None:
    ours = side("llama", True, "cpu")
    known, before = snapshot.Snapshot(ours.model), process.settings()
    assert known.is_mapped() and known.is_current()  # noqa: PT018
    with named(name).made(ours):
        assert not (known.is_mapped() and known.is_current() and process.settings() == before)


def test_layers_take_their_second_forms_where_their_code_stands() -> None:
    ours = side("llama", True, "cpu")
    call(ours)
    (graph,) = graphs_of(ours)
    assert graph.cache.fused
    call(ours)
    assert graphs_of(ours) == [graph]
    ours = side("llama", True, "cpu")
    with named("function of the file, wrapped: eager_attention_forward").made(ours):
        for _ in range(2):
            call(ours)
        (graph,) = graphs_of(ours)
        assert not graph.cache.fused
        assert "other code stands for" in str(explain(ours.model))
    assert not backend.fallbacks().get(("generate", "step_differs"))


def test_a_refusal_holds_until_the_model_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = side("llama", True, "cpu")
    tried: list[float] = []
    monkeypatch.setattr(validator, "compared", lambda *given: (tried.append(0.5) or 0.5, False))
    backend.reset_fallbacks()
    for _ in range(3):
        generate(ours)
    assert backend.fallbacks()[("generate", "step_differs")] == 3
    first = len(tried)
    ours.model.config.another = 1
    generate(ours)
    assert len(tried) == 2 * first


def generate(ours: Side) -> Any:
    return ours.model.generate(prompt(ours), max_new_tokens=6, do_sample=False)


def test_a_model_is_let_go_whatever_it_has_on_itself() -> None:
    ours = side("llama", True, "cpu")
    old = ours.model.prepare_inputs_for_generation
    ours.model.prepare_inputs_for_generation = functools.partial(old)
    ours.model.helper = types.SimpleNamespace(model=ours.model)
    for _ in range(2):
        generate(ours)
    gone = weakref.ref(ours.model)
    del old, ours
    gc.collect()
    assert gone() is None


def test_methods_of_the_loop_that_it_stands_for() -> None:
    ours = side("llama", True, "cpu")
    kind = type(ours.model)
    assert {"_prefill", "_has_unfinished_sequences"} <= eligibility._LOOP
    for name in sorted(eligibility._LOOP):
        backend.reset_fallbacks()
        method = getattr(kind, name)
        with patched(kind, name, functools.wraps(method)(lambda *g, method=method, **n: method(*g, **n))):
            generate(ours)
        assert backend.fallbacks()[("generate", "own_loop")] == 1, name
    calls = []
    sample = GenerationMixin._sample
    with patched(GenerationMixin, "_sample", lambda *g, **n: (calls.append(1), sample(*g, **n))[1]):
        generate(ours)
    assert calls == [1]


def test_code_is_known_by_where_it_was_written() -> None:
    def other(self: Any, x: Any) -> Any:
        return x

    assert provenance.runs_as_written(nn.Linear)
    for replacement in (other, functools.wraps(nn.Linear.forward)(other), torch.no_grad()(other), nn.Bilinear.forward):
        with patched(nn.Linear, "forward", replacement):
            assert not provenance.runs_as_written(nn.Linear)
        assert provenance.runs_as_written(nn.Linear)
    with patched(functional, "linear", functional.bilinear):
        assert not provenance.runs_as_written(nn.Linear)
    assert provenance.runs_as_written(nn.Linear)


def test_a_module_of_transformers_has_functions_of_what_it_is_installed_with() -> None:
    assert provenance.is_own(save_file, "transformers.model_debugging_utils", "save_file")
    assert not provenance.is_own(save_file, "torch.nn.functional", "linear")
    assert not provenance.is_own(pytest.importorskip, "transformers.model_debugging_utils", "save_file")


def test_what_a_process_adds_elsewhere_is_no_change() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    guard = code_guard.CodeGuard({type(module) for module in model.modules()}, frozenset({"sdpa"}))
    ALL_ATTENTION_FUNCTIONS["of another library"] = lambda *given: None
    try:
        assert guard.is_current()
    finally:
        del ALL_ATTENTION_FUNCTIONS["of another library"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        assert not guard.is_current()
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert guard.is_current()


class Dealt:
    """A tensor of several ranks, whose local one is another view each time."""

    def __init__(self) -> None:
        self.local = torch.ones(3)

    def to_local(self) -> torch.Tensor:
        return self.local.view_as(self.local)


def test_a_rank_has_the_same_tensors_in_each_call() -> None:
    module, dealt = nn.Linear(1, 1), Dealt()
    first = shards._local_of(module, "weight", dealt)
    assert shards._local_of(module, "weight", dealt) is first
    dealt.local = torch.zeros(3)
    assert shards._local_of(module, "weight", dealt).tolist() == [0, 0, 0]
    ranks: Any = object()
    assert SummedForward(module, ranks) == SummedForward(module, ranks)
    assert SummedForward(module, ranks) != SummedForward(nn.Linear(1, 1), ranks)
