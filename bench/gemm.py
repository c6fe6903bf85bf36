"""Time products of few rows against cuBLAS on the projections of Llama models, and find the fastest forms.

    python bench/gemm.py --json gemm.json --for 230

Every contender runs inside a CUDA graph over copies of the weight that together are three times larger than the L2
cache. Contenders are timed in turn, replay by replay, and the median is kept. What a graph computed is compared with
fp32 before its time counts. Kernels compile in threads while the case before is measured; cases come in order of
importance and are printed as they are done.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rewrite_runtime.device import graph_capture
from hf_rewrite_runtime.launching import launch, tiles
from hf_rewrite_runtime.linear.skinny import HEIGHTS, Form
from rewrite.tuning.candidates import one_row

linear = importlib.import_module("hf_rewrite_runtime.linear.gemv")
skinny = importlib.import_module("hf_rewrite_runtime.linear.skinny")

PEAK = 3.35e12
"""Bytes a second of an H100 SXM, by its data sheet."""
PROCESSORS = 132
SHARED_BYTES = 227 << 10
ROTATED_BYTES = 150 << 20
GRAPH_US = 300.0
SCREENING, FINAL, FINALISTS = 5, 21, 8
FIRST, AROUND = 30, 24
"""Forms that are tried from the start, besides the likely ones, and around the best of those."""
LIKELY = (
    (64, 256, 4, 1, 3), (64, 128, 4, 1, 5), (64, 128, 4, 1, 3), (64, 256, 4, 4, 3), (64, 128, 4, 2, 5),
    (64, 64, 4, 1, 5), (64, 256, 4, 2, 4), (64, 128, 4, 4, 5), (64, 128, 4, 3, 4), (128, 128, 4, 1, 2),
    (128, 128, 4, 1, 4), (128, 128, 8, 1, 4), (128, 64, 4, 1, 5), (32, 256, 2, 1, 6), (16, 512, 2, 1, 5),
)  # fmt: skip
"""What won some case or other before."""

LAYERS = {
    "1B": {"qkv": (3072, 2048), "gate-up": (16384, 2048), "down": (2048, 8192), "o": (2048, 2048)},
    "8B": {"qkv": (6144, 4096), "gate-up": (28672, 4096), "down": (4096, 14336), "o": (4096, 4096)},
    "70B": {"qkv": (10240, 8192), "gate-up": (57344, 8192), "down": (8192, 28672), "o": (8192, 8192)},
}
HEADS = {"1B": (128256, 2048), "8B": (128256, 4096), "70B": (128256, 8192)}
SIZES = {model: layers | {"head": HEADS[model]} for model, layers in LAYERS.items()}


@dataclass(frozen=True)
class Case:
    """One product: `rows` of input with a weight `[outputs, inputs]`."""

    model: str
    layer: str
    outputs: int
    inputs: int
    rows: int

    @property
    def weight_bytes(self) -> int:
        return 2 * self.outputs * self.inputs


@dataclass(frozen=True)
class Contender:
    """One way to compute a product."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], None]
    """Of input, weight and output."""
    form: tuple[int, ...] = ()


@dataclass
class Result:
    """One row of the table; times in microseconds of a call, errors relative to fp32."""

    case: Case
    us: dict[str, float]
    error: dict[str, float]
    kind: str
    form: tuple[int, ...]
    tried: int
    others: list[tuple[str, tuple[int, ...], float]] = field(default_factory=list)
    by_rule: float | None = None
    """Microseconds of the form for a shape that was not measured, as it was screened."""

    @property
    def vendor(self) -> float:
        return min(self.us["cublas"], self.us["cublaslt"])

    @property
    def ratio(self) -> float:
        return self.vendor / self.us["ours"]


def cases(rows: Sequence[int], layers: Sequence[str], models: Sequence[str]) -> list[Case]:
    """Every case; those that have to hold first."""
    found = [Case(model, layer, *SIZES[model][layer], count) for count in rows for model in models for layer in layers]
    return sorted(found, key=lambda case: (case.layer in ("o", "head"), case.rows > 16))


# ---- contenders ----


def vendor(name: str, library: str) -> Contender:
    def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.backends.cuda.preferred_blas_library(library)
        torch.mm(x, weight.t(), out=out)

    return Contender(name, run)


def skinny_of(form: Form) -> Contender:
    return Contender(
        "skinny " + shown(form),
        lambda x, weight, out: skinny.launch_skinny_linear(x, weight, None, None, None, out, form),
        tuple(map(int, form)),
    )


def vector_of(tile: tuple[int, int, int]) -> Contender:
    return Contender(
        "linear " + shown(tile),
        lambda x, weight, out: linear.launch_linear(x, linear.Weight(weight), None, None, None, out, tile),
        tile,
    )


def shown(form: Sequence[int]) -> str:
    return "/".join(str(int(part)) for part in form)


def height_of(rows: int) -> int:
    return min(size for size in HEIGHTS if size >= rows)


def allowed(case: Case, form: Form) -> bool:
    block_rows, block_cols, warps, splits, stages = form
    shared = (stages + 1) * (block_rows + height_of(case.rows)) * block_cols * 2  # the first tile stands alone
    programs = -(-case.outputs // block_rows) * splits
    return (
        block_cols * splits <= case.inputs
        and shared <= SHARED_BYTES
        and block_rows >= 8 * warps
        and programs <= 132 * 64
        and programs >= 64
        and (splits == 1 or programs <= 132 * 16)
        and block_rows * block_cols // (32 * warps) <= 256
        and 2 <= stages <= 8
    )


def estimate(case: Case, form: Form) -> float:
    """A guess at the microseconds, to choose what is tried first."""
    block_rows, block_cols, warps, splits, stages = form
    height, rows = height_of(case.rows), case.rows
    shared = stages * (block_rows + height) * block_cols * 2
    programs = -(-case.outputs // block_rows) * splits
    resident = min(SHARED_BYTES // shared, 2048 // (32 * warps), 16)
    here = min(resident, programs / PROCESSORS)
    in_flight = here * (stages - 1) * block_rows * block_cols * 2
    turns = programs / PROCESSORS
    uneven = math.ceil(turns) / turns if turns < 8 else 1.0
    tiles_each = case.inputs / (splits * block_cols)
    read = case.weight_bytes / 3.0e6 * max(1.0, 40e3 / in_flight) * (1 + 0.5 * (uneven - 1))
    again = case.inputs * 2 * rows * -(-case.outputs // block_rows) / 6e6
    parts = 8 * case.outputs * rows * splits / 5e6 + 0.7 if splits > 1 else 0.0
    return read + 0.7 * again + parts + (0.3 * stages / tiles_each if tiles_each < stages else 0.0)


def first_forms(case: Case) -> list[Form]:
    """The forms that are tried from the start: the best guesses, of each block the best ones."""
    every = [
        Form(*parts)
        for parts in itertools.product(
            (16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 16), (3, 4, 5, 7)
        )
    ]
    known = [Form(*tiles.rule("skinny_linear", case.outputs, case.inputs)), *(Form(*parts) for parts in LIKELY)]
    ranked = sorted(
        (form for form in every if allowed(case, form)),
        key=lambda form: (estimate(case, form), abs(form.num_warps - 4)),
    )
    turns: dict[tuple[int, ...], int] = {}
    numbered = []
    for place, form in enumerate(ranked):
        group = (form.block_rows, form.block_cols, form.num_warps, form.splits > 1)
        turns[group] = turns.get(group, -1) + 1
        numbered.append((turns[group], place, form))
    found = [form for _, _, form in sorted(numbered)[:FIRST]]
    return list(dict.fromkeys([*(form for form in known if allowed(case, form)), *found]))


def around(case: Case, form: Form) -> list[Form]:
    """Forms that differ in one field, or in two that keep the memory in flight."""
    block_rows, block_cols, warps, splits, stages = form
    found = [
        *(form._replace(block_cols=n) for n in (block_cols // 2, block_cols * 2)),
        *(form._replace(num_warps=n) for n in (warps // 2, warps * 2)),
        *(form._replace(splits=n) for n in (splits - 1, splits + 1, splits * 2, splits // 2, splits + 2)),
        *(form._replace(stages=n) for n in (stages - 1, stages + 1, stages + 2)),
        form._replace(block_rows=block_rows * 2, splits=splits * 2),
        form._replace(block_rows=block_rows // 2, splits=max(1, splits // 2)),
        form._replace(block_cols=block_cols // 2, stages=stages * 2 - 1),
        form._replace(block_cols=block_cols * 2, stages=stages // 2 + 1),
    ]
    return [
        one
        for one in dict.fromkeys(found)
        if one.block_rows >= 16 and one.block_cols >= 32 and one.num_warps >= 1 and one.splits >= 1
        if one != form and allowed(case, one)
    ]


def contenders_at_first(case: Case) -> list[Contender]:
    first = [skinny_of(form) for form in first_forms(case)]
    if case.rows > 1:
        return first
    rule = tiles.rule("linear", case.outputs, case.inputs)
    vectors = dict.fromkeys([rule, *one_row("linear", case.outputs, case.inputs)[:16]])
    return [vector_of(tile) for tile in vectors] + first[:8]


# ---- running ----


class Sets:
    """Inputs of a case: an input, and weights that together are larger than the L2 cache."""

    def __init__(self, case: Case, copies: int | None = None):
        self.copies = copies or max(2, -(-ROTATED_BYTES // case.weight_bytes))
        self.x = torch.randn(case.rows, case.inputs, device="cuda", dtype=torch.bfloat16)
        one = torch.randn(case.outputs, case.inputs, device="cuda", dtype=torch.bfloat16) * case.inputs**-0.5
        self.weights = [one, *(one.flip(0).roll(number, 0) for number in range(1, self.copies))]
        guess = case.weight_bytes / 2.5e6
        self.launches = self.copies * max(1, math.ceil(GRAPH_US / guess / self.copies))


class Compiler:
    """Compiles kernels in threads."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.pool = ThreadPoolExecutor(
            min(16, os.cpu_count() or 1), initializer=torch.cuda.set_device, initargs=(index,)
        )
        self.seen: set[Any] = set()

    def begin(self, contenders: Iterable[Contender], case: Case, sets: Sets | None = None) -> list[Future[None]]:
        """Compile what contenders launch inside a graph; nothing runs."""
        x = torch.empty(case.rows, case.inputs, device="cuda", dtype=torch.bfloat16) if sets is None else sets.x
        weight = (
            torch.empty(case.outputs, case.inputs, device="cuda", dtype=torch.bfloat16)
            if sets is None
            else sets.weights[0]
        )
        out = torch.empty(case.rows, case.outputs, device="cuda", dtype=torch.bfloat16)
        jobs: list[Callable[[], object]] = []

        def collect(key: Any, compile: Callable[[], object]) -> None:
            if key not in self.seen:
                self.seen.add(key)
                jobs.append(compile)

        launch.collect(collect)
        try:
            with launch.rehearsing():
                for contender in contenders:
                    contender.run(x, weight, out)
        finally:
            launch.collect(None)
        return [self.pool.submit(compiled, job) for job in jobs]


def compiled(job: Callable[[], object]) -> None:
    with contextlib.suppress(*failures()):
        job()


def failures() -> tuple[type[Exception], ...]:
    from triton import TritonError

    return RuntimeError, TritonError


class Program:
    """A graph of one contender over the copies of the weight."""

    def __init__(self, contender: Contender, case: Case, sets: Sets):
        self.contender, self.launches = contender, sets.launches
        self.out = torch.full((case.rows, case.outputs), float("nan"), device="cuda", dtype=torch.bfloat16)

        def run() -> None:
            for number in range(sets.launches):
                contender.run(sets.x, sets.weights[number % sets.copies], self.out)

        self.graph = graph_capture.capture(
            run,
            lambda: contender.run(sets.x, sets.weights[0], self.out),
            sets.x.device,
            torch.cuda.graph_pool_handle(),
        )
        self.last = sets.weights[(sets.launches - 1) % sets.copies]

    def microseconds(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / self.launches


def timed(programs: Sequence[Program], rounds: int) -> list[float]:
    """Median microseconds of each, timed in turn, each round from another one on."""
    times: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for place in range(len(programs)):
            at = (place + number) % len(programs)
            value = programs[at].microseconds()
            if number:
                times[at].append(value)
    return [statistics.median(values) for values in times]


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Launch kernels that start when the one before has ended."""
    before = skinny.overlaps, linear.overlaps
    skinny.overlaps = linear.overlaps = lambda tensor: False
    try:
        yield
    finally:
        skinny.overlaps, linear.overlaps = before


def measure(case: Case, compiler: Compiler, pending: list[Future[None]]) -> Result:
    """Search the forms of a case and compare the best one with cuBLAS."""
    sets = Sets(case)
    tried: dict[str, tuple[float, Contender]] = {}

    def screen(contenders: Sequence[Contender]) -> None:
        programs = []
        for contender in contenders:
            try:
                programs.append(Program(contender, case, sets))
            except failures() as error:
                print(f"    {contender.name} does not run: {str(error)[:80]}", flush=True)
        for program, value in zip(programs, timed(programs, SCREENING), strict=True) if programs else ():
            tried[program.contender.name] = (value, program.contender)

    wait(pending)
    screen(contenders_at_first(case))
    for _ in range(2):
        best = sorted(tried.values(), key=lambda found: found[0])[:2]
        forms = [Form(*one.form) for _, one in best if one.name.startswith("skinny")]
        more = [skinny_of(near) for form in forms for near in around(case, form)]
        fresh = [one for one in {one.name: one for one in more}.values() if one.name not in tried][:AROUND]
        wait(compiler.begin(fresh, case, sets))
        screen(fresh)
    ranked = sorted(tried.values(), key=lambda found: found[0])
    finalists = [one for _, one in ranked[:FINALISTS]]
    libraries = [vendor("cublas", "cublas"), vendor("cublaslt", "cublaslt")]
    programs = [Program(one, case, sets) for one in (*libraries, *finalists)]
    with without_overlap():
        programs += [Program(one, case, sets) for one in finalists]
    torch.backends.cuda.preferred_blas_library("cublas")
    times = timed(programs, FINAL)
    errors = [wrong(program, sets.x) for program in programs]
    library = min(times[:2])
    # The fastest in a step of those that are not slower than cuBLAS where nothing overlaps either.
    ours = min(range(2, 2 + len(finalists)), key=lambda place: (times[place + len(finalists)] > library, times[place]))
    winner = finalists[ours - 2]
    yardstick = max(errors[0], errors[1])
    if not max(errors) <= 2 * yardstick:
        print(f"    WRONG: {winner.name}: relative errors {errors}", flush=True)
    us = {"cublas": times[0], "cublaslt": times[1], "ours": times[ours], "alone": times[ours + len(finalists)]}
    error = {"cublas": errors[0], "cublaslt": errors[1], "ours": errors[ours], "alone": errors[ours + len(finalists)]}
    kind = winner.name.split()[0]
    others = [(one.name.split()[0], one.form, value) for value, one in ranked[:12]]
    ruled = tiles.rule(kind, case.outputs, case.inputs)
    by_rule = tried.get(f"{kind if kind == 'linear' else 'skinny'} {shown(ruled)}")
    return Result(case, us, error, kind, winner.form, len(tried), others, by_rule[0] if by_rule else None)


def wrong(program: Program, x: Tensor) -> float:
    """Relative error of what the graph computed last, the same in every replay."""
    once = program.out.clone()
    program.out.fill_(float("nan"))
    program.graph.replay()
    if not program.contender.name.startswith("cublas") and not torch.equal(once, program.out):
        print(f"    WRONG: {program.contender.name}: another result in another replay", flush=True)
    exact = x.float() @ program.last.float().t()
    return float((program.out.float() - exact).norm() / exact.norm())


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copying 1 GiB."""
    source = torch.randn(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 4 * source.numel() / statistics.median(times)


# ---- printing ----

HEAD = (
    f"{'model':5} {'layer':8} {'weight':>12} {'M':>3} {'cublas':>8} {'lt':>8} {'ours':>8} {'alone':>8} "
    f"{'ratio':>6} {'peak':>5} {'copy':>5}  form"
)


def line(result: Result, bandwidth: float) -> str:
    case, us = result.case, result.us
    moved = case.weight_bytes + 2 * case.rows * (case.inputs + case.outputs)
    rate = moved / (us["ours"] * 1e-6)
    search = f"of {result.tried}; rule {result.by_rule or 0:.2f}"
    return (
        f"{case.model:5} {case.layer:8} {case.outputs:>6}x{case.inputs:<5} {case.rows:>3} {us['cublas']:8.2f} "
        f"{us['cublaslt']:8.2f} {us['ours']:8.2f} {us['alone']:8.2f} {result.ratio:6.2f} {rate / PEAK:5.0%} "
        f"{rate / bandwidth:5.0%}  {result.kind} {shown(result.form)} ({search})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file, anew after every case")
    parser.add_argument(
        "--for", type=float, default=230.0, dest="seconds", help="begin no case after this many seconds"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 1, 32])
    parser.add_argument("--layers", nargs="+", default=["qkv", "gate-up", "down", "o", "head"])
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    import triton

    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}; a 1 GiB copy moves {bandwidth / 1e12:.2f} TB/s\n{HEAD}", flush=True)
    todo = cases(options.rows, options.layers, options.models)
    compiler = Compiler()
    results: list[Result] = []
    pending = compiler.begin(contenders_at_first(todo[0]), todo[0])
    for case, following in itertools.zip_longest(todo, todo[1:]):
        if time.perf_counter() - started > options.seconds:
            print(f"{options.seconds:.0f} s are over: {len(todo) - len(results)} cases are left out", flush=True)
            break
        ahead = [] if following is None else compiler.begin(contenders_at_first(following), following)
        results.append(measure(case, compiler, pending))
        pending = ahead
        print(line(results[-1], bandwidth), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            content = {
                "device": device,
                "copy_bytes_per_s": bandwidth,
                "results": [asdict(result) | {"ratio": result.ratio} for result in results],
            }
            options.json.write_text(json.dumps(content, indent=1))
    below = [result for result in results if result.ratio < 1]
    print(f"{len(results)} cases in {time.perf_counter() - started:.0f} s; slower than cuBLAS: {len(below)}")


if __name__ == "__main__":
    main()
