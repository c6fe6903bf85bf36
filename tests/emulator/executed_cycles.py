"""Holds what is read from AMD's assembly (`rewrite.kernels.issued`) against what is executed.

`python -m tests.emulator.executed_cycles` launches a product of one row, one of eight in parts, and the attention of a
step on gfx942, and prints for each the cycles of a wave that were read beside those that its waves executed, up to
where programs count themselves, as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import emulation


def main() -> list[dict[str, Any]]:
    """Launch, and return what each launch took."""
    emulator = emulation.begin("gfx942").emulator
    import torch

    from hf_rewrite_runtime.attention import decode_attention
    from hf_rewrite_runtime.linear import linear

    def product(rows: int, out: int, cols: int) -> int:
        x, weight = torch.randn(rows, 1, cols).bfloat16(), torch.randn(out, cols).bfloat16()
        linear.few_rows(x, weight, None, None, torch.zeros(rows, 1, out).bfloat16())
        return 2 * out * cols

    def attention(tokens: int) -> int:
        """Of as many tokens as the cache holds: all programs have one tile or more."""
        keys, values = torch.randn(2, 1, 2, tokens, 128).bfloat16()
        position, starts = torch.tensor([tokens - 1]), torch.zeros(1, dtype=torch.int64)
        split, arrived = decode_attention.Split(4, 4, 32, True, 4), torch.zeros(8, dtype=torch.int32)
        query, rule = torch.randn(1, 8, 1, 128).bfloat16(), decode_attention.ScoreRule(0.09)
        decode_attention.launch(query, keys, values, position, starts, arrived, rule, split)
        return 2 * 2 * 2 * tokens * 128

    launches: dict[str, Callable[[], int]] = {
        "linear, 1 row": lambda: product(1, 64, 4096),
        "skinny_linear, 8 rows": lambda: product(8, 1024, 14336),
        "decode_attention, 512 tokens": lambda: attention(512),
    }
    return [{"launch": name, **_compared(emulator, call)} for name, call in launches.items()]


def _compared(emulator: Any, call: Callable[[], int]) -> dict[str, Any]:
    """Return cycles of a wave by unit: as read, and as executed."""
    from rewrite.kernels import issued

    programs: list[Any] = []
    known = emulator.program

    def program(text: str) -> Any:
        made = known(text)
        made.reached = Counter()
        programs.append((text, made))
        return made

    emulator.program, begun = program, len(emulator.executed)
    moved = call()
    emulator.program = known
    ((text, made),) = programs
    (done,) = emulator.executed[begun:]
    count = done.grid[0] * done.grid[1] * done.grid[2]
    chip, instructions = made.listing.chip, made.listing.instructions
    end = next((n for n, one in enumerate(instructions) if "_atomic_" in one.name), len(instructions))
    taken: Counter[str] = Counter()
    for number, waves in made.reached.items():
        if number < end:
            for unit, cycles in issued.cycles(instructions[number].text, chip):
                taken[unit] += cycles * waves  # type: ignore[assignment]
    waves = count * done.threads // 64
    read = issued.of_amd(text, moved / count / done.threads)
    units = ("vector", "matrix", "lds", "cache")
    return {
        "read": {unit: round(getattr(read, unit), 1) for unit in units},
        "executed": {unit: round(taken[unit] / waves, 1) for unit in units},
    }


if __name__ == "__main__":
    print(json.dumps(main()))
