"""A whole small model whose forward runs as in a graph, its functions put off, by Triton's interpreter.

    TRITON_INTERPRET=1 REWRITE_BACKEND=triton python tests/runtime/forward_under_interpreter.py PACKAGE FILE CLASS

Prints the largest relative error of an output against the original's, and how many kernels of chains ran.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewrite.benchmark import forward_speed
from rewrite.benchmark.benchmark_models import build, sharing
from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants


def main(package: Path, file: str, name: str) -> None:
    """Run original and package on the same weights and inputs."""
    original = getattr(importlib.import_module(f"transformers.models.{file}.modeling_{file}"), name)
    module = loaded_sides.load(loaded_sides.locate(package))
    rewritten = getattr(module, name)
    ours = build(rewritten, small_variants(original, False, {})[0].config, "float32", "cpu")
    theirs = sharing(original, ours)
    given = forward_speed.arguments(ours, 2, 11, "cpu")
    rewritten._forward_without_graph = True
    files = [runtime_part(str(module.__package__), f"lazy/{name}") for name in ("fusion_text", "fusion_rows")]
    kernels, launch = [0], files[0].launch_text

    def counted(*arguments: Any) -> None:
        kernels[0] += 1
        launch(*arguments)

    for file in files:
        file.launch_text = counted
    switch = runtime_part(str(module.__package__), "forward/forward_settings")
    with torch.no_grad(), switch.use_forward_graphs("always"):
        ours(**given)
        kernels[0] = 0
        got, wanted = list(_tensors(ours(**given))), list(_tensors(theirs(**given)))
    explained = str(runtime_part(str(module.__package__), "core/explanation").explain(ours))
    assert "in a graph" in explained, explained
    assert "one by one" not in explained, explained
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(got, wanted, strict=True)]
    print(f"error {max(errors):.3g} kernels {kernels[0]}")


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
