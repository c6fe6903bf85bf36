"""Plants faults in the assembly of kernels and says which are seen: `python -m tests.emulator.faults`.

Tests are run on the emulator first, and a launch of each kernel is kept with all its tensors. Then one instruction
that it executes is changed at a time, and the launch is run again. A fault is seen if the emulator refuses the kernel
or a tensor differs by more than rounding. With `--weak` the waits, write-backs and invalidations of kernels that count
themselves are taken out one at a time, and memory is the weakest that the chip may have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from . import machine
from .assembly_text import Listing
from .emulation_options import AMD
from .isa_errors import Fault, UnknownInstruction
from .launches import Emulator, Recorded
from .results import SAMPLE, run_as

Change = Callable[[str], str | None]
"""A line with the fault; None where there is no place for it."""
NEVER = machine.MOST
SEEDS = (0, 1, 2, 3)
"""Orders in which the workgroups and waves run in a weak memory."""
CLOSE = 16
"""Roundings of the largest number, within which tensors count as equal."""


def _replaced(pattern: str, by: str) -> Change:
    def change(line: str) -> str | None:
        new, count = re.subn(pattern, by, line, count=1)
        return new if count else None

    return change


def _number(pattern: str, step: Callable[[int], int]) -> Change:
    """Change the number in the first group."""

    def change(line: str) -> str | None:
        match = re.search(pattern, line)
        if match is None:
            return None
        return line[: match.start(1)] + str(step(int(match[1], 0))) + line[match.end(1) :]

    return change


def _either(*changes: Change) -> Change:
    return lambda line: next((new for change in changes if (new := change(line)) is not None), None)


FAULTS: dict[str, Change] = {
    "a wait removed": _replaced(r"^\s*s_waitcnt .*", "s_nop 0"),
    "a wait for one instruction less": _number(r"(?:vm|lgkm)cnt\((\d+)\)", lambda n: n + 1),
    "a barrier removed": _replaced(r"^\s*s_barrier", "s_nop 0"),
    "lanes that should be off": _replaced(r"s_and_saveexec_b64 (s\[\d+:\d+\]), .*", r"s_mov_b64 \1, exec"),
    "a mask one too far": _either(
        _replaced(r"v_cmp_gt_([iu])", r"v_cmp_ge_\1"), _replaced(r"v_cmp_lt_([iu])", r"v_cmp_le_\1")
    ),
    "the wrong lanes": _either(
        _replaced(r"row_shr:8", "row_shr:4"), _replaced(r"row_bcast:31", "row_bcast:15"),
        _replaced(r"quad_perm:\[1,0,3,2\]", "quad_perm:[0,1,2,3]"), _replaced(r"row_ror:8", "row_ror:4"),
        _replaced(r"row_half_mirror", "row_mirror"),
    ),
    "the wrong half of the wave": _either(
        _replaced(r"v_permlane32_swap", "v_permlane16_swap"),
        _number(r"v_readlane_b32 s\d+, v\d+, (\d+)", lambda n: n ^ 32),
        _replaced(r"ds_bpermute_b32 (v\d+), v\d+, (v\d+)", r"v_mov_b32_e32 \1, \2"),
        _replaced(r"v_mbcnt_hi_u32_b32", "v_mbcnt_lo_u32_b32"),
    ),
    "the other half of a register": _either(
        _replaced("src0_sel:WORD_1", "src0_sel:WORD_0"), _replaced(r"op_sel_hi:\[0,1", "op_sel_hi:[1,1"),
        _replaced(r"op_sel_hi:\[1,0\]", "op_sel_hi:[1,1]"), _replaced(r"op_sel:\[1", "op_sel:[0"),
    ),
    "another offset": _number(r"\boffset:(\d+)", lambda n: n + 16),
    "another shift": _number(r"v_(?:lshlrev|lshrrev)_b32_e32 v\d+, (\d+),", lambda n: n + 1),
    "another constant": _number(
        r"(?:v_mov_b32_e32 v|s_mov_b32 s)\d+, (?!0x27000|0x7ffffff)(0x[0-9a-f]+|\d+)$",
        lambda n: n + 1 if n < 1 << 24 else n ^ 0x800000,  # twice or half of a float
    ),
    "another summand": _number(r"s_add_[iu]32 s\d+, s\d+, (0x[0-9a-f]+|\d+)$", lambda n: n + 1),
    "minus for plus": _either(_replaced("v_add_f32", "v_sub_f32"), _replaced("v_pk_add_f32", "v_pk_mul_f32")),
    "the least for the largest": _either(
        _replaced(r"v_max_([fiu]\S+ \S+) (\S+), (?!\2$)", r"v_min_\1 \2, "),
        _replaced(r"v_min_([fiu]\S+ \S+) (\S+), (?!\2$)", r"v_max_\1 \2, "),
    ),
    "a sum forgotten": _replaced("v_fmac_f32_e32", "v_mul_f32_e32"),
    "another register": _replaced(r"v_mov_b32_e32 (v\d+), v(\d)$", r"v_mov_b32_e32 \1, v1\2"),
    "matrices of another place": _replaced(r"(v_mfma_\S+ \S+), (\S+), (\S+),", r"\1, \3, \2,"),
    "a loop's end": _either(_replaced("s_cmp_lt_", "s_cmp_le_"), _replaced("s_cmp_ge_", "s_cmp_gt_")),
    "the other branch": _either(
        _replaced("s_cbranch_scc0", "s_cbranch_scc1"), _replaced("s_cbranch_vccnz", "s_cbranch_vccz")
    ),
    "without saturation": _replaced(r"^\s*s_setreg_imm32_b32 hwreg\(HW_REG_MODE, 23, 1\), 1", "s_nop 0"),
    "bytes selected otherwise": _replaced(r"v_perm_b32 (v\d+), (\S+), (\S+),", r"v_perm_b32 \1, \3, \2,"),
    "the unchosen value": _replaced(r"v_cndmask_b32_e64 (v\d+), (\S+), (\S+),", r"v_cndmask_b32_e64 \1, \3, \2,"),
}  # fmt: skip
SURVIVORS = {
    "lanes that should be off": "they store the same number, or where the buffer's size ends",
    "a mask one too far": "the size fills the block, the buffer's size masks too, or what comes in is zero",
    "the wrong lanes": "all of them hold one number, or zero",
    "the wrong half of the wave": "both halves hold one number, or zero",
    "the other half of a register": "both halves hold one number, or zero",
    "another offset": "of columns that are masked",
    "another shift": "of lanes that are masked, or rounded away",
    "another constant": "a threshold at which no number lies, or the start of what is overwritten",
    "another summand": "a bound that is rounded up to whole blocks, or one more turn that is masked",
    "a sum forgotten": "it begins at zero",
    "a loop's end": "one more turn, all of whose lanes are masked",
    "the other branch": "around what is masked",
    "without saturation": "scales keep every number below the largest",
    "a barrier removed": "no two waves meet there in this launch",
    "a wait removed": "another wait stands before the first use",
}
"""Why faults of a kind are not seen, of those that were looked at."""
OTHER_FORMAT = "8-bit floats of the other chip"
WEAK: dict[str, Change] = {
    "a wait removed": FAULTS["a wait removed"],
    "a barrier removed": FAULTS["a barrier removed"],
    "a write-back removed": _replaced(r"^\s*buffer_wbl2 .*", "s_nop 0"),
    "an invalidation removed": _replaced(r"^\s*(buffer_inv|buffer_wbinvl1).*", "s_nop 0"),
}


@dataclass(frozen=True)
class Planted:
    """A fault, and what became of it."""

    kernel: str
    fault: str
    line: str
    outcome: str
    """`refused`, `other numbers`, `rounded otherwise`, `equal`."""
    why: str = ""

    @property
    def seen(self) -> bool:
        """Whether a test would."""
        return self.outcome in ("refused", "other numbers")


class _Keeper:
    """A plugin of pytest that keeps a launch of each kernel: of those that are short the longest."""

    def __init__(self, wanted: Callable[[Recorded], bool]):
        self.wanted = wanted
        self.kept: dict[str, Recorded] = {}
        self._lengths: Counter[str] = Counter()
        self.emulator: Emulator | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self.emulator = config.pluginmanager.get_plugin("emulation").emulator  # type: ignore[union-attr]
        self.emulator.record = self.take

    def take(self, recorded: Recorded) -> None:
        assert self.emulator is not None
        length = sum(len(program.code) for program in [self.emulator.program(recorded.call.text)])
        size = sum(data.nbytes for data in recorded.after.values())
        if size < 1 << 22 and self.wanted(recorded) and length > self._lengths[recorded.kernel]:
            self.kept[recorded.kernel], self._lengths[recorded.kernel] = recorded, length


def keep(chip: str, tests: Sequence[str], wanted: Callable[[Recorded], bool]) -> tuple[Emulator, dict[str, Recorded]]:
    """Run tests on the emulator; return a launch of each kernel."""
    keeper = _Keeper(wanted)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--emulate", chip, *tests], plugins=[keeper])
    assert code == 0, "the tests themselves fail"
    assert keeper.emulator is not None
    return keeper.emulator, dict(sorted(keeper.kept.items()))


def changed(listing: Listing, number: int, line: str) -> str:
    """Return the text of a kernel with another instruction in place of one."""
    before, _, body = listing.text.partition(",@function")
    lines = body.split("\n")
    lines[listing.instructions[number].line] = f"\t{line}"
    return f"{before},@function" + "\n".join(lines)


def places(listing: Listing, reached: Collection[int], change: Change) -> list[tuple[int, str]]:
    """Return the instructions that a fault changes, and what they become."""
    found = []
    for number in sorted(reached):
        new = change(listing.instructions[number].text)
        if new is not None and new != listing.instructions[number].text:
            found.append((number, new))
    return found


def plant(
    emulator: Emulator, recorded: Recorded, changes: dict[str, Change], each: int, chance: random.Random
) -> Iterator[Planted]:
    """Run a launch with faults of each kind, at most `each`."""
    emulator.change = lambda text: text
    program = emulator.program(recorded.call.text)
    program.reached, machine.MOST = Counter(), NEVER
    tried = Emulator(emulator.chip, weak=emulator.weak, programs=emulator.programs)
    for tried.seed in SEEDS if emulator.weak else SEEDS[:1]:
        assert _difference(recorded, recorded.again(tried)) in ("equal", "rounded otherwise"), (
            f"{recorded.kernel} is wrong"
        )
    machine.MOST = 20 * len(program.reached) + 4 * tried.executed[-1].instructions
    for name, change in changes.items():
        sites = places(program.listing, program.reached, change)
        for number, line in chance.sample(sites, min(each, len(sites))):
            text = changed(program.listing, number, line)
            one = program.listing.instructions[number]
            yield _judged(emulator, recorded, text, name, f"line {one.line}, {one.text}")
    if re.search("v_cvt_.*[fb][fp]8", recorded.call.text) and "a wait removed" in changes and not emulator.weak:
        other = {"gfx942": "gfx950", "gfx950": "gfx942"}.get(emulator.chip, emulator.chip)
        text = re.sub(rf'(amdgcn_target ".*-){emulator.chip}', rf"\g<1>{other}", recorded.call.text)
        yield _judged(emulator, recorded, text, OTHER_FORMAT, other)


def _judged(emulator: Emulator, recorded: Recorded, text: str, name: str, line: str) -> Planted:
    outcomes = []
    alone = (False, True) if "barrier" in name else (False,)  # of waves in step a later one overtakes no earlier one
    for seed, one_by_one in itertools.product(SEEDS if emulator.weak else SEEDS[:1], alone):
        again = Emulator(emulator.chip, emulator.weak, alone=one_by_one, change=lambda _: text, seed=seed)
        try:
            after = recorded.again(again)
        except (Fault, UnknownInstruction) as error:
            return Planted(recorded.kernel, name, line, "refused", str(error).rsplit(": ", 1)[-1])
        outcomes.append(_difference(recorded, after))
    return Planted(
        recorded.kernel, name, line, max(outcomes, key=["equal", "rounded otherwise", "other numbers"].index)
    )


def _difference(recorded: Recorded, after: dict[str, Any]) -> str:
    dtypes = {name: value.dtype for name, _, value in recorded.call.arguments if isinstance(value, torch.Tensor)}
    found = "equal"
    for name, data in after.items():
        before = recorded.after[name]
        if (data == before).all():
            continue
        dtype = dtypes.get(name, torch.uint8)
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return "other numbers"
        got, wanted = (torch.from_numpy(one.copy()).view(dtype).double() for one in (data, before))
        if not torch.equal(got.isnan(), wanted.isnan()):
            return "other numbers"
        largest = wanted[wanted.isfinite()].abs().max() if wanted.isfinite().any() else torch.tensor(0.0)
        away = (got - wanted).abs()[(got - wanted).isfinite()]
        if (away > CLOSE * torch.finfo(dtype).eps * largest).any() or not torch.equal(got.isinf(), wanted.isinf()):
            return "other numbers"
        found = "rounded otherwise"
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=AMD, default="gfx942")
    parser.add_argument("--kernels", nargs="*", default=[], help="none for all")
    parser.add_argument("--each", type=int, default=1, help="faults of each kind in each kernel")
    parser.add_argument("--weak", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a line for each fault")
    given = parser.parse_args()
    chosen = json.loads(SAMPLE.read_text("utf-8"))
    tests = sorted({test for kernel, test in chosen.items() if not given.kernels or kernel in given.kernels})
    counts = re.compile("_atomic_")
    wanted = lambda one: (
        (not given.kernels or one.kernel in given.kernels) and (not given.weak or counts.search(one.call.text))
    )
    emulator, kept = keep(given.chip, tests, wanted)
    emulator.record, emulator.weak = None, given.weak
    chance, planted = random.Random(given.seed), []
    for recorded in kept.values():
        for one in plant(
            emulator, recorded, WEAK if given.weak else FAULTS, 1000 if given.weak else given.each, chance
        ):
            planted.append(one)
            if not one.seen:
                print(f"{one.outcome}: {one.kernel}: {one.fault}: {one.line}", flush=True)
    if given.json is not None:
        given.json.write_text(
            "".join(json.dumps({**asdict(one), "seen": one.seen}) + "\n" for one in planted), "utf-8"
        )
    for name in dict.fromkeys(one.fault for one in planted):
        mine = [one for one in planted if one.fault == name]
        why = "" if all(one.seen for one in mine) else f" (else {SURVIVORS.get(name, 'rounded away, or masked')})"
        print(f"{sum(one.seen for one in mine):4} of {len(mine):4} seen: {name}{why}")
    print(f"{sum(one.seen for one in planted):4} of {len(planted):4} seen, in {len(kept)} kernels")


if __name__ == "__main__":
    run_as("faults")
