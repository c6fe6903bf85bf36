"""Compute that need not happen, found by running: each finding has the line, the bytes and the proof.

A few calls are watched operator by operator (`watch.py`), with other inputs each time, and a finding has to hold in
every one of them. What depends on the inputs' values by chance is no finding: each kind has an argument that does not
rest on them, and the runs are there to confirm it.

| kind | argument | confirmed by |
|---|---|---|
| recomputed | operands come from parameters, buffers and constants alone | the same bits in every call |
| copy | neither it nor its source is written while it is there, and it ends with the call | bits, strides, dtype |
| cast | to a type that holds every value of the first, and back | the same bits |
| masked | keys that the mask hides from every query | in every call |
| unread | no operator that matters, and nobody else, reads the result before it is freed | in every call |
| loop | no turn reads what another wrote; the operands are slices of the same tensors | in every call |
| repeated | it depends on some arguments alone (`repeated.py`) | the same bits where these stay and others change |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .finding import Finding, Site, bare, grouped, is_product, pattern
from .repeated import repeated
from .watch import BUFFER, MADE, PARAMETER, UNKNOWN, Frame, Op, Operand, Watched

RECOMPUTED, COPY, CAST, MASKED, UNREAD, LOOP = "recomputed", "copy", "cast", "masked", "unread", "loop"
_FACTORIES = {
    "arange", "full", "zeros", "ones", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "zeros_like",
    "ones_like", "full_like", "empty_like", "new_empty", "lift_fresh", "empty_strided", "eye", "linspace",
}  # fmt: skip
_COPIES = {"clone", "_to_copy", "contiguous", "repeat", "cat"}
_WIDER = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.int32: {torch.int64, torch.float64},
    torch.int16: {torch.int32, torch.int64, torch.float32, torch.float64},
    torch.uint8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64},
    torch.bool: {torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64},
}
"""Types that hold every value of another."""
LONGEST_TURN = 400
"""Operators of one turn of a loop that is looked for."""


def findings(calls: Sequence[Watched], kept: Sequence[Watched] = ()) -> list[Finding]:
    """Everything that holds in all of several calls, the most bytes first.

    Args:
        calls: with other inputs each.
        kept: more, each with some arguments of the first call.
    """
    if not calls:
        return []
    kinds: tuple[Callable[[Sequence[Op]], Iterator[Site]], ...] = (_copies, _casts, _masked, _unread, _loops)
    found = list(_recomputed(calls))
    found_repeated = list(repeated(calls[0], [*calls[1:], *kept]))
    taken = {(each.line, each.function) for each in found}
    for look in kinds:
        by_call = [grouped(look(call.ops)) for call in calls]
        for key, site in by_call[0].items():
            if all(key in others for others in by_call) and (site.kind in (LOOP, MASKED) or key[1:3] not in taken):
                found.append(site.finding(len(calls)))
    return sorted([*found, *found_repeated], key=lambda finding: (-finding.bytes, finding.line))


# ---- the same result in each call


def _recomputed(calls: Sequence[Watched]) -> Iterator[Finding]:
    """Lines that compute from parameters, buffers and constants alone what they computed in the call before."""
    by_call = []
    for call in calls:
        constant: dict[tuple[int, str], list[Op]] = defaultdict(list)
        for op in call.ops:
            if op.constant and op.frames and not op.view and op.gives and bare(op) not in _FACTORIES and op.reads:
                constant[op.line, op.frames[-1].function].append(op)
        by_call.append(constant)
    for key, ops in by_call[0].items():
        others = [constant.get(key, []) for constant in by_call[1:]]
        if any(len(other) != len(ops) for other in others) or not _all_equal(ops, others):
            continue
        if all(sum(operand.bytes for operand in op.gives) <= 8 for op in ops):
            continue  # single numbers
        frame = ops[0].frames[-1]
        moved = sum(op.bytes for op in ops)
        site = Site(
            RECOMPUTED,
            frame,
            ops,
            moved,
            f"computes {_listed(ops)} from {_origins(ops)} anew in every call, with the same result for this shape",
            "every operand comes from parameters, buffers and constants, and the result has the same bits",
        )
        yield site.finding(len(calls))


def _all_equal(ops: Sequence[Op], others: Sequence[Sequence[Op]]) -> bool:
    for number, op in enumerate(ops):
        for other in others:
            again = other[number]
            if again.name != op.name or op.result is None or again.result is None:
                return False
            if op.result.shape != again.result.shape or not bool(torch.equal(op.result, again.result)):
                return False
            if any(operand.value.writes for operand in (*op.gives, *again.gives)):
                return False
    return True


def _listed(ops: Sequence[Op]) -> str:
    names = list(dict.fromkeys(bare(op) for op in ops))
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _origins(ops: Sequence[Op]) -> str:
    names = sorted(
        {operand.value.name for op in ops for operand in op.reads if operand.value.kind in (PARAMETER, BUFFER)}
    )
    return ", ".join(pattern(name) for name in names[:3]) if names else "constants"


# ---- copies and casts


def _copies(ops: Sequence[Op]) -> Iterator[Site]:
    """Copies with the bits, strides and dtype of their source, where neither is written while the copy is there."""
    for op in ops:
        if bare(op) not in _COPIES or not op.frames or len(op.reads) != 1 or len(op.gives) != 1 or not op.same:
            continue
        source, copy = op.reads[0], op.gives[0]
        if source.strides != copy.strides or source.dtype != copy.dtype or copy.value.escapes or copy.value.writes:
            continue
        if source.value.kind == UNKNOWN:
            continue  # nobody knows who else writes it
        last = max(copy.value.reads, default=op.index)
        if any(op.index < written <= last for written in source.value.writes):
            continue
        yield Site(
            COPY,
            op.frames[-1],
            [op],
            op.bytes,
            f"{bare(op)} copies what is already there, in the same order and type"
            + (", for this shape" if bare(op) in ("repeat", "cat") else ""),
            "neither the source nor the copy is written while the copy is read, nobody holds the copy after the call",
        )


def _casts(ops: Sequence[Op]) -> Iterator[Site]:
    """A cast to a wider type and, of the very same values, back."""
    makers = {id(op.gives[0].value): op for op in ops if len(op.gives) == 1 and not op.view}
    for op in ops:
        if bare(op) != "_to_copy" or not op.frames or len(op.reads) != 1 or len(op.gives) != 1:
            continue
        wide, back = op.reads[0], op.gives[0]
        first = makers.get(id(wide.value))
        if (
            first is None
            or bare(first) != "_to_copy"
            or not first.frames
            or wide.value.writes
            or len(first.reads) != 1
        ):
            continue
        narrow = first.reads[0]
        if narrow.dtype != back.dtype or wide.dtype not in _WIDER.get(narrow.dtype, set()):
            continue
        if back.value.writes or back.value.escapes or any(w > first.index for w in narrow.value.writes):
            continue
        alone = all(ops[read] is op or ops[read].view for read in wide.value.reads)
        where = f"line {first.line}" if first.line != op.line else "the same line"
        yield Site(
            CAST,
            op.frames[-1],
            [first, op] if alone else [op],
            op.bytes + (first.bytes if alone else 0),
            f"casts to {_type(narrow)} what {where} cast from {_type(narrow)} to {_type(wide)}, unchanged between",
            f"{_type(wide)} holds every value of {_type(narrow)}, so the way there and back changes nothing",
        )


def _type(operand: Operand) -> str:
    return str(operand.dtype).removeprefix("torch.")


# ---- masks


def _masked(ops: Sequence[Op]) -> Iterator[Site]:
    """Attention over keys that no query sees."""
    for op in ops:
        if op.masked <= 0 or not op.frames:
            continue
        spared = (
            sum(op.masked * operand.bytes for operand in op.reads[1:3]) if len(op.reads) > 2 else op.masked * op.bytes
        )
        yield Site(
            MASKED,
            op.frames[-1],
            [op],
            int(spared),
            f"{bare(op)} reads keys that the mask hides from every query, {op.masked:.0%} of them",
            "a key that is hidden from every query has weight 0 in every row of the softmax",
        )


# ---- results that nobody reads


def _unread(ops: Sequence[Op]) -> Iterator[Site]:
    """Operators whose results go nowhere: neither to an operator that matters nor out of the call."""
    needed: set[int] = set()
    dead: list[Op] = []
    for op in reversed(ops):
        values = [operand.value for operand in op.gives]
        written = [operand.value for operand in op.reads if op.index in operand.value.writes]
        matters = (
            not op.gives
            or any(value.escapes or id(value) in needed for value in values)
            or any(value.escapes or value.kind != MADE or id(value) in needed for value in written)
        )
        if matters:
            needed.update(id(operand.value) for operand in op.reads)
        elif not op.view and op.frames and bare(op) not in _FACTORIES:
            dead.append(op)
    for op in reversed(dead):
        if sum(operand.bytes for operand in op.gives) <= 8:
            continue
        yield Site(
            UNREAD,
            op.frames[-1],
            [op],
            op.bytes,
            f"nobody reads the result of {bare(op)}",
            "no operator that matters reads it, nothing reads its memory, and it is freed before the call ends",
        )


# ---- one by one


def _loops(ops: Sequence[Op]) -> Iterator[Site]:
    """Turns of a loop that do the same to slices of the same tensors, without any of another's results."""
    calls: dict[int, list[tuple[Op, Frame]]] = defaultdict(list)
    for op in ops:
        for frame in op.frames:
            calls[frame.serial].append((op, frame))
    taken: set[int] = set()
    for serial in sorted(calls, reverse=True):  # a function comes before its callers, which see the same loop
        for site in _loops_of(calls[serial]):
            indices = {op.index for op in site.ops}
            if not indices & taken:
                taken |= indices
                yield site


def _loops_of(own: Sequence[tuple[Op, Frame]]) -> Iterator[Site]:
    keys = [_turn_key(op, frame) for op, frame in own]
    later: dict[Any, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        later[key].append(number)
    start = 0
    while start < len(keys):
        length, turns = _repeated(keys, later, start)
        if turns < 2:
            start += 1
            continue
        blocks = [[op for op, _ in own[start + n * length : start + (n + 1) * length]] for n in range(turns)]
        if _independent(blocks):
            computing = [op for block in blocks for op in block if not op.view and bare(op) not in _FACTORIES]
            if len(computing) >= 2 * turns or any(is_product(op) for op in computing):
                yield Site(
                    LOOP,
                    own[start][1],
                    computing,
                    sum(op.bytes for op in computing),
                    f"a loop of {turns} turns does one by one what could be done at once: "
                    f"{len(computing)} operators instead of {len(computing) // turns}",
                    "no turn reads what another wrote, and their operands are slices of the same tensors",
                )
        start += length * turns


def _turn_key(op: Op, frame: Frame) -> tuple[Any, ...]:
    inner = tuple((f.function, f.line) for f in op.frames if f.serial != frame.serial)
    shapes = tuple(operand.shape for operand in (*op.reads, *op.gives))
    return op.name, op.overload, frame.line, inner, shapes


def _repeated(keys: Sequence[Any], later: dict[Any, list[int]], start: int) -> tuple[int, int]:
    """The length of a turn and the number of turns of what repeats from a place on; the shortest turn."""
    for second in later[keys[start]]:
        length = second - start
        if length <= 0:
            continue
        if length > LONGEST_TURN or second + length > len(keys):
            break
        turn = keys[start:second]
        if keys[second : second + length] != turn:
            continue
        turns = 2
        while keys[start + turns * length : start + (turns + 1) * length] == turn:
            turns += 1
        return length, turns
    return 0, 0


def _independent(blocks: Sequence[Sequence[Op]]) -> bool:
    """Whether turns use slices of the same tensors, and nothing that another turn made or wrote."""
    made = [{id(operand.value) for op in block for operand in op.gives if not op.view} for block in blocks]
    sliced = False
    for place in range(len(blocks[0])):
        column = [block[place] for block in blocks]
        for operands in zip(*(op.reads for op in column), strict=True):
            values = [id(operand.value) for operand in operands]
            if all(value in own for value, own in zip(values, made, strict=True)):
                continue
            if any(value in own for value in values for own in made):
                return False
            if len(set(values)) > 1:
                return False
            offsets = {operand.offset for operand in operands}
            written = any(op.index in operands[0].value.writes for op in column)
            if len(offsets) == len(operands):
                sliced = sliced or not written
            elif len(offsets) > 1 or written:
                return False
    return sliced
