"""Decode with published 8- and 4-bit weights (docs/fp8.md), against the same weights in 16 bits.

    python bench/blocks.py prepare PACKAGES          # needs libcst; writes PACKAGES/{llama,gpt_oss}
    python bench/blocks.py measure PACKAGES [--kinds fp8,mxfp4] [--layers 16,12] [--batch 1,8] [--json RESULTS.json]
    python bench/blocks.py tiles fp8|mxfp4           # times other tiles of the kernels of one row

`--kinds mxfp4 --layers 24` is the whole gpt-oss-20b, 55 GB for both; `--experts 4/4/1/1,1/8/3/0` then gives kernels
of MXFP4 experts other tiles than their rule (tiles of rows, warps, steps at once, 1 for loads ahead) and measures
once more.

Both models are the rewritten one. One has random weights in blocks; the other has what these stand for, in bf16. So
their logits have to agree, which is checked before anything is timed; whole `generate()` calls are timed in turn. Each
format is measured in a process of its own, which prints as it goes and begins nothing new after its `--seconds`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewrite.measure.runtime_part import runtime_part

ROOT = Path(__file__).resolve().parents[1]
CONTEXT, ROUNDS = 512, 5
RESULT = "result "
"""Begins the line that a process of one format tells its figures by."""


def prepare(folder: Path) -> None:
    """Write both packages, with the transformers of this environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("llama", "gpt_oss"):
        command = [sys.executable, "-m", "rewrite.cli", name, "--out", str(folder / name)]
        subprocess.run([*command, "--no-verify", "--diff", "none", "--force"], check=True, env=environment)


def fp8_models(layers: int, small: bool, device: str) -> tuple[Any, Any, str]:
    """Return a model of 8B widths with FP8 layers, and one with the same numbers in bf16."""
    import torch
    from transformers import FineGrainedFP8Config, LlamaConfig
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    hidden, inner, heads = (256, 512, 4) if small else (4096, 14336, 32)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 4, head_dim=hidden // heads, vocab_size=512 if small else 128256,
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    kind = importlib.import_module("llama.modeling_llama").LlamaForCausalLM
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        plain = kind(config).eval()
        packed = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
    replace_with_fp8_linear(packed, ["lm_head"], quantization, pre_quantized=True)
    products = runtime_part("llama", "linear/block_linear")
    formats = runtime_part("llama", "linear/blocks")
    for (_, one), (_, other) in zip(packed.named_modules(), plain.named_modules(), strict=True):
        if type(one).__name__ == "FP8Linear":
            rows, cols = other.weight.shape
            codes = (torch.randn(rows, cols, device=device) * 64).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-rows // 128), -(-cols // 128), device=device) * 2e-4 + 2e-4
            one.weight = torch.nn.Parameter(codes, requires_grad=False)
            one.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
            other.weight.data.copy_(formats.dequantized(formats.Blocks(codes, scale, 128, 128), torch.bfloat16))
        elif type(one) is type(other) and [*one.parameters(recurse=False)]:
            one.load_state_dict(other.state_dict())
    products.BlockLinear.adopt(packed)
    return plain, packed, "llama"


def mxfp4_models(layers: int, small: bool, device: str) -> tuple[Any, Any, str]:
    """Return a model of gpt-oss-20b's widths with MXFP4 experts, and one with the same numbers in bf16."""
    import torch
    from transformers import GptOssConfig

    sizes = (
        {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "vocab_size": 512, "head_dim": 32,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        if small else {"num_local_experts": 32}
    )  # fmt: skip
    config = GptOssConfig(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0, bos_token_id=0, **sizes)
    module = importlib.import_module("gpt_oss.modeling_gpt_oss")
    mxfp4, formats = runtime_part("gpt_oss", "moe/mxfp4"), runtime_part("gpt_oss", "linear/blocks")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        plain = module.GptOssForCausalLM(config).eval()
    with torch.device("meta"):  # in 16 bits 24 layers take 42 GB
        packed = module.GptOssForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    mxfp4.MxExperts.prepare(packed, {})
    packed.to_empty(device=device)
    for (_, one), (_, other) in zip(packed.named_buffers(), plain.named_buffers(), strict=True):
        one.copy_(other)
    for (_, one), (_, other) in zip(packed.named_modules(), plain.named_modules(), strict=True):
        if isinstance(one, mxfp4.MxExperts):
            for name in ("gate_up_proj", "down_proj"):
                blocks, scales = one._parameters[f"{name}_blocks"], one._parameters[f"{name}_scales"]
                blocks.random_(0, 256)
                scales.random_(117, 121)
                getattr(other, name).data.copy_(getattr(one, name))
            for name in ("gate_up_proj_bias", "down_proj_bias"):
                getattr(other, name).data.normal_(0, 0.02)
                getattr(one, name).data.copy_(getattr(other, name))
        elif [*one.parameters(recurse=False)]:
            one.load_state_dict(other.state_dict(), strict=False)
    assert formats is not None
    return plain, packed, "gpt_oss"


def measure(options: argparse.Namespace) -> None:
    """Measure each format in a process of its own."""
    kinds, layers = options.kinds.split(","), options.layers.split(",")
    results = []
    for kind, count in zip(kinds, layers * len(kinds) if len(layers) == 1 else layers, strict=False):
        command = [sys.executable, __file__, "one", str(options.packages), kind, count]
        for name in ("batch", "new", "device", "seconds"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--small"] if options.small else []
        command += ["--experts", options.experts] if options.experts else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(RESULT):
                    results.append(json.loads(line.removeprefix(RESULT)))
                else:
                    print(line, end="", flush=True)
        if process.returncode:
            raise SystemExit(f"{kind}: exit code {process.returncode}")
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure_one(options: argparse.Namespace) -> None:
    """Check that both models of a format compute the same, then time them in turn."""
    begun = time.perf_counter()

    def said(text: str) -> None:
        print(f"{time.perf_counter() - begun:5.1f} s  {text}", flush=True)

    import torch

    sys.path.insert(0, str(options.packages))
    torch.manual_seed(0)
    make = fp8_models if options.kind == "fp8" else mxfp4_models
    with torch.no_grad():
        plain, packed, name = make(options.layers, options.small, options.device)
        said(f"{options.kind}: two models of {options.layers} layers")
        for experts in dict.fromkeys(("", options.experts if options.kind == "mxfp4" else "")):
            if experts:
                tiles = tuple(tuple(map(int, tile.split("/"))) for tile in experts.split(","))
                runtime_part(name, "moe/mxfp4_experts").rule = lambda *sizes, tiles=tiles: tiles
                runtime_part(name, "decode/graph_cache").release_graphs(packed)
                said(f"tiles of experts: {experts}")
            for batch in (int(part) for part in options.batch.split(",")):
                ids = torch.randint(1, plain.config.vocab_size, (batch, CONTEXT), device=options.device)
                logits = [model(ids, logits_to_keep=8).logits.float() for model in (plain, packed)]
                prompt = error(logits[1], logits[0])
                kept = [
                    model.generate(
                        ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
                    ).logits
                    for model in (plain, packed)
                ]
                steps = [error(b.float(), a.float()) for a, b in zip(*kept, strict=True)]
                said(
                    f"batch {batch}: logits differ by {prompt:.4f} of their norm in the prompt, in the first steps by"
                )
                said("  " + " ".join(f"{step:.4f}" for step in steps) + " (later ones may be of other tokens)")
                times: dict[str, list[float]] = {"bf16": [], options.kind: []}
                for turn in range(ROUNDS):
                    if turn > 1 and time.perf_counter() - begun > options.seconds:
                        break
                    for label, model in (("bf16", plain), (options.kind, packed)):
                        times[label].append(per_token(model, ids, options.new, options.device))
                median = {label: statistics.median(found) for label, found in times.items()}
                ratio = median["bf16"] / median[options.kind]
                both = ", ".join(f"{label} {found:.3f} ms/token" for label, found in median.items())
                said(f"  decode: {both}, {ratio:.2f} times as fast")
                found = {"kind": options.kind, "layers": options.layers, "batch": batch, "ratio": ratio, "ms": times}
                found["experts"] = experts
                print(RESULT + json.dumps({**found, "prompt": prompt, "steps": steps}), flush=True)
                if time.perf_counter() - begun > options.seconds:
                    said("out of time")
                    break
        print("explain:", importlib.import_module(name).explain(packed), sep="\n", flush=True)


def error(got: Any, wanted: Any) -> float:
    """Return the norm of a difference, as a share of what was wanted."""
    return float((got - wanted).norm() / wanted.norm())


def per_token(model: Any, ids: Any, new: int, device: str) -> float:
    """Return the milliseconds that a further token takes: of long and short calls."""
    import torch

    taken = []
    for count in (2, 2 + new):
        synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, do_sample=False)
        synchronize()
        taken.append(time.perf_counter() - start)
    return 1000 * (taken[1] - taken[0]) / new


def replayed(run: Callable[[], object], times: int) -> float:
    """Return the microseconds of one of `times` runs that a graph holds."""
    import torch

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / (4 * times))
    return statistics.median(found)


def fp8_tiles() -> None:
    """Time tiles of the kernels of FP8 layers at 8B widths."""
    import torch

    from hf_rewrite_runtime.launching.launch import processors
    from hf_rewrite_runtime.linear import block_linear, block_rows, linear
    from hf_rewrite_runtime.linear.blocks import Blocks
    from hf_rewrite_runtime.norms.norm_form import Prologue

    device, copies = "cuda", 8
    for name, rows, cols, kind in (
        ("qkv", 6144, 4096, ""),
        ("o", 4096, 4096, ""),
        ("gate and up", 28672, 4096, "silu"),
        ("down", 4096, 14336, ""),
    ):
        weights = [torch.randn(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        blocks = [
            Blocks((w * 8).to(torch.float8_e4m3fn), torch.rand(rows // 128, cols // 128, device=device), 128, 128)
            for w in weights
        ]
        norm = Prologue(torch.randn(cols, device=device, dtype=torch.bfloat16), 1e-6)
        for count in (1, 8):
            x = torch.randn(count, 1, cols, device=device, dtype=torch.bfloat16)
            given = norm if name in ("qkv", "gate and up") else None
            one = kind if count == 1 else ""
            out = torch.empty(count, 1, rows // 2 if one else rows, device=device, dtype=torch.bfloat16)

            def plain(x: Any = x, weights: Any = weights, given: Any = given, one: str = one, out: Any = out) -> None:
                for weight in weights:
                    if one:
                        linear._gated(x, weight, None, one, given)
                    else:
                        linear.launch_product(x, weight, None, given, None, out)

            print(f"{name}, {count} rows: bf16 {replayed(plain, copies):.2f} us", flush=True)
            results = []
            for tile in candidates(count, bool(one)):

                def scaled(
                    x: Any = x, given: Any = given, one: str = one, out: Any = out, tile: Any = tile,
                    blocks: Any = blocks, count: int = count,
                ) -> None:  # fmt: skip
                    for weight in blocks:
                        if count == 1:
                            block_linear._launch_row(x, weight, None, given, None, out, one, tile)
                        else:
                            block_rows.launch_block_rows(x, weight, None, given, None, out, tile)

                try:
                    results.append((replayed(scaled, copies), tile))
                except Exception as error:  # a tile that a chip does not take
                    print("  ", tile, type(error).__name__, str(error)[:100])
            default = (
                block_linear.rule(rows // 2 if one else rows, cols, gated=bool(one))
                if count == 1
                else block_rows.rows_rule(rows, cols // 128, processors(0))
            )
            print("  default", default, "best", [(f"{us:.2f}", tile) for us, tile in sorted(results)[:6]], flush=True)


def candidates(count: int, gated: bool) -> list[tuple[int, ...]]:
    """Return tiles to try."""
    if count > 1:
        sizes = ((32, 4), (64, 4), (128, 8))
        return [(*size, splits, stages) for size in sizes for splits in (1, 2, 4, 6, 8) for stages in (4, 6)]
    rows = [(1, 128, 4), (2, 64, 2), (2, 128, 4), (2, 256, 8), (4, 64, 2), (4, 128, 4), (8, 128, 4)]
    return rows if gated else [(2 * r, g, w) for r, g, w in rows]


def mxfp4_tiles() -> None:
    """Time tiles of the kernels of MXFP4 experts at gpt-oss-20b's widths."""
    import torch

    from hf_rewrite_runtime.linear.blocks import Blocks
    from hf_rewrite_runtime.moe import block_experts as be
    from hf_rewrite_runtime.moe import mxfp4_experts as mx
    from hf_rewrite_runtime.moe.form import ExpertsForm, gating

    device, copies = "cuda", 4
    experts, hidden, size, top_k = 32, 2880, 2880, 4
    form = ExpertsForm(None, 1.702, 7.0, 1.0, interleaved=True, transposed=True, biased=True)
    how = gating(form)
    assert how is not None
    parts = []
    for _ in range(copies):
        weights = [
            Blocks(
                torch.randint(0, 256, (experts, rows, cols // 2), device=device, dtype=torch.uint8),
                torch.randint(117, 121, (experts, rows, cols // 32), device=device, dtype=torch.uint8), 1, 32,
            )
            for rows, cols in ((2 * size, hidden), (hidden, size))
        ]  # fmt: skip
        biases = tuple(torch.zeros(experts, rows, device=device, dtype=torch.bfloat16) for rows in (2 * size, hidden))
        parts.append(be.BlockExperts(weights[0], weights[1], biases, form))  # type: ignore[arg-type]
    for tokens in (1, 8):
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        index = torch.stack([torch.randperm(experts, device=device)[:top_k] for _ in range(tokens)])
        share, out = torch.rand(tokens, top_k, device=device, dtype=torch.bfloat16), torch.empty_like(x)
        results = []
        default = mx.rule(hidden, size, top_k)
        firsts = itertools.product((1, 2, 4), (2, 4), (1, 3), (0, 1))
        seconds = itertools.product((1, 2), (4, 8), (1, 3), (0, 1))
        trials = [(first, default[1]) for first in firsts] + [(default[0], second) for second in seconds]
        same = how._replace(transposed=False)

        def others(x: Any = x, index: Any = index, share: Any = share, out: Any = out, same: Any = same) -> None:
            for part in parts:
                be.launch_block_experts(x, index, share, part, None, out, same)

        print(f"{tokens} tokens: without matrix units {replayed(others, copies):.2f} us", flush=True)
        for tiles in [default, *trials]:

            def run(
                x: Any = x,
                index: Any = index,
                share: Any = share,
                out: Any = out,
                same: Any = same,
                tiles: Any = tiles,
            ) -> None:
                for part in parts:
                    mx.launch_mxfp4_experts(x, index, share, *part[:3], None, out, same, tiles)

            try:
                results.append((replayed(run, copies), tiles))
            except Exception as error:
                print("  ", tiles, type(error).__name__, str(error)[:100])
            if tiles == default and results:
                print(f"{tokens} tokens: default {tiles} {results[0][0]:.2f} us", flush=True)
        found = []
        for name, place in (("first", 0), ("second", 1)):
            best = sorted((us, tiles[place]) for us, tiles in results if tiles[1 - place] == default[1 - place])
            print("  ", name, [(f"{us:.2f}", tile) for us, tile in best[:6]], flush=True)
            found.append(best[0][1])
        print("   best", ",".join("/".join(map(str, tile)) for tile in found), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("packages", type=Path)
    two = commands.add_parser("measure")
    two.add_argument("packages", type=Path)
    two.add_argument("--kinds", default="fp8,mxfp4")
    two.add_argument("--layers", default="16,12", help="of each kind: half of the models' as a rule")
    two.add_argument("--json", type=Path)
    one_kind = commands.add_parser("one", help="what `measure` starts for each format")
    one_kind.add_argument("packages", type=Path)
    one_kind.add_argument("kind", choices=("fp8", "mxfp4"))
    one_kind.add_argument("layers", type=int)
    for command in (two, one_kind):
        command.add_argument("--batch", default="1,8")
        command.add_argument("--new", type=int, default=64)
        command.add_argument("--device", default="cuda")
        command.add_argument("--experts", default="", help="tiles of the two kernels of MXFP4 experts")
        command.add_argument("--seconds", type=float, default=60.0, help="after these a process begins nothing new")
        command.add_argument("--small", action="store_true", help="tiny models, to try the script")
    three = commands.add_parser("tiles")
    three.add_argument("kind", choices=("fp8", "mxfp4"))
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.packages)
    elif options.command == "measure":
        measure(options)
    elif options.command == "one":
        measure_one(options)
    else:
        {"fp8": fp8_tiles, "mxfp4": mxfp4_tiles}[options.kind]()


if __name__ == "__main__":
    main()
