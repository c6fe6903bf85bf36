"""Tables of cosines and sines hold the bits of the module that made them, and are left out where they could not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from conftest import EMULATED, INTERPRETED
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.rope.rope_cos_sin import _op, reference, rotary_rows

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
THETA = {"rope_theta": 10000.0}
STATIC: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def llama_rope(rope: dict[str, Any]) -> nn.Module:
    module: nn.Module = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=THETA | rope))
    return module


def long_rope(original: int) -> nn.Module:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i / 4 for i in range(8)],
        "original_max_position_embeddings": original,
    }
    config = Phi3Config(**SIZES, original_max_position_embeddings=original, rope_parameters=THETA | rope)
    module: nn.Module = Phi3RotaryEmbedding(config)
    return module


def hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2, 1, 64, dtype=dtype)


def check_every_position(module: nn.Module, cache: PreallocatedCache, dtype: torch.dtype, *layer_type: str) -> None:
    """Compare each step's rows with the module's own, for two rows that are 3 positions apart."""
    for position in range(cache.capacity):
        ids = torch.tensor([[position], [max(0, position - 3)]])
        expected = module(hidden(dtype), ids, *layer_type)
        with cache.step():
            got = rotary_rows(module, hidden(dtype), ids, cache, *layer_type)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype == dtype
            assert torch.equal(a, b), position
    assert not backend.fallbacks()
    assert cache.refusal is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", STATIC.values(), ids=STATIC.keys())
def test_rows_have_the_bits_of_the_module(rope: dict[str, Any], dtype: torch.dtype) -> None:
    cache = PreallocatedCache(1, 2, 100, "cpu")
    module = llama_rope(rope)
    check_every_position(module, cache, dtype)
    (tables,) = cache.tables.values()
    assert tables is not None
    assert tables[0].shape == (100, 16)


def test_tables_are_made_once_and_the_module_is_called_outside_of_steps() -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(position_ids.shape[1])
            angles = position_ids[..., None].float() * torch.ones(8)
            return angles.cos(), angles.sin()

    module, cache, ids = Counted(), PreallocatedCache(1, 1, 12, "cpu"), torch.tensor([[5]])
    rotary_rows(module, hidden(), ids, None)
    assert calls == [1]
    rotary_rows(module, hidden(), ids, cache)
    assert calls[1:] == [1, 12, 12, 1, 1]
    rotary_rows(module, hidden(), ids, cache)
    assert len(calls) == 7
    with cache.step():
        rotary_rows(module, hidden(), ids, cache)
        assert len(calls) == 7
        rotary_rows(Counted(), hidden(), ids, cache)
    assert len(cache.tables) == 2


def test_layer_types_have_tables_of_their_own() -> None:
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    module, cache = Gemma3RotaryEmbedding(config), PreallocatedCache(1, 2, 40, "cpu")
    for layer_type in ("sliding_attention", "full_attention"):
        check_every_position(module, cache, torch.bfloat16, layer_type)
    assert len(cache.tables) == 2


@pytest.mark.parametrize("capacity", [20, 32, 70])
def test_longrope_changes_frequencies_with_the_greatest_position(capacity: int) -> None:
    module, cache = long_rope(32), PreallocatedCache(1, 2, capacity, "cpu")
    module(hidden(), torch.arange(capacity)[None])  # may leave the long frequencies behind
    check_every_position(module, cache, torch.bfloat16)
    (tables,) = cache.tables.values()
    assert tables is not None
    assert tables[0].shape[0] == (capacity if capacity <= 32 else 2 * capacity)


@pytest.mark.parametrize("seen", [1, 60])
def test_dynamic_frequencies_are_constant_up_to_the_original_context(seen: int) -> None:
    module = llama_rope({"rope_type": "dynamic", "factor": 2.0})
    module(hidden(), torch.arange(seen)[None])
    check_every_position(module, PreallocatedCache(1, 2, 60, "cpu"), torch.float32)


def test_dynamic_frequencies_beyond_it_refuse_a_capture() -> None:
    module, cache = llama_rope({"rope_type": "dynamic", "factor": 2.0}), PreallocatedCache(1, 2, 65, "cpu")
    ids = torch.tensor([[64], [3]])
    with cache.step():
        got = rotary_rows(module, hidden(), ids, cache)
    assert cache.refusal == "rope_depends_on_length"
    assert backend.fallbacks() == {("rotary_rows", "rope_depends_on_length"): 1}
    assert torch.equal(got[0], module(hidden(), ids)[0])


def test_no_table_is_made_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    module, cache = llama_rope(STATIC["default"]), PreallocatedCache(1, 2, 16, "cpu")
    monkeypatch.setattr(
        importlib.import_module("hf_rewrite_runtime.rope.rope_cos_sin"), "is_capturing", lambda tensor: True
    )
    with cache.step():
        rotary_rows(module, hidden(), torch.tensor([[1]]), cache)
    assert not cache.tables


@pytest.mark.parametrize("position", [-1, 12, 40])
def test_positions_beyond_the_slots_have_no_rows(position: int) -> None:
    module, cache, ids = llama_rope(STATIC["default"]), PreallocatedCache(1, 1, 12, "cpu"), torch.tensor([[position]])
    with cache.step():
        got = rotary_rows(module, hidden(), ids, cache)
    assert torch.equal(got[0], module(hidden(), ids)[0])
    assert backend.fallbacks() == {("rotary_rows", "other_bits"): 1}


def test_a_prompt_that_says_nothing_of_the_positions_beside_it() -> None:
    class FromTheFirst(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = (position_ids - position_ids[:, :1])[..., None] * torch.ones(8)
            return angles.cos(), angles.sin()

    module, cache, ids = FromTheFirst(), PreallocatedCache(1, 1, 12, "cpu"), torch.tensor([[5]])
    rotary_rows(module, hidden(), torch.arange(5)[None], cache)  # where each row is the table's
    with cache.step():
        assert torch.equal(rotary_rows(module, hidden(), ids, cache)[0], module(hidden(), ids)[0])


def test_a_module_that_depends_on_anything_else_keeps_being_called() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = position_ids[..., None] * torch.ones(8) * position_ids.shape[1]
            return angles.cos(), angles.sin()

    class Single(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return position_ids.float()

    cache, ids = PreallocatedCache(1, 1, 12, "cpu"), torch.tensor([[5]])
    with cache.step():
        for module in (Scaled(), Single()):
            assert torch.equal(rotary_rows(module, hidden(), ids, cache)[0], module(hidden(), ids)[0])
        rotary_rows(Single(), hidden(), ids.expand(3, 1, 1), cache)
        hooked = llama_rope(STATIC["default"])
        hooked.register_forward_hook(lambda *_: None)
        rotary_rows(hooked, hidden(), ids, cache)
    reasons = {reason for _, reason in backend.fallbacks()}
    assert reasons == {"other_bits", "other_result", "positions_of_axes", "observed"}


@pytest.mark.skipif(
    not (INTERPRETED or EMULATED or torch.cuda.is_available()), reason="needs a GPU, Triton's interpreter or --emulate"
)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 16, 80, 128, 513])
def test_kernel_gathers_rows(device: torch.device, poisoned: None, dtype: torch.dtype, columns: int) -> None:
    cos, sin = (torch.randn(37, columns, device=device).to(dtype) for _ in range(2))
    for ids in (torch.tensor([[36]]), torch.randint(37, (5, 3)), torch.randint(37, (1, 1)).expand(4, 1)):
        ids = ids.to(device)
        assert all(torch.equal(a, b) for a, b in zip(_op(ids, cos, sin), reference(ids, cos, sin), strict=True))
    assert torch.isnan(_op(torch.tensor([[37], [-1]], device=device), cos, sin)[0]).all()
    assert _op(torch.zeros(0, 1, dtype=torch.int64, device=device), cos, sin)[0].shape == (0, 1, columns)


def test_fake_has_the_strides_of_the_result() -> None:
    ids, cos, sin = torch.randint(37, (3, 5)).t(), torch.randn(37, 16), torch.randn(37, 16).half()
    with FakeTensorMode() as mode:
        fake = _op(*(mode.from_tensor(tensor) for tensor in (ids, cos, sin)))
    for a, b in zip(_op(ids, cos, sin), fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_steps_compile_in_one_graph() -> None:
    module, cache = llama_rope(STATIC["default"]), PreallocatedCache(1, 2, 16, "cpu")
    ids = torch.tensor([[3], [1]])

    def step(ids: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary_rows(module, hidden(), ids, cache)
        return cos + sin

    with cache.step(), torch.no_grad():
        expected = step(ids)
        assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(ids), expected)
