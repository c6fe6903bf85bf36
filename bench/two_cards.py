"""A model whose layers lie on two cards (`device_map`), as accelerate places them: original and package, greedy.

    python bench/two_cards.py PACKAGE [--shape 1b] [--layers N]

Prints ms per token, as slopes between a short and a long generation taken in turn, whether the tokens agree within
near-ties, and what `explain` says. The exit code is 1 if the package is slower than its original, beyond 2%, or if
tokens differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG, ROUNDS = 8, 40, 5


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("package", type=Path)
    made.add_argument("--shape", default="1b")
    made.add_argument("--layers", type=int)
    given = made.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch

    from rewrite.benchmark import token_parity
    from rewrite.benchmark.benchmark_models import load
    from rewrite.measure import timing

    subject = load(given.package)
    models = {name: placed(getattr(subject, name), given) for name in ("original", "rewritten")}
    prompt = torch.randint(1, 1000, (1, 512), generator=torch.Generator().manual_seed(0)).to("cuda:0")

    def generate(name: str, new: int) -> Any:
        return models[name].generate(prompt, max_new_tokens=new, do_sample=False)

    def slope(name: str) -> float:
        few = timing.wall_ms("cuda:1", lambda: generate(name, SHORT))
        return (timing.wall_ms("cuda:1", lambda: generate(name, LONG)) - few) / (LONG - SHORT)

    expected = token_parity.truth(models["original"], prompt, LONG)
    judged = token_parity.compare(models["original"], expected, generate("rewritten", LONG)[:, 512:])
    print(f"tokens {'agree' if judged.passed else 'DIFFER'}: {judged.summary}", flush=True)
    times = timing.interleaved({name: lambda _, name=name: slope(name) for name in models}, (ROUNDS, ROUNDS), 0.0)
    for name, values in times.items():
        print(f"{name}: {median(values):.3f} ms per token")
    ratio = timing.ratio(times["original"], times["rewritten"])
    print(f"rewritten is {ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}) as fast")
    print(subject.explain(models["rewritten"]))
    return int(ratio["high"] < 0.98 or not judged.passed)


def placed(kind: Any, given: argparse.Namespace) -> Any:
    """A model with random weights, half of its layers on each card."""
    from accelerate import dispatch_model

    from rewrite.benchmark.benchmark_models import build
    from rewrite.measure.presets import config_for

    overrides = {"num_hidden_layers": given.layers} if given.layers else {}
    config = config_for(kind.config_class, given.shape, **overrides)
    model = build(kind, config, "bfloat16", "cuda:0")
    count = config.num_hidden_layers
    places = {f"model.layers.{layer}": int(2 * layer >= count) for layer in range(count)}
    places |= {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.norm": 1,
        "lm_head": 0 if config.tie_word_embeddings else 1,
    }
    return dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)


if __name__ == "__main__":
    sys.exit(main())
