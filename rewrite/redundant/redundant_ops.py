"""Compute that need not happen, found by running: each finding has the line, the bytes and the proof.

A few calls are watched operator by operator (`watch.py`), with other inputs each time, and a finding has to hold in
every one of them. What depends on the inputs' values by chance is no finding: each kind has an argument that does not
rest on them, and the runs are there to confirm it.

| kind | argument | confirmed by |
|---|---|---|
| recomputed | operands come from parameters, buffers and constants alone | the same bits in every call |
| unread | no operator that matters, and nobody else, reads the result before it is freed | in every call |
| repeated | it depends on some arguments alone (`repeated.py`) | the same bits where these stay and others change |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from .finding import Finding, Site, bare, grouped, pattern
from .repeated import repeated
from .watch import BUFFER, MADE, PARAMETER, Op, Watched

RECOMPUTED, UNREAD = "recomputed", "unread"
_FACTORIES = {
    "arange", "full", "zeros", "ones", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "zeros_like",
    "ones_like", "full_like", "empty_like", "new_empty", "lift_fresh", "empty_strided", "eye", "linspace",
}  # fmt: skip


def findings(calls: Sequence[Watched], kept: Sequence[Watched] = ()) -> list[Finding]:
    """Everything that holds in all of several calls, the most bytes first.

    Args:
        calls: with other inputs each.
        kept: more, each with some arguments of the first call.
    """
    if not calls:
        return []
    found = list(_recomputed(calls))
    taken = {(each.line, each.function) for each in found}
    found += repeated(calls[0], [*calls[1:], *kept])
    first, *others = [grouped(_unread(call.ops)) for call in calls]
    for key, site in first.items():
        if all(key in other for other in others) and key[1:3] not in taken:
            found.append(site.finding(len(calls)))
    return sorted(found, key=lambda finding: (-finding.bytes, finding.line))


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
