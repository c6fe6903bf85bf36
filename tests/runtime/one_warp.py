"""A few of NVIDIA's instructions for the 32 threads of a warp, to try a text of them on a CPU (PTX ISA 9)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

LANE = torch.arange(32)


def run(text: str, results: int, inputs: list[Tensor]) -> list[Tensor]:
    """Return `$0` and so on of a text, each `[32]`; words are int64 without a sign, numbers fp64."""
    registers = {f"${results + i}": given for i, given in enumerate(inputs)} | {"%laneid": LANE}

    def value(name: str) -> Tensor:
        if name in registers:
            return registers[name]
        if name.startswith("0f"):
            word = torch.tensor(int(name[2:], 16), dtype=torch.int64).to(torch.int32)
            return word.view(torch.float32).double().expand(32)
        return torch.tensor(int(name, 0)).expand(32)

    for line in text.strip("{}\n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        if name.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
            into, a, b, c = (re.split(r",\s*", group) for group in re.findall(r"{([^}]*)}", rest))
            product = _product(*([value(part) for part in parts] for parts in (a, b, c)))
            registers |= dict(zip(into, product, strict=True))
            continue
        into, *given = re.split(r",\s*", rest)
        registers[into] = _one(name, [value(part) for part in given])
    return [registers[f"${i}"] for i in range(results)]


def _one(name: str, given: list[Tensor]) -> Tensor:
    if name.startswith("mov."):
        return given[0]
    if name == "selp.f32":
        return torch.where(given[2], given[0], given[1])
    a, b = given
    if name == "mul.lo.u32":
        return a * b & 0xFFFFFFFF
    return {
        "and.b32": torch.bitwise_and,
        "shr.u32": torch.bitwise_right_shift,
        "setp.ne.u32": torch.ne,
        "mul.f32": torch.mul,
    }[name](a, b)


def _product(a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    """Multiply as the figures of `mma.m16n8k16` say who holds what."""
    row, quad = LANE // 4, LANE % 4
    left, right, sums = (torch.zeros(shape, dtype=torch.float64) for shape in ((16, 16), (16, 8), (16, 8)))
    for half in range(2):
        for i, word in enumerate(a):
            left[row + 8 * (i % 2), 2 * quad + half + 8 * (i // 2)] = _bf16(word, half)
        for i, word in enumerate(b):
            right[2 * quad + half + 8 * i, row] = _bf16(word, half)
    for i, number in enumerate(c):
        sums[row + 8 * (i // 2), 2 * quad + i % 2] = number.double()
    sums += left @ right
    return [sums[row + 8 * (i // 2), 2 * quad + i % 2] for i in range(4)]


def _bf16(word: Tensor, half: int) -> Tensor:
    return (word >> 16 * half & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double()
