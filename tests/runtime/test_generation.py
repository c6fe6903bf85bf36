"""`generate()` through the decode graph gives what transformers' own gives; on a CPU the step runs as plain calls."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import threading
import time
import types
import weakref

import pytest
import torch
from experts_model import Qwen3Moe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
    StoppingCriteria,
)
from transformers.cache_utils import DynamicLayer

from hf_rewrite_runtime.cache.cache_argument import given_back, passed_on
from hf_rewrite_runtime.cache.layers import CacheFull
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode import eligibility, graph_cache, rank_agreement, recorded_inputs, validation, validator
from hf_rewrite_runtime.decode.eligibility import recomputes_at_switch
from hf_rewrite_runtime.decode.graph_cache import release_graphs, store_of
from hf_rewrite_runtime.decode.step_buffers import UnknownCache
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.generate import (
    call_graphs,
    call_prefill,
    decode_loop,
    drafting,
    generation,
    loop_reasons,
    neutral_modes,
    replayed_loop,
)
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.tensor_parallel import shards

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
V = 199
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EOS = list(range(40, 60))


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = not GPU


class Mistral(GraphGeneration, MistralForCausalLM):
    _step_without_graph = not GPU


class Gemma2(GraphGeneration, Gemma2ForCausalLM):
    _step_without_graph = not GPU


class Qwen3(GraphGeneration, Qwen3ForCausalLM):
    _step_without_graph = not GPU


class GPT2(GraphGeneration, GPT2LMHeadModel):
    _step_without_graph = not GPU


MODELS = {
    "llama": (Llama, LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (Mistral, MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6)),
    "gemma2": (Gemma2, Gemma2ForCausalLM, Gemma2Config(**SIZES, sliding_window=6)),
    "qwen3": (Qwen3, Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "qwen3_moe": (
        Qwen3Moe,
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "gpt2": (GPT2, GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=V, initializer_range=0.3)),
}
SAMPLINGS = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 1e-4},
    "penalised": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.4},
    "greedy_penalised": {
        "do_sample": False,
        "repetition_penalty": 1.4,
        "min_new_tokens": 9,
        "renormalize_logits": True,
    },
    "biased": {"do_sample": False, "sequence_bias": {(7,): -9.0, (11,): 3.5}, "bad_words_ids": [[13], [17]]},
    "suppressed": {
        "do_sample": False,
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [9],
        "forced_eos_token_id": EOS[0],
    },
    "bounded": {"do_sample": True, "min_length": 20, "remove_invalid_values": True},
    "no_token_twice": {"do_sample": True, "no_repeat_ngram_size": 1},
    "no_pair_twice": {"do_sample": False, "no_repeat_ngram_size": 2},
    "no_token_of_the_prompt": {"do_sample": False, "encoder_no_repeat_ngram_size": 1},
}


def pair(name="llama", dtype=torch.float32, seed=0, **changes):
    """Return a model with the graph's loop and the original with the same weights."""
    ours, original, config = MODELS[name]
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = ours(config).eval().to(DEVICE, dtype)
    other = original(copy.deepcopy(config)).eval().to(DEVICE, dtype)
    other.load_state_dict(model.state_dict())
    return model, other


def prompt(batch=3, length=9, padded=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(60, V, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded and batch > 1:
        mask[0, :4] = 0
        mask[-1, :1] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def state():
    return torch.cuda.get_rng_state() if GPU else torch.get_rng_state()


def run(model, inputs, seed=5, **arguments):
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True, **arguments}
    output = model.generate(**inputs, **arguments)
    return output, state()


def loops(model):
    """Return the reasons counted since the last call, and forget them."""
    reasons = [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    backend.reset_fallbacks()
    return reasons


def same(ours, original, logits=True):
    (mine, my_state), (theirs, their_state) = ours, original
    assert torch.equal(mine.sequences, theirs.sequences)
    assert torch.equal(my_state, their_state)
    assert given_back(mine).get_seq_length() == given_back(theirs).get_seq_length()
    for a, b in zip(given_back(mine).layers, given_back(theirs).layers, strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.values, b.values, rtol=1e-3, atol=1e-3)
    for name in ("logits", "scores"):
        if logits and getattr(theirs, name) is not None:
            mine_all, theirs_all = getattr(mine, name), getattr(theirs, name)
            assert len(mine_all) == len(theirs_all)
            for a, b in zip(mine_all, theirs_all, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("eos", [None, EOS], ids=["endless", "eos"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_equals_the_original_loop(sampling, padded, eos):
    model, original = pair()
    arguments = dict(SAMPLINGS[sampling], eos_token_id=eos)
    for wanted in ({}, {"output_logits": True, "output_scores": True}):
        inputs = prompt(padded=padded)
        same(run(model, inputs, **arguments, **wanted), run(original, inputs, **arguments, **wanted))
    assert loops(model) == []


@pytest.mark.parametrize("sampling", ["greedy", "warped"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name, sampling):
    model, original = pair(name)
    for batch in (1, 3):
        arguments = dict(SAMPLINGS[sampling], eos_token_id=EOS, output_logits=True)
        same(run(model, prompt(batch), **arguments), run(original, prompt(batch), **arguments))
    assert loops(model) == []


def test_without_a_dict_and_with_max_length():
    model, original = pair()
    arguments = {**prompt(), "max_length": 30, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    assert torch.equal(model.generate(**arguments), original.generate(**arguments))
    assert loops(model) == []


def test_inference_mode_and_several_sequences_of_a_prompt():
    model, original = pair()
    arguments = dict(SAMPLINGS["warped"], num_return_sequences=3)
    with torch.inference_mode():
        ours = run(model, prompt(2), **arguments)
    same(ours, run(original, prompt(2), **arguments))
    same(run(model, prompt(2), **arguments), run(original, prompt(2), **arguments))
    assert loops(model) == []


def test_positions_that_are_given_count_up():
    model, original = pair()
    given = prompt()
    given["position_ids"] = given["attention_mask"].cumsum(-1) + 3
    same(run(model, given, **SAMPLINGS["greedy"]), run(original, given, **SAMPLINGS["greedy"]))
    assert loops(model) == (["position_ids"] if eligibility.repeats_given_positions(model) else [])


@pytest.mark.parametrize(
    ("has", "repeats"),
    [
        (["_get_initial_cache_position"], True),  # 5.0, 5.1
        (["_get_initial_cache_position", "_prepare_position_ids_for_generation"], False),  # 5.2, 5.3: makes them
        (["_prepare_position_ids_for_generation"], False),
    ],
)
def test_positions_are_taken_of_every_release_that_counts_them_up(has, repeats):
    assert eligibility.repeats_given_positions(types.SimpleNamespace(**dict.fromkeys(has))) is repeats


@pytest.mark.parametrize("size", [2, 4, 100])
def test_a_prompt_in_chunks(size):
    model, original = pair("mistral")
    if eligibility.makes_cache_position(model):
        pytest.skip("this transformers reads a prompt in chunks into a given cache only")
    arguments = {"do_sample": False, "prefill_chunk_size": size}
    same(run(model, prompt(padded=False), **arguments), run(original, prompt(padded=False), **arguments))
    assert loops(model) == []


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("own", [False, True], ids=["returned", "own"])
def test_a_cache_is_continued(name, own):
    outputs = []
    models = pair(name)
    for model in models:
        inputs = prompt()
        cache = DynamicCache(config=model.config) if own else None
        first, _ = run(model, {**inputs, passed_on(): cache}, max_new_tokens=5, do_sample=False)
        ids = torch.cat([first.sequences, inputs["input_ids"][:, :2]], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, : ids.shape[1] - 9])], dim=1)
        again = {"input_ids": ids, "attention_mask": mask, passed_on(): given_back(first)}
        outputs.append(run(model, again, do_sample=True, output_logits=True))
        assert not own or given_back(outputs[-1][0]) is cache
    same(*outputs)
    assert loops(models[0]) == []


def test_the_callers_cache_is_left_at_the_same_length_without_a_dict():
    lengths = []
    for model in pair():
        cache = DynamicCache(config=model.config)
        model.generate(**prompt(), **{passed_on(): cache}, max_new_tokens=7, do_sample=False)
        lengths.append((cache.get_seq_length(), cache.layers[0].keys.shape))
    assert lengths[0] == lengths[1]


class Sink:
    def __init__(self):
        self.tokens, self.times, self.ended = [], [], 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.tokens.append(value)
        self.times.append(time.perf_counter())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_every_token_in_order():
    sinks = []
    for model in pair():
        sinks.append(Sink())
        model.generate(**prompt(), streamer=sinks[-1], max_new_tokens=20, do_sample=False, eos_token_id=EOS)
    ours, original = sinks
    assert len(ours.tokens) == len(original.tokens)
    assert all(torch.equal(a, b) for a, b in zip(ours.tokens, original.tokens, strict=True))
    assert ours.ended == 1


@pytest.fixture(scope="module")
def tokenizer():
    words = {**{f"w{index}": index for index in range(V - 1)}, "abcdef": V - 1}
    text = Tokenizer(models.WordLevel(words, unk_token="w2"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=text, unk_token="w2", pad_token="w0")


def test_a_stop_string_that_begins_in_the_prompt(tokenizer):
    model, original = pair()
    inputs = prompt(1)
    first = int(original.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1])
    last = int(inputs["input_ids"][0, -1])
    arguments = {"stop_strings": f"w{last} w{first}", "tokenizer": tokenizer, "max_new_tokens": 24}
    ours, theirs = (m.generate(**inputs, do_sample=False, **arguments) for m in (model, original))
    assert torch.equal(ours, theirs)
    assert theirs.shape[1] == 10
    assert loops(model) == []


def test_a_graph_serves_calls_that_differ_in_what_they_read():
    model, original = pair()
    for shift in (0, 20, 60):
        ends = [40 + shift, 41 + shift, 42 + shift, 50 + shift]
        bias = {(token,): 6.0 for token in ends[:2]}
        arguments = {"eos_token_id": ends, "sequence_bias": bias, "min_new_tokens": 3, "pad_token_id": shift}
        same(run(model, prompt(), **arguments), run(original, prompt(), **arguments))
    (graph,) = store_of(model).graphs.values()
    assert len(graph._programs) == 1
    assert loops(model) == []


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("eos", [None, EOS], ids=["endless", "eos"])
def test_stop_strings(tokenizer, batch, eos):
    model, original = pair()
    free = original.generate(**prompt(batch), max_new_tokens=24, do_sample=False, pad_token_id=0)
    stops = [f"w{int(free[row, 9 + 7 + row])}" for row in range(batch)]
    arguments = {
        "stop_strings": stops,
        "tokenizer": tokenizer,
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
    }
    ours, theirs = (m.generate(**prompt(batch), eos_token_id=eos, **arguments) for m in (model, original))
    assert torch.equal(ours, theirs)
    assert theirs.shape[1] < 33
    assert loops(model) == []


def test_max_time_ends_a_generation():
    model, _ = pair()
    output = model.generate(**prompt(), max_new_tokens=1500, max_time=0.0, do_sample=False)
    assert output.shape[1] == 9 + 1
    assert loops(model) == []


def test_grows_past_its_capacity(monkeypatch):
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 6)
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    model, original = pair("mistral")
    for sampling in ("greedy", "penalised"):
        arguments = dict(SAMPLINGS[sampling], max_new_tokens=60, eos_token_id=EOS[:2], output_logits=True)
        same(run(model, prompt(), **arguments), run(original, prompt(), **arguments))
    assert loops(model) == []
    assert max(capacity for _, capacity in store_of(model).graphs) > 20


def test_reused_interleaved_and_of_two_models():
    calls = [
        (dict(SAMPLINGS["greedy"]), prompt(3)),
        (dict(SAMPLINGS["penalised"]), prompt(2, 14, seed=1)),
        (dict(SAMPLINGS["warped"], max_new_tokens=400), prompt(3, 5, seed=2)),
        (dict(SAMPLINGS["biased"]), prompt(3, 11, seed=3)),
        (dict(SAMPLINGS["greedy"]), prompt(3, 6, padded=False, seed=4)),
    ]
    pairs = [pair(seed=0), pair("qwen3", seed=1)]
    expected = [[run(original, inputs, **arguments) for arguments, inputs in calls] for _, original in pairs]
    for _ in range(2):
        for index, (arguments, inputs) in enumerate(calls):
            for (model, _), wanted in zip(pairs, expected, strict=True):
                same(run(model, inputs, **arguments), wanted[index])
    assert loops(None) == []


def test_what_an_earlier_call_left_in_the_slots_changes_nothing():
    model, original = pair()
    run(model, prompt(), do_sample=False)
    for graph in store_of(model).graphs.values():
        for buffer in graph.cache.buffers:
            buffer.fill_(torch.nan)
    same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: m.load_state_dict({k: torch.randn_like(v) * 0.2 for k, v in m.state_dict().items()}, assign=True),
        lambda m: setattr(m.model.layers[0].mlp, "up_proj", torch.nn.Linear(64, 96, bias=False, device=DEVICE)),
        lambda m: m.model.norm.weight.data.mul_(2),
    ],
    ids=["moved", "assigned", "replaced", "in_place"],
)
def test_a_changed_model_is_captured_anew(change, request):
    model, original = pair()
    run(model, prompt(), do_sample=False)
    (before,) = store_of(model).graphs.values()
    for one in (model, original):
        with torch.no_grad():
            change(one)
    original.load_state_dict(model.state_dict())
    same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))
    (after,) = store_of(model).graphs.values()
    # What is written in place is seen by a graph that reads the same addresses.
    assert (after is before) == (request.node.callspec.id == "in_place")


def test_memory_is_bounded_and_given_back():
    model, _ = pair()
    for batch in range(1, 8):
        run(model, prompt(batch), do_sample=False, max_new_tokens=3)
    graphs = list(store_of(model).graphs.values())
    assert len(graphs) == graph_cache.GRAPHS_KEPT
    assert sum(line.startswith("graph:") for line in explain(model).graphs) == len(graphs)
    assert "capacity 256" in str(explain(model))
    gone = [weakref.ref(graph.cache.layers[0].keys) for graph in graphs]
    del graphs
    gc.disable()
    try:
        release_graphs(model)
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()
    assert not any(line.startswith("graph:") for line in explain(model).graphs)
    run(model, prompt(), do_sample=False)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_the_first_slot_of_each_row_is_known_to_the_cache():
    model, _ = pair()
    for padded, starts in ((True, [4, 0, 1]), (False, [0, 0, 0])):
        run(model, prompt(padded=padded), do_sample=False)
        (graph,) = store_of(model).graphs.values()
        assert graph.cache.starts.tolist() == starts


def test_threads_take_turns():
    model, original = pair()
    inputs = [prompt(2, 5 + index, seed=index) for index in range(4)]
    expected = [original.generate(**one, max_new_tokens=12, do_sample=False, pad_token_id=0) for one in inputs]
    results = [None] * 4

    def work(index):
        for _ in range(3):
            results[index] = model.generate(**inputs[index], max_new_tokens=12, do_sample=False, pad_token_id=0)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert loops(model) == []


def test_a_call_from_inside_a_call_takes_the_original_loop():
    model, original = pair()
    inner = []

    class Nested(Sink):
        def put(self, value):
            if not inner:
                inner.append(None)
                inner[0] = model.generate(**prompt(2), max_new_tokens=4, do_sample=False, pad_token_id=0)

    outer = model.generate(**prompt(), streamer=Nested(), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(outer, original.generate(**prompt(), max_new_tokens=9, do_sample=False, pad_token_id=0))
    assert torch.equal(inner[0], original.generate(**prompt(2), max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_probabilities_that_are_no_numbers_raise_as_in_the_original():
    model, _ = pair()
    arguments = {"do_sample": True, "max_new_tokens": 9}
    model.generate(**prompt(), **arguments)
    (graph,) = store_of(model).graphs.values()
    forward = graph.call.forward
    graph._programs.clear()
    graph.call.forward = lambda: forward() * torch.nan
    graph.prove = lambda tokens, sampling: None
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**prompt(), **arguments)


def test_a_model_with_cross_attention_gives_its_cache_back_as_the_original_does():
    model, original = pair("gpt2", add_cross_attention=True)
    mine, theirs = (run(m, prompt(), do_sample=False)[0] for m in (model, original))
    assert loops(model) == []
    assert torch.equal(mine.sequences, theirs.sequences)
    assert type(given_back(mine)) is type(given_back(theirs)) is EncoderDecoderCache
    for name in ("self_attention_cache", "cross_attention_cache"):
        ours, others = (getattr(given_back(out), name) for out in (mine, theirs))
        assert type(ours) is type(others) is DynamicCache
        assert len(ours.layers) == len(others.layers)
        assert ours.get_seq_length() == others.get_seq_length()


class Doubled(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def with_holes(inputs):
    inputs["attention_mask"][0, 5] = 0
    return inputs


OTHER_LOOP = {
    "outputs": {"output_hidden_states": True},
    "cache_implementation": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("what", OTHER_LOOP)
def test_what_does_not_fit_takes_the_original_loop(what):
    model, original = pair()
    arguments = dict(do_sample=False, **OTHER_LOOP[what])
    mine, theirs = (run(m, prompt(), **copy.deepcopy(arguments))[0] for m in (model, original))
    assert torch.equal(mine.sequences, theirs.sequences)
    assert loops(model) == [what]


def test_reasons_of_the_model_and_its_inputs():
    model, _original = pair()
    arguments = {"do_sample": False, "max_new_tokens": 4}

    def reason(inputs=None, **more):
        run(model, inputs or prompt(), **arguments, **more)
        assert all(reason in loop_reasons.REASONS for reason in explain(model).modules.get("", "").split(": ")[1:])
        return loops(model)

    assert reason(with_holes(prompt())) == ["attention_mask"]
    static = StaticCache(config=model.config, max_cache_len=64)
    assert reason({**prompt(), passed_on(): static}) == ["cache_kind"]
    assert reason({"inputs_embeds": torch.randn(2, 5, 64, device=DEVICE)}) == ["inputs"]
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    assert reason() == ["observed"]
    handle.remove()
    assert eligibility._unfit_model(model, True) == "gradient"
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert eligibility.unfit_modules(model) == "attention_implementation"
    model.set_attn_implementation("sdpa")
    assert reason() == []
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert reason() == ["autocast"]
    with torch.no_grad():
        model.model.rotary_emb.rope_type = "dynamic"
        assert eligibility.unfit_modules(model) == "rope_depends_on_length"
        model.model.rotary_emb.rope_type = "default"
        model.compile()
        assert eligibility._unfit_model(model, True) == "compiled"
    model._compiled_call_impl = None
    assert reason() == []


def test_recording_hooks_of_transformers_do_not_rule_the_graph_out():
    model, original = pair()
    for _ in range(2):
        run(model, prompt(), do_sample=False, output_hidden_states=True)
        loops(model)
        same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))
        assert loops(model) == []


def test_the_cpu_is_a_reason(monkeypatch):
    monkeypatch.setattr(Llama, "_step_without_graph", False)
    model, _ = pair()
    model.cpu()
    inputs = {name: tensor.cpu() for name, tensor in prompt().items()}
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert loops(model) == ["cpu"]


def blind_beyond(seen):
    """Return what makes a class whose steps see so many slots that nothing has written."""

    def made(inner):
        class Blind(inner):
            def forward(self, *args, attention_mask=None, **kwargs):
                past = kwargs[passed_on()]
                if getattr(past, "stepping", False):
                    attention_mask = torch.zeros(3, 1, 1, past.capacity, device=DEVICE)
                    unseen = torch.arange(past.capacity, device=DEVICE) > past.position + seen
                    attention_mask.masked_fill_(unseen, -torch.inf)
                return super().forward(*args, attention_mask=attention_mask, **kwargs)

        return Blind

    return made


def test_a_step_that_sees_unwritten_slots_is_noticed():
    model, original = pair()
    model.model.__class__ = blind_beyond(1)(type(model.model))
    for _ in range(2):
        inputs = prompt(padded=False)
        same(run(model, inputs, do_sample=False), run(original, inputs, do_sample=False))
        assert loops(model) == ["step_differs"]
    assert "differ" in str(explain(model))


@pytest.mark.parametrize("seen", [0, 1])
def test_where_one_rounding_makes_other_logits_no_bit_may_move(seen, monkeypatch):
    """As of Gemma 3n with random weights: what must not be seen is looked for bit by bit."""
    model, _ = pair(dtype=torch.bfloat16)
    head, last = type(model.lm_head), model.model.layers[-1]

    class Wild(head):
        def forward(self, hidden):
            return torch.sin(1e7 * super().forward(hidden))

    model.lm_head.__class__ = Wild
    last.__class__ = blind_beyond(seen)(type(last))  # no layer behind it keeps what it makes of that
    verdicts = []
    monkeypatch.setattr(
        validator, "compared", lambda *given: verdicts.append(validation.compared(*given)) or verdicts[-1]
    )
    run(model, prompt(padded=False), do_sample=False)
    assert loops(model) == (["step_differs"] if seen else [])
    for verdict, holds in verdicts:
        assert (verdict.distance > 0.5, verdict.vague, holds) == (True, True, not seen)


def asks_for_a_number(past):
    return past is not None and not isinstance(past.get_seq_length(), int)


def takes_one_token(past):
    return isinstance(past, PreallocatedCache) and past.length > 0


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        *((asks_for_a_number, error) for error in (TypeError, AttributeError, AssertionError)),
        *((takes_one_token, error) for error in (RuntimeError, AssertionError)),
    ],
)
def test_a_step_that_needs_the_length_as_a_number_or_takes_no_single_token_is_noticed(fails, error):
    """The latter as XLM, which sees no cache, or CPM-Ant, which counts other tokens than are given."""
    model, original = pair()
    inner = type(model.model)

    class Failing(inner):
        def forward(self, *args, **kwargs):
            if fails(kwargs[passed_on()]):
                raise error("the mask is of more tokens")
            return super().forward(*args, **kwargs)

    model.model.__class__ = Failing
    for _ in range(2):
        same(run(model, prompt(), do_sample=True), run(original, prompt(), do_sample=True))
        assert loops(model) == ["step_fails"]
    assert "of more tokens" in str(explain(model))


class Asks(LlamaForCausalLM):
    """Its `forward` asks something for an attribute, as Qwen4Exp asks a layer of its cache for positions."""

    asked = "layer"

    def forward(self, *args, **kwargs):
        cache = kwargs[passed_on()]
        assert {"layer": cache.layers[0], "cache": cache, "model": self}[self.asked].something
        return super().forward(*args, **kwargs)


class AsksInOurs(GraphGeneration, Asks):
    _step_without_graph = not GPU


@pytest.mark.parametrize("asked", ["layer", "cache"])
def test_a_cache_that_is_asked_for_what_it_lacks_takes_the_original_loop(asked, monkeypatch):
    model, original = pair()
    model.__class__, original.__class__, model.asked, original.asked = AsksInOurs, Asks, asked, asked
    monkeypatch.setattr({"layer": DynamicLayer, "cache": DynamicCache}[asked], "something", 1, raising=False)
    for _ in range(2):
        same(run(model, prompt(), do_sample=True), run(original, prompt(), do_sample=True))
        assert loops(model) == ["cache_kind"]
    assert "something" in str(explain(model))


class Keeps(LlamaForCausalLM):
    """Keeps the tokens on a layer of its cache."""

    def forward(self, *args, **kwargs):
        layer, ids = kwargs[passed_on()].layers[0], kwargs["input_ids"]
        layer.seen = torch.cat([layer.seen, ids], dim=-1) if hasattr(layer, "seen") else ids
        return super().forward(*args, **kwargs)


class KeepsInOurs(GraphGeneration, Keeps):
    _step_without_graph = not GPU


def test_what_a_step_leaves_on_a_layer_of_the_cache_is_noticed():
    """A replay would leave it as it was."""
    model, original = pair()
    model.__class__, original.__class__ = KeepsInOurs, Keeps
    for _ in range(2):
        same(run(model, prompt(), do_sample=True), run(original, prompt(), do_sample=True))
        assert loops(model) == ["step_changes"]
    assert "seen" in str(explain(model))


def test_an_attribute_that_the_model_itself_lacks_raises_as_in_the_original():
    model, _ = pair()
    model.__class__, model.asked = AsksInOurs, "model"
    with pytest.raises(AttributeError, match="something"):
        run(model, prompt(), do_sample=False)
    assert loops(model) == []


def test_a_configuration_that_names_no_cache_layers_takes_the_original_loop(monkeypatch):
    """Release 5.0 counts none where `num_kv_shared_layers` is 0, and adds layers as they are written."""
    model, original = pair()
    monkeypatch.setattr("hf_rewrite_runtime.decode.step_buffers.DynamicCache", lambda config: DynamicCache())
    for _ in range(2):
        inputs = prompt()
        mine, theirs = (run(m, {**inputs, passed_on(): DynamicCache()}, do_sample=False) for m in (model, original))
        same(mine, theirs)
        assert loops(model) == ["cache_kind"]
    with pytest.raises(UnknownCache):
        DecodeGraph(model, batch_size=1, capacity=8)


def test_a_configuration_without_a_number_of_layers_has_no_graph(monkeypatch):
    model, _ = pair()
    monkeypatch.setattr(model.config, "get_text_config", lambda decoder: object())
    with pytest.raises(UnknownCache):
        DecodeGraph(model, batch_size=1, capacity=8)


def test_every_reason_is_used():
    of_calls = (eligibility, generation, graph_cache, rank_agreement, shards, recorded_inputs)
    found_out = (call_graphs, call_prefill, drafting, decode_loop, neutral_modes, replayed_loop, validation)
    text = "".join(inspect.getsource(module) for module in (*of_calls, *found_out))
    assert all(f'"{reason}"' in text for reason in loop_reasons.REASONS)
    named = set(re.findall(r'(?:Unsupported\(|refuse\(graph, |reason = |"generate", )"(\w+)"', text))
    assert len(named) > 15
    assert named <= loop_reasons.REASONS.keys()


def test_the_graph_by_hand_equals_the_model():
    model, original = pair()
    inputs = prompt()
    graph = DecodeGraph(model, batch_size=3, capacity=20)
    for _ in range(2):  # the second time after a reset
        cache, held = DynamicCache(config=original.config), []
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            wanted = original(**inputs, position_ids=positions, **{passed_on(): cache}).logits[:, -1]
        ours = graph.prefill(**inputs)
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
        for _ in range(11):
            tokens = wanted.argmax(-1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
            with torch.no_grad():
                wanted = original(
                    input_ids=tokens[:, None], attention_mask=mask, position_ids=positions, **{passed_on(): cache}
                ).logits[:, -1]
            held.append((graph.step(tokens), wanted))
        for mine, theirs in held:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        with pytest.raises(CacheFull):
            graph.step(tokens)
        graph.reset()
    assert graph.nbytes == 3 * 2 * 3 * 2 * 20 * 16 * 4
    graph.release()
    assert graph.nbytes == 0
    torch.testing.assert_close(graph.prefill(**inputs), ours, rtol=1e-3, atol=1e-3)


def gpu(test):
    """Mark a test that captures."""
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="needs a CUDA or ROCm device")(test))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replays_equal_plain_calls(sampling, dtype):
    model, _ = pair("qwen3", dtype)
    arguments = dict(SAMPLINGS[sampling], eos_token_id=EOS, output_logits=True)
    outputs = []
    for without in (True, False):
        model._step_without_graph = without
        outputs.append(run(model, prompt(), **arguments))
    (plain, plain_state), (replayed, replayed_state) = outputs
    assert torch.equal(plain.sequences, replayed.sequences)
    assert torch.equal(plain_state, replayed_state)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, replayed.logits, strict=True))
    assert loops(model) == []


@gpu
def test_nothing_waits_between_replays(monkeypatch):
    model, original = pair()
    replay, replays = decode_loop.Program.replay, []

    def watched(program):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(program)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        replays.append(program)

    monkeypatch.setattr(decode_loop.Program, "replay", watched)
    for sampling in ("greedy", "penalised"):
        arguments = dict(SAMPLINGS[sampling], output_scores=True)
        same(run(model, prompt(), **arguments), run(original, prompt(), **arguments))
    assert len(replays) == 2 * 23


@gpu
def test_a_step_that_asks_the_host_leaves_everything_in_order():
    model, original = pair()
    healthy, healthy_original = pair("qwen3")
    inner = type(model.model)

    class Asking(inner):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if getattr(kwargs[passed_on()], "stepping", False):
                output.last_hidden_state.sum().item()
            return output

    model.model.__class__ = Asking
    for _ in range(2):
        for sampling in ("drawn", "greedy"):
            arguments = dict(SAMPLINGS[sampling])
            same(run(model, prompt(), **arguments), run(original, prompt(), **arguments))
            assert loops(model) == ["step_not_capturable"]
            same(run(healthy, prompt(), **arguments), run(healthy_original, prompt(), **arguments))
            assert loops(healthy) == []
    assert "captur" in str(explain(model))
    model.model.__class__ = inner
    release_graphs(model)
    same(run(model, prompt(), do_sample=True), run(original, prompt(), do_sample=True))
    assert loops(model) == []
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run(healthy, prompt(), do_sample=True)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


@gpu
def test_another_thread_may_draw_while_a_graph_is_captured():
    models = [pair(name, seed=index) for index, name in enumerate(("llama", "qwen3", "mistral", "gemma2"))]
    failures = []

    def work(model, original):
        try:
            for batch in (1, 2, 3):
                run(model, prompt(batch), do_sample=True)
                greedy = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
                mine, theirs = (m.generate(**prompt(batch), **greedy) for m in (model, original))
                assert torch.equal(mine, theirs)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=both) for both in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@gpu
def test_streams_of_different_calls_keep_their_order():
    model, original = pair()
    wanted = run(original, prompt(), do_sample=False, eos_token_id=EOS)[0].sequences
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = run(model, prompt(), do_sample=False, eos_token_id=EOS)[0].sequences
            torch.cuda.current_stream().synchronize()
        assert torch.equal(ours, wanted)


@gpu
def test_graph_memory_comes_back():
    model, _ = pair()
    run(model, prompt(8), do_sample=True)
    release_graphs(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for batch in (8, 16, 32):
        run(model, prompt(batch), do_sample=True)
    release_graphs(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21


def owning(prepare):
    """Return a pair whose own class prepares each step's inputs."""
    model, original = pair()
    model.__class__ = type("Own", (Llama,), {"prepare_inputs_for_generation": prepare})
    return model, original


@pytest.mark.parametrize("marked", [False, True])
def test_inputs_of_a_model_s_own_are_taken_if_they_follow_from_the_token_before(marked):
    def prepare(self, *args, **kwargs):
        return Llama.prepare_inputs_for_generation(self, *args, **kwargs)

    model, original = owning(recomputes_at_switch(prepare) if marked else prepare)
    for padded in (False, True):
        inputs = prompt(padded=padded)
        same(run(model, inputs, do_sample=False), run(original, inputs, do_sample=False))
    assert loops(model) == ([] if marked or eligibility.can_watch() else ["own_loop"])


@pytest.mark.parametrize("unfit", ["doubled", "scaled", "another", "unknown", "one_at_first"])
def test_inputs_that_do_not_follow_take_the_original_loop(unfit):
    def prepare(self, input_ids, *args, **kwargs):
        given = Llama.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
        count = input_ids.shape[1]
        more = {
            "doubled": torch.tensor([2 * count]),
            "scaled": torch.tensor([count / 2]),
            "another": torch.zeros(count),
            "unknown": {count},
            "one_at_first": torch.ones(1) if count == 10 else None,
        }
        return given | {"unused": more[unfit]}

    model, original = owning(prepare)
    same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))
    assert loops(model) == ["inputs" if eligibility.can_watch() else "own_loop"]


def test_a_mask_that_a_model_makes_itself_is_not_another_s():
    def prepare(self, *args, attention_mask=None, **kwargs):
        attention_mask = attention_mask.clone()
        attention_mask[:, :5] = 0
        return LlamaForCausalLM.prepare_inputs_for_generation(self, *args, attention_mask=attention_mask, **kwargs)

    model, original = owning(prepare)
    original.__class__ = type("Other", (LlamaForCausalLM,), {"prepare_inputs_for_generation": prepare})
    same(run(model, prompt(), do_sample=False), run(original, prompt(), do_sample=False))
    assert loops(model) == ["attention_mask" if eligibility.can_watch() else "own_loop"]
