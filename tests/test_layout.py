"""From the packed projection to the output projection nothing is copied: attention stays in `[B, S, H, D]`.

What a modeling file, its cache and its operators do between the products with `q_proj` and with `o_proj` is watched,
operator by operator, on a CPU. Rotation and cache write with `cat`, which is not counted here: the kernels that stand
for them write once. What torch's attention copies inside itself, `bench/layout.py` shows on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back
from rewrite.measure.runtime_part import runtime_part

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "runtime"))

import fake_aiter  # noqa: E402

LAYERS, LENGTH = 2, 12
COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::repeat_interleave", "aten::index_select")
PADDED = {"attention_mask": torch.tensor([[1] * LENGTH, [0] * 3 + [1] * (LENGTH - 3)])}


class Census(TorchDispatchMode):
    """Counts copies between the first product with a weight of the queries, keys or values and that of the output."""

    def __init__(self, model):
        super().__init__()
        layers = [layer.self_attn for layer in model.model.layers]
        self.first = {getattr(a, name).weight.data_ptr() for a in layers for name in ("q_proj", "k_proj", "v_proj")}
        self.last = {attention.o_proj.weight.data_ptr() for attention in layers}
        self.inside, self.windows, self.copies = False, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            weights = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
            self.windows += self.inside and bool(weights & self.last)
            self.inside = bool(weights & self.first) or (self.inside and not weights & self.last)
        if self.inside and name in COPIES:
            self.copies[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def package(rewritten):
    return rewritten("llama")


@pytest.fixture
def runtime(package, monkeypatch):
    """The runtime of the package, whose operators show their inside to a dispatch mode."""
    backend = runtime_part(package.__name__, "core/backend")
    monkeypatch.setattr(backend, "_len_torch_dispatch_stack", lambda: 0)
    modules = {"aiter_calls": "aiter/aiter_calls", "aiter_probe": "core/aiter_probe"}
    return {name: runtime_part(package.__name__, module) for name, module in modules.items()}


@pytest.fixture
def model(package, runtime):
    torch.manual_seed(0)
    config = package.LlamaForCausalLM.config_class(
        hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=LAYERS,
        vocab_size=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = package.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model(ids(1))  # packs the weights
    return model


def ids(batch, length=LENGTH):
    return torch.arange(length).expand(batch, length)


def copies(model, *args, **kwargs):
    """Copies per layer of one forward."""
    with torch.no_grad(), Census(model) as census:
        model(*args, **kwargs)
    assert census.windows == LAYERS
    return {name: count / LAYERS for name, count in census.copies.items()}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("use_cache", [True, False])
def test_prefill_copies_nothing(model, batch, use_cache):
    assert copies(model, ids(batch), use_cache=use_cache) == {}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [True, False])
def test_a_step_copies_nothing(model, batch, padded):
    mask = PADDED["attention_mask"][-batch:] if padded else torch.ones(batch, LENGTH, dtype=torch.long)
    with torch.no_grad():
        cache = model(ids(batch), attention_mask=mask)
    mask = torch.cat([mask, mask[:, -1:]], 1)
    assert copies(model, ids(batch, 1), attention_mask=mask, **{argument_of(model): given_back(cache)}) == {}


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (2, 3)])
def test_padding_copies_what_torchs_kernels_ask_for(model, batch, most):
    """No kernel of torch's takes grouped keys and a mask (but cuDNN's): the original copies keys and values."""
    mask = PADDED["attention_mask"][-batch:]
    assert sum(copies(model, ids(batch), attention_mask=mask, use_cache=False).values()) <= most


def test_prefill_by_aiter_copies_nothing(model, runtime, monkeypatch, tmp_path):
    def unseen(release, **arguments):
        with _disable_current_modes():
            return fake_aiter.flash_attn_func(release, **arguments)

    release = fake_aiter.Release(fake_aiter.RELEASES[-1], {"flash_attn_func": unseen})
    fake_aiter.install(tmp_path, release)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runtime["aiter_probe"], "chip", lambda device=None: "gfx942")
    monkeypatch.setattr(runtime["aiter_calls"].backend, "device_guard", fake_aiter.device_guard)
    runtime["aiter_calls"].forget()
    try:
        with pytest.warns(RuntimeWarning, match="aiter .* is used"), torch.no_grad():
            model(ids(2))
        fake_aiter.calls.clear()
        assert copies(model, ids(2)) == {}
        assert fake_aiter.calls["flash_attn_func"] == LAYERS
    finally:
        release.take_back()
        runtime["aiter_calls"].forget()


def test_a_copy_is_seen(model, package, monkeypatch):
    modeling = importlib.import_module(f"{package.__name__}.modeling_llama")
    native_gqa = modeling.native_gqa

    def copying(interface):
        inner = native_gqa(interface)
        return lambda module, query, *rest, **options: inner(module, query.contiguous(), *rest, **options)

    monkeypatch.setattr(modeling, "native_gqa", copying)
    assert copies(model, ids(2)) == {"aten::clone": 2.0}  # the query, and the result, which comes in its order
