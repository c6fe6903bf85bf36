"""Reads what a compiler made of a launch: registers, spills, and how many bits each load takes at once."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import last_arrivals

Widths = dict[int, int]
"""How many instructions move so many bits a thread."""

_AMD_GLOBAL = re.compile(r"^\s+(?:global|buffer|flat)_load_(?:lds_)?(\w+)", re.M)
_AMD_SHARED = re.compile(r"^\s+ds_read(2)?(?:st64)?_([bui]\d+)", re.M)
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_AMD_SCRATCH = re.compile(r"^\s+scratch_(?:load|store)_", re.M)
_LOAD = re.compile(r"\bld\.(global|shared)([.:\w]*)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*,")
_MATRIX = re.compile(r"\bldmatrix\.sync\.aligned\.m8n8\.x(\d)")
_VALUE = re.compile(r"\s*(%\w+)(?::\d+)? = (\S+)")
_SLOT = re.compile(r"memdesc_index %\w+\[(%\w+)\] : !ttg\.memdesc<(\d+)x")
_WRITE = re.compile(r"(?:local_store %\w+, |async_copy_global_to_local %\w+, |buffer_load_to_local .* into )(%\w+)")


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
    lost_slots: int = 0
    """Accesses to a ring of LDS slots that leave it, as the function `lost_slots` has it (AMD)."""


@dataclass(frozen=True)
class Row:
    """What the compiler made of a launch, or why it made nothing."""

    arch: str
    kernel: str
    shape: str
    """Of which model or size, and in which form."""
    threads: int
    """Of a workgroup."""
    options: dict[str, int] = field(default_factory=dict)
    """What the compiler was given, as at a launch."""
    figures: Figures | None = None
    shared: int = 0
    """Bytes of LDS (shared memory) of a workgroup."""
    occupancy: float = 0.0
    """Waves that a SIMD unit holds at a time."""
    compiler: str = ""
    """Its name and version."""
    error: str = ""
    """Why there are no figures."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.arch} · {self.kernel} · {self.shape}"

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        found = data["figures"]
        if found is not None:
            widths = ("loads", "shared_loads")
            whole = {name: {int(width): count for width, count in found[name].items()} for name in widths}
            found = Figures(**{**found, **whole})
        return cls(**{**data, "figures": found})


def of_amd(text: str, ttgir: str) -> Figures:
    """Read AMD's assembly, with the metadata at its end, and Triton's own form of the kernel."""
    spills, scratch = _number(".vgpr_spill_count", text), _number(".private_segment_fixed_size", text)
    if not re.search(r'amdgcn_target ".*-gfx90a\b', text) and not _AMD_SCRATCH.search(text):
        scratch = 0  # it is set aside for scalar registers that went to lanes, and nothing touches it
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
        lost_slots=lost_slots(ttgir),
    )


def lost_slots(ttgir: str) -> int:
    """Return how many accesses to a ring of two or more LDS slots do not go round.

    A pipelined loop keeps what it loads ahead in a ring. The slot it writes goes up by one a turn and back to zero
    behind the last: an addition, a comparison, a selection. Where the loop counts in int64 from a bound that is not
    known, AMD's range analysis in Triton 3.8 and 3.9 holds the comparison for decided. Then the addition alone is left
    and a program leaves its LDS (gfx950), or every turn writes one slot, which another has yet to read (gfx942, three
    stages). Loops that count in int32 keep the selection.

    Args:
        ttgir: Triton's form of a kernel for GPUs, of which each operation has a line.
    """
    made: dict[str, str] = {}
    placed: dict[str, int] = {}
    """The loop, by its number, in which a slot was taken by a fixed index or by one that is added to."""
    loops, depth, number, found = [(0, 0)], 0, 0, 0
    for line in ttgir.splitlines():
        if value := _VALUE.match(line):
            made[value[1]] = value[2]
        if (slot := _SLOT.search(line)) and int(slot[2]) > 1:
            found += made.get(slot[1]) == "arith.addi"
            if value:
                placed[value[1]] = loops[-1][1]
        if (write := _WRITE.search(line)) and placed.get(write[1], loops[-1][1]) != loops[-1][1]:
            found += 1
        opened = line.count("{") - line.count("}")
        if "scf.for" in line and opened > 0:
            number += 1
            loops.append((depth, number))
        depth += opened
        while len(loops) > 1 and depth <= loops[-1][0]:
            loops.pop()
    return found


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
