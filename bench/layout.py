"""Which copies a layer makes, by kernel: original against rewritten, prefill and decode.

    python bench/layout.py PACKAGE [--length 512] [--json FILE]

Models of 2 and of 4 layers run the same call; the difference of their kernels, halved, is a layer's. The shape is that
of Llama 3.2 1B with random bf16 weights. The calls: prefill of one sequence, of two of which one is padded, a step of
`forward` with a growing cache, and a token of `generate()`, where a rewritten package replays its graph. Kernels are
counted by CUPTI or rocprofiler, so that those inside a graph and those that torch's attention launches are seen.
Parity is the largest difference of the last logits over the largest logit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back

COPY = re.compile(r"copy|CatArray|repeat_interleave|DtoD", re.IGNORECASE)
SMALL, LARGE, TOKENS = 2, 4, 16
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}


def built(cls, layers):
    torch.manual_seed(0)
    config = cls.config_class(**SIZES, num_hidden_layers=layers, attn_implementation="sdpa")
    config.eos_token_id = None
    with torch.device("cuda"):
        return cls._from_config(config, dtype=torch.bfloat16).eval()


def padded(ids):
    mask = torch.ones_like(ids).repeat(2, 1)
    mask[1, : ids.shape[1] // 4] = 0
    return {"input_ids": ids.repeat(2, 1), "attention_mask": mask, "use_cache": False}


def step(model, ids):
    cached = {argument_of(model): given_back(model(input_ids=ids))}
    torch.cuda.synchronize()
    return lambda: model(input_ids=ids[:, :1], **cached)


def tokens(model, ids, new):
    mask = torch.ones_like(ids)
    return lambda: model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def census(run):
    """Kernels, copies and fills of one call: how often each ran, and for how many µs."""
    run()
    counts, times = Counter(), Counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            counts[event.name] += 1
            times[event.name] += event.time_range.elapsed_us()
    return counts, times


def less(more, fewer, by):
    """What `more` has above `fewer`, divided."""
    return [{name: (a[name] - b[name]) / by for name in a | b} for a, b in zip(more, fewer, strict=True)]


def per_layer(models, make):
    """Kernels and copies of a layer in the call that `make(model)` returns."""
    few, many = (census(make(model)) for model in models)
    return sorted_rows(*less(many, few, LARGE - SMALL))


def per_layer_and_token(models, ids):
    generations = [[census(tokens(model, ids, new)) for new in (8 + TOKENS, 8)] for model in models]
    few, many = (less(long, short, TOKENS) for long, short in generations)
    few, many = ([Counter(side) for side in sides] for sides in (few, many))
    return sorted_rows(*less(many, few, LARGE - SMALL))


def sorted_rows(counts, times):
    found = [
        {"name": n[:140], "count": c, "us": times[n], "copy": bool(COPY.search(n))} for n, c in counts.items() if c
    ]
    found.sort(key=lambda row: -row["us"])
    return {
        "kernels": sum(row["count"] for row in found),
        "us": sum(row["us"] for row in found),
        "copies": sum(row["count"] for row in found if row["copy"]),
        "copies_us": sum(row["us"] for row in found if row["copy"]),
        "by_name": found,
    }


def measure(models, ids):
    with torch.no_grad():
        for model in models:
            model(input_ids=ids[:, :8])
        result = {
            "prefill": per_layer(models, lambda model: lambda: model(input_ids=ids, use_cache=False)),
            "prefill with cache": per_layer(models, lambda model: lambda: model(input_ids=ids)),
            "prefill, 2 rows, padded": per_layer(models, lambda model: lambda: model(**padded(ids))),
            "step of forward": per_layer(models, lambda model: step(model, ids)),
            "token of generate": per_layer_and_token(models, ids),
        }
        return result, models[0](input_ids=ids).logits[0, -1].float()


def attention_layouts(length):
    """Whether torch's attention, given views of `[B, S, H, D]`, leaves its result so, by kernel and mask."""
    heads, kv_heads, head_dim = (SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    size = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(2, length, heads, head_dim, **size).transpose(1, 2)
    key, value = (torch.randn(2, length, kv_heads, head_dim, **size).transpose(1, 2) for _ in range(2))
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda").tril()
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for name, given, grouped in (
            ("causal", None, True),
            ("mask", mask, True),
            ("mask, keys repeated", mask, False),
        ):
            keys = (key, value) if grouped else (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
            options = {"attn_mask": given, "is_causal": given is None, "enable_gqa": grouped}
            try:
                with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):
                    out = F.scaled_dot_product_attention(query, *keys, **options)
            except RuntimeError:
                found[f"{backend.name}, {name}"] = "refused"
            else:
                found[f"{backend.name}, {name}"] = "BSHD" if out.transpose(1, 2).is_contiguous() else str(out.stride())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.package.resolve().parent))
    ours = importlib.import_module(f"{options.package.name}.modeling_llama")
    theirs = importlib.import_module("transformers.models.llama.modeling_llama")
    ids = torch.arange(options.length, device="cuda")[None] * 7 % SIZES["vocab_size"]
    card = f"{torch.cuda.get_device_name()} · torch {torch.__version__} · transformers {transformers.__version__}"
    originals, rewritten = ([built(m.LlamaForCausalLM, n) for n in (SMALL, LARGE)] for m in (theirs, ours))
    for original, own in zip(originals, rewritten, strict=True):
        own.load_state_dict(original.state_dict())
    report = {"card": card, "length": options.length, "sides": {}}
    print(card, f"· {options.length} tokens · a layer of Llama 3.2 1B")
    logits = {}
    for side, models in (("original", originals), ("rewritten", rewritten)):
        report["sides"][side], logits[side] = measure(models, ids)
    difference = (logits["original"] - logits["rewritten"]).abs().max() / logits["original"].abs().max()
    report["largest_difference"] = float(difference)
    report["attention"] = attention_layouts(options.length)
    for kernel, layout in report["attention"].items():
        print(f"{kernel}: {layout}")
    print("| call | side | kernels | µs | copies | µs |\n|---|---|---|---|---|---|")
    for call in report["sides"]["original"]:
        for side, calls in report["sides"].items():
            row = calls[call]
            figures = (row["kernels"], f"{row['us']:.1f}", f"{row['copies']:g}", f"{row['copies_us']:.1f}")
            print(f"| {call} | {side} | {' | '.join(map(str, figures))} |")
    for side, calls in report["sides"].items():
        for call, row in calls.items():
            for copy in row["by_name"]:
                if copy["copy"]:
                    print(f"{side}, {call}: {copy['count']:g} × {copy['us'] / copy['count']:.1f} µs {copy['name']}")
    print(f"largest difference of the last logits {difference:.1e}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
