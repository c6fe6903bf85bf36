"""A package with weights of 4 bits, beside itself in 16 bits and its original: the same weights, dequantised.

    python bench/integer_weights.py PACKAGE [--shape 8b] [--rows 1,8,32] [--json FILE]

transformers makes 16 bits of a compressed-tensors checkpoint at its first call, so that the original here is what such
a checkpoint runs as. The sides run in turn in one process. ms a token are the slope between a short and a long call of
`generate()`, medians of the turns. The tokens of the first turn are compared: with random weights logits are flat, and
two correct roundings part soon.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_rewrite_runtime.integer.integer_formats import Compressed
from hf_rewrite_runtime.integer.integer_layers import IntegerLinear
from hf_rewrite_runtime.integer.integer_weights import Integers
from rewrite.benchmark.benchmark_models import build, load, sharing
from rewrite.benchmark.benchmark_plan import Plan, write_json
from rewrite.benchmark.benchmark_run import header
from rewrite.measure.presets import SHAPES, config_for
from rewrite.measure.timing import wall_ms

CONTEXT, ROUNDS = 128, 3
LENGTHS = {"original": (4, 12), "16 bits": (8, 64), "4 bits": (8, 64)}
"""Tokens of the short call, and how many more the long one has."""


def quantise(model: Any, dense: Any, group: int) -> int:
    """Give the blocks' layers random integers, and a second model the weights that these are; return their bytes."""
    nbytes = 0
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or not re.search(r"\.\d+\.", name):
            continue
        rows, cols = layer.weight.shape
        device, dtype = layer.weight.device, layer.weight.dtype
        words = torch.randint(-(2**31), 2**31, (rows, cols // 8), device=device).to(torch.int32)
        scale = (torch.rand(rows, cols // group, device=device) + 0.5) / (4.6 * cols**0.5)
        parent, _, own = name.rpartition(".")
        with torch.device("meta"):
            made = IntegerLinear(nn.Linear(cols, rows, bias=False), Compressed(4, group, dtype))
        for key in made.form.tensors(rows, cols):
            del made._parameters[key]
        made._hold(Integers(words, scale.to(dtype), None, 4, group))
        setattr(model.get_submodule(parent), own, made)
        dense.get_submodule(name).weight.copy_(made.dense(dtype))
        nbytes += made.parts().nbytes
    return nbytes


def ms(model: Any, ids: torch.Tensor, lengths: tuple[int, int], device: str) -> float:
    """Return ms a token."""

    def generate(new: int) -> None:
        model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)

    short, more = lengths
    before = wall_ms(device, lambda: generate(short))
    return (wall_ms(device, lambda: generate(short + more)) - before) / more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    subject = load(given.package)
    config = config_for(subject.original.config_class, given.shape)
    ours, dense = (build(subject.rewritten, config, given.dtype, given.device) for _ in range(2))
    with torch.no_grad():
        nbytes = quantise(ours, dense, given.group)
    sides = {"original": sharing(subject.original, dense), "16 bits": dense, "4 bits": ours}
    for model in sides.values():
        model.generation_config.eos_token_id = None
    record = header(Plan(given.package, shape=given.shape, device=given.device, dtype=given.dtype), subject)
    record |= {"group": given.group, "bytes": nbytes, "rows": {}}
    generator = torch.Generator().manual_seed(2)
    for rows in map(int, given.rows.split(",")):
        ids = torch.randint(4, ours.config.vocab_size, (rows, CONTEXT), generator=generator).to(given.device)
        arguments = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        tokens = {name: model.generate(ids, **arguments)[0, CONTEXT:] for name, model in sides.items()}
        for name, model in sides.items():
            ms(model, ids, LENGTHS[name], given.device)
        turns = [{n: ms(m, ids, LENGTHS[n], given.device) for n, m in sides.items()} for _ in range(ROUNDS)]
        found: dict[str, Any] = {name: round(median(turn[name] for turn in turns), 3) for name in sides}
        same = int((tokens["4 bits"] == tokens["16 bits"]).long().cumprod(0).sum())
        record["rows"][str(rows)] = found | {"same": same, "of": 16}
        print(rows, json.dumps(record["rows"][str(rows)]), flush=True)
        if given.json:
            write_json(given.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
