"""A vision tower over many windows and images, original and rewritten in turn: calls of attention, times, parity.

    python bench/segments.py PACKAGE [--layers 4] [--grid 1,52,78 --grid 1,52,78] [--dtype float32] [--device cpu]

PACKAGE is one of a model whose tower takes `grid_thw` (qwen2_vl, qwen2_5_vl, qwen3_vl, glm4v …). The tower has the
widths of the configuration class, which are those of the published model, and random weights.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM = 1


class Calls:
    """Counts calls of torch's attention while it is entered."""

    def __enter__(self) -> Calls:
        self.count, self.plain = 0, torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = self._counted  # type: ignore[assignment]
        return self

    def _counted(self, *args: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        return self.plain(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        torch.nn.functional.scaled_dot_product_attention = self.plain


def tower_of(module: Any) -> type[torch.nn.Module]:
    """Return the class of a modeling file that takes patches and the grids that they lie in."""
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == module.__name__:
            if [*inspect.signature(kind.forward).parameters][1:3] == ["hidden_states", "grid_thw"]:
                return kind
    raise SystemExit(f"{module.__name__} has no tower that takes grid_thw")


def towers(package: Path, layers: int, dtype: torch.dtype, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the tower of the installed transformers and that of a package, with the same weights."""
    sys.path.insert(0, str(package.resolve().parent))
    file = next(package.glob("modeling_*.py")).stem
    name = file.removeprefix("modeling_")
    original = tower_of(importlib.import_module(f"transformers.models.{name}.{file}"))
    rewritten = tower_of(importlib.import_module(f"{package.resolve().name}.{file}"))
    config = original.config_class()  # type: ignore[operator]
    config.depth = layers
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    made = [kind(config).to(device, dtype).eval() for kind in (original, rewritten)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def measure(model: torch.nn.Module, patches: Tensor, grid: Tensor) -> float:
    """Return the ms of one call."""
    start = time.perf_counter()
    with torch.no_grad():
        model(patches, grid_thw=grid)
    if patches.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Run one comparison and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grid", action="append", help="times, rows and columns of patches of one image")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    sides = towers(given.package, given.layers, dtype, given.device)
    grid = torch.tensor([[int(n) for n in one.split(",")] for one in given.grid or ("1,52,78", "1,52,78")])
    config: Any = sides[0].config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(int(grid.prod(1).sum()), width).to(given.device, dtype)
    grid = grid.to(given.device)
    results, calls = [], []
    for side in sides:
        with torch.no_grad(), Calls() as counted:
            out = side(patches, grid_thw=grid)
        results.append(next(v for v in (out.values() if isinstance(out, dict) else (out,)) if isinstance(v, Tensor)))
        calls.append(counted.count)
    apart = (results[0].double() - results[1].double()).abs().max() / results[0].double().abs().max()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM + given.rounds):
        for own, side in zip(times, sides, strict=True):
            own.append(measure(side, patches, grid)) if turn >= WARM else measure(side, patches, grid)
    device = torch.cuda.get_device_name() if patches.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    row = {
        "class": type(sides[0]).__name__,
        "layers": given.layers,
        "grids": grid.tolist(),
        "dtype": given.dtype,
        "device": device,
        "torch": torch.__version__,
        "calls of attention": calls,
        "largest difference, relative": float(apart),
        "ms": [round(statistics.median(own), 1) for own in times],
        "range": [[round(min(own), 1), round(max(own), 1)] for own in times],
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
