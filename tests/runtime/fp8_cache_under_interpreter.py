"""A whole small Llama whose `generate()` runs by kernels, keys and values in 8 bits, by Triton's interpreter.

    TRITON_INTERPRET=1 REWRITE_BACKEND=triton python tests/runtime/fp8_cache_under_interpreter.py PACKAGE

Prints the relative distance of its logits from the original's whose cache rounds, of the first token and of the
others, and that of the rounding itself; then which layers and prompts took which form.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from rounded_cache import rounded_cache
from test_fp8_cache import SIZES, generate, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from rewrite.measure.runtime_part import runtime_part


def main(folder: Path) -> None:
    """Run both for one row and for three, one of them padded."""
    sys.path.insert(0, str(folder.parent))
    package = importlib.import_module(folder.name)
    runtime_part(folder.name, "decode/prompt_graph").ROUNDING = 16
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 2})
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config).eval()
    ours = package.LlamaForCausalLM(config).eval()
    ours.load_state_dict(theirs.state_dict())
    ours._step_without_graph, ours.starts_plainly = True, False
    for batch, padded in ((1, False), (3, True)):
        given = prompt(batch, 9, padded) | {"max_new_tokens": 6, "min_new_tokens": 6}
        runtime_part(folder.name, "decode/cache_format").set_cache_format("fp8")
        found = torch.stack(generate(ours, **given).logits)
        wanted = torch.stack(generate(theirs, **given, past_key_values=rounded_cache(2)).logits)
        plain = torch.stack(generate(theirs, **given).logits)
        far = [
            float((one - other).norm() / other.norm())
            for one, other in ((found[0], wanted[0]), (found[1:], wanted[1:]), (plain[1:], wanted[1:]))
        ]
        print("distance", *(f"{value:.3g}" for value in far))
        print(package.explain(ours))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
