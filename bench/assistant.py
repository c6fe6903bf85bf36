"""Time `generate(assistant_model=M)` of a rewritten Llama beside plain `generate()`, and print it.

    rewrite llama --out optimized_llama --no-verify
    python bench/assistant.py optimized_llama --shape 8b --assistant 1b --rows 1 4

Both models have random weights whose text is planned, as in `prompt_lookup.py`: every token has one successor, far
from any tie. The assistant's successors are those of the model but for a part of the vocabulary (`--right` is the
rest), so that a draft is right as often as is asked for, whatever came before. The work of a step does not depend on
that.

Both sides alternate and the median is kept; the tokens are compared. The rounds are counted, with the tokens that each
gave to a row.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch
from lookup import SHAPES, batches_of, compared, counting, model_of

from hf_rewrite_runtime.decode.graph_cache import release_graphs
from hf_rewrite_runtime.decode.step_graph import Program
from hf_rewrite_runtime.speculative.left_pad_rows import Alignment
from hf_rewrite_runtime.speculative.verify_step import RaggedWindow, Window


def mislead(assistant, follows, right):
    """Let an assistant have another successor for a part of the vocabulary."""
    generator = torch.Generator().manual_seed(2)
    wrong = (torch.rand(len(follows), generator=generator) > right).nonzero()[:, 0]
    device = assistant.lm_head.weight.device
    with torch.no_grad():
        taken = assistant.lm_head.weight[follows[wrong].to(device)]
        assistant.lm_head.weight[follows[wrong].roll(1).to(device)] = taken


def main():
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--assistant", choices=SHAPES, default="1b")
    parser.add_argument("--right", type=float, nargs="+", default=[0.8, 0.0], help="of the drafts, by themselves")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="batch sizes, of at most 8")
    parser.add_argument("--tokens", type=int, default=5, help="K, at most 5")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.path.insert(0, str(asked.package.resolve().parent))
    package = importlib.import_module(asked.package.name)
    counts = counting(Program, Window, RaggedWindow, Alignment)
    model, follows = model_of(package, asked.shape, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {asked}")
    for right in asked.right:
        assistant, _ = model_of(package, asked.assistant, device)
        mislead(assistant, follows, right)
        assistant.generation_config.num_assistant_tokens = asked.tokens
        ways = {"plain": {}, "assisted": {"assistant_model": assistant}}
        for rows in asked.rows:
            inputs = batches_of(follows, rows, asked.prompt, asked.new, 1, 1)["nothing"]
            given = {key: tensor.to(device) for key, tensor in inputs.items()}
            ms, steps, verdict = compared(counts, model, follows, given, ways, asked.new, asked.rounds)
            rounds = steps["assisted"][1]
            print(
                f"{rows} rows, {right:.0%} right: plain {ms['plain']:.3f} ms a token, assisted {ms['assisted']:.3f}, "
                f"{ms['plain'] / ms['assisted']:.2f}x; rounds {rounds}, other steps "
                f"{steps['assisted'][0] - (asked.tokens + 1) * rounds}; {verdict}",
                flush=True,
            )
        release_graphs(assistant)


if __name__ == "__main__":
    main()
