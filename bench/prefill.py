"""Prefill of a rewritten package against its original, at real shapes, with parity and memory in the same run.

    python bench/prefill.py PACKAGE [--shapes 1b,8b] [--lengths 128,512,2048,8192] [--json FILE]

Random bf16 weights, batch 1, eager, no cache. Both sides are interleaved call by call on the same input, which is new
for each repetition; the figure is the median of wall-clock times between device-wide synchronisations, and the ratio
has a 95% bootstrap interval. Memory is what the allocator holds before and after the first forward, which packs the
weights. Parity is the error of the last logits against the original run in fp32, as a multiple of the original's own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

from rewrite.measure.presets import OTHER_NAMES, SHAPES
from rewrite.measure.runtime_part import runtime_part
from rewrite.measure.timing import ratio
from rewrite.verify.models.real_shapes import SIZES


def config_for(cls, shape):
    known = cls.config_class().to_dict()
    names = {name: size for size in SIZES for name in (size, *OTHER_NAMES.get(size, ()))}
    fields = {name: SHAPES[shape][size] for name, size in names.items() if name in known}
    return cls.config_class(**fields, max_position_embeddings=16384)


def built(cls, config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = cls._from_config(config, dtype=dtype)
    return model.eval()


def last_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()


def timed(model, ids):
    torch.cuda.synchronize()
    started = time.perf_counter()
    last_logits(model, ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure(original, rewritten, length, vocab, seconds):
    times = ([], [])
    deadline, number = time.perf_counter() + seconds, -4
    while number < 20 or (time.perf_counter() < deadline and number < 200):
        ids = torch.randint(vocab, (1, length), device="cuda")
        sides = [(0, original), (1, rewritten)]
        for side, model in sides if number % 2 else sides[::-1]:
            elapsed = timed(model, ids)
            if number >= 0:
                times[side].append(elapsed)
        number += 1
    found = ratio(*times)
    ms = [statistics.median(side) for side in times]
    return {"original_ms": ms[0], "rewritten_ms": ms[1], "ratio": found["value"], "low": found["low"],
            "high": found["high"], "repeats": len(times[0])}  # fmt: skip


def parity(original, rewritten, exact, ids):
    truth, ours, theirs = (last_logits(model, ids) for model in (exact, rewritten, original))
    rmse = [float((side - truth).square().mean().sqrt()) for side in (ours, theirs)]
    return {"rewritten_rmse": rmse[0], "original_rmse": rmse[1], "multiple": rmse[0] / rmse[1],
            "top1_equal": bool(ours.argmax() == theirs.argmax())}  # fmt: skip


def run(package, shape, lengths, seconds):
    modeling = next(package.glob("modeling_*.py")).stem
    sys.path.insert(0, str(package.resolve().parent))
    ours = importlib.import_module(f"{package.name}.{modeling}")
    theirs = importlib.import_module(f"transformers.models.{modeling.removeprefix('modeling_')}.{modeling}")
    name = next(n for n in vars(ours) if n.endswith("ForCausalLM"))
    config = config_for(getattr(theirs, name), shape)
    original = built(getattr(theirs, name), config)
    last_logits(original, torch.zeros(1, 8, dtype=torch.long, device="cuda"))  # the workspaces of cuBLAS count once
    before = torch.cuda.memory_allocated()
    rewritten = built(getattr(ours, name), config)
    rewritten.load_state_dict(original.state_dict())
    loaded = torch.cuda.memory_allocated() - before
    last_logits(rewritten, torch.zeros(1, 8, dtype=torch.long, device="cuda"))
    packed = torch.cuda.memory_allocated() - before
    result = {"shape": shape, "class": name, "loaded_GiB": loaded / 2**30, "packed_GiB": packed / 2**30,
              "growth": packed / loaded - 1}  # fmt: skip
    exact = built(getattr(theirs, name), config, torch.float32)
    exact.load_state_dict(original.state_dict())
    ids = torch.randint(config.vocab_size, (1, 512), device="cuda")
    result["parity"] = parity(original, rewritten, exact, ids)
    del exact
    torch.cuda.empty_cache()
    result["lengths"] = {n: measure(original, rewritten, n, config.vocab_size, seconds) for n in lengths}
    explain = runtime_part(package.name, "core/explanation").explain
    result["fallbacks"] = explain(rewritten).fallbacks
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--lengths", default="128,512,2048,8192")
    parser.add_argument("--seconds", type=float, default=5.0, help="time to spend on each length")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    card = torch.cuda.get_device_name()
    report = {"card": card, "torch": torch.__version__, "transformers": transformers.__version__, "results": []}
    print(f"{card} · torch {torch.__version__} · transformers {transformers.__version__}")
    print("| shape | tokens | original ms | rewritten ms | ratio (95% interval) |\n|---|---|---|---|---|")
    for shape in options.shapes.split(","):
        result = run(options.package, shape, lengths, options.seconds)
        report["results"].append(result)
        for length, row in result["lengths"].items():
            print(f"| {shape} | {length} | {row['original_ms']:.2f} | {row['rewritten_ms']:.2f} "
                  f"| {row['ratio']:.2f}× ({row['low']:.2f}–{row['high']:.2f}) |")  # fmt: skip
        print(f"\n{shape}: memory {result['growth']:+.2%} after packing · parity {result['parity']} · "
              f"fallbacks {result['fallbacks']}\n")  # fmt: skip
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
