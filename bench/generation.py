"""Greedy tokens of a rewritten package against its original: 64 prompts × 256 tokens, and where they first part.

    python bench/generation.py PACKAGE [--shape 1b] [--batches 1,8] [--json bench/results/generation-h100.json]

Random weights make flat logits, so two correct roundings part soon; then everything behind is another text. So three
questions are asked: at which token does a row first differ; and, with the original fed what the rewritten model wrote,
is every token of it the original's best or within twice the original's own noise of it; and are there at most twice as
many that are not the best as in the original's own text. Prompts have several lengths and are padded on the left where
rows are taken together; the reference is fed each row alone and without padding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rewrite.benchmark import contenders, token_parity
from rewrite.benchmark.benchmark_models import build, load, sharing
from rewrite.benchmark.benchmark_plan import Plan, write_json
from rewrite.benchmark.benchmark_run import header
from rewrite.measure.presets import SHAPES, config_for

BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


def histogram(first: tuple[int, ...], tokens: int) -> dict[str, int]:
    """How many rows first differ in each range of steps."""
    counts = {}
    for low, high in zip(BINS, (*BINS[1:], tokens), strict=True):
        if low < tokens:
            counts[f"{low}–{min(high, tokens) - 1}"] = sum(low <= step < high for step in first)
    return counts | {"never": sum(step < 0 for step in first)}


def padded(rows: int, length: int, vocab: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts [rows, length] whose left part is padding, up to a half, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocab, (rows, length), generator=generator)
    pads = torch.randint(0, length // 2, (rows, 1), generator=generator)
    mask = (torch.arange(length) >= pads).long()
    return torch.where(mask.bool(), ids, torch.zeros_like(ids)).to(device), mask.to(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    subject = load(given.package)
    ours = build(subject.rewritten, config_for(subject.original.config_class, given.shape), given.dtype, given.device)
    theirs = sharing(subject.original, ours)
    plan = Plan(given.package, shape=given.shape, device=given.device, dtype=given.dtype, new_tokens=given.tokens)
    record = header(plan, subject) | {"batches": {}}
    prompts, mask = padded(given.rows, given.length, ours.config.get_text_config().vocab_size, given.device)
    started = time.perf_counter()
    truth = token_parity.truth(theirs, prompts, given.tokens, mask)
    seconds = time.perf_counter() - started
    print(f"original: noise {truth.noise:.3g} at most, {truth.noise_rms:.3g} RMS", end="; ")
    print(f"{truth.different} of {truth.tokens.numel()} tokens another of a near-tie; {seconds:.0f} s", flush=True)
    side = contenders.rewritten(ours, given.tokens, given.device)
    for batch in (int(part) for part in given.batches.split(",")):
        started = time.perf_counter()
        tokens = token_parity.generated(side, prompts, given.tokens, batch, mask)
        generated = time.perf_counter() - started
        found = token_parity.compare(theirs, truth, tokens)
        counts = histogram(found.first, given.tokens)
        entry = {**asdict(found), "first_divergence": counts, "seconds": generated}
        record["batches"][str(batch)] = entry | {"explain": str(subject.explain(ours))}
        print(f"batch {batch}: {'pass' if found.passed else 'FAIL'}: {found.summary}; {generated:.0f} s")
        print("  first difference at: " + json.dumps(counts, ensure_ascii=False), flush=True)
        if given.json:
            write_json(given.json, record)
    return int(not all(entry["passed"] for entry in record["batches"].values()))


if __name__ == "__main__":
    sys.exit(main())
