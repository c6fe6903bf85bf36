"""Which instructions Triton emits for the catalogue's kernels: `python -m tests.emulator.mnemonics [--record FILE]`.

Compiles every launch of the catalogue for a chip with the Triton that is installed, has the emulator read every line,
and prints the mnemonics with how often each occurs; those that the emulator does not know are marked, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rewrite.kernels.kernel_run import environment

from .emulation_options import AMD
from .results import ROOT, run_as

RECORDS = ROOT / "fixtures/kernels"
_MARK = "mnemonics "


def emitted(chip: str, kernels: Iterable[str] = ()) -> dict[str, dict[str, int]]:
    """Return the mnemonics of a chip's kernels, without their forms: how often, and how often unknown."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _START, str(ROOT / "tests"), chip, *kernels]
        done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert lines, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(lines[-1].removeprefix(_MARK))
    return found


_START = "import sys; sys.path.insert(0, sys.argv[1]); from emulator.mnemonics import work; work(*sys.argv[2:])"


def work(chip: str, *kernels: str) -> None:
    """Print what `emitted` returns; for a process that has not imported the runtime."""
    from hf_rewrite_runtime.launching import launch
    from rewrite.kernels.chips import CHIPS
    from rewrite.kernels.compile_work import pretended

    from .assembly_text import listing
    from .isa_errors import UnknownInstruction
    from .machine import assemble

    pretended(CHIPS[chip], launch)
    catalogue, cases = (importlib.import_module(f"rewrite.kernels.{name}") for name in ("catalogue", "kernel_cases"))
    count: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for entry in cases.entries(catalogue.cases()):
        if kernels and entry.kernel not in kernels:
            continue
        found = listing(entry.launch().asm["amdgcn"])
        for one in found.instructions:
            count[one.name] += 1
            try:
                assemble(one, chip, found.labels)
            except UnknownInstruction:
                unknown[one.name] += 1
    print(_MARK + json.dumps({"emitted": dict(sorted(count.items())), "unknown": dict(unknown)}))


def recorded() -> set[str]:
    """Return the mnemonics of every record: of all chips and versions of Triton that were asked."""
    files = RECORDS.glob("mnemonics-*.json")
    return {name for file in files for names in json.loads(file.read_text("utf-8")).values() for name in names}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=", ".join(AMD))
    parser.add_argument("--record", type=Path, help="write the names, a list for each chip")
    given = parser.parse_args()
    found = {chip: emitted(chip) for chip in given.chips or AMD}
    for chip, names in found.items():
        print(f"{chip}: {len(names['emitted'])} mnemonics, {sum(names['emitted'].values())} instructions")
        for name, count in names["emitted"].items():
            mark = f"  UNKNOWN in {names['unknown'][name]}" if name in names["unknown"] else ""
            print(f"  {count:7} {name}{mark}")
    unknown = sorted({name for names in found.values() for name in names["unknown"]})
    print(f"unknown: {', '.join(unknown) or 'none'}")
    if given.record is not None:
        lines = {chip: list(names["emitted"]) for chip, names in found.items()}
        given.record.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(unknown))


if __name__ == "__main__":
    run_as("mnemonics")
