"""Compares the launches of one vendor, in a process of its own, and prints a line for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewrite.kernels.kernel_cases import Entry

MARK, COUNT = "exact-row ", "exact-rows "
"""Begins the lines for `exact_run`."""
CHIPS = {"cuda": "sm_90", "hip": "gfx942"}
"""The chip that a process pretends to be on, by its vendor: of the others it takes the forms."""


def work(backend: str, kernels: Sequence[str], part: int, parts: int, every: int) -> None:
    """Compare every `parts`-th launch, and print how it ended.

    Args:
        backend: `cuda` or `hip`.
        kernels: names of those wanted; none for all.
        part: which launches of every `parts` are this process's.
        parts: how many processes share them.
        every: of a kernel's launches only every so manieth, but for the first.
    """
    import torch

    from hf_rewrite_runtime.launching import launch
    from rewrite.kernels.chips import CHIPS as KNOWN

    torch.set_num_threads(1)
    chip = KNOWN[CHIPS[backend]]
    launch.pretend(launch.Target(backend, chip.arch, chip.processors, chip.shared_of_group))
    from . import exact_forms, exact_launch, interpreted_ring
    from .references import REFERENCES, UNSEEN

    wanted = [entry for entry in exact_forms.launches(backend) if not kernels or entry.kernel in kernels]
    by_kernel: dict[str, list[Entry]] = {}
    for entry in wanted:
        by_kernel.setdefault(entry.kernel, []).append(entry)
    wanted = [entry for entries in by_kernel.values() for entry in entries[::every]]
    print(f"{COUNT}{len(wanted[part::parts])}", flush=True)
    interpreted_ring.install()
    for entry in wanted[part::parts]:
        row = {"backend": backend, "kernel": entry.kernel, "shape": entry.shape, "differs": "", "unseen": ""}
        try:
            row["unseen"] = UNSEEN.get(entry.kernel) or exact_launch.run(entry.launch, REFERENCES[entry.kernel])
        except exact_launch.Differs as error:
            row["differs"] = f"{error}, in the form {exact_launch.form(entry.launch)}"
        print(MARK + json.dumps(row), flush=True)
