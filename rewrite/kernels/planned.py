"""The launches of a decode step on a card: collected and compiled, not run, in a process that pretends to be there."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rewrite.errors import RewriteError

from . import issued, kernel_run
from .cards import CARDS
from .chips import MODELLED, SIMDS, occupancy
from .compile_work import pretended, read
from .model_sizes import STEPS

_START = (
    "import sys; sys.path[:] = sys.argv[3].split('\\n'); "
    "from rewrite.kernels.planned import work; work(*sys.argv[1:3], *sys.argv[4:])"
)
LIBRARY = "torch's own product"


@dataclass(frozen=True)
class Planned:
    """One launch of a step and what it takes of the card."""

    part: str
    """Which operator of the step it belongs to."""
    kernel: str
    """`LIBRARY` where the tables leave the product to torch."""
    count: int
    """How often in a step."""
    moved: int
    """Bytes of weights and cache."""
    programs: int = 0
    threads: int = 0
    """Of a program."""
    resident: int = 0
    """Programs that one processor holds at a time."""
    registers: int = 0
    """Of a thread."""
    shared: int = 0
    """Bytes of a program."""
    matrix: bool = False
    """Whether matrix instructions multiply."""
    overlaps: bool = False
    """Whether it begins before the launch ahead has ended."""
    vector: int = 0
    """Cycles that a wave takes of its SIMD unit, where the assembly says so (AMD); likewise the next four."""
    multiply: int = 0
    """Of its matrix cores."""
    lds: int = 0
    """Of the compute unit's LDS."""
    cache: int = 0
    """Of its first-level cache."""
    tail: int = 0
    """Of its SIMD unit, in the last program to count itself, behind all others."""
    flight: int = 0
    """Bytes of weights and cache that a thread has on their way at most."""


Plans = dict[int, list[Planned]]
"""The launches of a step, by its rows."""


def plan(card: str, model: str, rows: Sequence[int] = ()) -> Plans:
    """Return the launches of a step on a card of `cards.CARDS`, compiled in a process of its own.

    Args:
        card: its name.
        model: of `models.STEPS`.
        rows: of sequences; all that the model has for none.

    Raises:
        RewriteError: that process failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _START, card, model, "\n".join(sys.path), *map(str, rows)]
        done = subprocess.run(command, capture_output=True, text=True, env=kernel_run.environment(cache), check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RewriteError(f"the step of '{model}' could not be compiled for {card}: {why}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(rows): [Planned(**one) for one in launches] for rows, launches in found.items()}


def work(card_name: str, model: str, *rows: str) -> None:
    """Print the launches of a step as one line of JSON; for a process that has not imported the runtime."""
    from hf_rewrite_runtime.launching import launch

    card = CARDS[card_name]
    chip = MODELLED[card.arch]
    triton = pretended(chip, launch)
    tiles = importlib.import_module("hf_rewrite_runtime.launching.tiles")
    tiles.try_out(tiles.MEASURED.get(card.device, {}))
    cuobjdump = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    wanted = tuple(map(int, rows)) or STEPS[model].rows
    found = {count: list(map(asdict, _launches(chip, model, count, cuobjdump))) for count in wanted}
    print(json.dumps(found))


def _launches(chip: Any, model: str, rows: int, cuobjdump: Path) -> Iterator[Planned]:
    torch = importlib.import_module("torch")
    launch = importlib.import_module("hf_rewrite_runtime.launching.launch")
    steps = importlib.import_module("rewrite.kernels.step_launches")
    with torch.no_grad(), launch.rehearsing():
        for part in steps.parts(STEPS[model], rows):
            collected: list[Any] = []
            launch.collect(lambda key, planned, into=collected: into.append(planned))
            try:
                part.call()
            finally:
                launch.collect(None)
            if not collected:
                yield Planned(part.name, LIBRARY, part.count, part.moved)
            shares = _shares(part.moved, [one.kernel.jit_function.__name__ for one in collected])
            for one, moved in zip(collected, shares, strict=True):
                yield _of(chip, one, Planned(part.name, "", part.count, moved), cuobjdump)


def _shares(moved: int, kernels: list[str]) -> list[int]:
    """Return what each launch of a part moves: the first all of it, of experts two thirds and one third."""
    if len(kernels) == 2 and ("experts" in kernels[0] or "joined" in kernels[0]):
        return [2 * moved // 3, moved - 2 * moved // 3]
    return [moved, *[0] * (len(kernels) - 1)] if kernels else []


def _of(chip: Any, one: Any, planned: Planned, cuobjdump: Path) -> Planned:
    compiled = one()
    figures = read(chip, compiled, cuobjdump)
    threads = one.options["num_warps"] * chip.wave
    shared = compiled.metadata.shared
    waves = occupancy(chip, threads, figures.registers, figures.scalars, shared)
    programs = one.grid[0] * one.grid[1] * one.grid[2]
    if chip.backend == "hip":
        taken = issued.of_amd(compiled.asm["amdgcn"], planned.moved / programs / threads)
        planned = replace(
            planned, vector=round(taken.vector), multiply=round(taken.matrix), lds=round(taken.lds),
            cache=round(taken.cache), tail=round(taken.tail), flight=taken.flight,
        )  # fmt: skip
    return replace(
        planned,
        kernel=one.kernel.jit_function.__name__.strip("_").removesuffix("_kernel"),
        programs=programs,
        threads=threads,
        resident=int(waves * SIMDS / (threads / chip.wave)),
        registers=figures.registers,
        shared=shared,
        matrix=figures.matrix,
        overlaps=figures.overlaps,
    )


def write(path: Path, plans: Mapping[tuple[str, str], Plans]) -> None:
    """Write the launches of steps, by card and model: one a line, so that a change is one line of a diff."""
    steps = []
    for (card, model), found in plans.items():
        for rows, launches in found.items():
            lines = ",\n".join(f"   {json.dumps(astuple(one))}" for one in launches)
            steps.append(f"  {json.dumps(f'{card} {model} {rows}')}: [\n{lines}\n  ]")
    columns = json.dumps([field.name for field in fields(Planned)])
    path.write_text(f'{{\n "columns": {columns},\n "steps": {{\n' + ",\n".join(steps) + "\n }\n}\n", encoding="utf-8")


def load(path: Path) -> dict[tuple[str, str], Plans]:
    """Read a file that `write` wrote."""
    plans: dict[tuple[str, str], Plans] = {}
    for name, launches in json.loads(path.read_text(encoding="utf-8"))["steps"].items():
        card, model, rows = name.split()
        plans.setdefault((card, model), {})[int(rows)] = [Planned(*one) for one in launches]
    return plans
