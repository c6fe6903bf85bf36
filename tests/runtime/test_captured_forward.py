"""Forwards that replay a graph: what they return, what they notice, what they leave alone.

On a CPU the forward is run again in place of a replay, with the same copies in and out; on a GPU (`-m gpu`) it is a
graph.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_text_lengths import device
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_rewrite_runtime.core import backend, output_layout, weight_copies
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.forward import captured, forward_cache, forward_eligibility, forward_settings
from hf_rewrite_runtime.forward.captured import CapturedForward
from hf_rewrite_runtime.guards.snapshot import Snapshot
from hf_rewrite_runtime.lazy import lazy_mode

__all__ = ["device"]


class Settings:
    """A configuration."""

    def __init__(self) -> None:
        self._attn_implementation = "sdpa"
        self.doubled = False
        self.names = ["a"]


class Model(CapturedForward, nn.Module):
    """A small model that counts how often its code ran."""

    def __init__(self, act: Callable[[Model, Tensor, dict[str, Any]], Any] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.config = Settings()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.factor = 1.0
        self.runs = [0]
        self.act = act

    def forward(self, x: Tensor, **keywords: Any) -> Any:
        """Whatever `act` says, else a product."""
        RUNS[0] += 1
        if self.act is not None:
            return self.act(self, x, keywords)
        y = self.linear(x) * self.factor * self.scale
        return y * 2 if self.config.doubled else y


RUNS = [0]


def made(device: str, act: Callable[[Model, Tensor, dict[str, Any]], Any] | None = None) -> Model:
    return Model(act).to(device).eval().requires_grad_(False)


def inputs(device: str, number: int = 0, rows: int = 3) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number)).to(device)


def plain(model: Model, *arguments: Any, **keywords: Any) -> Any:
    with forward_settings.use_forward_graphs("never"):
        return model(*arguments, **keywords)


def graphs(model: nn.Module) -> int:
    return len(forward_cache.store_of(model).graphs)


def replays(model: nn.Module) -> int:
    return forward_cache.store_of(model).replays


def refused(model: nn.Module) -> set[str]:
    kept = forward_cache.store_of(model)
    said = [*kept.refused.values(), *([kept.whole] if kept.whole else [])]
    return {refusal.reason for refusal in said} | set(kept.reasons)


def test_replays_use_new_inputs_and_leave_old_outputs_alone(device: str) -> None:
    model = made(device)
    first = model(inputs(device))
    second = model(inputs(device, 1))
    kept = second.clone()
    third = model(inputs(device, 2))
    assert replays(model) == 2
    for number, output in enumerate((first, second, third)):
        torch.testing.assert_close(output, plain(model, inputs(device, number)))
    assert torch.equal(second, kept)


def test_the_second_call_of_a_kind_captures(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(device)
    monkeypatch.setattr("hf_rewrite_runtime.forward.capture_trial._times", lambda *given: (2.0, 1.0))
    with forward_settings.use_forward_graphs("auto"):
        model(inputs(device))
        assert not graphs(model)
        model(inputs(device, rows=4))
        assert not graphs(model)
        model(inputs(device))
        assert graphs(model) == 1
        model(inputs(device, 1))
    assert replays(model) == 1


def test_a_graph_that_is_not_faster_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rewrite_runtime.forward import capture_trial

    times = iter([1.0, 0.99] * capture_trial.ROUNDS + [1.0, 0.9] * capture_trial.ROUNDS)
    monkeypatch.setattr(capture_trial, "_milliseconds", lambda action: next(times))
    given: Any = [None] * 4
    with pytest.raises(capture_trial.Unsuitable, match=r"0\.99 ms against 1\.00 ms"):
        capture_trial._times(*given)
    assert capture_trial._times(*given) == (1.0, 0.9)


def test_long_forwards_are_measured_once_where_that_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rewrite_runtime.forward import capture_trial

    times = iter([220.0, 150.0] + [220.0, 210.0] * capture_trial.ROUNDS)
    monkeypatch.setattr(capture_trial, "_milliseconds", lambda action: next(times))
    given: Any = [None] * 4
    assert capture_trial._times(*given) == (220.0, 150.0)
    assert capture_trial._times(*given) == (220.0, 210.0)
    assert not list(times)


@dataclass
class TwoOutputs(ModelOutput):
    """An output with parts of its own."""

    first: Tensor | None = None
    inner: BaseModelOutput | None = None
    many: tuple[Tensor, ...] | None = None
    absent: Tensor | None = None


def _nested(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    y = model.linear(x)
    return TwoOutputs(y, BaseModelOutput(last_hidden_state=y + 1, hidden_states=(y, y * 2)), (y.t(), y[0]))


def _containers(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    y = model.linear(x)
    return {"a": y, "b": [y + 1, (y + 2, None, 3, "text")], "given": x, "weight": model.linear.weight}


@pytest.mark.parametrize("act", [_nested, _containers])
def test_outputs_of_every_kind(device: str, act: Callable[..., Any]) -> None:
    model = made(device, act)
    given = inputs(device, 1)
    model(inputs(device))
    found, expected = model(given), plain(model, given)
    assert replays(model) == 1
    assert type(found) is type(expected)
    if act is _nested:
        assert list(found) == list(expected)
        assert found.first is found.inner.hidden_states[0]
        torch.testing.assert_close(found.to_tuple()[:1], expected.to_tuple()[:1])
        torch.testing.assert_close(found.inner.to_tuple(), expected.inner.to_tuple())
        found.first.zero_()
        assert not found.many[0].any()  # views of one memory are still that
    else:
        assert found["given"] is given
        assert found["weight"] is model.linear.weight
        assert found["b"][1][1:] == (None, 3, "text")
        torch.testing.assert_close(found["b"][1][0], expected["b"][1][0])


def test_arguments_decide_which_graph(device: str) -> None:
    def act(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
        y = model.linear(x)
        if keywords.get("mask") is not None:
            y = y * keywords["mask"]
        return (y,) if keywords.get("as_tuple") else y

    model = made(device, act)
    x, mask = inputs(device), torch.ones(3, 1, device=device)
    for keywords in ({}, {"as_tuple": True}, {"mask": mask}, {"mask": None}, {"mask": mask.bool()}):
        for number in range(2):
            found, expected = model(x + number, **keywords), plain(model, x + number, **keywords)
            torch.testing.assert_close(found, expected)
    assert graphs(model) == 5
    model(x, mask=torch.zeros_like(mask))
    assert not model(x, mask=torch.zeros_like(mask)).any()
    assert graphs(model) == 5


def test_weights_changed_in_place_are_read(device: str) -> None:
    model = made(device)
    model(inputs(device))
    model.linear.weight.mul_(2)
    torch.testing.assert_close(model(inputs(device)), plain(model, inputs(device)))
    assert replays(model) == 1


class Mode(TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), keywords: Any = None) -> Any:
        return function(*given, **(keywords or {}))


def test_a_default_device_is_what_a_graph_was_captured_under(device: str) -> None:
    model = made(device)
    for _ in range(3):
        model(inputs(device))
    before = replays(model)
    x, wanted = inputs(device), plain(model, inputs(device))
    with torch.device("meta"):
        outputs = [model(x) for _ in range(3)]
    assert replays(model) == 2 * before
    assert not refused(model)
    assert all(torch.equal(output, wanted) for output in outputs)


def test_modes_that_a_graph_does_not_know(device: str) -> None:
    model = made(device)
    for _ in range(2):
        model(inputs(device))
    assert replays(model) == 1
    with torch.enable_grad():
        x = inputs(device).requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
    model.train()
    model(inputs(device))
    model.eval()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(model(inputs(device)), plain(model, inputs(device)))
    with Mode():
        model(inputs(device))
    assert replays(model) == 1
    with torch.inference_mode():
        assert model(inputs(device)).is_inference()
    assert not model(inputs(device)).is_inference()
    assert replays(model) == 3
    assert refused(model) == {"autocast", "watched"}
    model.act = lambda model, x, keywords: x
    cache = object()
    assert model(inputs(device), past_key_values=cache) is not None
    model(inputs(device), other=cache)
    assert "inputs" in refused(model)


def test_a_parametrised_weight_is_part_of_the_graph(device: str) -> None:
    model = made(device)
    nn.utils.parametrizations.weight_norm(model.linear)
    model.eval()
    model(inputs(device))
    model.linear.parametrizations.weight.original0.mul_(3)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(model(inputs(device)), plain(model, inputs(device)))
    assert replays(model) == 1


def _draws(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x + torch.rand_like(x)


def _asks(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x * 2 if x.sum().item() > 0 else x


def _selects(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x[x > 0]


def _writes_input(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x.add_(1) * 2


def _writes_state(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    model.scale.add_(1)
    return x * model.scale


def _writes_data(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    model.scale.data.mul_(2)
    return x * model.scale


def _counts(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    model.factor += 1
    return x * 2


def _returns_object(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x * 2, object()


def _returns_view(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x[:1]


def _returns_host(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    return x * 2, torch.zeros(2, device="meta")


def _copies_weights(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    weight_copies.note()
    return x * 2


REFUSED = [
    (_draws, "random"),
    (_writes_input, "changes_inputs"),
    (_writes_state, "changes_state"),
    (_writes_data, "changes_state"),
    (_counts, "changes_state"),
    (_returns_object, "outputs"),
    (_returns_view, "outputs"),
    (_returns_host, "outputs"),
    (_copies_weights, "derived_weights"),
]


@pytest.mark.parametrize(("act", "reason"), REFUSED)
def test_refusals(device: str, act: Callable[..., Any], reason: str) -> None:
    model = made(device, act)
    twin = copy.deepcopy(model)
    given, other_given = inputs(device), inputs(device)
    for _ in range(4):
        torch.manual_seed(1)
        found = model(given)
        torch.manual_seed(1)
        expected = plain(twin, other_given)
        for one, other in zip(*([v] if isinstance(v, Tensor) else v for v in (found, expected)), strict=True):
            if isinstance(one, Tensor) and not one.is_meta:
                torch.testing.assert_close(one, other)
        assert torch.equal(given, other_given)
        assert (model.factor, model.scale.item()) == (twin.factor, twin.scale.item())
    assert not graphs(model)
    assert reason in refused(model)
    if device == "cuda":
        torch.cuda.empty_cache()  # which raises if a graph was begun in the pool of one that has gone
    assert forward_eligibility.REASONS[reason] in str(explain(model))


def _permuted(model: Model, x: Tensor, keywords: dict[str, Any]) -> Any:
    y = model.linear(x).t() * 2
    y = y.contiguous() if output_layout.is_free() else y
    return y if model.factor == 1 else y.t().view(-1)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_another_layout_is_tried_first_and_given_up(device: str, factor: float) -> None:
    """Where what is returned would be laid out otherwise, or code fails on it."""
    model = made(device, _permuted)
    model.factor = factor
    for number in range(2):
        found, expected = model(inputs(device, number)), plain(model, inputs(device, number))
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    assert replays(model) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("act", [_asks, _selects])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_asks_the_host_is_refused(device: str, act: Callable[..., Any]) -> None:
    model = made(device, act)
    for number in range(4):
        torch.testing.assert_close(model(inputs(device, number)), plain(model, inputs(device, number)))
    assert refused(model) == {"not_capturable"}
    model.act = None
    for _ in range(forward_cache.LOOKS_AGAIN + 3):
        model(inputs(device))
    assert graphs(model) == 1  # the change was seen, later


@pytest.mark.parametrize(("act", "times"), [(_writes_input, 1), (_counts, 8)])
def test_what_is_tried_in_vain_is_seldom_tried_again(
    device: str, act: Callable[..., Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try reads every weight. A first change of the model is forgiven once, so that there are two at a time."""
    tried: list[int] = []
    inner = captured.attempt

    def attempt(*arguments: Any) -> Any:
        tried.append(model.runs[0])
        return inner(*arguments)

    monkeypatch.setattr(captured, "attempt", attempt)
    model = made(device, act)
    for _ in range(10 * forward_cache.LOOKS_AGAIN):
        model(inputs(device))
    assert len(tried) == times
    assert tried[0] < 3
    model.act = None
    for _ in range(9 * forward_cache.LOOKS_AGAIN):
        model(inputs(device))
    assert graphs(model) == 1, "the change was seen, later"


def test_what_cannot_be_looked_at_is_left_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensors: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("no sum of these")

    monkeypatch.setattr("hf_rewrite_runtime.forward.capture_trial._sums", fails)
    model = made(device)
    for _ in range(2):
        torch.testing.assert_close(model(inputs(device)), plain(model, inputs(device)))
    assert refused(model) == {"not_capturable"}
    assert "no sum of these" in str(explain(model))


def test_few_graphs_are_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And take no turns: a graph makes room for another one's only when many calls have not used it."""
    monkeypatch.setattr(forward_cache, "GRAPHS_KEPT", 2)
    monkeypatch.setattr(forward_cache, "IDLE", 4)
    model = made(device)

    def call(*numbers: int) -> set[int]:
        for rows in numbers:
            torch.testing.assert_close(model(inputs(device, rows, rows)), plain(model, inputs(device, rows, rows)))
        return {shapes[0][0] for shapes, _ in forward_cache.captured_kinds(model)}

    assert call(1, 2, 1, 3, 1, 3) == {1, 2}
    assert replays(model) == forward_cache.store_of(model).reasons["full"] == 2
    assert call(1, 1, 1, 3) == {1, 3}
    forward_cache.release_forwards(model)
    assert not graphs(model)


def test_a_kind_that_was_dropped_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = forward_cache.ForwardStore(made("cpu"))
    kept.graphs["kind"] = None  # type: ignore[assignment]
    kept._last["kind"] = 0
    kept._evict("kind")
    assert [kept.count("kind") for _ in range(4)] == [3, 2, 1, 0]
    assert [kept.count("other") for _ in range(2)] == [1, 0]


def test_threads_get_their_own_outputs(device: str) -> None:
    model = made(device)
    model(inputs(device))
    wrong: list[int] = []

    def work(number: int) -> None:
        given = inputs(device, number)
        with torch.no_grad(), contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
            expected = functional.linear(given, model.linear.weight, model.linear.bias)
            for _ in range(20):
                if not torch.allclose(model(given), expected, atol=1e-4):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert replays(model) == 80


class Outer(CapturedForward, nn.Module):
    """A model with another one inside."""

    def __init__(self, inner: Model):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, host: bool = False) -> Any:
        """The inner one, with something that nobody understands where the host is asked."""
        return (self.inner(x), object()) if host else self.inner(x) + 1


def test_parts_of_a_model_are_captured_where_the_whole_is_not(device: str) -> None:
    model = Outer(made(device)).eval()
    for number in range(3):
        model(inputs(device, number))
    assert (graphs(model), graphs(model.inner)) == (1, 0)
    for number in range(3):
        found, _ = model(inputs(device, number), host=True)
        torch.testing.assert_close(found, plain(model.inner, inputs(device, number)))
    assert graphs(model.inner) == 1
    assert "forward of inner: in a graph for 3×8" in str(explain(model))


def test_a_model_is_not_kept_alive(device: str) -> None:
    model = made(device)
    for _ in range(2):
        model(inputs(device))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    model = made(device)
    model.linear.above = [model]  # type: ignore[assignment]
    for _ in range(2):
        model(inputs(device))
    assert refused(model) == {"own_state"}


def test_a_copy_of_a_model_has_graphs_of_its_own(device: str) -> None:
    model = made(device)
    for _ in range(2):
        model(inputs(device))
    twin = copy.deepcopy(model)
    twin.linear.weight.mul_(2)
    torch.testing.assert_close(twin(inputs(device)), plain(twin, inputs(device)))
    torch.testing.assert_close(model(inputs(device)), plain(model, inputs(device)))


@pytest.mark.parametrize(("most", "act", "reasons"), [
    (2**26, None, set()), (0, None, {"inference_tensors"}), (2**26, _writes_state, {"changes_state"}),
])  # fmt: skip
def test_tensors_of_inference_mode(
    device: str, monkeypatch: pytest.MonkeyPatch, most: int, act: Any, reasons: set[str]
) -> None:
    """Nobody counts what is written to them, so few are compared and many are left alone."""
    monkeypatch.setattr("hf_rewrite_runtime.forward.capture_trial.MOST_COPIED", most)
    with torch.inference_mode():
        model = made(device, act)
        for _ in range(2):
            model(inputs(device))
    assert refused(model) == reasons
    assert graphs(model) == (not reasons)


def test_a_hook_is_called_once_a_call(device: str) -> None:
    model, seen = made(device), []
    model.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    for calls in range(1, 5):
        model(inputs(device))
        assert len(seen) == calls
    assert "observed" in refused(model)


@pytest.mark.parametrize("name", ["_forward_pre_hooks", "_buffers", "training"])
def test_snapshots_see_every_module(name: str) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for _ in range(3)]).eval()
    snapshot = Snapshot(model)
    assert snapshot.is_current()
    part = model[1][1]
    if name == "training":
        part.train()
    elif name == "_buffers":
        part.register_buffer("table", torch.ones(2))
    else:
        part.register_forward_pre_hook(lambda module, args: None)
    assert not snapshot.is_current()


def test_the_compiler_passes_through(device: str) -> None:
    model = made(device)
    compiled = torch.compile(Outer(model).eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs(device)), plain(model, inputs(device)) + 1)
    assert not graphs(model)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_settings, "_chosen", None)
    monkeypatch.setenv(forward_settings.ENVIRONMENT_VARIABLE, "never")
    assert forward_settings.get_forward_graphs() == "never"
    with forward_settings.use_forward_graphs("auto"):
        assert forward_settings.get_forward_graphs() == "auto"
    with pytest.raises(ValueError, match="choose one of auto, exact, never, always"):
        forward_settings.set_forward_graphs("sometimes")


def _skips_layers(model: Model, x: Tensor, _: dict[str, Any]) -> Tensor:
    for _ in range(3):
        probability = torch.rand([])
        if not (model.training and probability < 0.5):
            x = model.linear(x)
    return x


def test_numbers_that_nobody_reads_are_drawn_again(device: str) -> None:
    """As many as the forward draws, so that what is drawn next is what it would be."""
    model = made(device, _skips_layers)
    following: dict[str, list[float]] = {}
    for name, call in (("plain", plain), ("ours", lambda model, x: model(x))):
        torch.manual_seed(3)
        following[name] = []
        for number in range(4):
            call(model, inputs(device, number))
            following[name].append(float(torch.rand([])))
    assert replays(model) == 3
    assert following["ours"] == following["plain"]


@pytest.mark.parametrize(
    "act",
    [
        lambda model, x, _: x * float(torch.rand([])),
        lambda model, x, _: x if torch.rand([]) < 2 else -x,
        lambda model, x, _: x + torch.rand(8).to(x.device),
        lambda model, x, _: (x, torch.rand(1))[0] + random.random(),
        lambda model, x, _: x + torch.randn(8).to(x.device),
    ],
    ids=["item", "test", "moved", "another generator", "another function"],
)
def test_numbers_that_are_read_are_drawn_by_the_forward(act: Any, device: str) -> None:
    model = made(device, act)
    torch.manual_seed(3)
    random.seed(3)
    ours = [model(inputs(device)) for _ in range(2)]
    torch.manual_seed(3)
    random.seed(3)
    wanted = [plain(model, inputs(device)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(ours, wanted, strict=True))
    assert "random" in refused(model)


def test_a_trial_leaves_the_generator_as_the_call_left_it(device: str) -> None:
    model = made(device, _skips_layers)
    torch.manual_seed(3)
    plain(model, inputs(device))
    wanted = torch.get_rng_state()
    torch.manual_seed(3)
    model(inputs(device))
    assert torch.equal(torch.get_rng_state(), wanted)


def test_functions_that_cannot_be_put_off_run_one_by_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets at memory unseen reads what nobody computed: that is noticed, and said."""
    monkeypatch.setattr(lazy_mode.LazyMode, "_settle", lambda step, *given: None)
    model = made(device, lambda model, x, _: (model.linear(x) * 2 + 1).sum(-1, keepdim=True) + x)
    with backend.use_backend("triton") if device == "cuda" else contextlib.nullcontext():
        outputs = [model(inputs(device, number)) for number in range(3)]
        wanted = [plain(model, inputs(device, number)) for number in range(3)]
    for ours, other in zip(outputs, wanted, strict=True):
        assert torch.allclose(ours, other, atol=1e-6)
    if device == "cuda":
        assert "its functions one by one: Unsuitable: by" in str(explain(model))


def test_kernels_are_compiled_for_few_kinds_of_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts hold sizes: calls of ever other lengths would compile for ever."""
    monkeypatch.setattr(forward_cache, "KINDS_COMPILED", 2)
    model = made(device, lambda model, x, _: model.linear(x) * 2 + 1)
    for rows in (1, 2, 3, 2):
        assert torch.allclose(model(inputs(device, rows=rows)), plain(model, inputs(device, rows=rows)), atol=1e-6)
    kept = forward_cache.store_of(model)
    assert [bool(graph.as_written) for graph in kept.graphs.values()] == [False, True, False]
    assert replays(model) == 1
    assert "its functions one by one: kernels were compiled for" in str(explain(model))


def test_a_tensor_whose_memory_was_given_back_is_not_read(device: str) -> None:
    """FSDP keeps the weights that it gathered, without memory between calls; a sum of them would end the process."""
    model = made(device)
    model.gathered = torch.ones(64)
    model.gathered.untyped_storage().resize_(0)
    for number in range(2):
        torch.testing.assert_close(model(inputs(device, number)), plain(model, inputs(device, number)))
    assert (graphs(model), refused(model)) == (0, {"not_capturable"})
