"""The loss without logits, beside transformers' own: values, gradients, what may be read afterwards, and when not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerances import assert_same_gradient
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.loss.cross_entropy import Shape, total_loss
from hf_rewrite_runtime.loss.deferred_logits import DeferredLogits, WeightsChanged

chunked = importlib.import_module("hf_rewrite_runtime.loss.chunked_loss")
cross_entropy = importlib.import_module("hf_rewrite_runtime.loss.cross_entropy")

V, H = 29, 8


class Model(nn.Module):
    """A causal model of one layer, with the loss as the modeling files have it, or as it is rewritten."""

    def __init__(self, fused: bool, cap: float | None = None, scale: float = 1.0, bias: bool = False):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(V, H)
        self.lm_head = nn.Linear(H, V, bias=bias)
        self.fused, self.cap, self.scale = fused, cap, scale
        self.loss_function: Callable[..., Tensor] = loss_utils.ForCausalLMLoss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        hidden_states = torch.tanh(self.embed(input_ids))
        head = chunked.head_logits if self.fused else lambda model, states, head, labels: head(states)
        logits = head(self, hidden_states, self.lm_head, labels)
        logits = logits * self.scale
        if self.cap is not None:
            logits = logits / self.cap
            logits = torch.tanh(logits)
            logits = logits * self.cap
        loss = None
        if labels is not None:
            call = chunked.chunked_loss if self.fused else lambda function, *a, **k: function(*a, **k)
            loss = call(self.loss_function, logits=logits, labels=labels, vocab_size=V, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Five rows at once, so that every loss is of several chunks and the last one is short."""
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocabulary, size: 5)
    backend.reset_fallbacks()
    yield
    chunked._chosen = None


def tokens() -> Tensor:
    return torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    found = tokens()
    found[0, :4], found[2, -2:] = -100, -100
    return found


KEYWORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "number of items": {"num_items_in_batch": torch.tensor(17)},
    "number of items, int": {"num_items_in_batch": 17},
    "other ignored": {"ignore_index": 5},
    "shifted by the caller": {"shift_labels": labels().roll(-1, 1)},
    "unknown to the loss": {"output_hidden_states": False},
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.25},
    "capped": {"cap": 2.0, "scale": 3.0},
}


def trained(model: Model, factor: float = 1.7, **keywords: Any) -> tuple[CausalLMOutputWithPast, dict[str, Tensor]]:
    given = labels()
    if "ignore_index" in keywords:
        given = given.masked_fill(given < 0, keywords["ignore_index"])
    out = model(tokens(), given, **keywords)
    assert out.loss is not None
    (factor * out.loss).backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_loss_and_gradients(keywords: dict[str, Any], form: dict[str, Any]) -> None:
    ours, mine = trained(Model(True, **form), **keywords)
    theirs, wanted = trained(Model(False, **form), **keywords)
    assert isinstance(ours.logits, DeferredLogits)
    assert not ours.logits.is_computed
    assert not backend.fallbacks()
    assert ours.loss.dtype == theirs.loss.dtype == torch.float32
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert mine.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same_gradient(gradient, mine[name])
    assert ours.logits.shape == theirs.logits.shape
    assert torch.equal(ours.logits.detach(), theirs.logits)


def test_tied_frozen_and_masked() -> None:
    for change in (_tie, _freeze, _masked):
        sides = [Model(fused) for fused in (True, False)]
        for model in sides:
            change(model)
        (ours, mine), (theirs, wanted) = (trained(model) for model in sides)
        assert isinstance(ours.logits, DeferredLogits)
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert mine.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_same_gradient(gradient, mine[name])


def _tie(model: Model) -> None:
    model.lm_head.weight = model.embed.weight


def _freeze(model: Model) -> None:
    model.lm_head.weight.requires_grad_(False)


def _masked(model: Model) -> None:
    model.loss_function = loss_utils.ForMaskedLMLoss


def test_no_label_counts() -> None:
    """The mean of nothing is NaN, and its gradient zero, as torch has it."""
    for model in (Model(True), Model(False)):
        loss = model(tokens(), torch.full_like(tokens(), -100)).loss
        loss.backward()
        assert loss.isnan()
        assert not model.lm_head.weight.grad.any()


def test_never_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    product = torch.nn.functional.linear
    noted = lambda x, *rest: (rows.append(x.shape[0]), product(x, *rest))[1]
    own = SimpleNamespace(**{**vars(cross_entropy.F), "linear": noted})  # torch's own is left: it is looked at
    monkeypatch.setattr(cross_entropy, "F", own)
    trained(Model(True))
    assert rows == [5] * 6 + [3]


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    for model in (Model(True), Model(False)):
        with pytest.raises((IndexError, RuntimeError)):
            model(tokens(), torch.full_like(tokens(), V))


def test_gradients_in_fp64() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 2), (4, 2), (4,)))
    given = torch.tensor([1, 3, -100, 0, 3, 2])
    for shape in (Shape(), Shape(0.5), Shape(0.4, 2.5, True)):
        function = lambda *x, shape=shape: total_loss(*x, given, -100, shape)
        assert torch.autograd.gradcheck(function, (x, weight, bias))
        assert torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True], ids=["low", "autocast"])
def test_low_precision(dtype: torch.dtype, mixed: bool) -> None:
    """No further from the gradients of a model in fp32 than the original's own."""
    exact = trained(Model(False))[1]
    found = []
    for fused in (True, False):
        model = Model(fused)
        if not mixed:
            model.to(dtype)
        with torch.autocast("cpu", dtype, enabled=mixed):
            out, gradients = trained(model)
        assert isinstance(out.logits, DeferredLogits) == fused
        assert out.logits.dtype == dtype
        found.append(gradients)
    for name, right in exact.items():
        ours, theirs = ((side[name].float() - right).norm() for side in found)
        assert found[0][name].dtype == found[1][name].dtype
        assert ours <= 1.25 * theirs


def test_reading_the_logits() -> None:
    model, original = Model(True, cap=2.0), Model(False, cap=2.0)
    out, wanted = model(tokens(), labels()), original(tokens(), labels()).logits
    assert out.logits.argmax(-1).equal(wanted.argmax(-1))
    assert torch.softmax(out.logits, -1).equal(torch.softmax(wanted, -1))
    assert (out.logits[:, -1] + 1).equal(wanted[:, -1] + 1)
    assert (out.logits == wanted).all()
    assert torch.stack([out.logits, out.logits]).equal(torch.stack([wanted, wanted]))
    assert out.to_tuple()[1] is out.logits
    (out.loss + out.logits.square().mean()).backward()
    wanted_loss = original(tokens(), labels())
    (wanted_loss.loss + wanted_loss.logits.square().mean()).backward()
    assert_same_gradient(original.lm_head.weight.grad, model.lm_head.weight.grad)


def test_logits_of_other_weights_are_refused() -> None:
    model = Model(True)
    out, _ = trained(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(WeightsChanged, match="REWRITE_CHUNKED_LOSS"):
        out.logits.argmax(-1)


def test_hidden_states_that_were_written_to_are_refused() -> None:
    model = Model(True)
    states = torch.randn(2, 3, model.lm_head.in_features)
    logits = chunked.head_logits(model, states, model.lm_head, torch.zeros(2, 3, dtype=torch.int64))
    states.mul_(2)
    with pytest.raises(WeightsChanged):
        chunked.chunked_loss(model.loss_function, logits * 2, torch.zeros(2, 3, dtype=torch.int64), 11)


def _not_training(model: Model) -> None:
    model.eval()


def _turned_off(model: Model) -> None:
    chunked.use_chunked_loss(False)


def _hooked(model: Model) -> None:
    model.lm_head.register_forward_hook(lambda module, given, output: output * 2)


def _adapted(model: Model) -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    model.lm_head = Adapter(H, V, bias=False)
    nn.init.ones_(model.lm_head.weight)


def _own_loss(model: Model) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()


@pytest.mark.parametrize("change", [_not_training, _turned_off, _hooked, _adapted, _own_loss])
def test_everything_else_takes_the_logits(change: Callable[[Model], None]) -> None:
    sides = [Model(fused) for fused in (True, False)]
    torch.manual_seed(5)
    for model in sides:
        change(model)
        model.lm_head.weight.data = sides[0].lm_head.weight.data.clone()
    (ours, mine), (theirs, wanted) = (trained(model) for model in sides)
    assert type(ours.logits) is Tensor
    assert ours.loss.equal(theirs.loss)
    assert ours.logits.equal(theirs.logits)
    assert all(mine[name].equal(wanted[name]) for name in wanted)
    assert bool(backend.fallbacks()) == (change is not _not_training)


def test_other_keywords_take_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_OTHER_KEYWORDS", ["label_smoothing"])
    model = Model(True)
    out, _ = trained(model, label_smoothing=0.1)
    assert ("chunked_loss", "other_keyword") in backend.fallbacks()
    torch.testing.assert_close(out.loss, trained(Model(False), label_smoothing=0.1)[0].loss)


def test_compiled_whole() -> None:
    out, gradients = trained(Model(True, scale=0.5))
    model = Model(True, scale=0.5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again, found = trained(compiled)
    assert again.loss.equal(out.loss)
    assert again.logits.argmax(-1).shape == (3, 11)
    assert all(found[f"_orig_mod.{name}"].equal(gradient) for name, gradient in gradients.items())


def test_mixed_precision_as_accelerate_does_it() -> None:
    """Its wrapper makes fp32 of every 16-bit output: of deferred logits later, if ever."""
    operations = pytest.importorskip("accelerate.utils.operations")
    model = Model(True)
    with torch.autocast("cpu", torch.bfloat16):
        out = operations.convert_to_fp32(model(tokens(), labels()))
    assert isinstance(out.logits, DeferredLogits)
    assert not out.logits.is_computed
    assert out.logits.dtype == torch.float32
    assert out.logits.detach().dtype == torch.float32
