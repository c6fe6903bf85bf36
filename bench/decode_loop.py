"""Time what the loop of `generate()` adds to bare replays of its graph, and print it.

    python bench/decode_loop.py

Llama-3.2-1B's shape with random bf16 weights and transformers' own code in the graph, batch 1, 512 tokens of context.
Both sides alternate and the median is kept: 256 replays in a row with one wait at the end, and the time that 256 more
tokens add to `generate()`.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core.explain import explain
from hf_rewrite_runtime.decode.generation import GraphGeneration
from hf_rewrite_runtime.decode.graph_store import store_of

GraphGeneration.starts_plainly = False

TOKENS = 256
ROUNDS = 7


class Model(GraphGeneration, LlamaForCausalLM):
    """Llama with the decode loop."""


class Swallow:
    """A streamer that does nothing."""

    def put(self, value):
        pass

    def end(self):
        pass


def model_1b():
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        eos_token_id=128001,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        return Model(config).eval()


def seconds(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model, ids, **arguments):
    def generate(tokens):
        # The end of a row must not come early, and the test for it must be made.
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens} if arguments.get("do_sample") else {}
        return model.generate(ids, **{"max_new_tokens": tokens, "do_sample": False, **limits, **arguments})

    first = seconds(lambda: generate(2))
    generate(2 + TOKENS)
    graph = max(store_of(model).graphs.values(), key=lambda graph: graph.cache.capacity)
    program = list(graph._programs.values())[-1]

    def replay():
        graph.state.position.fill_(ids.shape[1])
        for _ in range(TOKENS):
            program.replay()

    short, long, bare = [], [], []
    for _ in range(ROUNDS):
        bare.append(seconds(replay))
        short.append(seconds(lambda: generate(2)))
        long.append(seconds(lambda: generate(2 + TOKENS)))
    per_token = (statistics.median(long) - statistics.median(short)) / TOKENS
    per_replay = statistics.median(bare) / TOKENS
    added = (per_token / per_replay - 1) * 100
    print(
        f"first call {first:.2f} s, replay {per_replay * 1e3:.4f} ms, token {per_token * 1e3:.4f} ms, "
        f"+{(per_token - per_replay) * 1e6:.1f} µs ({added:.1f}%)"
    )


def main():
    model = model_1b()
    ids = torch.randint(1000, 100000, (1, 512), device="cuda")
    for name, arguments in {
        "greedy": {},
        "greedy, streamed": {"streamer": Swallow()},
        "drawn, top-k 50, top-p 0.9": {"do_sample": True, "top_k": 50, "top_p": 0.9},
        "greedy with logits": {"output_logits": True, "return_dict_in_generate": True},
    }.items():
        print(name, end=": ", flush=True)
        measure(model, ids, **arguments)
    print(explain(model))


if __name__ == "__main__":
    main()
