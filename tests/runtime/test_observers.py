"""Whose hooks and forwards keep a module's call, and whose do nothing: by what they do, not by whose they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.forward import forward_eligibility
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.guards.observers import has_own_forward, only_records

GPU = torch.cuda.is_available()


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = not GPU


@pytest.fixture
def models() -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model, original = Llama(config).eval(), LlamaForCausalLM(config).eval()
    original.load_state_dict(model.state_dict())
    backend.reset_fallbacks()
    return (model.cuda(), original.cuda()) if GPU else (model, original)


def taken(models: tuple[Any, Any], calls: int = 2) -> bool:
    """Return whether the loop takes the last of some calls, each of which has to give the original's tokens."""
    model, _ = models
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1)).to(model.device)
    for _ in range(calls):
        backend.reset_fallbacks()
        tokens = [one.generate(ids, max_new_tokens=6, do_sample=False) for one in models]
        assert torch.equal(*tokens)
    reasons = {reason for operator, reason in backend.fallbacks() if operator == "generate"}
    with torch.no_grad():
        forward = forward_eligibility.unfit_model(model)
    assert (forward == "observed") == (reasons == {"observed"})
    assert reasons <= {"observed"}
    return not reasons


def each(models: tuple[Any, Any]) -> Iterator[tuple[Any, nn.Module]]:
    for model in models:
        yield model, model.model.layers[1].mlp


# what does nothing -------------------------------------------------------------------------------------------------


def _checkpointed(models: tuple[Any, Any]) -> None:
    for model in models:
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        assert model.model.embed_tokens._forward_hooks


def _peft_s(models: tuple[Any, Any]) -> None:
    def make_inputs_require_grad(layer: Any, arguments: Any, result: Any) -> None:
        result.requires_grad_(True)

    for model in models:
        model.model.embed_tokens.register_forward_hook(make_inputs_require_grad)


def _recorded(models: tuple[Any, Any]) -> None:
    for model in models:
        model(torch.ones(1, 2, dtype=torch.int64, device=model.device), output_hidden_states=True)


def _recorded_and_checkpointed(models: tuple[Any, Any]) -> None:
    _recorded(models)
    _checkpointed(models)


def _put_back(models: tuple[Any, Any]) -> None:
    """As compressed-tensors leaves modules."""
    for _, module in each(models):
        module.forward = module.forward.__func__.__get__(module)


def _undecorated(models: tuple[Any, Any]) -> None:
    """As accelerate leaves a model: its loop over `__wrapped__` goes on to the last one."""
    for model in models:
        function = type(model).forward
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        assert function is not type(model).forward
        model.forward = MethodType(function, model)


def _unwrapped(models: tuple[Any, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    for model in models:
        accelerate.state.AcceleratorState._reset_state(True)  # of what ran in this process before
        accelerator = accelerate.Accelerator(cpu=not GPU, mixed_precision="bf16")
        accelerator.unwrap_model(accelerator.prepare_model(model, evaluation_mode=True), keep_fp32_wrapper=False)
        accelerate.state.AcceleratorState._reset_state(True)
        assert "forward" in vars(model)


def _dispatched(models: tuple[Any, Any]) -> None:
    """One device is no reason for a hook."""
    accelerate = pytest.importorskip("accelerate")
    for model in models:
        accelerate.dispatch_model(model, {"": model.device})


def _hooked_and_not(models: tuple[Any, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    for _, module in each(models):
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu"))
        accelerate.hooks.remove_hook_from_module(module)
        assert "forward" in vars(module)


def _parametrised(models: tuple[Any, Any]) -> None:
    class Half(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    for _, module in each(models):
        parametrize.register_parametrization(module.up_proj, "weight", Half())


def _weight_norm(models: tuple[Any, Any]) -> None:
    for _, module in each(models):
        nn.utils.parametrizations.weight_norm(module.up_proj)


NOTHING = [
    _checkpointed, _peft_s, _recorded, _recorded_and_checkpointed, _put_back, _undecorated, _unwrapped, _dispatched,
    _hooked_and_not, _parametrised, _weight_norm,
]  # fmt: skip


@pytest.mark.parametrize("before", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("change", NOTHING, ids=lambda change: change.__name__)
def test_what_does_nothing_leaves_the_loop(
    models: tuple[Any, Any], change: Callable[[tuple[Any, Any]], None], before: bool
) -> None:
    if not before:
        assert taken(models)
    change(models)
    assert taken(models)
    assert explain(models[0]).watched == {}
    if change in (_recorded, _recorded_and_checkpointed):
        assert all(graph.cache.fused for graph in store_of(models[0]).graphs.values())


# what does something -----------------------------------------------------------------------------------------------


def _half(*arguments: Any) -> Any:
    return arguments[-1] * 0.5


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(_half)


def _pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0.5,))


def _marks_and_halves(module: nn.Module) -> None:
    def make_inputs_require_grads(module: Any, inputs: Any, output: Any) -> Any:
        output.requires_grad_(True)
        return output * 0.5

    module.register_forward_hook(make_inputs_require_grads)


def _parametrised_and_hooked(module: Any) -> None:
    parametrize.register_parametrization(module.up_proj, "weight", nn.Identity())
    module.up_proj.register_forward_hook(_half)


def _forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 0.5


def _of_another(module: nn.Module) -> None:
    other = type(module)(LlamaConfig(hidden_size=32, intermediate_size=48)).to(next(module.parameters()))
    for parameter in other.parameters():
        nn.init.constant_(parameter, 0.1)
    module.forward = other.forward


def _of_another_class(module: nn.Module) -> None:
    """As `kernels` replaces layers."""

    class Kernel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    module.forward = MethodType(Kernel.forward, module)


def _wrapped(module: Any) -> None:
    """As compressed-tensors wraps, in the name of what it wraps."""

    @functools.wraps(module.forward.__func__)
    def forward(self: Any, x: torch.Tensor) -> Any:
        return type(self).forward(self, x) * 0.5

    module.forward = forward.__get__(module)


def _aligned(module: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(next(module.parameters()).device))


def _old_weight_norm(module: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(module.up_proj)


WATCHES = [
    (_hook, "forward hook _half of "),
    (_pre_hook, "forward pre-hook _pre_hook.<locals>.<lambda> of "),
    (_marks_and_halves, "make_inputs_require_grads of "),
    (_parametrised_and_hooked, "forward hook _half of "),
    (_forward, "`forward` of the instance _forward.<locals>.<lambda> of "),
    (_of_another, "LlamaMLP.forward of "),
    (_of_another_class, "Kernel.forward of "),
    (_wrapped, "_wrapped.<locals>.forward of "),
    (_aligned, "new_forward of "),
    (_old_weight_norm, "forward pre-hook WeightNorm of "),
]


@pytest.mark.parametrize("before", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize(("change", "named"), WATCHES, ids=lambda one: getattr(one, "__name__", ""))
def test_what_does_something_is_called_and_named(
    models: tuple[Any, Any], change: Callable[[nn.Module], None], named: str, before: bool
) -> None:
    if not before:
        assert taken(models)
    for _, module in each(models):
        change(module)
    assert not taken(models)
    said = explain(models[0])
    (name,) = said.watched
    assert name.startswith("model.layers.1.mlp")
    assert named.rpartition(".<locals>")[2] in said.watched[name]
    assert said.watched[name].endswith(".py")
    assert said.modules[""] == "generate: observed"
    assert f"{name}: watched by " in str(said)


def test_reasons_are_of_the_present(models: tuple[Any, Any]) -> None:
    handle = models[0].model.norm.register_forward_hook(lambda *_: None)
    assert not taken(models)
    assert explain(models[0]).modules[""] == "generate: observed"
    handle.remove()
    assert "" not in explain(models[0]).modules
    assert taken(models)
    models[0].train().model.layers[0].self_attn.attention_dropout = 0.5
    models[0].generate(torch.ones(1, 3, dtype=torch.int64, device=models[0].device), max_new_tokens=3)
    assert explain(models[0]).modules[""] == "generate: training"
    models[0].eval().model.layers[0].self_attn.attention_dropout = 0.0
    assert taken(models)
    assert "" not in explain(models[0]).modules


def test_global_hooks_are_named(models: tuple[Any, Any]) -> None:
    handle = nn.modules.module.register_module_forward_hook(_half)
    try:
        assert "global forward hook _half of " in explain(models[0]).watched[""]
    finally:
        handle.remove()
    assert explain(models[0]).watched == {}


def test_a_mark_is_something_where_gradients_are_wanted() -> None:
    module = nn.Embedding(3, 4)
    module.register_forward_hook(lambda module, inputs, output: None)
    marked = nn.Embedding(3, 4)

    def mark(module: Any, inputs: Any, output: Any) -> None:
        output.requires_grad_(True)

    marked.register_forward_hook(mark)
    assert backend.observed(marked)
    with torch.no_grad():
        assert not backend.observed(marked)
        assert only_records(marked)
        assert backend.observed(module)
        assert not only_records(module)


def test_a_forward_is_one_s_own_if_it_is_bound_to_it() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert has_own_forward(one)
    one.forward = MethodType(nn.Linear.forward, one)
    assert has_own_forward(one)
    one.forward = other.forward
    assert not has_own_forward(one)
    one.forward = MethodType(nn.Identity.forward, one)
    assert not has_own_forward(one)
