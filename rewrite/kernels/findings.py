"""What must not come out of a compiler, and where it may nevertheless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .assembly import Row, share_below
from .chips import CHIPS, MOST_THREADS

Kind = Literal["does not compile", "spills", "shared memory", "scalar loads", "threads", "last arrivals", "ring slots"]

WIDE = 64
"""Bits from which on a load is no scalar one: 4 bf16 elements. AMD's memory units want 128."""
MOST_NARROW = 0.5
"""Part of what a kernel reads that may come in narrower loads: a position, a bias, the ends of a table."""


@dataclass(frozen=True)
class Exemption:
    """A finding that is known and stays."""

    kind: Kind
    kernel: str
    reason: str
    shape: str | None = None
    """None for every shape."""
    chips: str | None = None
    """The backend of the chips that it is for, or the one chip; None for all."""
    compiler: str | None = None
    """How the version that it is for begins, `triton 3.4`; None for all."""


BYTES = "8 columns a head are 16 bytes, and a mask is one byte a slot"
SCALES = "the scales of a slot are 4 bytes of 260, which all threads of its columns read"
EXEMPTIONS = (
    Exemption("scalar loads", "rotary", "a program of 8 heads of 64 columns has 2 elements a thread", "Llama 1B"),
    Exemption("scalar loads", "rotary_rows", "one row of a table: 256 bytes that one wave reads at once", chips="hip"),
    Exemption(
        "scalar loads",
        "block_rows",
        "rows that all programs share, from a cache: Triton 3.9 copies 4 bytes a lane",
        chips="gfx950",
    ),
    Exemption("scalar loads", "dequantize_integers", "a thread writes the 16 bytes that one word becomes"),
    Exemption("scalar loads", "masked_attention", BYTES, "8 heads of 8, bools", "hip"),
    Exemption("scalar loads", "masked_attention", BYTES, "8 heads of 8, bools", "cuda", "triton 3.8"),
    Exemption("scalar loads", "masked_attention", BYTES, "8 heads of 8, bools", "cuda", "triton 3.9"),
    Exemption(
        "spills",
        "masked_attention",
        "192 bytes, once a program; not later",
        "71 of 1 heads of 64",
        "cuda",
        "triton 3.6",
    ),
    Exemption("spills", "shared_sum", "8 bytes, once a wait for another card; not later", "8B", "cuda", "triton 3.4"),
    Exemption("scalar loads", "write_token", "one head: 256 bytes that one wave reads at once", chips="hip"),
    Exemption("scalar loads", "rope_cache", "one head a program: 2 pairs of columns a thread at most"),
    Exemption("scalar loads", "decode_attention", SCALES, "Llama 8B, 8 bits, 32k", "gfx90a"),
    Exemption("scalar loads", "decode_attention", SCALES, "Llama 8B, 8 bits, 32k", "gfx950"),
    Exemption("scalar loads", "decode_attention", SCALES, "Gemma 9B, 8 bits, 32k", "gfx950"),
    Exemption(
        "scalar loads", "qkv_prompt", "every other column: a line's second half is in L1", "8B, 64 columns, prompt"
    ),
    Exemption(
        "scalar loads", "state_space_step", "16 numbers of a state: half of what is read is of a channel", "Mamba 1.4B"
    ),
    Exemption("scalar loads", "log_decay", "one number a head, 16 to 64 of them"),
    Exemption("scalar loads", "conv_step", "3 or 4 numbers a channel, which one thread moves: nobody else reads them"),
    Exemption("scalar loads", "take_best", "one program a step, for one number a block of the vocabulary"),
    Exemption("scalar loads", "chain", "one or two numbers a thread: it is short, and more threads wait less"),
    Exemption("scalar loads", "select_experts", "one score a thread"),
    Exemption("scalar loads", "page_tables", "two numbers a row: it writes", chips="hip"),
    Exemption("scalar loads", "slot_lists", "two numbers a row: it writes", chips="hip"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one row."""

    kind: Kind
    row: Row
    text: str

    def __str__(self) -> str:
        return f"{self.row.name}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """The finding as plain JSON values."""
        return {"kind": self.kind, "kernel": self.row.kernel, "shape": self.row.shape, "text": self.text}


def judge(rows: Sequence[Row]) -> list[Finding]:
    """Return what is wrong, without what is exempt."""
    found = [finding for row in rows for finding in _of(row)]
    return [finding for finding in found if not any(_covers(exemption, finding) for exemption in EXEMPTIONS)]


def unused_exemptions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the exemptions that no row of their chips needs."""
    chips = {None, *(row.arch for row in rows), *(CHIPS[row.arch].backend for row in rows)}
    found = [finding for row in rows for finding in _of(row)]
    compilers = {row.compiler for row in rows}
    wanted = [
        exemption
        for exemption in EXEMPTIONS
        if exemption.chips in chips and any(_compiles(exemption, compiler) for compiler in compilers)
    ]
    return [asdict(e) for e in wanted if not any(_covers(e, finding) for finding in found)]


def _covers(exemption: Exemption, finding: Finding) -> bool:
    return (
        exemption.kind == finding.kind
        and exemption.kernel == finding.row.kernel
        and exemption.shape in (None, finding.row.shape)
        and exemption.chips in (None, finding.row.arch, CHIPS[finding.row.arch].backend)
        and _compiles(exemption, finding.row.compiler)
    )


def _compiles(exemption: Exemption, compiler: str) -> bool:
    return exemption.compiler is None or compiler.startswith(exemption.compiler)


def _of(row: Row) -> list[Finding]:
    chip, found = CHIPS[row.arch], []

    def say(kind: Kind, text: str) -> None:
        found.append(Finding(kind, row, text))

    if row.threads > MOST_THREADS:
        say("threads", f"{row.threads} threads in a workgroup, at most {MOST_THREADS} can be launched")
    if row.figures is None:
        say("does not compile", f"does not compile: {row.error}")
        return found
    if row.figures.spills:
        unit = "vector registers" if chip.backend == "hip" else "bytes"
        say("spills", f"{row.figures.spills} {unit} are spilled to memory")
    if row.shared > chip.shared_of_group:
        say("shared memory", f"{row.shared} bytes of LDS, {row.arch} has {chip.shared_of_group}")
    if row.figures.early:
        say("last arrivals", "the last program to count itself may read what another has not stored yet")
    if row.figures.lost_slots:
        say("ring slots", f"{row.figures.lost_slots} accesses of a pipelined loop leave the slots in LDS that it has")
    narrow = share_below(row.figures.loads, WIDE)
    if narrow > MOST_NARROW:
        widths = ", ".join(f"{count} of {width} bits" for width, count in row.figures.loads.items())
        say("scalar loads", f"{narrow:.0%} of what it reads comes in loads under {WIDE} bits ({widths})")
    return found
