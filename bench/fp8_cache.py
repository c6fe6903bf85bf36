"""Steps with keys and values in 16 and in 8 bits, in turn, at the sizes of Llama 8B with random weights.

    rewrite llama --out ./optimized_llama --no-verify
    python bench/fp8_cache.py ./optimized_llama [--layers 32]

Whole captured steps of the package's decode graph, whose cache is filled with random numbers: nothing is read or
generated. Prints a row for each batch and context as it is measured; what does not fit the card is left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SHAPES = ((1, 2048), (1, 8192), (1, 32768), (8, 2048), (8, 8192), (32, 2048), (8, 32768), (32, 8192))
ROUNDS, REPLAYS = 3, 16


def model_of(package: Any, layers: int) -> Any:
    """Return a model with random weights in bf16 on the GPU."""
    import torch
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = package.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=layers))
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def graph_of(package: Any, model: Any, batch: int, context: int, form: str | None) -> Any:
    """Return a decode graph that holds `context` tokens of random numbers, and its captured step."""
    import torch

    from hf_rewrite_runtime.decode.cache_format import set_cache_format
    from hf_rewrite_runtime.decode.step_graph import DecodeGraph

    set_cache_format(form)
    graph = DecodeGraph(model, batch, context + 256)
    for layer in graph.cache.attention_layers:
        layer.allocate(SIZES["num_key_value_heads"], 128, 128, torch.bfloat16, model.device)
        for start in range(0, context, 2048):
            shape = batch, SIZES["num_key_value_heads"], min(2048, context - start), 128
            new = torch.randn(shape, dtype=torch.bfloat16, device=model.device)
            layer.update(new, new)
    graph.begin(context, None)
    return graph, graph.program(None)


def milliseconds(graph: Any, program: Any, context: int) -> float:
    """Return how long a step takes."""
    import torch

    graph.begin(context, None)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        program.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS


def row(package: Any, model: Any, batch: int, context: int) -> str:
    """Return what a batch and a context take in both forms."""
    graphs = {form: graph_of(package, model, batch, context, form) for form in (None, "fp8")}
    best = dict.fromkeys(graphs, float("inf"))
    for _ in range(ROUNDS):
        for form, (graph, program) in graphs.items():
            best[form] = min(best[form], milliseconds(graph, program, context))
    sizes = [graph.nbytes / 2**30 for graph, _ in graphs.values()]
    for graph, _ in graphs.values():
        graph.release()
    whole, eight = best.values()
    cells = (batch, f"{context:,}", *(f"{number:.2f}" for number in (whole, eight, whole / eight, *sizes)))
    return " | ".join(map(str, ("", *cells, ""))).strip()


def main() -> None:
    """Measure every shape that fits."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    sys.path.insert(0, str(given.package.resolve().parent))
    package = importlib.import_module(given.package.resolve().name)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("| batch | context | 16 bits, ms | 8 bits, ms | times as fast | GiB | GiB |")
    with torch.no_grad():
        model = model_of(package, given.layers)
        for batch, context in SHAPES:
            try:
                print(row(package, model, batch, context), flush=True)
            except torch.OutOfMemoryError:
                print(f"| {batch} | {context:,} | out of memory |")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
