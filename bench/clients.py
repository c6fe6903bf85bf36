"""Calls of `generate()` as clients make them, whose tokens the host chooses: a rewritten package against its original.

    python bench/clients.py PACKAGE [--shape 1b] [--calls processor,beams] [--json bench/results/clients-h200.json]

Both sides share the weights and run in turn in one process. A call's ms a token are the slope between a short and a
long one, medians of the turns; a call of one token is timed whole, behind 2,048. The tokens of the first turn are
compared: with random weights logits are flat, and two correct roundings part soon.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rewrite.benchmark.benchmark_models import build, load, sharing
from rewrite.benchmark.benchmark_plan import Plan, write_json
from rewrite.benchmark.benchmark_run import header
from rewrite.measure.presets import SHAPES, config_for
from rewrite.measure.timing import wall_ms

LENGTHS = {"original": (4, 12), "rewritten": (8, 72)}
"""Tokens of the short call, and how many more the long one has."""
CONTEXT, LONG_CONTEXT = 128, 2048
ROUNDS = 3


def halved(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Forbid every other token, by the last one: a processor that runs on the device."""
    odd = torch.arange(scores.shape[1], device=scores.device) % 2 == 1
    return scores.masked_fill((ids[:, -1:] % 2 == 1) == odd, float("-inf"))


def never(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    """Stop no row."""
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def trained(model: Any) -> Any:
    """Return the model in training mode."""
    return model.train()


def mixed(model: Any) -> Any:
    """Return the model under accelerate's mixed precision."""
    from accelerate import Accelerator

    return Accelerator(mixed_precision="bf16").prepare_model(model)


CALLS: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None]] = {
    "plain": ({}, None),
    "processor": ({"logits_processor": [halved]}, None),
    "criterion": ({"stopping_criteria": [never]}, None),
    "words": ({"bad_words_ids": [[5, 6]]}, None),
    "beams": ({"num_beams": 4}, None),
    "one token": ({}, None),
    "training": ({}, trained),
    "mixed precision": ({}, mixed),
}
"""Arguments of each, and what the model is under."""


class Side:
    """A model whose calls are timed."""

    def __init__(self, name: str, model: Any, device: str):
        self.model, self.device, self.lengths = model, device, LENGTHS[name]

    def generate(self, ids: torch.Tensor, new: int, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the `new` tokens `[1, new]` that follow a prompt."""
        given = {"max_new_tokens": new, "min_new_tokens": None, "do_sample": False, "pad_token_id": 0, **arguments}
        with torch.no_grad():
            found: torch.Tensor = self.model.generate(ids, **given)
        return found[:, ids.shape[1] :]

    def ms(self, ids: torch.Tensor, arguments: dict[str, Any], one: bool) -> float:
        """Return ms a token, or of a whole call of one."""
        if one:
            return wall_ms(self.device, lambda: self.generate(ids, 1, arguments))
        short, more = self.lengths
        before = wall_ms(self.device, lambda: self.generate(ids, short, arguments))
        return (wall_ms(self.device, lambda: self.generate(ids, short + more, arguments)) - before) / more


def measure(sides: dict[str, Side], call: str, vocabulary: int, device: str) -> dict[str, Any]:
    """Return the times of one call on both sides, in turn, and how many of its first tokens are the same."""
    arguments, under = CALLS[call]
    one = call == "one token"
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, vocabulary, (1, LONG_CONTEXT if one else CONTEXT), generator=generator).to(device)
    for side in sides.values():
        if under is not None:
            under(side.model)
    tokens = [side.generate(ids, 1 if one else 16, arguments)[0] for side in sides.values()]
    for side in sides.values():
        side.ms(ids, arguments, one)
        side.ms(ids, arguments, one)
    turns = [{name: side.ms(ids, arguments, one) for name, side in sides.items()} for _ in range(ROUNDS)]
    for side in sides.values():
        side.model.eval()
        side.model.__dict__.pop("forward", None)
    found: dict[str, Any] = {name: median(turn[name] for turn in turns) for name in sides}
    same = int((tokens[0] == tokens[1]).long().cumprod(0).sum())
    return found | {"times": found["original"] / found["rewritten"], "same": same, "of": len(tokens[0])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--calls", default=",".join(CALLS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    subject = load(given.package)
    ours = build(subject.rewritten, config_for(subject.original.config_class, given.shape), given.dtype, given.device)
    theirs = sharing(subject.original, ours)
    for model in (ours, theirs):
        model.generation_config.eos_token_id = None
    sides = {"original": Side("original", theirs, given.device), "rewritten": Side("rewritten", ours, given.device)}
    record = header(Plan(given.package, shape=given.shape, device=given.device, dtype=given.dtype), subject)
    record["calls"] = {}
    for call in given.calls.split(","):
        found = record["calls"][call] = measure(sides, call, ours.config.get_text_config().vocab_size, given.device)
        print(call.ljust(16), json.dumps({k: round(v, 3) for k, v in found.items()}), flush=True)
        if given.json:
            write_json(given.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
