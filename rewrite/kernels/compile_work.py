"""Compiles a part of the catalogue for one chip, in a process that may die of it, and prints a line for each launch.

A fatal error inside a compiler cannot be caught: `run` starts this again behind the launch that it died of.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .assembly import Figures, Row, of_amd, of_nvidia
from .chips import CHIPS, Chip, occupancy

MARK = "kernel-row "
COUNT = "kernel-rows "
"""Begins the lines for `run`: compilers print what they like."""


def work(arch: str, module: str, kernels: Sequence[str], one_of_each: bool, part: int, parts: int, start: int) -> None:
    """Compile every `parts`-th launch of `module.cases()`, and print each before it is compiled and after.

    Args:
        arch: of `chips.CHIPS`.
        module: to import once the runtime pretends to be on the chip.
        kernels: names of those wanted; none for all.
        one_of_each: only the first launch of each kernel.
        part: which launches of every `parts` are this process's.
        parts: how many processes share the chip.
        start: how many of its own this process leaves out: a process before it has done them.
    """
    from hf_rewrite_runtime.launching import launch

    chip = CHIPS[arch]
    triton = pretended(chip, launch)
    catalogue = importlib.import_module(module)
    from .kernel_cases import entries

    cuobjdump = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    wanted = [entry for entry in entries(catalogue.cases()) if not kernels or entry.kernel in kernels]
    if one_of_each:
        wanted = list({entry.kernel: entry for entry in reversed(wanted)}.values())[::-1]
    print(f"{COUNT}{len(wanted[part::parts])}", flush=True)
    for entry in wanted[part::parts][start:]:
        options = entry.launch.options
        threads = options["num_warps"] * chip.wave
        row = Row(arch, entry.kernel, entry.shape, threads, options, compiler=f"triton {triton.__version__}")
        _tell(row)
        compiled = entry.launch()
        figures = read(chip, compiled, cuobjdump)
        shared = compiled.metadata.shared
        waves = occupancy(chip, row.threads, figures.registers, figures.scalars, shared)
        _tell(replace(row, figures=figures, shared=shared, occupancy=waves))


def read(chip: Chip, compiled: Any, cuobjdump: Path) -> Figures:
    """Return what a compiled kernel takes."""
    if chip.backend == "hip":
        return of_amd(compiled.asm["amdgcn"], compiled.asm["ttgir"])
    return of_nvidia(compiled.asm["ptx"], compiled.asm["cubin"], cuobjdump)


def pretended(chip: Chip, launch: Any) -> Any:
    """Let Triton and the runtime's `launch` act as on a chip for the rest of the process; return Triton."""
    launch.pretend(launch.Target(chip.backend, chip.arch, chip.processors, chip.shared_of_group))
    triton = importlib.import_module("triton")
    triton.runtime.driver.set_active(Driver(chip))
    return triton


def _tell(row: Row) -> None:
    print(MARK + json.dumps(row.to_json()), flush=True)


class Driver:
    """What Triton asks of the driver of a GPU in order to compile for it.

    Args:
        chip: that the GPU has.
    """

    def __init__(self, chip: Chip):
        self.chip = chip

    def get_current_target(self) -> Any:
        """Return it, as Triton's compiler takes it."""
        compiler = importlib.import_module("triton.backends.compiler")
        arch = self.chip.arch
        return compiler.GPUTarget(self.chip.backend, int(arch[3:]) if arch.startswith("sm_") else arch, self.chip.wave)

    def get_current_device(self) -> int:
        """Return the first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0
