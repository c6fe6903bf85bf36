"""Training steps of a package beside its original: time, peak memory, parity of loss and gradients in one run.

python bench/training.py llama --shape 1b --device cuda
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": ("llama", "LlamaForCausalLM", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}),
    "qwen3-1.7b": ("qwen3", "Qwen3ForCausalLM", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True}),
    "gemma2-2b": ("gemma2", "Gemma2ForCausalLM", {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 8192}),
}  # fmt: skip


def config_of(shape: str, small: bool, attention: str) -> Any:
    kind, class_name, sizes = SHAPES[shape]
    if small:
        sizes = sizes | {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        sizes |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2} if "moe" in kind else {}
    import transformers

    original = getattr(transformers, class_name)
    config = original.config_class(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = attention
    return config


class Side:
    def __init__(self, name: str, model: Any, compiled: bool, ids: torch.Tensor):
        self.name, self.model, self.ids = name, model, ids
        self.call = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=ids.is_cuda)

    def step(self) -> torch.Tensor:
        loss = self.call(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(side: Side, steps: int, device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        side.step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def parity(original: Any, ours: Any, ids: torch.Tensor) -> dict[str, float]:
    """Compare loss and every gradient in the model's dtype with those of the original in fp32."""
    wide = type(original)(original.config).to(ids.device, torch.float32)
    wide.load_state_dict(original.state_dict())
    found: dict[str, dict[str, torch.Tensor]] = {}
    losses = {}
    rows = ids[:1, :512]
    for name, model in (("exact", wide), ("original", original), ("ours", ours)):
        model.train()
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        losses[name] = float(loss)
        found[name] = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    ratios = {}
    for key, right in found["exact"].items():
        theirs, mine = ((found[side][key] - right).norm() for side in ("original", "ours"))
        ratios[key] = float(mine / theirs.clamp(min=1e-12))
    worst = max(ratios, key=lambda key: ratios[key])
    return {
        "loss": losses,
        "missing": sorted(found["exact"].keys() ^ found["ours"].keys()),
        "median": statistics.median(ratios.values()),
        "worst": ratios[worst],
        "at": worst,
        "head": {k: v for k, v in ratios.items() if "embed" in k or "lm_head" in k},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sides", default="original,ours")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    kind, class_name, _ = SHAPES[given.shape]
    folder = Path(tempfile.mkdtemp())
    subprocess.run(
        [sys.executable, "-m", "rewrite.cli", kind, "--out", str(folder / f"ours_{kind}"), "--no-verify", "-q"],
        check=True,
    )
    sys.path.insert(0, str(folder))
    package = importlib.import_module(f"ours_{kind}")
    import transformers

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = config_of(given.shape, given.small, given.attention)
    torch.manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (given.batch, given.length), device=device)
    with torch.device(device):
        first = getattr(transformers, class_name)(config).to(dtype).train()
    second = getattr(package, class_name)(config).to(device, dtype).train()
    second.load_state_dict(first.state_dict())
    print(given.shape, "parity", json.dumps(parity(first, second, ids)), flush=True)
    print(package.explain(second), flush=True)
    classes = {
        "original": (transformers, False),
        "ours": (package, False),
        "original compiled": (transformers, True),
        "ours compiled": (package, True),
    }
    del first, second
    sides = []
    for name in given.sides.split(","):
        try:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            module, compiled = classes[name]
            torch.manual_seed(1)
            with torch.device(device):
                model = getattr(module, class_name)(config).to(dtype).train()
            side = Side(name, model, compiled, ids)
            losses = [float(side.step()) for _ in range(3)]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                side.step()
                sync(device)
                peak = (torch.cuda.max_memory_allocated() - before) / 2**30
                print(f"{given.shape} {name}: peak {peak:.2f} GiB, losses {losses}", flush=True)
            else:
                print(name, losses)
            sides.append(side)
        except Exception:
            traceback.print_exc()
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(given.rounds):
        for side in sides:
            times[side.name].append(timed(side, 3, device))
    for name, values in times.items():
        print(
            f"{given.shape} {name}: {statistics.median(values):.1f} ms ({min(values):.1f}–{max(values):.1f})",
            flush=True,
        )
    if given.profile:
        from torch.profiler import ProfilerActivity, profile

        side = next(side for side in sides if side.name == "ours")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as taken:
            side.step()
            sync(device)
        print(taken.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))


if __name__ == "__main__":
    main()
