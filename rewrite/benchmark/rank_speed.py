"""`rewrite bench --tp N`: a package on N cards beside its original there, and beside both on one.

The measurement runs under torchrun, one process a card. The first process also has both models whole; while it times
those, the others wait. Decode times are slopes between a short and a long generation, taken in turn, by the clock of
the first process. Weights go through `from_pretrained(tp_plan="auto")`: those of a checkpoint, or random ones, which
every process draws alike and no disk has to hold. What is found is said, and written, as soon as it is.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.measure import timing
from rewrite.measure.plans import columns_plan, experts_plan
from rewrite.measure.presets import config_for
from rewrite.measure.processes import launch
from rewrite.measure.runtime_part import runtime_part

from . import token_parity
from .benchmark_models import build, from_checkpoint, load, settled, sharing
from .benchmark_plan import Plan, plain, write_json
from .contenders import Generating
from .rank_tables import (
    ALL_SIDES,
    DEALT,
    ORIGINAL,
    ORIGINAL_EP,
    ORIGINAL_TP,
    OURS,
    OURS_EP,
    OURS_TP,
    RATIOS,
    REWRITTEN,
    SIDES,
)

if TYPE_CHECKING:
    from torch import Tensor

SHORT = 8
AGREE_PROMPT = 64
SUM_KIB = (8, 32, 128, 512, 2048, 8192)
SUMS_A_GRAPH = 50


def measure(plan: Plan, ranks: int) -> dict[str, Any]:
    """Measure in `ranks` processes and return the figures.

    Args:
        plan: a package and what to measure it at; of the contexts the first.
        ranks: cards, or processes of a CPU.

    Raises:
        RanksFailed: if a process fails.
    """
    device = plan.device.partition(":")[0]
    batches = sorted({cell.batch for cell in plan.cells})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        arguments = [str(plan.package), "--json", str(out), "--device", device, "--dtype", plan.dtype]
        arguments += ["--batch", ",".join(map(str, batches)), "--context", str(plan.cells[0].context)]
        arguments += ["--prompts", ",".join(map(str, plan.prefill)), "--new-tokens", str(plan.new_tokens)]
        arguments += ["--parity-tokens", str(plan.parity_tokens)]
        given = {"shape": plan.shape, "weights": plan.weights, "original": plan.original, "layers": plan.layers}
        for name, value in given.items():
            arguments += [f"--{name}", str(value)] if value is not None else []
        launch("rewrite.benchmark.rank_speed", ranks, arguments, "the measurement")
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return record


class _Run:
    """One process of a measurement."""

    def __init__(self, given: argparse.Namespace):
        import torch
        import torch.distributed as dist

        self.given = given
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.gpu = given.device != "cpu"
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if self.gpu else "cpu"
        if self.gpu:
            torch.cuda.set_device(self.device)
        device_id = torch.device(self.device) if self.gpu else None
        dist.init_process_group("nccl" if self.gpu else "gloo", device_id=device_id)
        self.subject = load(given.package, given.original)
        self.sides: tuple[str, ...] = given.sides
        self.models: dict[str, Any] = {}
        self.record: dict[str, Any] = {
            "ranks": self.ranks,
            "model": self.subject.original.__name__,
            "shape": given.shape,
            "layers": given.layers,
            "dtype": given.dtype,
            "device": torch.cuda.get_device_name(0) if self.gpu else "cpu",
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            "weights_bytes": {},
            "decode": [],
            "prompts": [],
            "agree": [],
            "notes": [],
        }

    def say(self, text: str) -> None:
        """Print from the first process."""
        if self.rank == 0:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def barrier(self) -> None:
        """Wait for every process."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.gpu:
            torch.cuda.synchronize()

    def everything(self) -> dict[str, Any]:
        """Measure."""
        self._load()
        for batch in self.given.batch:
            self._decode(batch)
            self._write()
        for length in self.given.prompts:
            self._prompt(length)
            self._write()
        for rows, new in self.given.agree:
            self._agree(rows, new)
            self._write()
        if self.gpu and OURS_TP in self.models and self.given.sums:
            self.record["sums_us"] = self._sums()
        for side in (OURS_TP, OURS_EP):
            if side in self.models:
                name = "explain" if side == OURS_TP else "explain, experts"
                self.record[name] = str(self.subject.explain(self.models[side]))
                self.say(self.record[name])
        self._write()
        return self.record

    def _write(self) -> None:
        if self.rank == 0 and self.given.json is not None:
            write_json(self.given.json, plain(self.record))

    def _load(self) -> None:
        given = self.given
        whole = self._whole() if self.rank == 0 or not given.weights else None
        if self.rank == 0:
            assert whole is not None
            self.models[ORIGINAL] = whole
            if OURS in self.sides:
                self.models[OURS] = sharing(self.subject.rewritten, whole)
            self._count(ORIGINAL, sum(p.nbytes for p in {id(p): p for p in whole.parameters()}.values()))
            self._count(OURS, self.record["weights_bytes"][ORIGINAL])
        self.barrier()
        self.say(f"whole models are there, {self.record['weights_bytes'].get(ORIGINAL, 0) / 1e9:.2f} GB")
        for side in DEALT:
            if side not in self.sides:
                continue
            before = self._allocated()
            self.models[side] = self._dealt(side, whole)
            self._count(side, self._allocated() - before)
            self.say(f"{side}: {self.record['weights_bytes'][side] / 1e9:.2f} GB a rank")
        if self.given.device == "cpu":
            self.subject.rewritten._step_without_graph = True

    def _whole(self) -> Any:
        """The original as one process has it; with random weights the same in each."""
        given, kind = self.given, self.subject.original
        if given.weights:
            return from_checkpoint(kind, given.weights, given.dtype, self.device)
        overrides = {"num_hidden_layers": given.layers} if given.layers else {}
        return build(kind, config_for(kind.config_class, given.shape, **overrides), given.dtype, self.device)

    def _dealt(self, side: str, whole: Any) -> Any:
        """A model of which this rank has its part, in memory of its own."""
        import torch

        kind = self.subject.rewritten if side in REWRITTEN else self.subject.original
        plan = experts_plan(self.ranks) if side in (ORIGINAL_EP, OURS_EP) else columns_plan()
        settings = {"dtype": getattr(torch, self.given.dtype), **plan}
        if whole is None or self.given.weights:
            return settled(kind.from_pretrained(self.given.weights, **settings))
        weights = dict(whole.state_dict())
        model = kind.from_pretrained(None, config=copy.deepcopy(whole.config), state_dict=weights, **settings)
        return settled(_owning(model))

    def _allocated(self) -> int:
        import torch

        gc.collect()
        if not self.gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def _count(self, side: str, count: int) -> None:
        self.record["weights_bytes"][side] = count

    def _time(self, side: str, call: Callable[[], Any]) -> float:
        """Milliseconds of a side's call, which the processes without it wait for."""
        self.barrier()
        spent = timing.wall_ms(self.device, call) if side in self.models else 0.0
        self.barrier()
        return spent

    def _prompts(self, rows: int, length: int) -> Tensor:
        import torch

        model = self.models[OURS_TP]
        generator = torch.Generator().manual_seed(rows * 1000 + length)
        size = model.config.get_text_config().vocab_size
        return torch.randint(1, size, (rows, length), generator=generator).to(self.device)

    def _generate(self, side: str, prompt: Tensor, new: int) -> Tensor | None:
        model = self.models.get(side)
        return None if model is None else Generating(side, model, SHORT, new).generate(prompt, new)

    def _decode(self, batch: int) -> None:
        import torch

        given = self.given
        prompt, long = self._prompts(batch, given.context), given.new_tokens
        for side in self.sides:  # warm: compiled, packed, captured, and captured anew now that weights have moved
            began = time.perf_counter()
            before = self._allocated()
            for _ in range(2 if side in REWRITTEN else 1):
                self._time(side, lambda side=side: self._generate(side, prompt, SHORT + 4))  # type: ignore[misc]
            more = self._allocated() - before
            self.say(f"{side}: first call {time.perf_counter() - began:.1f} s, {more / 1e6:.0f} MB more")

        def slope(side: str) -> float:
            few = self._time(side, lambda: self._generate(side, prompt, SHORT))
            count = long if side in REWRITTEN else SHORT + max((long - SHORT) // 4, 8)
            many = self._time(side, lambda: self._generate(side, prompt, count))
            return (many - few) / (count - SHORT)

        calls = {side: lambda _, side=side: slope(side) for side in self.sides}
        times = timing.interleaved(calls, (given.rounds, given.rounds), 0.0)
        entry: dict[str, Any] = {
            "batch": batch,
            "context": given.context,
            "ms": {side: median(times[side]) for side in self.sides},
            "ratios": {},
        }
        self.say(f"batch {batch}: " + ", ".join(f"{side} {ms:.3f}" for side, ms in entry["ms"].items()))
        for name, slow, fast in RATIOS if self.rank == 0 else ():
            if slow in times and fast in times:
                ratio = entry["ratios"][name] = timing.ratio(times[slow], times[fast])
                self.say(f"  {fast} against {name}: {ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
        entry["times"] = times
        self.record["decode"].append(entry)
        self._write()
        entry |= self._compared(prompt, given.parity_tokens, [side for side in self.sides if side != ORIGINAL])
        dealt = [side for side in (OURS_TP, OURS_EP) if side in self.models]
        torch.manual_seed(self.rank)
        drawn = [
            self.models[side].generate(prompt, do_sample=True, max_new_tokens=given.parity_tokens) for side in dealt
        ]
        entry["ranks_draw_alike"] = all(self._ranks_agree(tokens) for tokens in drawn)
        self.say(f"  ranks agree: {entry['ranks_agree']}, drawn {entry['ranks_draw_alike']}")
        self.barrier()

    def _compared(self, prompt: Tensor, new: int, sides: Sequence[str]) -> dict[str, Any]:
        """Tokens of several sides, between the ranks and against the whole original's."""
        tokens = {side: self._generate(side, prompt, new) for side in sides}
        dealt = [found for side, found in tokens.items() if side in (OURS_TP, OURS_EP)]
        entry: dict[str, Any] = {"ranks_agree": all(self._ranks_agree(found) for found in dealt), "parity": {}}
        if self.rank == 0:
            original = self.models[ORIGINAL]
            expected = token_parity.truth(original, prompt, new, rows_at_once=32)
            for side, found in tokens.items():
                if found is not None:
                    judged = token_parity.compare(original, expected, found)
                    entry["parity"][side] = {"passed": judged.passed, "summary": judged.summary}
                    self.say(f"  {side}: {'agrees' if judged.passed else 'DIFFERS'}: {judged.summary}")
        return entry

    def _agree(self, rows: int, new: int) -> None:
        """Compare the tokens of many rows, of the ranks and of one card."""
        prompt = self._prompts(rows, AGREE_PROMPT)
        sides = [side for side in (OURS, OURS_TP, OURS_EP) if side in self.sides]
        began = time.perf_counter()
        self.say(f"{rows} x {new} tokens")
        entry = {"rows": rows, "tokens": new, **self._compared(prompt, new, sides)}
        self.barrier()
        self.record["agree"].append(entry)
        self.say(f"  ranks agree: {entry['ranks_agree']}, {time.perf_counter() - began:.1f} s")

    def _ranks_agree(self, tokens: Tensor | None) -> bool:
        import torch
        import torch.distributed as dist

        assert tokens is not None
        found = [torch.empty_like(tokens) for _ in range(self.ranks)]
        dist.all_gather(found, tokens.contiguous())
        return all(torch.equal(found[0], other) for other in found)

    def _prompt(self, length: int) -> None:
        prompt = self._prompts(1, length)
        calls = {
            side: lambda _, side=side: self._time(side, lambda: self._generate(side, prompt, 2)) for side in self.sides
        }
        timing.interleaved(calls, (1, 1), 0.0)
        times = timing.interleaved(calls, (self.given.rounds, self.given.rounds), 0.0)
        entry: dict[str, Any] = {"tokens": length, "ms": {side: median(times[side]) for side in self.sides}}
        if ORIGINAL_TP in times and OURS_TP in times:
            entry["against original"] = timing.ratio(times[ORIGINAL_TP], times[OURS_TP])
        self.say(f"prompt {length}: " + ", ".join(f"{side} {ms:.2f}" for side, ms in entry["ms"].items()))
        self.record["prompts"].append(entry)

    def _sums(self) -> dict[str, dict[str, float]]:
        """Microseconds of one sum in a graph: by NCCL, by torch's one-shot, and by the package, with a residual."""
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        shared = symmetric.empty(SUM_KIB[-1] * 512, dtype=torch.bfloat16, device=torch.device(self.device))
        symmetric.rendezvous(shared, group=group.group_name)  # type: ignore[union-attr]
        dealt = next(p for p in self.models[OURS_TP].parameters() if hasattr(p, "device_mesh"))
        package = self.subject.rewritten.__module__.rpartition(".")[0]
        ranks = runtime_part(package, "tensor_parallel/ranks").ranks_of(dealt.device_mesh)
        found: dict[str, dict[str, float]] = {}
        for kib in SUM_KIB:
            part = torch.zeros(kib * 512, dtype=torch.bfloat16, device=self.device)
            place = shared[: part.numel()]

            def one_shot(part: Tensor = part, place: Tensor = place) -> None:
                name = group.group_name  # type: ignore[union-attr]
                torch.ops.symm_mem.one_shot_all_reduce_copy(place, part, "sum", name)

            def library(part: Tensor = part) -> None:
                dist.all_reduce(part)

            def ours(part: Tensor = part) -> None:
                ranks.sum(part, part)

            for name, call in (("library", library), ("one-shot", one_shot), ("with residual", ours)):
                found.setdefault(str(kib), {})[name] = self._in_graph(call)
            self.say(f"sum of {kib} KiB: {found[str(kib)]}")
        return found

    def _in_graph(self, call: Callable[[], None]) -> float:
        import torch

        call()
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(SUMS_A_GRAPH):
                call()
        graph.replay()
        times = []
        for _ in range(5):
            self.barrier()
            times.append(timing.wall_ms(self.device, graph.replay) * 1e3 / SUMS_A_GRAPH)
        return median(times)


def _owning(model: Any) -> Any:
    """The model, each of its parameters with memory of its own: of a tensor on its device the loader keeps views."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for parameter in model.parameters():
            part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            part.data = part.data.clone(memory_format=torch.contiguous_format)
    return model


def _rows_and_tokens(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",") if part]
    return [(int(rows), int(tokens)) for rows, tokens in pairs]


def _sides(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    unknown = [side for side in asked if side not in ALL_SIDES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: a side is one of {', '.join(ALL_SIDES)}")
    return tuple(side for side in ALL_SIDES if side in asked)


def main() -> None:
    """One process of a measurement."""
    import torch.distributed as dist

    made = argparse.ArgumentParser(prog="python -m rewrite.benchmark.rank_speed", description=__doc__)
    made.add_argument("package", type=Path)
    made.add_argument("--original")
    made.add_argument("--shape")
    made.add_argument("--layers", type=int, help="fewer than the shape has")
    made.add_argument("--weights")
    made.add_argument("--device", default="cuda")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--prompts", type=lambda text: [int(part) for part in text.split(",") if part], default=[])
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--parity-tokens", type=int, default=32)
    made.add_argument("--sides", type=_sides, default=SIDES, help=f"of {', '.join(ALL_SIDES)}")
    made.add_argument("--agree", type=_rows_and_tokens, default=[], metavar="ROWSxTOKENS", help="compare so many")
    made.add_argument("--no-sums", dest="sums", action="store_false", help="do not time single sums")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--json", type=Path)
    given = made.parse_args()
    run = _Run(given)
    run.everything()
    run.models.clear()  # with their graphs, which hold on to what is destroyed now
    gc.collect()
    run.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
