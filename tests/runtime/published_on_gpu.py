"""python tests/runtime/published_on_gpu.py PACKAGES: load small published checkpoints on a GPU, print what differs.

PACKAGES has `llama` and `gpt_oss`, as `bench/blocks.py prepare` writes them.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from published import write_fp8, write_mxfp4
from safetensors.torch import load_file
from transformers import (
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)


def fp8(folder: Path) -> Any:
    """Write an FP8 checkpoint."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    write_fp8(LlamaForCausalLM(config).bfloat16(), folder)
    return LlamaForCausalLM, "llama", FineGrainedFP8Config(dequantize=True)


def mxfp4(folder: Path) -> Any:
    """Write an MXFP4 checkpoint."""
    config = GptOssConfig(
        vocab_size=512, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, eos_token_id=None,
        pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            parameter.data.normal_(0, 0.1)
    write_mxfp4(model, folder)
    return GptOssForCausalLM, "gpt_oss", Mxfp4Config(dequantize=True)


def main() -> None:
    """Load, compare, save."""
    sys.path.insert(0, sys.argv[1])
    for write in (fp8, mxfp4):
        try:
            with tempfile.TemporaryDirectory() as place, torch.no_grad():
                folder = Path(place)
                original, name, dense = write(folder / "published")
                package = importlib.import_module(name)
                kind = getattr(importlib.import_module(f"{name}.modeling_{name}"), original.__name__)
                plain = original.from_pretrained(folder / "published", quantization_config=dense).cpu().float()
                model = kind.from_pretrained(folder / "published", device_map="cuda")
                ids = torch.randint(1, 500, (1, 40))
                print(
                    write.__name__,
                    {
                        type(m).__mro__[:2]
                        for m in model.modules()
                        if "FP8" in type(m).__name__ or "Experts" in type(m).__name__
                    },
                )
                for count in (40, 9, 1):
                    got = model(ids[:, :count].cuda()).logits.float().cpu()
                    print(" ", count, "tokens:", tuple(got.shape), float(got.norm()))
                tokens = model.generate(ids.cuda(), max_new_tokens=24, do_sample=False)
                print(" ", tokens[0, 40:].tolist())
                print(package.explain(model))
                model.save_pretrained(folder / "saved")
                one, other = (load_file(folder / at / "model.safetensors") for at in ("published", "saved"))
                same = one.keys() == other.keys() and all(
                    torch.equal(one[k].view(torch.uint8), other[k].view(torch.uint8)) for k in one
                )
                print("  saved the same bytes:", same)
                try:
                    wanted = plain(ids).logits
                    got = model(ids.cuda()).logits.float().cpu()
                    print("  against the original on the CPU:", float((got - wanted).norm() / wanted.norm()))
                except Exception as error:
                    print("  the original:", type(error).__name__, str(error)[:200])
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
