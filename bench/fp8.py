"""Decode and prompt with weights in 8 bits, against the same package without: time, memory, and what it costs in KL.

    python bench/fp8.py prepare PACKAGES                       # needs libcst; writes PACKAGES/{llama,llama_fp8}
    python bench/fp8.py measure PACKAGES [--shape 8b] [--json bench/results/fp8-8b-h100.json] [--tiles]

`measure` needs torch, triton and transformers only. Both models have the same random bf16 weights, and one copy of
them. Before anything is timed, the prompt's and the steps' logits are compared with a third model: the original in
plain torch, its weights and activations rounded to 8 bits and back. `--tiles` then times other tiles of the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back
from rewrite.measure.runtime_part import runtime_part

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "tiny": (256, 512, 2, 4, 2, 64, 512),
}
NEW, CONTEXT, ROUNDS = 128, 512, 5
TILES = {
    "linear": [
        (rows, cols, warps) for rows in (2, 4, 8) for cols in (1024, 2048, 4096) for warps in (4, 8)
        if 8192 <= rows * cols <= 32768 and (rows * cols) // (warps * 32) in (32, 64, 128)
    ],
    "gated": [
        (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 2048, 4), (2, 2048, 8), (2, 4096, 8), (4, 1024, 4), (4, 2048, 8),
    ],
    "skinny_linear": [
        (16, 256, 2), (16, 512, 2), (16, 512, 4), (32, 128, 4), (32, 256, 2), (32, 256, 4), (32, 512, 4), (64, 128, 4),
        (64, 256, 4), (128, 128, 4), (128, 128, 8),
    ],
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write both packages, with the transformers of this environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name, more in (("llama", []), ("llama_fp8", ["--with", "fp8"])):
        command = [sys.executable, "-m", "rewrite.cli", "llama", "--out", str(folder / name), *more]
        subprocess.run([*command, "--no-verify", "--diff", "none", "--force"], check=True, env=environment)


class Models:
    """The same weights read in 16 bits, in 8, and rounded to 8 bits in plain torch."""

    def __init__(self, packages: Path, shape: str, device: str):
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        sys.path.insert(0, str(packages))
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
        self.config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary, max_position_embeddings=8192,
            tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.device = torch.device(device)
        plain = importlib.import_module("llama.modeling_llama").LlamaForCausalLM
        fp8 = importlib.import_module("llama_fp8.modeling_llama").LlamaForCausalLM
        self.runtime = {name: runtime_part("llama_fp8", name.replace(".", "/")) for name in RUNTIME}
        with torch.device(self.device), default_dtype(torch.bfloat16):
            self.plain = plain(self.config).eval()
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, (1.0 if "embed" in name else parameter.shape[1]) ** -0.5)
        self.fp8 = self._with_the_same_weights(fp8)
        self.reference = self._rounded(LlamaForCausalLM)
        for model in (self.plain, self.fp8):
            model._step_without_graph = self.device.type == "cpu"

    def _with_the_same_weights(self, model_class: Any) -> Any:
        """A model with the parameters of `plain` themselves."""
        import torch

        with torch.device("meta"), default_dtype(torch.bfloat16):
            model = model_class(self.config).eval()
        theirs = dict(self.plain.named_modules())
        for name, module in model.named_modules():
            module._parameters.update(theirs[name]._parameters)
            module._buffers.update(theirs[name]._buffers)
        return model

    def _rounded(self, model_class: Any) -> Any:
        """The original with its projections rounded to 8 bits and back, and their inputs where those are quantised."""
        import torch

        form = self.runtime["device.e4m3"]
        model = self._with_the_same_weights(model_class)
        dtype = form.dtype_for(self.plain.lm_head.weight)

        def rounded(module: Any, arguments: Any) -> Any:
            (x,) = arguments
            is_step = x.shape[-2] == 1 and x.numel() <= 16 * x.shape[-1]
            return (x if is_step else form.quantize(x, dtype).dequantized(x.dtype),)

        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                weight = form.quantize(module.weight.detach(), dtype).dequantized(module.weight.dtype)
                module._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False), "bias": None}
                module.register_forward_pre_hook(rounded)
        return model


RUNTIME = (
    "device.e4m3",
    "fp8.fp8_weights",
    "fp8.fp8_gemv",
    "fp8.product",
    "fp8.fp8_rows",
    "core.explanation",
    "core.backend",
    "launching.launch",
    "decode.graph_cache",
)


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def generate(model: Any, ids: Any, new: int, **more: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **more
        )


def forced(model: Any, ids: Any, tokens: Any) -> Any:
    """The logits `[1, n, V]` of a prompt's last token and of each of the tokens after it, one step at a time."""
    import torch

    found = []
    with torch.no_grad():
        out = model(ids, logits_to_keep=1, use_cache=True)
        found.append(out.logits[:, -1].float())
        for step in range(tokens.shape[1] - 1):
            out = model(tokens[:, step : step + 1], **{argument_of(model): given_back(out)}, logits_to_keep=1)
            found.append(out.logits[:, -1].float())
    return torch.stack(found, 1)


def closeness(expected: Any, found: Any) -> dict[str, float]:
    first, second = expected.float().log_softmax(-1), found.float().log_softmax(-1)
    divergence = (first.exp() * (first - second)).sum(-1)
    distance = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    top = (expected.argmax(-1) == found.argmax(-1)).float()
    return {
        "kl_mean": float(divergence.mean()), "kl_max": float(divergence.max()), "distance_max": float(distance.max()),
        "top_1": float(top.mean()),
    }  # fmt: skip


def parity(models: Models, steps: int) -> dict[str, Any]:
    """The logits of a prompt and of steps in the loop, against plain torch with the same rounding, and without."""
    import torch

    ids = torch.randint(1, models.config.vocab_size, (1, CONTEXT), device=models.device)
    with torch.no_grad():
        prompt = {name: getattr(models, name)(ids).logits[0].cpu() for name in ("plain", "fp8", "reference")}
    out = generate(models.fp8, ids, steps, return_dict_in_generate=True, output_logits=True)
    tokens = out.sequences[:, CONTEXT:]
    loop = {"fp8": torch.stack(out.logits, 1)[0].cpu()}
    loop |= {name: forced(getattr(models, name), ids, tokens)[0].cpu() for name in ("plain", "reference")}
    return {
        f"{where}: {one} || {other}": closeness(logits[one], logits[other])
        for where, logits in (("prompt", prompt), ("loop", loop))
        for one, other in (("reference", "fp8"), ("plain", "reference"), ("plain", "fp8"))
    }


def seconds(run: Callable[[], Any]) -> float:
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def decoding(models: Models, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a token of `generate()`, both models in turn: what 128 more tokens take."""
    import torch

    ids = torch.randint(1, models.config.vocab_size, (batch, CONTEXT), device=models.device)
    sides = {"bf16": models.plain, "fp8": models.fp8}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    prompts: dict[str, list[float]] = {name: [] for name in sides}
    for model in sides.values():
        generate(model, ids, 2 + NEW)
        generate(model, ids, 2)
    for _ in range(rounds):
        for name, model in sides.items():
            short = seconds(lambda model=model: generate(model, ids, 2))
            long = seconds(lambda model=model: generate(model, ids, 2 + NEW))
            samples[name].append((long - short) / NEW * 1e3)
            prompts[name].append(short * 1e3)
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(found) for name, found in samples.items()}
    figures |= {f"{name}_samples_ms": [round(s, 4) for s in found] for name, found in samples.items()}
    figures |= {f"{name}_prompt_and_2_tokens_ms": statistics.median(found) for name, found in prompts.items()}
    figures["ratio"] = figures["bf16_ms"] / figures["fp8_ms"]
    layers = [m for m in models.plain.modules() if isinstance(m, torch.nn.Linear)]
    elements = sum(module.weight.numel() for module in layers)
    figures["bf16_weights_gb_s"] = 2 * elements / figures["bf16_ms"] / 1e6
    figures["fp8_weights_gb_s"] = elements / figures["fp8_ms"] / 1e6
    return figures


def prompts(models: Models, tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a forward of a prompt, without a graph."""
    import torch

    ids = torch.randint(1, models.config.vocab_size, (1, tokens), device=models.device)
    sides = {"bf16": models.plain, "fp8": models.fp8}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    product = models.runtime["fp8.product"]

    def read(model: Any) -> None:
        with torch.no_grad():
            for _ in range(4):
                model(ids, logits_to_keep=1, use_cache=True)

    samples["fp8, fast sums"] = []
    for fast in (True, False):
        product.FAST_SUMS = fast
        read(models.fp8)
    read(models.plain)
    for _ in range(rounds):
        for name, model in sides.items():
            samples[name].append(seconds(lambda model=model: read(model)) / 4 * 1e3)
        product.FAST_SUMS = True
        samples["fp8, fast sums"].append(seconds(lambda: read(models.fp8)) / 4 * 1e3)
        product.FAST_SUMS = False
    return {name: statistics.median(found) for name, found in samples.items()}


def read_speed() -> float:
    """GB/s at which torch sums 4 GiB."""
    import torch

    data = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    data.sum()
    return data.nbytes * 4 / seconds(lambda: [data.sum() for _ in range(4)]) / 1e9


def tiles(models: Models, rows: int, stop: float) -> dict[str, Any]:
    """Microseconds a call and GB/s of each tile of each product of a step, over the weights of all layers."""
    import torch

    step, launch, runtime = models.runtime["fp8.fp8_gemv"], models.runtime["launching.launch"], models.runtime
    layers = models.fp8.model.layers
    norm = runtime["norms.norm_form"].norm_form(layers[0].input_layernorm)
    copies = runtime["fp8.fp8_weights"]._copies
    found: dict[str, Any] = {}
    groups = {
        "qkv": ([copies[layer.self_attn.q_proj].weight for layer in layers], "linear", norm, False),
        "o": ([copies[layer.self_attn.o_proj].weight for layer in layers], "linear", None, True),
        "gate_up": ([copies[layer.mlp.gate_proj].weight for layer in layers], "gated", norm, False),
        "down": ([copies[layer.mlp.down_proj].weight for layer in layers], "linear", None, True),
        "head": ([copies[models.fp8.lm_head].weight], "linear", None, False),
        "qkv without norm": ([copies[layer.self_attn.q_proj].weight for layer in layers], "linear", None, False),
        "gate_up without norm": ([copies[layer.mlp.gate_proj].weight for layer in layers], "gated", None, False),
    }
    for name, (weights, kind, prologue, adds) in groups.items():
        outputs, inputs = weights[0].values.shape
        kind = kind if rows == 1 else "skinny_linear"
        outputs = outputs // 2 if kind == "gated" else outputs
        x = torch.randn(rows, 1, inputs, device=models.device, dtype=torch.bfloat16)
        out = torch.empty(rows, 1, outputs, device=models.device, dtype=torch.bfloat16)
        residual = torch.zeros_like(out) if adds else None

        def run(tile: Any, kind=kind, weights=weights, prologue=prologue, x=x, out=out, residual=residual) -> None:
            for weight in weights:
                if kind == "gated":
                    step.launch_gated(x, step.read(weight), None, "silu", prologue, out, tile)
                elif kind == "linear":
                    step.launch_linear(x, step.read(weight), None, prologue, residual, out, tile)
                else:
                    step.launch_skinny(x, step.read(weight), None, prologue, residual, out, tile)

        candidates = [step.tile_for(kind, weights[0], normed=prologue is not None), *TILES[kind]]
        candidates = [t for t in dict.fromkeys(candidates) if inputs % t[1] == 0 and outputs % t[0] == 0]
        waiting: dict[Any, Any] = {}
        launch.collect(lambda key, compile, waiting=waiting: waiting.setdefault(key, compile))
        with launch.rehearsing():
            for tile in candidates:
                run(tile)
        launch.collect(None)
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda compile: compile(), waiting.values()))
        times = {}
        for tile in candidates:
            if time.perf_counter() > stop:
                break
            times[" ".join(map(str, tile))] = replayed(lambda tile=tile: run(tile), launch) / len(weights)
        size = weights[0].values.nbytes
        best = sorted(times.items(), key=lambda item: item[1])
        rule = " ".join(map(str, candidates[0]))
        key = f"{kind} {outputs}x{inputs}x1"
        found[f"{name}, {rows} rows"] = {"key": key, "rule": rule, "us": times, "best": best[0][0] if best else None}
        shown = ", ".join(f"{tile}: {us:.2f} µs {size / us / 1e3:.0f} GB/s" for tile, us in best[:5])
        print(f"  {name}, {rows} rows ({key}), rule {rule} {times.get(rule, 0):.2f} µs; best {shown}", flush=True)
    return found


def replayed(run: Callable[[], None], launch: Any) -> float:
    """Microseconds of a graph of a function, the median of some replays."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), launch.rehearsing():
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    samples = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 500)
    return statistics.median(samples)


def measure(packages: Path, shape: str, out: Path | None, seconds_left: float, with_tiles: bool) -> int:
    import torch

    stop = time.perf_counter() + seconds_left
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    models = Models(packages, shape, device)
    record: dict[str, Any] = {"shape": shape, "versions": versions(), "new_tokens": NEW, "context": CONTEXT}

    def note(name: str, run: Callable[[], Any]) -> None:
        started = time.perf_counter()
        record[name] = run()
        print(f"{name} ({time.perf_counter() - started:.0f} s): {json.dumps(record[name], indent=1)}", flush=True)
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    note("parity", lambda: parity(models, 24))
    del models.reference
    if device == "cuda":
        torch.cuda.empty_cache()
        note("read_gb_s", read_speed)
        note("allocated_gb", lambda: torch.cuda.memory_allocated() / 1e9)
        note("copies_gb", lambda: models.runtime["fp8.fp8_weights"].nbytes(models.fp8) / 1e9)
    for batch in (1, 8):
        note(f"decode, batch {batch}", lambda batch=batch: decoding(models, batch, ROUNDS))
    for tokens in (512, 2048):
        note(f"prompt of {tokens}, ms", lambda tokens=tokens: prompts(models, tokens, ROUNDS))
    note("explain", lambda: str(models.runtime["core.explanation"].explain(models.fp8)).splitlines())
    if with_tiles and device == "cuda":
        for rows in (1, 8):
            note(f"tiles, {rows} rows", lambda rows=rows: tiles(models, rows, stop))
    return 0


def versions() -> dict[str, str]:
    import torch
    import transformers
    import triton

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": card, "torch": torch.__version__, "transformers": transformers.__version__,
        "triton": triton.__version__,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("packages", type=Path)
    measuring = commands.add_parser("measure")
    measuring.add_argument("packages", type=Path)
    measuring.add_argument("--shape", choices=list(SHAPES), default="8b")
    measuring.add_argument("--json", type=Path)
    measuring.add_argument(
        "--for", dest="duration", type=float, default=150, help="seconds, after which no more tiles"
    )
    measuring.add_argument("--tiles", action="store_true")
    given = parser.parse_args()
    if given.command == "prepare":
        prepare(given.packages)
        return 0
    return measure(given.packages, given.shape, given.json, given.duration, given.tiles)


if __name__ == "__main__":
    sys.exit(main())
