"""Runs whole models as chains of launches, as they would be on a chip, and compares their tokens with torch's.

`python -m tests.emulator.whole_models` writes packages of Llama, Qwen3-MoE and GPT-2, generates with them on the
emulator and with the original files in torch, and prints for each whether the tokens are the same and which launches
the rules chose. With `--wide` models have one layer of the width of real ones, and so the tiles, forms and splits that
a step of those has on an MI300X. Graphs are left out: a step is the same launches one after another.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import emulation

_LLAMA = {"num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
_MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_LLAMA, "num_hidden_layers": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_LLAMA, **_MIXTURE, "num_hidden_layers": 2}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 256, "n_head": 8, "n_layer": 2, "n_positions": 128}),
}
"""By the model's folder in transformers: its class, and sizes."""
_OF_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_OF_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
_OF_30B = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_OF_8B, "num_hidden_layers": 1}),
    "qwen2": ("Qwen2ForCausalLM", {**_OF_1_5B, "num_hidden_layers": 1}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_OF_30B, "num_hidden_layers": 1}),
}
"""One layer of Llama 8B, of Qwen2.5 1.5B, and of Qwen3 30B-A3B with a quarter of its experts."""
VOCABULARY, PROMPT = 512, 9


@dataclass(frozen=True)
class Ran:
    """What became of one model."""

    model: str
    rows: int
    tokens: int
    """Of a row."""
    same: bool
    launches: dict[str, int]
    """How often each was launched: its kernel, grid and threads."""
    instructions: int
    seconds: float


def main() -> int:
    """Run what the command line asks for; return 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--chip", default="gfx942")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--wrong", action="store_true", help="Take reciprocals for exponentials.")
    given = parser.parse_args()
    known = WIDE if given.wide else SMALL
    emulator = emulation.begin(given.chip).emulator
    if given.wrong:
        emulator.change = lambda text: text.replace("v_exp_f32", "v_rcp_f32")
    ran = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name in given.models or known:
            models = _models(Path(folder), name, *known[name])
            for rows in given.rows:
                ran.append(run(emulator, name, models, rows, given.tokens))
                print(line(ran[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in ran], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.same for one in ran) else 1


def line(ran: Ran) -> str:
    """Say what became of a model."""
    said = "same tokens" if ran.same else "OTHER TOKENS"
    count = sum(ran.launches.values())
    kernels = len({name.split()[0] for name in ran.launches})
    return (
        f"{ran.model}, {ran.rows} rows: {said}, {count} launches of {kernels} kernels in {len(ran.launches)} forms, "
        f"{ran.instructions} instructions, {ran.seconds:.0f} s"
    )


def run(emulator: Any, name: str, models: tuple[Any, Any], rows: int, tokens: int) -> Ran:
    """Generate with both, the shorter rows padded on the left."""
    import torch

    theirs, ours = models
    ids = torch.randint(4, VOCABULARY, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    begun, start = len(emulator.executed), time.process_time()
    found = ours.generate(ids, **options)
    took, executed = time.process_time() - start, emulator.executed[begun:]
    same = torch.equal(found, theirs.generate(ids, **options))
    launches = Counter(f"{one.kernel} {'x'.join(map(str, one.grid))} of {one.threads}" for one in executed)
    return Ran(name, rows, tokens, same, dict(launches), sum(one.instructions for one in executed), took)


def _models(folder: Path, name: str, class_name: str, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Return the original and the rewritten model with the same weights, in bf16."""
    import torch

    original = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), class_name)
    config = original.config_class(**sizes, vocab_size=VOCABULARY, eos_token_id=None, pad_token_id=0, bos_token_id=1)
    torch.manual_seed(0)
    with torch.no_grad():
        theirs = original._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2 if parameter.ndim == 1 else 0.04)
        ours = getattr(_package(folder, name), class_name)._from_config(config, dtype=torch.bfloat16).eval()
    ours.load_state_dict(theirs.state_dict())
    ours._step_without_graph, ours.starts_plainly = True, False
    return theirs, ours


def _package(folder: Path, name: str) -> Any:
    """Write the package of a model and import it."""
    from rewrite.codemod.build import build
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options
    from rewrite.source.resolve import resolve
    from rewrite.transforms import select

    transforms = select()
    files = assemble(build(resolve(name), transforms), transforms, Options((), ()), Path(f"emulated_{name}")).files
    for path, content in files.items():
        (folder / f"emulated_{name}" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"emulated_{name}" / path).write_bytes(content)
    return importlib.import_module(f"emulated_{name}")


if __name__ == "__main__":
    sys.exit(main())
