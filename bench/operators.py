"""Time the operators against eager torch, torch.compile and Liger, and print a table.

    python bench/operators.py --json operators.json

Every contender runs inside a CUDA graph that walks over distinct inputs and outputs, together larger than the L2 cache
where one set is. Contenders are timed in turn, replay by replay, and the median is kept; each is compared with an fp64
run first. Liger is left out where `liger_kernel` is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

gated_activation = importlib.import_module("hf_rewrite_runtime.linear.gated_activation")


add_rms_norm = importlib.import_module("hf_rewrite_runtime.norms.add_rms_norm")
rms_norm = importlib.import_module("hf_rewrite_runtime.norms.rms_norm")

rotary = importlib.import_module("hf_rewrite_runtime.rope.rotary")

HIDDEN_SIZES = (2048, 4096, 8192, 16384)
ROWS = (1, 16, 128, 1024, 8192)
HEAD_DIM = 128
EPS = 1e-5
L2_BYTES = 128 << 20  # twice an H100's, with room
Tensors = tuple[torch.Tensor, ...]
Contender = Callable[..., torch.Tensor | Tensors]


class Case(NamedTuple):
    """One operator at one shape."""

    operator: str
    inputs: Callable[[], Tensors]
    moved_bytes: int
    contenders: dict[str, Contender]
    exact: Contender


class Result(NamedTuple):
    """One row of the table; times in microseconds."""

    operator: str
    hidden_size: int
    rows: int
    mib: float
    us: dict[str, float]
    error: dict[str, float]
    share_of_copy: float


def liger() -> dict[str, Contender]:
    """Return Liger's forward passes by operator name, or nothing where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel import ops

    return {
        "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w: ops.LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False),
        "silu_mul": lambda g, u: ops.LigerSiLUMulFunction.apply(g, u),
        "gelu_tanh_mul": lambda g, u: ops.LigerGELUMulFunction.apply(g, u),
        "rotary": lambda q, k, c, s: ops.LigerRopeFunction.apply(q, k, c, s),
    }


def eager_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    summed = residual + x
    return rms_norm.reference(summed, weight, EPS, 0.0, False), summed


def eager_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return rotate(q), rotate(k)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def exact_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    summed = residual + x
    return exact_rms_norm(summed, weight), summed.double()


def in_double(function: Contender) -> Contender:
    return lambda *inputs: function(*(x.double() for x in inputs))


def cases(hidden_size: int, rows: int) -> list[Case]:
    """Return every operator at one shape, in bf16."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def packed(*widths: int) -> Tensors:
        return rand(rows, sum(widths)).split(widths, dim=-1)

    heads, kv_heads = hidden_size // HEAD_DIM, max(1, hidden_size // HEAD_DIM // 4)

    def rotary_inputs() -> Tensors:
        q, k = rand(1, rows, heads * HEAD_DIM), rand(1, rows, kv_heads * HEAD_DIM)
        angle = torch.rand(1, rows, HEAD_DIM // 2, device="cuda").repeat(1, 1, 2) * 6.28
        q, k = (x.view(1, rows, -1, HEAD_DIM).transpose(1, 2) for x in (q, k))
        return q, k, angle.cos().bfloat16(), angle.sin().bfloat16()

    def gated(name: str, eager: Contender, activation: Any) -> Case:
        ours = lambda gate, up: gated_activation.gated_activation(gate, up, activation)
        return Case(
            name,
            lambda: (rand(rows, hidden_size), rand(rows, hidden_size)),
            6 * rows * hidden_size,
            {"ours": ours, "eager": eager, "inductor": eager},
            in_double(eager),
        )

    silu_mul = lambda gate, up: F.silu(gate) * up
    gelu_tanh = torch.nn.GELU(approximate="tanh")
    gelu_mul = lambda gate, up: F.gelu(gate, approximate="tanh") * up
    eager_norm = lambda x, w: rms_norm.reference(x, w, EPS, 0.0, False)
    packed_silu = Case(
        "silu_mul, packed",
        lambda: packed(hidden_size, hidden_size),
        6 * rows * hidden_size,
        {
            "ours": lambda gate, up: gated_activation.gated_activation(gate, up, F.silu),
            "eager": silu_mul,
            "inductor": silu_mul,
        },
        in_double(silu_mul),
    )
    return [
        Case(
            "rms_norm",
            lambda: (rand(rows, hidden_size), rand(hidden_size)),
            4 * rows * hidden_size + 2 * hidden_size,
            {"ours": lambda x, w: rms_norm.rms_norm(x, w, EPS), "eager": eager_norm, "inductor": eager_norm},
            exact_rms_norm,
        ),
        Case(
            "add_rms_norm",
            lambda: (rand(rows, hidden_size), rand(rows, hidden_size), rand(hidden_size)),
            8 * rows * hidden_size + 2 * hidden_size,
            {
                "ours": lambda x, r, w: add_rms_norm.add_rms_norm(x, r, w, EPS),
                "eager": eager_add_rms_norm,
                "inductor": eager_add_rms_norm,
            },
            exact_add_rms_norm,
        ),
        gated("silu_mul", silu_mul, F.silu),
        gated("gelu_tanh_mul", gelu_mul, gelu_tanh),
        packed_silu,
        Case(
            "rotary",
            rotary_inputs,
            4 * rows * (heads + kv_heads) * HEAD_DIM + 4 * rows * HEAD_DIM,
            {"ours": rotary.rotary, "eager": eager_rotary, "inductor": eager_rotary},
            in_double(eager_rotary),
        ),
    ]


def outputs(result: torch.Tensor | Tensors) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def error(got: torch.Tensor | Tensors, exact: torch.Tensor | Tensors) -> float:
    """Return the largest relative error ‖got - exact‖ / ‖exact‖ of the outputs."""
    pairs = zip(outputs(got), outputs(exact), strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def captured(function: Contender, sets: list[Tensors], launches: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Record `launches` calls over the input sets; the outputs are kept so that each call writes its own."""
    graph, kept = torch.cuda.CUDAGraph(), []
    for _ in range(3):
        function(*sets[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in range(launches):
            result = function(*sets[call % len(sets)])
            if call < len(sets):
                kept.append(result)
    return graph, kept


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], launches: int, repeats: int) -> dict[str, float]:
    """Return the median time of one call of each contender, the contenders timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times[name].append(1e3 * start.elapsed_time(end) / launches)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth() -> float:
    """Return the bytes a second, read and written, of the fastest way here to copy 1 GiB: torch's copy or a kernel."""
    source = torch.randn(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    graphs = {
        "copy": captured(lambda x: target.copy_(x), [(source,)], 4)[0],
        "kernel": captured(lambda x: torch.neg(x, out=target), [(source,)], 4)[0],
    }
    return 4 * source.numel() / (min(microseconds(graphs, 4, 9).values()) * 1e-6)


def measure(case: Case, hidden_size: int, rows: int, bandwidth: float, repeats: int) -> Result:
    """Check and time every contender of one case."""
    torch.compiler.reset()
    contenders = dict(case.contenders)
    contenders["inductor"] = torch.compile(contenders["inductor"], dynamic=False)
    if case.operator in (known := liger()):
        contenders["liger"] = known[case.operator]
    sets = [case.inputs() for _ in range(min(32, max(2, -(-L2_BYTES // case.moved_bytes))))]
    launches = max(len(sets), 32 if case.moved_bytes < L2_BYTES else 4)
    errors, graphs, kept = {}, {}, []
    for name, contender in contenders.items():
        errors[name] = error(contender(*(x.clone() for x in sets[0])), case.exact(*sets[0]))
    with torch.no_grad():
        for name, contender in contenders.items():
            graphs[name], result = captured(contender, sets, launches)
            kept.append(result)
        times = microseconds(graphs, launches, repeats)
    share = case.moved_bytes / (times["ours"] * 1e-6) / bandwidth
    return Result(case.operator, hidden_size, rows, case.moved_bytes / (1 << 20), times, errors, share)


def table(results: list[Result]) -> str:
    """Return the results as a markdown table; times in microseconds."""
    names = ["ours", "liger", "inductor", "eager"]
    lines = [
        f"| operator | hidden size | rows | MiB moved | {' | '.join(names)} | share of copy bandwidth |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in results:
        times = " | ".join(f"{row.us[name]:.2f}" if name in row.us else "–" for name in names)
        lines.append(
            f"| {row.operator} | {row.hidden_size} | {row.rows} | {row.mib:.2f} | {times} | {row.share_of_copy:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=HIDDEN_SIZES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    results = [
        measure(case, hidden_size, rows, bandwidth, options.repeats)
        for hidden_size in options.hidden_sizes
        for rows in options.rows
        for case in cases(hidden_size, rows)
    ]
    results.sort(key=lambda row: row.operator)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}; a 1 GiB copy moves {bandwidth / 1e12:.2f} TB/s\n")
    print(table(results))
    if options.json:
        rows = [row._asdict() for row in results]
        options.json.write_text(
            json.dumps({"device": device, "copy_bytes_per_s": bandwidth, "results": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
