"""Products of Llama 8B's layers with weights of 4 bits, each alone in a graph: µs, and what its bytes take.

    python bench/integer_products.py [--rows 1,8] [--bandwidth 4.8]

A graph has the product of as many weights as take 300 MB, more than a cache holds; the best of three runs of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from hf_rewrite_runtime.integer.integer_layers import _by_kernel
from hf_rewrite_runtime.integer.integer_weights import Integers

SHAPES = {
    "qkv": (6144, 4096, True, ""),
    "o": (4096, 4096, False, ""),
    "gate and up": (28672, 4096, True, "silu"),
    "down": (4096, 14336, False, ""),
}
"""Rows, columns, whether a norm stands before, and the activation."""


def weight(rows: int, cols: int) -> Integers:
    """Random integers in groups of 128."""
    words = torch.randint(-(2**31), 2**31, (rows, cols // 8), device="cuda").int()
    return Integers(words, (torch.rand(rows, cols // 128, device="cuda") * 0.01).bfloat16(), None, 4, 128)


def microseconds(multiply: Callable[[Integers], Tensor | None], weights: list[Integers]) -> float:
    """Return µs a product, all of them in one graph."""
    for one in weights[:2]:
        multiply(one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in weights:
            multiply(one)
    graph.replay()
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 4 / len(weights) * 1000)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for count in map(int, given.rows.split(",")):
        for name, (rows, cols, has_norm, kind) in SHAPES.items():
            weights = [weight(rows, cols) for _ in range(max(2, int(600e6 / (rows * cols))))]
            x = torch.randn(count, 1, cols, device="cuda").bfloat16()
            norm = torch.nn.RMSNorm(cols, 1e-6, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
            residual = None if kind or has_norm else torch.randn(count, 1, rows, device="cuda").bfloat16()

            def multiply(one: Integers, x=x, norm=norm if has_norm else None, residual=residual, kind=kind):  # type: ignore[no-untyped-def]
                return _by_kernel(x, one, None, norm, residual, kind)

            with torch.no_grad():
                took = microseconds(multiply, weights)
            print(f"{count} {name:12} {took:6.2f} µs, its bytes {weights[0].nbytes / given.bandwidth / 1e6:5.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
