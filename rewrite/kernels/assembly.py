"""Reads what a compiler made: registers, spills, and how many bits each load takes at once."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import last_arrivals

Widths = dict[int, int]
"""How many instructions move so many bits a thread."""

_AMD_GLOBAL = re.compile(r"^\s+(?:global|buffer|flat)_load_(?:lds_)?(\w+)", re.M)
_AMD_SHARED = re.compile(r"^\s+ds_read(2)?(?:st64)?_([bui]\d+)", re.M)
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_LOAD = re.compile(r"\bld\.(global|shared)([.:\w]*)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*,")
_MATRIX = re.compile(r"\bldmatrix\.sync\.aligned\.m8n8\.x(\d)")


@dataclass(frozen=True)
class Figures:
    """What a kernel takes of its chip."""

    registers: int
    """Vector registers of a thread, accumulators included."""
    accumulators: int
    """Of these, those that only matrix instructions use (AMD's AGPRs)."""
    scalars: int | None
    """Scalar registers of a wave; NVIDIA has none to count."""
    spills: int
    """What is kept in memory for want of registers: AMD vector registers, NVIDIA bytes."""
    scalar_spills: int
    """Scalar registers kept in lanes of vector registers, which costs no memory."""
    code: int | None
    """Bytes."""
    loads: Widths
    """Of global memory."""
    shared_loads: Widths
    matrix: bool
    """Whether matrix instructions multiply."""
    overlaps: bool
    """Whether it waits for the kernel before it, as a programmatic dependent launch does."""
    arrivals: int = 0
    """Atomic operations by which its programs count themselves, where a barrier does not order stores (AMD)."""
    early: int = 0
    """Of these and of the loads after them, those that `last_arrivals` finds too early."""


def of_amd(text: str) -> Figures:
    """Read AMD's assembly, with the metadata at its end."""
    spills, scratch = _number(".vgpr_spill_count", text), _number(".private_segment_fixed_size", text)
    counted = last_arrivals.of_amd(text)
    pairs = [(2 if twice else 1, int(kind[1:])) for twice, kind in _AMD_SHARED.findall(text)]
    return Figures(
        registers=_number(".vgpr_count", text),
        accumulators=_number(".agpr_count", text),
        scalars=_number(".sgpr_count", text),
        spills=spills or scratch // 4,
        scalar_spills=_number(".sgpr_spill_count", text),
        code=int(re.findall(r"codeLenInByte = (\d+)", text)[0]),
        loads=_counted(_amd_width(kind) for kind in _AMD_GLOBAL.findall(text)),
        shared_loads=_counted(width for count, width in pairs for _ in range(count)),
        matrix="v_mfma_" in text,
        overlaps=False,
        arrivals=counted.count,
        early=counted.early + counted.early_reads,
    )


def _amd_width(kind: str) -> int:
    found = _AMD_WIDTHS.get(kind.split("_")[0])
    return found or (8 if "byte" in kind else 16)


def _number(name: str, text: str) -> int:
    return int(re.findall(rf"{re.escape(name)}:\s+(\d+)", text)[0])


def of_nvidia(ptx: str, cubin: bytes, tool: Path) -> Figures:
    """Read NVIDIA's assembly, and of the binary what `tool` (cuobjdump) says of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    taken = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    found: dict[str, list[int]] = {"global": [], "shared": []}
    for space, kind in _LOAD.findall(ptx):
        found[space].append(_nvidia_width(kind))
    found["global"] += [int(size, 0) * 8 for size in _COPY.findall(ptx)]
    found["shared"] += [int(count) * 32 for count in _MATRIX.findall(ptx)]
    return Figures(
        registers=taken["REG"],
        accumulators=0,
        scalars=None,
        spills=taken["STACK"] + taken["LOCAL"],
        scalar_spills=0,
        code=None,
        loads=_counted(found["global"]),
        shared_loads=_counted(found["shared"]),
        matrix=bool(re.search(r"\b((wg)?mma(\.sync|_async|\.mma_async)|tcgen05\.mma)", ptx)),
        overlaps="griddepcontrol.wait" in ptx,
    )


def _nvidia_width(kind: str) -> int:
    vector, element = re.search(r"\.v(\d)", kind), re.findall(r"\.[bsuf](\d+)", kind)
    return int(element[-1]) * (int(vector[1]) if vector else 1)


def _counted(widths: Iterable[int]) -> Widths:
    return dict(sorted(Counter(widths).items(), reverse=True))


def share_below(widths: Widths, bits: int) -> float:
    """Return which part of all bits comes in instructions that move fewer than `bits`."""
    total = sum(width * count for width, count in widths.items())
    return sum(width * count for width, count in widths.items() if width < bits) / total if total else 0.0
