"""`rewrite bench --tp N`: a package on N cards beside its original there, and beside both on one.

The measurement runs under torchrun, one process a card. The first process also has both models whole; while it times
those, the others wait. Decode times are slopes between a short and a long generation, taken in turn, by the clock of
the first process. Weights go through a checkpoint on disk and `from_pretrained(tp_plan="auto")`, as a user's do.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.measure import timing
from rewrite.measure.presets import config_for
from rewrite.measure.processes import launch
from rewrite.measure.runtime_part import runtime_part

from . import parity
from .contenders import Generating
from .models import build, from_checkpoint, load, settled, sharing
from .plan import Plan, plain, write_json
from .tables import Table, narrow, ratio_text

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL, OURS, ORIGINAL_TP, OURS_TP = "original", "ours", "original_tp", "ours_tp"
SIDES = (ORIGINAL, OURS, ORIGINAL_TP, OURS_TP)
SHORT = 8
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
        launch("rewrite.benchmark.ranks", ranks, arguments, "the measurement")
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
        with tempfile.TemporaryDirectory() as own:
            self._load(Path(own))
        for batch in self.given.batch:
            self._decode(batch)
        for length in self.given.prompts:
            self._prompt(length)
        if self.gpu:
            self.record["sums_us"] = self._sums()
        explanation = str(self.subject.explain(self.models[OURS_TP]))
        self.record["explain"] = explanation
        self.say(explanation)
        return self.record

    def _load(self, own: Path) -> None:
        import torch.distributed as dist

        given = self.given
        place = [given.weights or str(own)]
        dist.broadcast_object_list(place, src=0)
        if self.rank == 0:
            if given.weights:
                whole = from_checkpoint(self.subject.original, given.weights, given.dtype, self.device)
            else:
                overrides = {"num_hidden_layers": given.layers} if given.layers else {}
                config = config_for(self.subject.original.config_class, given.shape, **overrides)
                whole = build(self.subject.original, config, given.dtype, self.device)
                whole.save_pretrained(place[0], max_shard_size="2GB")
            self.models[ORIGINAL] = whole
            self.models[OURS] = sharing(self.subject.rewritten, whole)
            self._count(ORIGINAL, sum(p.nbytes for p in {id(p): p for p in whole.parameters()}.values()))
            self._count(OURS, self.record["weights_bytes"][ORIGINAL])
            self.say("whole models are there")
        self.barrier()
        for side, kind in ((ORIGINAL_TP, self.subject.original), (OURS_TP, self.subject.rewritten)):
            before = self._allocated()
            self.models[side] = self._dealt(kind, place[0])
            self._count(side, self._allocated() - before)
            self.say(f"{side}: {self.record['weights_bytes'][side] / 1e9:.2f} GB a rank")
        if self.given.device == "cpu":
            type(self.models[OURS_TP])._step_without_graph = True

    def _dealt(self, kind: Any, folder: str) -> Any:
        import torch

        dtype = getattr(torch, self.given.dtype)
        return settled(kind.from_pretrained(folder, dtype=dtype, tp_plan="auto"))

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
        for side in SIDES:  # warm: compiled, packed, captured, and captured anew now that weights have moved
            began = time.perf_counter()
            before = self._allocated()
            for _ in range(2 if side in (OURS, OURS_TP) else 1):
                self._time(side, lambda side=side: self._generate(side, prompt, SHORT + 4))  # type: ignore[misc]
            more = self._allocated() - before
            self.say(f"{side}: first call {time.perf_counter() - began:.1f} s, {more / 1e6:.0f} MB more")

        def slope(side: str) -> float:
            few = self._time(side, lambda: self._generate(side, prompt, SHORT))
            count = long if side in (OURS, OURS_TP) else SHORT + max((long - SHORT) // 4, 8)
            many = self._time(side, lambda: self._generate(side, prompt, count))
            return (many - few) / (count - SHORT)

        calls = {side: lambda _, side=side: slope(side) for side in SIDES}
        times = timing.interleaved(calls, (given.rounds, given.rounds), 0.0)
        entry: dict[str, Any] = {
            "batch": batch,
            "context": given.context,
            "ms": {side: median(times[side]) for side in SIDES},
        }
        if self.rank == 0:
            for name, slow, fast in (("one card", OURS, OURS_TP), ("original", ORIGINAL_TP, OURS_TP)):
                entry[f"against {name}"] = timing.ratio(times[slow], times[fast])
            entry["times"] = times
        self.say(f"batch {batch}: " + ", ".join(f"{side} {ms:.3f}" for side, ms in entry["ms"].items()))
        tokens = {side: self._generate(side, prompt, given.parity_tokens) for side in (OURS_TP, OURS, ORIGINAL_TP)}
        entry["ranks_agree"] = self._ranks_agree(tokens[OURS_TP])
        if self.rank == 0:
            expected = parity.truth(self.models[ORIGINAL], prompt, given.parity_tokens)
            found = {s: parity.compare(self.models[ORIGINAL], expected, t) for s, t in tokens.items() if t is not None}
            entry["parity"] = {side: {"passed": p.passed, "summary": p.summary} for side, p in found.items()}
            for side, judged in found.items():
                self.say(f"  {side}: {'agrees' if judged.passed else 'DIFFERS'}: {judged.summary}")
        torch.manual_seed(self.rank)
        drawn = self.models[OURS_TP].generate(prompt, do_sample=True, max_new_tokens=given.parity_tokens)
        entry["ranks_draw_alike"] = self._ranks_agree(drawn)
        self.say(f"  ranks agree: {entry['ranks_agree']}, drawn {entry['ranks_draw_alike']}")
        self.record["decode"].append(entry)
        self.barrier()

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
            side: lambda _, side=side: self._time(side, lambda: self._generate(side, prompt, 2)) for side in SIDES
        }
        timing.interleaved(calls, (1, 1), 0.0)
        times = timing.interleaved(calls, (self.given.rounds, self.given.rounds), 0.0)
        entry: dict[str, Any] = {"tokens": length, "ms": {side: median(times[side]) for side in SIDES}}
        if self.rank == 0:
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
        ranks = runtime_part(package, "parallel/ranks").ranks_of(dealt.device_mesh)
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


def tables(record: dict[str, Any]) -> list[Table]:
    """The figures as tables."""
    ranks = record["ranks"]
    titles = {
        ORIGINAL: "original, one card",
        OURS: "rewritten, one card",
        ORIGINAL_TP: f"original, {ranks} ranks",
        OURS_TP: f"rewritten, {ranks} ranks",
    }
    found = []
    for entry in record["decode"]:
        rows = []
        for side in SIDES:
            size = record["weights_bytes"].get(side, 0)
            said = entry["parity"].get(side)
            agrees = "" if said is None else "agree" if said["passed"] else "DIFFER"
            rows.append((titles[side], narrow(entry["ms"][side]), f"{size / 1e9:.2f}" if size else "–", agrees))
        notes = [
            f"{ranks} ranks against {name}: {ratio_text(entry[f'against {name}'])}"
            for name in ("one card", "original")
        ]
        notes += [f"{titles[side]}: {said['summary']}" for side, said in entry["parity"].items() if not said["passed"]]
        notes += [] if entry["ranks_agree"] and entry["ranks_draw_alike"] else ["THE RANKS GENERATE DIFFERENT TOKENS"]
        title = f"decode, batch {entry['batch']}, {entry['context']} tokens before"
        found.append(Table(title, ("", "ms/token", "GB a rank", "tokens"), tuple(rows), tuple(notes)))
    if record["prompts"]:
        headings = ("", *(f"{entry['tokens']} tokens" for entry in record["prompts"]))
        lines = [(titles[side], *(narrow(e["ms"][side], 2) for e in record["prompts"])) for side in SIDES]
        found.append(Table("prompt and two tokens, batch 1, ms", headings, tuple(lines)))
    if record.get("sums_us"):
        lines = [(f"{kib} KiB", *(narrow(us, 1) for us in kinds.values())) for kib, kinds in record["sums_us"].items()]
        headings = ("", "library", "one-shot", "the package's, with a residual")
        found.append(Table("one sum over the ranks in a graph, µs", headings, tuple(lines)))
    return found


def exit_code(record: dict[str, Any]) -> int:
    """0, or 1 where tokens differ, or where the ranks are slower than the original's."""
    for entry in record["decode"]:
        own = entry["parity"]
        # Experts chosen by a rounding: then the original's own ranks do not agree with one card either.
        explained = own[OURS_TP]["passed"] or not own[ORIGINAL_TP]["passed"]
        agrees = entry["ranks_agree"] and entry["ranks_draw_alike"] and explained
        if not agrees or entry["against original"]["high"] < 1.0:
            return 1
    return 0


def main() -> None:
    """One process of a measurement."""
    import torch.distributed as dist

    made = argparse.ArgumentParser(prog="python -m rewrite.benchmark.ranks", description=__doc__)
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
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--json", type=Path)
    given = made.parse_args()
    run = _Run(given)
    record = run.everything()
    if run.rank == 0 and given.json is not None:
        write_json(given.json, plain(record))
    run.models.clear()  # with their graphs, which hold on to what is destroyed now
    gc.collect()
    run.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
