"""How the dimensions of a tensor come to lie in those of another one that is made from it by moving them about.

A dimension is a tuple of factors, the slowest first: of `[B, H, S, D]`, a tensor whose second dimension is `(H, n)`
holds every head n times in a row, one whose second dimension is `(n, H)` holds all heads, n times over. Views, copies,
permutations and repetitions only regroup factors, however they are spelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature

from rewrite.analysis.terms.spelling import NONE, Term, constant

Axis = tuple[Term, ...]
Axes = tuple[Axis, ...]
_WHOLE = Term("slice", (NONE, NONE, NONE))
_DOTS = Term("constant", (), "...")
_ZERO, _ONE, _REST = constant(0), constant(1), constant(-1)


class NotRegrouped(Exception):
    """The tensor is made by something that does more than move dimensions about."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what


def axes_of(term: Term, tensor: Term, axes: Axes) -> Axes:
    """Return the dimensions of `term`, over the factors of those of `tensor` and the sizes that are new in it.

    Raises:
        NotRegrouped: if something else is done to `tensor`.
    """
    return _Reading(tensor, axes).of(term)


class _Reading:
    def __init__(self, tensor: Term, axes: Axes):
        self.tensor, self.axes = tensor, axes

    def of(self, term: Term) -> Axes:
        """Return the dimensions of a term."""
        if term == self.tensor:
            return self.axes
        rule = _RULES.get(term.op)
        if rule is None or not term.args:
            raise NotRegrouped(f"`{term.op or term.value}`")
        try:
            given = signature(rule).bind(self, *term.args)
        except TypeError as error:  # arguments that move no dimension, such as `out=`
            raise NotRegrouped(f"`{term.op}` with more arguments") from error
        return rule(*given.args)

    def size(self, term: Term) -> Axis:
        """Return the factors of a size."""
        if term == _ONE:
            return ()
        if term.op == "mul":
            return self.size(term.args[0]) + self.size(term.args[1])
        if term.op == "index" and term.args[0].op == "shape" and len(term.args) == 2:
            return self.of(term.args[0].args[0])[_number(term.args[1])]
        if term.op in ("parameter", "attribute", "name", "constant") or term.op.startswith("."):
            return (term,)
        if term.op == "floordiv" and all(len(self.size(side)) == 1 for side in term.args):
            return (term,)
        raise NotRegrouped(f"a size `{term}`")

    def sizes(self, terms: Sequence[Term]) -> list[Term]:
        """Return the sizes that are given one by one, or as one tuple."""
        return list(terms[0].args) if len(terms) == 1 and terms[0].op == "tuple" else list(terms)

    def index(self, term: Term, *items: Term) -> Axes:
        axes = self.of(term)
        taken = [item for item in items if item not in (NONE, _DOTS)]
        rest = len(axes) - len(taken)
        if any(item != _WHOLE for item in taken) or rest < 0 or (rest and items.count(_DOTS) > 1):
            raise NotRegrouped("a part of the tensor")
        new: list[Axis] = []
        left = list(axes)
        for item in items if _DOTS in items else (*items, _DOTS):
            if item == NONE:
                new.append(())
            else:
                new += [left.pop(0) for _ in range(rest if item == _DOTS else 1)]
        return tuple(new)

    def unsqueeze(self, term: Term, place: Term) -> Axes:
        axes = list(self.of(term))
        axes.insert(_place(place, len(axes) + 1), ())
        return tuple(axes)

    def expand(self, term: Term, *given: Term) -> Axes:
        axes, sizes = self.of(term), self.sizes(given)
        if len(sizes) != len(axes):
            raise NotRegrouped("an expansion by new dimensions")
        return tuple(self._expanded(axis, size) for axis, size in zip(axes, sizes, strict=True))

    def _expanded(self, axis: Axis, size: Term) -> Axis:
        if size == _REST:
            return axis
        factors = self.size(size)
        if axis and Counter(factors) != Counter(axis):
            raise NotRegrouped(f"an expansion to `{size}`")
        return axis or factors

    def reshape(self, term: Term, *given: Term) -> Axes:
        left = [factor for axis in self.of(term) for factor in axis]
        sizes = self.sizes(given)
        known = [None if size == _REST else self.size(size) for size in sizes]
        if known.count(None) > 1:
            raise NotRegrouped("two sizes of -1")
        inferred = len(left) - sum(len(factors) for factors in known if factors is not None)
        new: list[Axis] = []
        for factors in known:
            count = inferred if factors is None else len(factors)
            part, left = tuple(left[: max(count, 0)]), left[max(count, 0) :]
            if factors is not None and Counter(part) != Counter(factors):
                raise NotRegrouped("sizes that dimensions do not add up to")
            new.append(part)
        if left or inferred < 0:
            raise NotRegrouped("sizes that dimensions do not add up to")
        return tuple(new)

    def flatten(self, term: Term, start: Term = _ZERO, end: Term = _REST) -> Axes:
        axes = self.of(term)
        first, last = _place(start, len(axes)), _place(end, len(axes))
        return (*axes[:first], sum(axes[first : last + 1], ()), *axes[last + 1 :])

    def unflatten(self, term: Term, place: Term, *given: Term) -> Axes:
        axes = self.of(term)
        number = _place(place, len(axes))
        part = _Reading(Term("part"), (axes[number],)).reshape(Term("part"), *self.sizes(given))
        return (*axes[:number], *part, *axes[number + 1 :])

    def transpose(self, term: Term, first: Term, second: Term) -> Axes:
        axes = list(self.of(term))
        one, other = _place(first, len(axes)), _place(second, len(axes))
        axes[one], axes[other] = axes[other], axes[one]
        return tuple(axes)

    def permute(self, term: Term, *given: Term) -> Axes:
        axes = self.of(term)
        places = [_place(place, len(axes)) for place in self.sizes(given)]
        if sorted(places) != list(range(len(axes))):
            raise NotRegrouped("a permutation of other dimensions")
        return tuple(axes[place] for place in places)

    def repeat(self, term: Term, *given: Term) -> Axes:
        axes, sizes = self.of(term), self.sizes(given)
        if len(sizes) != len(axes):
            raise NotRegrouped("a repetition by new dimensions")
        return tuple(self.size(size) + axis for size, axis in zip(sizes, axes, strict=True))

    def repeat_interleave(self, term: Term, times: Term, place: Term = NONE, length: Term = NONE) -> Axes:
        axes = list(self.of(term))
        number = _place(place, len(axes))
        axes[number] = axes[number] + self.size(times)
        if length != NONE and Counter(self.size(length)) != Counter(axes[number]):  # torch raises where it is another
            raise NotRegrouped(f"an output size `{length}`")
        return tuple(axes)

    def stack(self, tensors: Term, place: Term = _ZERO) -> Axes:
        tensor, times = self._copies(tensors)
        axes = list(self.of(tensor))
        axes.insert(_place(place, len(axes) + 1), self.size(times))
        return tuple(axes)

    def cat(self, tensors: Term, place: Term = _ZERO) -> Axes:
        tensor, times = self._copies(tensors)
        axes = list(self.of(tensor))
        number = _place(place, len(axes))
        axes[number] = self.size(times) + axes[number]
        return tuple(axes)

    def _copies(self, tensors: Term) -> tuple[Term, Term]:
        """Return x and n of `[x] * n`, or of a list that names x n times."""
        if tensors.op == "mul":
            held = next((side for side in tensors.args if side.op == "tuple"), None)
            if held is not None and len(held.args) == 1:
                return held.args[0], next(side for side in tensors.args if side is not held)
        if tensors.op == "tuple" and tensors.args and len(set(tensors.args)) == 1:
            return tensors.args[0], constant(len(tensors.args))
        raise NotRegrouped("tensors of several kinds side by side")

    def select(self, test: Term, yes: Term, no: Term) -> Axes:
        """A choice of what is the same anyway: without the factor n where n is 1."""
        one, other = self.of(yes), self.of(no)
        if one == other:
            return one
        if test.op == "eq" and _ONE in test.args:
            factors = self.size(next((side for side in test.args if side != _ONE), _ONE))
            if len(factors) == 1 and one == tuple(tuple(f for f in axis if f not in factors) for axis in other):
                return other
        raise NotRegrouped(f"a choice by `{test}`")

    def same(self, term: Term, *rest: Term) -> Axes:
        return self.of(term)


_RULES: dict[str, Callable[..., Axes]] = {
    "index": _Reading.index,
    "unsqueeze": _Reading.unsqueeze,
    "expand": _Reading.expand,
    "broadcast_to": _Reading.expand,
    "reshape": _Reading.reshape,
    "view": _Reading.reshape,
    "flatten": _Reading.flatten,
    "unflatten": _Reading.unflatten,
    "transpose": _Reading.transpose,
    "permute": _Reading.permute,
    "repeat": _Reading.repeat,
    "tile": _Reading.repeat,
    "repeat_interleave": _Reading.repeat_interleave,
    "stack": _Reading.stack,
    "cat": _Reading.cat,
    "select": _Reading.select,
    "contiguous": _Reading.same,
    "clone": _Reading.same,
}
"""Every operation that only moves dimensions about, by its name among terms."""


def _number(term: Term) -> int:
    if term.op != "constant" or not term.value.lstrip("-").isdigit():
        raise NotRegrouped(f"a dimension `{term}`")
    return int(term.value)


def _place(term: Term, count: int) -> int:
    number = _number(term)
    if not -count <= number < count:
        raise NotRegrouped(f"a dimension {number} of {count}")
    return number % count
