"""`python -m rewrite.benchmark.cold`: a process in which nothing is warm, for the time to the first token.

The model is in memory and nothing has run: no kernel is loaded, tuned or compiled, and Triton's and Inductor's caches
on disk are empty. The clock runs from the first `generate()` to the arrival of its tokens at a streamer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .benchmark_plan import COMPILED, ORIGINAL, OURS, STATIC, Cell, Plan

LIMIT_S = 300
NEW_TOKENS = 32


def first_token(plan: Plan, side: str, cell: Cell) -> dict[str, Any]:
    """Run one side in a process of its own. Returns its figures, or `error`."""
    command = [sys.executable, "-m", "rewrite.benchmark.cold", str(plan.package), "--side", side]
    command += ["--device", plan.device, "--dtype", plan.dtype, "--batch", str(cell.batch)]
    command += ["--context", str(cell.context)]
    for name, value in (("--original", plan.original), ("--shape", plan.shape), ("--weights", plan.weights)):
        command += [name, value] if value is not None else []
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **caches, "PYTHONPATH": path}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {LIMIT_S} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


class Clock:
    """A streamer that notes when tokens arrive."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def put(self, value: Any) -> None:
        """The prompt first, then tokens."""
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


def measure(plan: Plan, side: str, cell: Cell) -> dict[str, Any]:
    """Build one model, generate, and say when tokens came and how much memory it took."""
    import torch

    from rewrite.measure.presets import config_for
    from rewrite.verify.models import loaded_sides

    from . import benchmark_models

    subject = benchmark_models.load(plan.package, plan.original)
    model_class = subject.rewritten if side == OURS else subject.original
    if plan.weights is not None:
        model = benchmark_models.from_checkpoint(model_class, plan.weights, plan.dtype, plan.device)
    else:
        assert plan.shape is not None
        model = benchmark_models.build(
            model_class, config_for(subject.original.config_class, plan.shape), plan.dtype, plan.device
        )
    vocab = int(model.config.get_text_config().vocab_size)
    prompt = torch.randint(vocab, (cell.batch, cell.context), device=plan.device)
    if hasattr(model, loaded_sides.BEGINS):  # as it is for everybody else
        setattr(model, loaded_sides.BEGINS, None)
    gpu = plan.device != "cpu"
    held = 0
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": clock}
    if side == STATIC:
        settings["cache_implementation"] = "static"
    started = time.perf_counter()
    with torch.no_grad():
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    if gpu:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    figures: dict[str, Any] = {
        "first_token_s": clock.arrivals[1] - started,
        "second_token_s": clock.arrivals[2] - started,
        "tokens_s": ended - started,
        "tokens": NEW_TOKENS,
    }
    if gpu:
        figures |= {
            "weights_bytes": held,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return figures


def main() -> None:
    """Measure one side and print its figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--side", choices=(ORIGINAL, OURS, *COMPILED), default=OURS)
    parser.add_argument("--original")
    parser.add_argument("--shape")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    names = ("package", "original", "shape", "weights", "device", "dtype")
    plan = Plan(**{name: getattr(given, name) for name in names})
    print(json.dumps(measure(plan, given.side, Cell(given.batch, given.context))))


if __name__ == "__main__":
    main()
