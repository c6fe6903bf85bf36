"""Prompts read in a graph of a longer length; on a CPU its forward runs as plain calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_rewrite_runtime.cache.cache_argument import given_back, passed_on
from hf_rewrite_runtime.cache.preallocated import skips_mask
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode import kernels_ahead
from hf_rewrite_runtime.decode.prompt_graph import MOST_TOKENS, ROUNDING, is_causal
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.norms.rms_norm import rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6)),
}


def model_of(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    model_class, config = MODELS[kind]
    return model_class(config).to(DEVICE).eval()


def prompt(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, 99, (rows, tokens), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)


@pytest.mark.parametrize("kind", MODELS)
def test_prompts_of_all_lengths_share_a_graph(kind: str) -> None:
    model = model_of(kind)
    graph = DecodeGraph(model, batch_size=2, capacity=256)
    for tokens in (5, 1, ROUNDING, 77, ROUNDING + 1):
        ids = prompt(2, tokens)
        with torch.no_grad():
            expected = model(ids).logits[:, -1]
            torch.testing.assert_close(graph.prefill(ids), expected, rtol=1e-4, atol=1e-4)
            following = expected.argmax(-1)
            longer = model(torch.cat([ids, following[:, None]], 1)).logits[:, -1]
            torch.testing.assert_close(graph.step(following), longer, rtol=1e-4, atol=1e-4)
    assert graph.prompts.refusal is None
    assert graph.prompts.lengths == [ROUNDING, 2 * ROUNDING]


def test_no_mask_where_attention_is_causal_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, mistral = model_of(), model_of("mistral")
    assert llama.config._attn_implementation == "sdpa"
    assert is_causal(llama, 512)
    assert [is_causal(mistral, length) for length in (5, 6, 128)] == [True, False, False]
    llama.config.attention_chunk_size = 64
    assert [is_causal(llama, length) for length in (63, 64)] == [True, False]
    monkeypatch.setattr(mistral.config, "sliding_window", None)
    assert is_causal(mistral, 128)
    mistral.config._attn_implementation = "eager"
    assert not is_causal(mistral, 128)
    mistral.config._attn_implementation = "sdpa"
    del llama.config.attention_chunk_size


def test_masks_are_left_out_in_the_graph_and_nowhere_else() -> None:
    seen: list[bool] = []
    model = model_of()
    graph = DecodeGraph(model, batch_size=1, capacity=256)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(skips_mask(kwargs[passed_on()])), with_kwargs=True
    )
    graph.prefill(prompt(1, 9))
    assert not skips_mask(graph.cache)
    assert True in seen
    assert False in seen
    with graph.cache.step():
        assert skips_mask(graph.cache)
    assert not skips_mask(None)


@pytest.mark.parametrize("held", ["as a parameter", "as a buffer"])
def test_weights_that_a_step_moves_are_read_where_they_are(held: str) -> None:
    model, before = model_of(), []
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight
    if held == "as a buffer":
        del layer.weight
        weight = weight.detach()
        layer.register_buffer("weight", weight)

    def packs(module: Any, args: Any, kwargs: Any) -> None:
        """Move a weight in the first step, as one does that packs what a prompt multiplies one by one."""
        if getattr(kwargs[passed_on()], "stepping", False) and not before:
            before.append(weight.data)
            weight.data = weight.data.clone()
            before[0].zero_()

    model.model.register_forward_pre_hook(packs, with_kwargs=True)
    graph = DecodeGraph(model, batch_size=1, capacity=256)
    graph.prefill(prompt(1, 9))
    assert before
    assert graph.prompts.lengths == []
    for tokens in (7, 8):
        ids = prompt(1, tokens)
        with torch.no_grad():
            expected = model(ids, use_cache=True).logits[:, -1]
        torch.testing.assert_close(graph.prefill(ids), expected, rtol=1e-4, atol=1e-4)
        assert graph.prompts.lengths == [ROUNDING]


def test_prompts_with_padding_and_long_ones_are_read_as_they_are() -> None:
    model = model_of()
    graph = DecodeGraph(model, batch_size=2, capacity=256)
    mask = torch.ones(2, 5, dtype=torch.int64, device=DEVICE)
    mask[1, 0] = 0
    graph.prefill(prompt(2, 5), mask)
    assert graph.prompts.lengths == []
    assert graph.prompts.length_for(1, MOST_TOKENS + 1, 2 * MOST_TOKENS) is None
    assert graph.prompts.length_for(MOST_TOKENS // ROUNDING + 1, 3, 256) is None


def test_no_position_beyond_the_model_s_is_used() -> None:
    graph = DecodeGraph(model_of(), batch_size=1, capacity=1024)
    assert graph.prompts.length_for(1, 512, 1024) == 512
    assert graph.prompts.length_for(1, 513, 1024) is None


def test_a_model_that_looks_ahead_reads_its_prompts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    inner = model.model.forward

    def ahead(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        return SimpleNamespace(
            last_hidden_state=output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True),
            **{passed_on(): given_back(output)},
            hidden_states=None,
            attentions=None,
        )

    monkeypatch.setattr(model.model, "forward", ahead)
    graph = DecodeGraph(model, batch_size=1, capacity=256)
    ids = prompt(1, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    for _ in range(2):
        graph.cache.clear()
        logits = graph.read_prompt(ids, lambda: model(ids, **{passed_on(): graph.cache}, use_cache=True).logits[:, -1])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert graph.cache.length == 9
    assert "tokens behind the prompt" in str(graph.prompts.refusal)


def test_a_model_that_takes_no_index_reads_its_prompts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    forward = type(model).forward

    def strict(self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        if not isinstance(logits_to_keep, int):
            raise TypeError("an index")
        return forward(self, *args, logits_to_keep=logits_to_keep, **kwargs)

    monkeypatch.setattr(type(model), "forward", strict)
    graph = DecodeGraph(model, batch_size=1, capacity=256)
    graph.prompts.refusal = None
    ids = prompt(1, 9)
    logits = graph.read_prompt(
        ids, lambda: model(ids, **{passed_on(): graph.cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
    )
    assert logits.shape == (1, 99)
    assert graph.prompts.refusal == "TypeError: an index"


def test_the_first_prompt_of_a_model_is_read_plainly_and_compiled_with_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With captures that run what they capture: which forwards there are, of how many tokens, and in what order."""
    events: list[tuple[str, int]] = []
    model = model_of()

    def noted(module: Any, args: Any, kwargs: Any) -> None:
        kind = "plain" if backend.runs_plainly() else "collected" if launch.collects() else "run"
        events.append((kind, kwargs["input_ids"].shape[1]))

    def captured(run: Any, rehearse: Any, device: Any, pool: Any) -> Any:
        rehearse()
        run()
        return SimpleNamespace(replay=run)

    for module in ("device.compile_ahead", "decode.step_graph", "decode.prompt_graph"):
        monkeypatch.setattr(f"hf_rewrite_runtime.{module}.capture", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(kernels_ahead, "compiler_loading", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(kernels_ahead, "compile_all", lambda jobs, device: events.append(("compiled", 0)))
    model.register_forward_pre_hook(noted, with_kwargs=True)
    ids = prompt(1, 9)
    graph = DecodeGraph(model, batch_size=1, capacity=256, captures=True)
    first = graph.prefill(ids)
    warm_up = [("plain", 9), ("plain", 1), ("collected", 1), ("collected", ROUNDING), ("compiled", 0)]
    assert events[:6] == [*warm_up, ("run", 9)]
    assert graph.cache.length == 9
    events.clear()
    another = DecodeGraph(model, batch_size=1, capacity=256, captures=True)
    torch.testing.assert_close(another.prefill(ids), first)
    assert events[0] == ("run", 9)
    with torch.no_grad():
        torch.testing.assert_close(first, model(input_ids=ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_kernels_of_prompt_and_step_are_compiled_together_before_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    model = model_of()
    norm = model.model.norm

    def normed(x: torch.Tensor) -> torch.Tensor:
        if not backend.runs_plainly() and not launch.collects():
            events.append("launched")
        return rms_norm(x, norm.weight, norm.variance_epsilon)

    def compiled(jobs: Any, device: torch.device) -> None:
        events.append([key[0].jit_function.__name__ for key in jobs])

    monkeypatch.setattr(norm, "forward", normed)
    monkeypatch.setattr(kernels_ahead, "compile_all", compiled)
    ids = prompt(1, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        events.clear()
        for _ in range(2):
            graph = DecodeGraph(model, batch_size=1, capacity=256)
            torch.testing.assert_close(graph.prefill(ids), expected, rtol=1e-4, atol=1e-4)
    together = events.index("launched")
    assert together == 1
    assert {"_rms_norm_kernel", "_masked_attention_kernel"} <= set(events[0])  # type: ignore[call-overload]
    assert sum(event != "launched" for event in events) == 3, "the first prompt's, and a step's of each graph"
