"""Time a sparse block (norm, router, experts, residual) against transformers' own, and print a table.

    python bench/experts.py --json bench/results/experts.json

Every contender runs inside a CUDA graph that walks over layers with weights of their own, together far larger than the
L2 cache, and over tokens of their own. Contenders are timed in turn, replay by replay, and the median is kept; each is
compared with an fp64 run of the first layer. transformers' eager loop asks the host which experts were hit, so it
cannot be captured and is timed by the clock. The floor is the bytes of the weights of the experts that were hit over
the rate at which torch sums 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.moe import experts
from hf_rewrite_runtime.moe.experts import fused_experts
from hf_rewrite_runtime.moe.router import RoutingRule, router
from hf_rewrite_runtime.norms.rms_norm import rms_norm

DEVICE = "cuda"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 512)
GATHERED_BYTES = 12 << 30  # what batched_mm may copy of the weights
MODELS: dict[str, tuple[type[Any], type[nn.Module], type[nn.Module], dict[str, int]]] = {
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig,
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeRMSNorm,
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "Mixtral-8x7B": (
        MixtralConfig,
        MixtralSparseMoeBlock,
        MixtralRMSNorm,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}


class Layer(NamedTuple):
    """A norm and the sparse block behind it, with what the rewriter would have put into their classes."""

    norm: Any
    block: Any


class Result(NamedTuple):
    """One row of the table; times in microseconds a layer."""

    model: str
    tokens: int
    experts_hit: float
    floor_us: float
    us: dict[str, float]
    error: dict[str, float]


def layers(model: str, count: int) -> list[Layer]:
    """Return layers in bf16 with random weights, their classes with the methods of a rewritten file."""
    config_class, block_class, norm_class, sizes = MODELS[model]
    config = config_class(**sizes)
    config._experts_implementation = "grouped_mm"
    made = []
    for _ in range(count):
        with torch.device(DEVICE):
            layer = Layer(norm_class(config.hidden_size), block_class(config))
        layer = Layer(layer.norm.bfloat16(), layer.block.bfloat16().eval().requires_grad_(False))
        for parameter in layer.block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        made.append(layer)
    norm, gate = type(made[0].norm), type(made[0].block.gate)
    forward = {"forward": lambda s, x: rms_norm(x, s.weight, s.variance_epsilon)}
    described_norm = type(norm.__name__, (norm,), forward)
    described_gate = type(gate.__name__, (gate,), {"rule": rule})
    for layer in made:
        layer.norm.__class__, layer.block.gate.__class__ = described_norm, described_gate
    return made


def rule(gate: Any) -> RoutingRule:
    """Return what the rewriter reads from the two routers."""
    if hasattr(gate, "norm_topk_prob"):
        return RoutingRule(gate.weight, gate.top_k, normalize=gate.norm_topk_prob)
    return RoutingRule(gate.weight, gate.top_k, weights_in_fp32=True)


def ours(layer: Layer, x: Tensor) -> Tensor:
    layer.block.experts.config._experts_implementation = "grouped_mm"
    hidden_states, weights, index = router(x, layer.block.gate, norm=layer.norm)
    return fused_experts(hidden_states, layer.block.experts, index, weights, residual=x)


def kernels(layer: Layer, x: Tensor) -> Tensor:
    """Run our kernels for any number of tokens."""
    default, experts.sorting_is_faster = experts.sorting_is_faster, lambda *_: False
    try:
        return ours(layer, x)
    finally:
        experts.sorting_is_faster = default


def original(implementation: str) -> Callable[[Layer, Tensor], Tensor]:
    def run(layer: Layer, x: Tensor) -> Tensor:
        layer.block.experts.config._experts_implementation = implementation
        return x + layer.block(layer.norm(x))

    return run


def exact(layer: Layer, x: Tensor, index: Tensor) -> Tensor:
    """Compute the block in fp64, with the experts that were chosen in bf16."""
    block, norm = layer.block, layer.norm
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.double()
    tokens = normed.view(-1, x.shape[-1])
    probabilities = (tokens @ block.gate.weight.double().T).softmax(-1).gather(-1, index)
    if getattr(block.gate, "norm_topk_prob", True):
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for token, slot in torch.cartesian_prod(*(torch.arange(size) for size in index.shape)).tolist():
        expert = index[token, slot]
        gate, up = (block.experts.gate_up_proj[expert].double() @ tokens[token]).chunk(2)
        out[token] += probabilities[token, slot] * (block.experts.down_proj[expert].double() @ (F.silu(gate) * up))
    return wide + out.view(x.shape)


def captured(function: Callable[[Layer, Tensor], Tensor], stack: list[Layer], x: Tensor) -> torch.cuda.CUDAGraph:
    """Record one call a layer, each on its own tokens; also loads every kernel before the capture."""
    for layer, tokens in zip(stack, x, strict=True):
        function(layer, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, tokens in zip(stack, x, strict=True):
            function(layer, tokens)
    return graph


def replayed(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, repeats: int) -> dict[str, float]:
    """Return the median microseconds of one call of each graph, the graphs replayed in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times[name].append(1e3 * start.elapsed_time(end) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def clocked(function: Callable[[Layer, Tensor], Tensor], stack: list[Layer], x: Tensor) -> float:
    """Return the microseconds a layer of calls without a graph, by the clock."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for layer, tokens in zip(stack, x, strict=True):
            function(layer, tokens)
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / len(stack)


def read_rate() -> float:
    """Return the bytes a second at which torch sums 2 GiB."""
    x = torch.randn(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    x.sum(dtype=torch.float32)
    with torch.cuda.graph(graph):
        x.sum(dtype=torch.float32)
    return 2 * x.numel() / (replayed({"sum": graph}, 1, 9)["sum"] * 1e-6)


def measure(model: str, stack: list[Layer], tokens: int, rate: float, repeats: int) -> Result:
    """Check and time every contender on `tokens` tokens a layer."""
    block = stack[0].block
    count, hidden_size, size = block.experts.down_proj.shape
    x = torch.randn(len(stack), tokens, 1, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    contenders = {"ours": ours, "grouped_mm": original("grouped_mm")}
    gathered = 6 * tokens * block.gate.top_k * hidden_size * size
    if gathered <= GATHERED_BYTES:
        contenders["batched_mm"] = original("batched_mm")
    if 1 < tokens <= 64:
        contenders["ours, kernels"] = kernels
    chosen = [layer.block.gate(layer.norm(one).view(-1, hidden_size))[2] for layer, one in zip(stack, x, strict=True)]
    hit = statistics.mean(len(index.unique()) for index in chosen)
    errors = {}
    if tokens <= 16:
        wanted = exact(stack[0], x[0], chosen[0])
        errors = {
            name: ((f(stack[0], x[0]).double() - wanted).norm() / wanted.norm()).item()
            for name, f in contenders.items()
        }
    graphs = {name: captured(function, stack, x) for name, function in contenders.items()}
    times = replayed(graphs, len(stack), repeats)
    times["eager"] = clocked(original("eager"), stack, x)
    moved = 2 * (hit * 3 * hidden_size * size + count * hidden_size)
    return Result(model, tokens, hit, 1e6 * moved / rate, times, errors)


def table(results: list[Result]) -> str:
    """Return the results as a markdown table; microseconds a layer."""
    names = ["ours", "ours, kernels", "grouped_mm", "batched_mm", "eager"]
    lines = [f"| model | tokens | experts hit | floor | {' | '.join(names)} |", "|---" * (4 + len(names)) + "|"]
    for row in results:
        times = " | ".join(f"{row.us[name]:.1f}" if name in row.us else "–" for name in names)
        lines.append(f"| {row.model} | {row.tokens} | {row.experts_hit:.1f} | {row.floor_us:.1f} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.manual_seed(0)
    rate, results = read_rate(), []
    with torch.no_grad():
        for model in options.models:
            stack = layers(model, options.layers)
            for tokens in options.tokens:
                results.append(measure(model, stack, tokens, rate, options.repeats))
                print(results[-1], flush=True)
            del stack
            torch.cuda.empty_cache()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}; torch sums 2 GiB at {rate / 1e12:.2f} TB/s\n\n{table(results)}\n\n{backend.fallbacks()}")
    if options.json:
        rows = [row._asdict() for row in results]
        options.json.write_text(
            json.dumps({"device": device, "read_bytes_per_s": rate, "results": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
