"""Reads in AMD's assembly how many cycles of each unit of a compute unit a program takes, and what it has on its way.

Straight code is counted once, the body of a loop as often as it has to run until the program has read its bytes: the
loads of a loop that move most say what a turn reads. Branches are counted as taken through everything, but what is
behind the atomic operation by which programs count themselves is for the last of them alone: the tail. What a unit
takes of an instruction, from AMD's "CDNA3 Instruction Set Architecture" and the peaks of the MI300X and MI355X:

    vector   4 cycles of a SIMD unit a wave; 16 for exp, log, reciprocal, root, and 32-bit integer products
    matrix   operations / those of a SIMD unit a cycle
    LDS      64 lanes' bytes / 128 a cycle, of the compute unit
    cache    64 lanes' bytes / 64 a cycle, of the compute unit's first level
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

LANES = 64
_SLOW = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(?:lo|hi)_u?i?32|v_mad_u64_u32|v_mad_i64_i32")
_LOAD = re.compile(r"(?:buffer|global)_load_(\w+) (.*)")
_BASE = re.compile(r"s\[\d+:\d+\]")
_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "sbyte": 1}
_LDS = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_[biu](\d+)")
_MATRIX = re.compile(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+)")
_RATES = {"gfx90a": (256, 256, 64), "gfx942": (512, 1024, 64), "gfx950": (1024, 2048, 64)}
"""Operations of a SIMD unit's matrix cores a cycle: of 16 bits, 8 bits, fp32."""
_WAIT = re.compile(r"s_waitcnt .*\bvmcnt\((\d+)\)")
_LABEL = re.compile(r"([.\w$]+):")
_BRANCH = re.compile(r"s_c?branch\w* ([.\w$]+)")


@dataclass(frozen=True)
class Issued:
    """What one wave of a program takes, in cycles of each unit, and the bytes of a thread."""

    vector: float
    """Of its SIMD unit, likewise `matrix`."""
    matrix: float
    lds: float
    """Of its compute unit, likewise `cache`."""
    cache: float
    tail: float
    """Of its SIMD unit, in the last program to count itself: what it does behind all others."""
    flight: int
    """Bytes of a thread's weights (keys and values) that are on their way at a time, at most."""


@dataclass(frozen=True)
class _Line:
    text: str
    weight: str = ""
    """Of a load its base, as scalar registers; empty for other instructions."""
    size: int = 0
    """Bytes of a thread that it loads."""


def of_amd(text: str, moved: float) -> Issued:
    """Read the assembly of a kernel.

    Args:
        text: of one kernel, as LLVM prints it.
        moved: bytes of weights and cache that a thread of it reads.
    """
    chip = re.findall(r'amdgcn_target ".*-(gfx\w+)', text)[0]
    lines, spans = _parsed(text)
    stream = _stream(lines, spans)
    turns = [1.0] * len(lines)
    if spans:
        inside = sum(line.size for n, line in enumerate(lines) if line.weight in stream and _within(n, spans))
        ahead = sum(line.size for n, line in enumerate(lines) if line.weight in stream and not _within(n, spans))
        often = max((moved - ahead) / inside, 1.0) if inside else 1.0
        turns = [often if _within(n, spans) else 1.0 for n in range(len(lines))]
    taken = dict.fromkeys(("vector", "matrix", "lds", "cache", "tail"), 0.0)
    counted = False
    for line, often in zip(lines, turns, strict=True):
        counted |= "_atomic_" in line.text
        for unit, each in _cycles(line, chip):
            if not counted:
                taken[unit] += each * often
            elif unit == "vector":
                taken["tail"] += each * often
    return Issued(**taken, flight=_flight(lines, stream))


def _parsed(text: str) -> tuple[list[_Line], list[tuple[int, int]]]:
    """Return the instructions, and the first and last of each loop."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    spans = []
    for raw in (line.split(";")[0].strip() for line in text.splitlines()):
        if raw.startswith(".section") and lines:
            break
        if label := _LABEL.match(raw):
            labels[label[1]] = len(lines)
        elif raw and not raw.startswith((".", "//")):
            lines.append(_line(" ".join(raw.split())))
            branch = _BRANCH.match(lines[-1].text)
            if branch and branch[1] in labels:
                spans.append((labels[branch[1]], len(lines) - 1))
    return lines, spans


def _line(text: str) -> _Line:
    load = _LOAD.match(text)
    size = _BYTES.get(load[1].split("_")[0], 0) if load else 0
    base = _BASE.findall(load[2])[-1:] if load else []
    return _Line(text, base[0] if base else "pointers" if size else "", size)


def cycles(text: str, chip: str) -> Iterator[tuple[str, float]]:
    """Yield what an instruction, as LLVM prints it, takes of each unit."""
    yield from _cycles(_line(" ".join(text.split())), chip)


def _within(number: int, spans: list[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in spans)


def _stream(lines: list[_Line], spans: list[tuple[int, int]]) -> set[str]:
    """Return the bases of what is streamed: of loads in loops, else of those that pass the caches by, else of all."""
    there = [line for number, line in enumerate(lines) if line.size and (not spans or _within(number, spans))]
    passing = [line for line in there if line.text.endswith(" nt")]
    sizes: Counter[str] = Counter()
    for line in passing or there:
        sizes[line.weight] += line.size
    most = max(sizes.values(), default=0)
    return {base for base, size in sizes.items() if 2 * size >= most}


def _cycles(line: _Line, chip: str) -> Iterator[tuple[str, float]]:
    """Yield what an instruction takes of each unit."""
    if line.text.startswith("v_mfma_"):
        yield "matrix", _matrix(line.text, chip)
    elif line.text.startswith("v_"):
        yield "vector", 16.0 if _SLOW.match(line.text) else 4.0
    elif found := _LDS.match(line.text):
        yield "lds", (2 if found[1] else 1) * int(found[2]) / 8 * LANES / 128
    elif line.size:
        yield "cache", line.size * LANES / 64


def _matrix(text: str, chip: str) -> float:
    found = _MATRIX.match(text)
    if found is None:
        raise ValueError(f"how long it takes is not known: {text}")
    rows, columns, depth, blocks, kind = found.groups()
    of_16, of_8, of_32 = _RATES[chip]
    rate = of_32 if kind.startswith("f32") else of_8 if "f8" in kind or "fp8" in kind else of_16
    return 2.0 * int(rows) * int(columns) * int(depth) * int(blocks or 1) / rate


def _flight(lines: list[_Line], stream: set[str]) -> int:
    """Return the most bytes of streams that a thread has on their way: loads since the last wait that takes them."""
    under_way: list[int] = []
    most = 0
    for line in lines:
        if line.size:
            under_way.append(line.size if line.weight in stream else 0)
            most = max(most, sum(under_way))
        elif wait := _WAIT.match(line.text):
            left = int(wait[1])
            under_way = under_way[len(under_way) - left :] if left < len(under_way) else under_way
    return most
