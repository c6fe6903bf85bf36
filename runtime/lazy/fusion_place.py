"""Where the programs of a chain's kernel are in the numbers of a tensor (`lazy.fusion_text`): indices, as text.

Triton loads several numbers at once where it sees that their addresses follow each other. It sees that of quotients
and remainders of an index that counts up, and of sums of them with products; not of quotients of quotients. So every
address is a sum over coordinates, each computed from the index itself, whatever lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Name = Callable[[str], str]
"""Makes a variable of an expression, the same one for the same expression."""


def in_order(shape: Sequence[int]) -> list[int]:
    """Return the strides of numbers that lie one after the other; 0 where there is one."""
    return [0 if size == 1 else math.prod(shape[place + 1 :]) for place, size in enumerate(shape)]


class Place:
    """A block of indices into the numbers of a tensor, which lie in order.

    Args:
        name: makes variables.
        shape: of the tensor.
        flat: the index into all of it, or what gives that when it is asked for.
        coordinate: gives the index along a dimension, or of several next to each other as one: by the first and the
            last of them. None for those that it does not know as one; by default all are made from `flat`.
    """

    def __init__(
        self, name: Name, shape: Sequence[int], flat: str | Callable[[], str],
        coordinate: Callable[[int, int], str | None] | None = None,
    ):  # fmt: skip
        self.name, self.shape = name, tuple(shape)
        self._flat, self._given = flat, coordinate
        self._counts = coordinate is None

    @property
    def flat(self) -> str:
        """The index into all numbers."""
        if not isinstance(self._flat, str):
            self._flat = self._flat()
        return self._flat

    def coordinate(self, dim: int) -> str:
        """Return the index along a dimension."""
        found = self.span(dim, dim)
        assert found is not None
        return found

    def span(self, first: int, last: int) -> str | None:
        """Return the index along dimensions from `first` to `last`, as one; None where they are no one."""
        if self._given is not None:
            return self._given(first, last)
        return part_of(self.name, self.flat, self.shape, first, last)

    def address(self, strides: Sequence[int]) -> str:
        """Return the sum of coordinates times strides."""
        if [stride if size > 1 else 0 for size, stride in zip(self.shape, strides, strict=True)] == in_order(
            self.shape
        ):
            return self.flat
        parts = list[str]()
        for first, last, stride in self._runs(strides):
            found = self.span(first, last)
            places = [(found, stride)] if found else [(self.coordinate(d), strides[d]) for d in range(first, last + 1)]
            parts += [place if by == 1 else f"{place} * {by}" for place, by in places[::-1] if by and place != "0"]
        return self.name(" + ".join(parts)) if parts else "0"

    def _runs(self, strides: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return runs of dimensions that are one in memory, with the stride of the last of each, from the last run."""
        runs = list[tuple[int, int, int]]()
        length = 1
        for dim in range(len(self.shape) - 1, -1, -1):
            size, stride = self.shape[dim], strides[dim]
            if size == 1:
                continue
            if runs and stride == length * runs[-1][2] and all(s == 1 for s in self.shape[dim + 1 : runs[-1][0]]):
                runs[-1] = (dim, *runs[-1][1:])
                length *= size
            else:
                runs.append((dim, dim, stride))
                length = size
        return runs

    def shifted(self, dim: int, start: int, size: int) -> Place:
        """Return the place in what lies from `start` on along a dimension."""

        def coordinate(first: int, last: int) -> str | None:
            if first == last == dim and start:
                return self.name(f"{self.coordinate(dim)} - {start}")
            return self.span(first, last) if not first <= dim <= last or first == last else None

        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._by(shape, coordinate)

    def within(self, shape: Sequence[int], strides: Sequence[int]) -> Place:
        """Return the place in numbers of another shape, which are read with strides over this one's dimensions."""
        strides = [stride if size > 1 else 0 for size, stride in zip(self.shape, strides, strict=True)]
        if strides == in_order(self.shape):
            if tuple(shape) == self.shape:
                return self
            if self._counts:
                return Place(self.name, shape, self._flat)
        parts = _parts(self.shape, strides, shape)
        if parts is None:
            return Place(self.name, shape, lambda: self.address(strides))

        def coordinate(first: int, last: int) -> str | None:
            if first != last:
                return None
            sums = [(self.coordinate(dim), by) for dim, by in parts[first]]
            if len(sums) == 1 and sums[0][1] == 1:
                return sums[0][0]
            return self.name(" + ".join(f"{place} * {by}" for place, by in sums)) if sums else "0"

        return self._by(shape, coordinate)

    def _by(self, shape: Sequence[int], coordinate: Callable[[int, int], str | None]) -> Place:
        def flat() -> str:
            return by_coordinates(self.name, shape, lambda dim: str(coordinate(dim, dim)))

        return Place(self.name, shape, flat, coordinate)


def by_coordinates(name: Name, shape: Sequence[int], coordinate: Callable[[int], str]) -> str:
    """Return the variable of the index with these coordinates."""
    terms = [(coordinate(dim), by) for dim, by in enumerate(in_order(shape)) if by]
    return name(" + ".join(place if by == 1 else f"{place} * {by}" for place, by in terms)) if terms else "0"


def part_of(name: Name, flat: str, shape: Sequence[int], first: int, last: int) -> str:
    """Return the variable of what an index is along the dimensions from `first` to `last`."""
    size, behind, before = (math.prod(part) for part in (shape[first : last + 1], shape[last + 1 :], shape[:first]))
    if size == 1:
        return "0"
    text = f"{flat} // {behind}" if behind > 1 else flat
    text = f"{text} % {size}" if before > 1 else text
    return text if text == flat else name(text)


def _parts(shape: Sequence[int], strides: Sequence[int], into: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """Return of which dimensions, and how often each, the coordinates into a shape are sums.

    None where a dimension would have to be taken apart.
    """
    own, found, most = in_order(into), [list[tuple[int, int]]() for _ in into], [0] * len(into)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size == 1 or not stride:
            continue
        place = next((place for place, step in enumerate(own) if step and step <= stride), None)
        if place is None or stride % own[place]:
            return None
        most[place] += (size - 1) * (stride // own[place])
        found[place].append((dim, stride // own[place]))
    return found if all(end < size for end, size in zip(most, into, strict=True)) else None
