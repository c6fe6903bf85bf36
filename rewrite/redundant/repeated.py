"""What a call need not do again where some of its arguments stay the same: a fixed image, a constant prompt, a prefix.

A part of a call is all that depends on these arguments alone: on them, on weights and on constants, and on no other
argument, neither through data nor through what the host did with a number that it read of one. So its results follow
from the arguments kept. That is confirmed by a call with these arguments and others in place of the rest: the same
operators give the same bits. Where a cache that came with the call, or a buffer that an earlier call wrote, has its
values from is not known, and what depends on it is part of no finding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from .finding import Finding, Site, bare, is_product, pattern, size
from .watch import MADE, Frame, Op, Watched

REPEATED = "repeated"
SHARE = 0.05
"""Of a call's operations: a part that takes less is not worth a cache."""
MOST = 8
"""Sets of arguments that are looked at."""


def repeated(call: Watched, others: Sequence[Watched]) -> Iterator[Finding]:
    """The parts of a call that other calls with the same arguments repeat, the fewest arguments first."""
    for kept in parts(call):
        part = _part(call, kept)
        same = [other for other in others if _keeps(call, other, kept)]
        if same and all(_same_bits(part, _part(other, kept)) for other in same):
            yield _finding(call, part, kept, same)


def parts(call: Watched) -> list[frozenset[str]]:
    """Sets of arguments of which a part of the call worth a word depends on nothing else, the smallest first.

    Where everything that comes out depends on them, there is no part: then the call itself is the same again.
    """
    total = sum(operations(op) for op in call.ops)
    own: defaultdict[frozenset[str], float] = defaultdict(float)
    for op in call.ops:
        if _counts(op) and "?" not in op.sources:
            own[op.sources] += operations(op) if is_product(op) else 0
    made = {id(operand.value): operand.value for op in call.ops for operand in op.gives}
    outcome = [
        call.ops[value.maker].sources | value.sources
        for value in made.values()
        if value.escapes and value.kind == MADE and value.maker is not None
    ]
    found = [
        kept
        for kept, taken in own.items()
        if kept and taken >= SHARE * total and not all(sources <= kept for sources in outcome)
    ]
    return sorted(found, key=lambda kept: (len(kept), sorted(kept)))[:MOST]


def operations(op: Op) -> float:
    """Multiplications and additions of an operator, from its shapes; one a number where it is no product."""
    if op.view or not op.gives:
        return 0.0
    name, shapes = bare(op), [operand.shape for operand in op.reads]
    out = prod(op.gives[0].shape)
    if "scaled_dot_product" in name and len(shapes) > 2:
        return 2.0 * prod(shapes[0][:-1]) * shapes[1][-2] * (shapes[1][-1] + shapes[2][-1])
    if "convolution" in name and len(shapes) > 1:
        return 2.0 * out * prod(shapes[1][1:])
    factors = shapes[-2:] if name.startswith(("addmm", "baddbmm", "addmv")) else shapes[:2]
    if is_product(op) and len(factors) == 2:
        return 2.0 * out * factors[0][-1]
    return float(out)


def _counts(op: Op) -> bool:
    return bool(op.frames and op.gives and not op.view)


def _part(call: Watched, kept: frozenset[str]) -> list[Op]:
    """The operators that depend on these arguments and on nothing else."""
    return [op for op in call.ops if _counts(op) and op.sources and op.sources <= kept]


def _keeps(call: Watched, other: Watched, kept: frozenset[str]) -> bool:
    """Whether another call has these arguments, and others beside them."""
    if call.inputs.keys() != other.inputs.keys():
        return False
    same = {name for name, digest in call.inputs.items() if other.inputs[name] == digest}
    return kept <= same and len(same) < len(call.inputs)


def _same_bits(part: Sequence[Op], again: Sequence[Op]) -> bool:
    def seen(op: Op) -> tuple[object, ...]:
        return op.name, op.line, op.digest

    return [seen(op) for op in part] == [seen(op) for op in again]


def _finding(call: Watched, part: list[Op], kept: frozenset[str], same: Sequence[Watched]) -> Finding:
    places = _places(call, part, kept)
    (first, _), *more = places.most_common()
    taken, total = sum(operations(op) for op in part), sum(operations(op) for op in call.ops)
    beside = f", with {_lines([line for (line, _, _), _ in more])}" if more else ""
    one = len(kept) == 1
    changed = sorted({name for other in same for name in call.inputs if other.inputs[name] != call.inputs[name]})
    names, others = _and(sorted(kept)), _and(changed)
    site = Site(
        REPEATED,
        Frame(0, *first),
        part,
        sum(op.bytes for op in part),
        f"if {names} {'stays' if one else 'stay'} the same, {_number(len(part))} not run again{beside}, "
        f"{taken / total:.0%} of the operations of a call; {size(_carried(call, part))} are used of their results",
        f"they depend on {names} and on the weights alone, and with other {others} they gave the same bits",
    )
    found = site.finding(len(same))
    return Finding(**{**vars(found), "proof": site.proof, "lines": tuple(sorted({op.line for op in part}))})


def _places(call: Watched, part: Sequence[Op], kept: frozenset[str]) -> Counter[tuple[int, str, str]]:
    """Where the part is called from: of each operator the innermost function that does something else besides."""
    mixed = {frame.serial for op in call.ops if not op.sources <= kept for frame in op.frames}
    places: Counter[tuple[int, str, str]] = Counter()
    for op in part:
        frame = next((frame for frame in reversed(op.frames) if frame.serial in mixed), op.frames[0])
        places[frame.line, frame.function, pattern(frame.module)] += int(operations(op)) + 1
    return places


def _carried(call: Watched, part: Sequence[Op]) -> int:
    """Bytes of the part's results that others read or the call returns: what would have to be kept."""
    inside = {op.index for op in part}
    made = {id(operand.value): operand for op in part for operand in op.gives}
    largest = {key: operand.bytes for key, operand in made.items() if operand.value.escapes}
    for op in call.ops:
        if op.view or op.index in inside:
            continue
        for operand in op.reads:
            if (key := id(operand.value)) in made:
                largest[key] = max(largest.get(key, 0), operand.bytes)
    return sum(largest.values())


def _number(count: int) -> str:
    return f"{count} operators need" if count > 1 else "1 operator need"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _lines(lines: Sequence[int]) -> str:
    found = sorted(set(lines))
    listed = _and([str(line) for line in found[:4]]) if len(found) <= 4 else f"{len(found)} other lines"
    return listed if len(found) > 4 else f"line{'s' if len(found) > 1 else ''} {listed}"
