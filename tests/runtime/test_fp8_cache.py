"""`generate()` with keys and values in 8 bits is transformers' own with a cache that rounds, in plain torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rounded_cache import RoundedLayer, rounded, rounded_cache
from tolerances import ROUNDED_CACHE, ROUNDED_CACHE_IN_FP32
from torch import Tensor

from hf_rewrite_runtime.cache.fp8_layer import Fp8Layer
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from rewrite.measure.runtime_part import runtime_part

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199, "max_position_embeddings": 2048,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
}
"""With norms of queries and keys, a window in every layer, and one in every second layer with capped scores."""


class Pair:
    """A package and the original with the same weights in fp64, which is computed in plain torch."""

    def __init__(self, name: str, rewritten: Callable[[str], Any]):
        self.name = name
        kind, options = MODELS[name]
        self.package = rewritten(name)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
        torch.manual_seed(0)
        original = getattr(transformers, f"{kind}ForCausalLM")
        self.theirs = original(config).double().eval()
        self.ours = getattr(self.package, f"{kind}ForCausalLM")(config).double().eval()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.ours._step_without_graph = True
        self.ours.starts_plainly = False
        self.format = runtime_part(self.package.__name__, "decode/cache_format")
        self.layers = config.num_hidden_layers

    def ours_in_8_bits(self, **given: Any) -> Any:
        """Generate with the package, keys and values in 8 bits."""
        self.format.set_cache_format("fp8")
        try:
            return generate(self.ours, **given)
        finally:
            self.format.set_cache_format(None)

    def rounded(self, kind: type[RoundedLayer] = RoundedLayer, **given: Any) -> Any:
        """Generate with the original and a cache that rounds; a window is left to the masks, which have it too."""
        return generate(self.theirs, past_key_values=rounded_cache(self.layers, kind), **given)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, rewritten: Callable[[str], Any]) -> Pair:
    return Pair(request.param, rewritten)


@pytest.fixture(scope="module")
def llama(rewritten: Callable[[str], Any]) -> Pair:
    return Pair("llama", rewritten)


def generate(model: Any, **given: Any) -> Any:
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    return model.generate(**{**settings, **given}, return_dict_in_generate=True, output_logits=True)


def prompt(batch: int, length: int, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, 199, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : length // 2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def distance(one: Any, other: Any) -> float:
    """Return how far the logits of two generations are from each other, relative; tokens have to be the same."""
    assert torch.equal(one.sequences, other.sequences)
    ours, theirs = (torch.stack(result.logits) for result in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_equals_the_original_with_a_cache_that_rounds(pair: Pair, padded: bool) -> None:
    if padded and pair.name == "gemma2":
        pytest.skip("its own softmax of padding alone, in fp32 of masks in fp64, is no number")
    given = prompt(3, 9, padded)
    ours = pair.ours_in_8_bits(**given)
    said = str(pair.package.explain(pair.ours))
    assert f"{pair.layers} of {pair.layers} layers in 8 bits" in said
    assert "generate:" not in said
    assert distance(ours, pair.rounded(**given)) < ROUNDED_CACHE
    whole = generate(pair.ours, **given)
    assert float((ours.logits[1] - whole.logits[1]).norm() / whole.logits[1].norm()) > 100 * ROUNDED_CACHE
    assert torch.equal(ours.logits[0], whole.logits[0])  # a prompt attends to its own 16 bits


class OtherHead(RoundedLayer):
    """Takes each head's scale of the next one: what a kernel with a wrong pointer would do."""

    def rounded(self, states: Tensor) -> Tensor:
        """Return `[B, Hk, n, D]` as it would be kept."""
        right = super().rounded(states)
        scale = torch.exp2(torch.ceil(torch.log2(states.abs().amax(-1, keepdim=True) / 448)))
        return right * scale.roll(1, dims=1) / scale


def test_the_scale_of_another_head_is_noticed(llama: Pair) -> None:
    given = prompt(3, 9)
    ours, wrong = llama.ours_in_8_bits(**given), llama.rounded(OtherHead, **given)
    assert float((ours.logits[1] - wrong.logits[1]).norm() / wrong.logits[1].norm()) > 100 * ROUNDED_CACHE


def test_a_package_whose_kernel_has_it_is_noticed(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug is planted: what is read takes the scales of the next head."""
    layer = runtime_part(llama.package.__name__, "cache/fp8_layer").Fp8Layer
    right = layer.read

    def read(self: Any, end: int, start: int = 0) -> Any:
        scales, self.scales = self.scales, self.scales.roll(1, dims=1)
        try:
            return right(self, end, start)
        finally:
            self.scales = scales

    monkeypatch.setattr(layer, "read", read)
    given = prompt(3, 9)
    runtime_part(llama.package.__name__, "decode/graph_cache").release_graphs(llama.ours)
    ours, reference = llama.ours_in_8_bits(**given), llama.rounded(**given)
    runtime_part(llama.package.__name__, "decode/graph_cache").release_graphs(llama.ours)
    assert float((ours.logits[1] - reference.logits[1]).norm() / reference.logits[1].norm()) > 100 * ROUNDED_CACHE


def test_a_cache_is_continued_and_handed_back(llama: Pair) -> None:
    """What a call hands back is transformers' cache in the model's dtype, with the numbers that were kept."""
    given = prompt(2, 9)
    first, reference = llama.ours_in_8_bits(**given, max_new_tokens=5), llama.rounded(**given, max_new_tokens=5)
    for ours, theirs in zip(first.past_key_values.layers, reference.past_key_values.layers, strict=True):
        assert type(ours) is transformers.cache_utils.DynamicLayer
        assert ours.keys.dtype == torch.float64
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    longer = torch.cat([first.sequences, prompt(2, 4)["input_ids"]], dim=1)
    again = {"input_ids": longer, "attention_mask": torch.ones_like(longer), "max_new_tokens": 7}
    second = llama.ours_in_8_bits(**again, past_key_values=first.past_key_values)
    wanted = generate(llama.theirs, **again, past_key_values=reference.past_key_values)
    assert distance(second, wanted) < ROUNDED_CACHE


def test_a_text_moves_to_a_larger_cache(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = runtime_part(llama.package.__name__, "generate/call_graphs")
    monkeypatch.setattr(graphs, "FIRST_ROOM", 8)
    given = prompt(2, 250) | {"max_new_tokens": 30, "min_new_tokens": 30}
    ours = llama.ours_in_8_bits(**given)
    assert "capacity 512" in str(llama.package.explain(llama.ours))
    assert distance(ours, llama.rounded(**given)) < ROUNDED_CACHE


def test_memory_is_half_and_a_byte_a_number(llama: Pair) -> None:
    sizes = {}
    for name in (None, "fp8"):
        llama.format.set_cache_format(name)
        graph = DecodeGraph(llama.ours.float(), batch_size=2, capacity=64)
        graph.prefill(prompt(2, 9)["input_ids"])
        sizes[name] = graph.nbytes
        graph.step(torch.tensor([3, 4]))
    llama.format.set_cache_format(None)
    llama.ours.double()
    numbers = 2 * 3 * 2 * 2 * 64 * 16
    assert sizes == {None: 4 * numbers, "fp8": numbers + numbers // 16 * 2}


def test_what_cannot_be_in_8_bits_says_so(llama: Pair, rewritten: Callable[[str], Any]) -> None:
    given = prompt(1, 9)
    whole = generate(llama.ours, **given)
    drafted = llama.ours_in_8_bits(**given, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted.sequences, whole.sequences)
    assert "fp8_cache: drafts" in str(llama.package.explain(llama.ours))
    llama.format.set_cache_format("fp8")
    again = generate(llama.ours, **given)  # the other cache does not stay in 16 bits
    llama.format.set_cache_format(None)
    assert distance(again, llama.rounded(**given)) < ROUNDED_CACHE

    package = rewritten("deepseek_v2")
    sizes = SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.DeepseekV2Config(
        **sizes, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = package.DeepseekV2ForCausalLM(config).eval()
    model._step_without_graph, model.starts_plainly = True, False
    whole = generate(model, **given)
    llama.format.set_cache_format("fp8")
    latents = generate(model, **given)
    llama.format.set_cache_format(None)
    said = str(package.explain(model))
    assert "fp8_cache: no_method_for_one_token" in said
    assert "graph: batch 1" in said
    assert "in 8 bits" not in said
    assert torch.equal(latents.sequences, whole.sequences)


def test_it_is_on_request(llama: Pair) -> None:
    assert llama.format.get_cache_format() is None
    with pytest.raises(ValueError, match="choose fp8"):
        llama.format.set_cache_format("fp4")


def filled(capacity: int, dtype: torch.dtype = torch.bfloat16) -> tuple[PreallocatedCache, Tensor, Tensor]:
    """Return a cache of one layer with 6 tokens of 3 rows, and its keys and values before the rounding."""
    cache = PreallocatedCache(1, 3, capacity, "cpu")
    cache.layers[0] = Fp8Layer(cache)
    key, value = torch.randn(3, 2, 6, 16, dtype=dtype), torch.randn(3, 2, 6, 24, dtype=dtype)
    found = cache.layers[0].update(key, value)
    assert found[0] is key
    assert found[1] is value
    return cache, key, value


def test_rows_are_chosen_and_tokens_forgotten() -> None:
    cache, key, value = filled(8)
    layer = cache.layers[0]
    layer.crop(-2)
    assert layer.get_seq_length() == 4
    more = torch.randn(3, 2, 1, 16).bfloat16(), torch.randn(3, 2, 1, 24).bfloat16()
    keys, values = layer.update(*more)
    torch.testing.assert_close(keys, torch.cat([rounded(key[:, :, :4]), rounded(more[0])], 2), rtol=0, atol=0)
    torch.testing.assert_close(values, torch.cat([rounded(value[:, :, :4]), rounded(more[1])], 2), rtol=0, atol=0)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.read(5)[0], keys[[2, 0, 0]])
    assert torch.equal(layer.read(5)[1], values[[2, 0, 0]])
    with pytest.raises(RuntimeError, match="holds 8 tokens"):
        layer.update(key, value)
    cache.clear()
    assert not any(buffer.any() for buffer in cache.buffers)


def test_what_another_cache_holds_is_taken_over_as_it_is() -> None:
    small, key, value = filled(8)
    large = PreallocatedCache(1, 3, 32, "cpu")
    large.layers[0] = Fp8Layer(large)
    large.copy_from(small)
    for mine, theirs in zip(large.buffers, small.buffers, strict=True):
        assert torch.equal(mine[:, :, :6], theirs[:, :, :6])
        assert not mine[:, :, 6:].any()
    growing = transformers.DynamicCache()
    small.store(growing, 6)
    assert torch.equal(growing.layers[0].keys, rounded(key))
    again, _, _ = filled(8)
    again.clear()
    again.load(growing)  # numbers that were rounded are rounded to themselves
    again.rewind(6)
    assert torch.equal(again.layers[0].read(6)[0], rounded(key))
    assert torch.equal(again.layers[0].read(6)[1], rounded(value))


@pytest.mark.parametrize("poison", [64.0, -64.0, 0.0])
def test_slots_are_spoiled_for_the_proof_of_a_step(poison: float) -> None:
    cache, _, value = filled(8)
    cache.layers[0].spoil(4, poison)
    values = cache.layers[0].read(8)[1]
    assert (values[:, :, 4:] == poison).all()
    assert torch.equal(values[:, :, :4], rounded(value)[:, :, :4])


def test_a_step_of_a_layer_without_a_method_reads_copies() -> None:
    cache, key, value = filled(8, torch.float32)
    new = torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 24)
    cache.position.fill_(6)
    with cache.step():
        keys, values = cache.layers[0].update(*new)
    assert torch.equal(keys[:, :, :7], rounded(torch.cat([key, new[0]], 2)))
    assert torch.equal(values[:, :, :7], rounded(torch.cat([value, new[1]], 2)))
    assert keys.shape[2] == 8


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs numpy before 2.4, as [dev] has it",
)
def test_kernels_give_the_originals_logits_with_a_cache_that_rounds(llama: Pair) -> None:
    script = Path(__file__).with_name("fp8_cache_under_interpreter.py")
    paths = os.pathsep.join((str(script.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {"TRITON_INTERPRET": "1", "REWRITE_BACKEND": "triton", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(script), str(Path(llama.package.__file__).parent)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    far = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("distance")]
    assert len(far) == 2
    for first, others, rounding in far:
        assert max(float(first), float(others)) < ROUNDED_CACHE_IN_FP32 < float(rounding) / 100
    assert run.stdout.count("every operator took its fast form") == 2
    assert "by a step's functions" in run.stdout
