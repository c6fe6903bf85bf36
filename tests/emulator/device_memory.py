"""A device's memory: tensors with room between them, and a fault for whatever lies outside of all.

`WeakMemory` is the weakest that a chip may be (LLVM, "User Guide for AMDGPU Backend", memory model): stores stay on
their way until their wave waits for them, or the grid has ended. Then they are in a cache: from gfx942 on in the L2 of
the die, which others see once it is written back; on gfx90a in the one L2. Any line may be in a cache already, as it
was before the launch, and stays until it is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .isa_errors import Fault
from .waves import U32, Waves

BASE = 0x10_0000_0000
PAGE = 4096
Bytes = NDArray[np.uint8]


class DeviceMemory:
    """Tensors by name; each begins as far behind a boundary of 256 bytes as `alignment` has it."""

    def __init__(self, tensors: Mapping[str, Bytes], alignment: Mapping[str, int]):
        self.names = list(tensors)
        begins, at = [], PAGE
        for name, data in tensors.items():
            begins.append(at + alignment.get(name, 0) % 256)
            at = (begins[-1] + len(data) + 2 * PAGE - 1) // PAGE * PAGE + PAGE
        self.bytes = np.full(at, 0xA5, np.uint8)
        self._words = self.bytes.view(U32)
        self._begin = np.array(begins, np.int64)
        self._end = self._begin + np.array([len(data) for data in tensors.values()], np.int64)
        for begin, data in zip(begins, tensors.values(), strict=True):
            self.bytes[begin : begin + len(data)] = data

    def address(self, name: str) -> int:
        """Return where a tensor begins."""
        return BASE + int(self._begin[self.names.index(name)])

    def tensor(self, name: str) -> Bytes:
        """Return the bytes of a tensor as they are now."""
        number = self.names.index(name)
        return self.bytes[self._begin[number] : self._end[number]]

    def _at(self, address: Any, size: int, what: str) -> NDArray[np.int64]:
        at = address.astype(np.int64) - BASE
        number = np.searchsorted(self._begin, at, "right") - 1
        outside = (number < 0) | (at + size > self._end[number])
        if outside.any():
            first = int(outside.argmax())
            raise Fault(self._message(int(at[first]), size, what, int(outside.sum())))
        return at

    def _message(self, at: int, size: int, what: str, lanes: int) -> str:
        gaps = np.where(at < self._begin, self._begin - at, at + size - self._end)
        near = int(gaps.argmin())
        behind = "behind the end" if at >= self._begin[near] else "before the beginning"
        return (
            f"a {what} of {size} bytes at {BASE + at:#x} by {lanes} lanes, the first {int(gaps[near])} bytes {behind} "
            f"of {self.names[near]} ({int(self._end[near] - self._begin[near])} bytes)"
        )

    def _gather(self, whole: Bytes, at: NDArray[np.int64], size: int) -> Bytes:
        if size % 4 == 0 and not (at & 3).any():
            found = whole.view(U32)[(at >> 2)[:, None] + np.arange(size // 4)]
            return found.view(np.uint8)
        return whole[at[:, None] + np.arange(size)]

    def load(self, address: Any, size: int, waves: Waves) -> Bytes:
        """Return `[lanes, size]` bytes."""
        return self._gather(self.bytes, self._at(address, size, "load"), size)

    def store(self, address: Any, data: Bytes, waves: Waves) -> Callable[[], None] | None:
        """Write `[lanes, size]` bytes; return what happens when they are waited for."""
        size = data.shape[1]
        at = self._at(address, size, "store")
        self.bytes[at[:, None] + np.arange(size)] = data
        return None

    def now(self, address: Any) -> int:
        """Return 32 bits as an atomic operation reads them."""
        at = int(self._at(address, 4, "atomic operation")[0])
        return int(self.bytes[at : at + 4].view(U32)[0])

    def put_now(self, address: Any, value: int) -> None:
        """Write 32 bits as an atomic operation does."""
        at = int(self._at(address, 4, "atomic operation")[0])
        self.bytes[at : at + 4].view(U32)[0] = value

    def write_back(self, waves: Waves) -> Callable[[], None] | None:
        """Let other dies see what is in this one's cache; return what happens when that is waited for."""
        return None

    def invalidate(self, waves: Waves) -> None:
        """Read anew what others may have written."""

    def finish(self) -> None:
        """End the grid: everything is written."""


class _Cache:
    def __init__(self, memory: Bytes):
        self.bytes = memory.copy()
        self.has = np.ones(len(memory), bool)
        self.dirty = np.zeros(len(memory), bool)


class WeakMemory(DeviceMemory):
    """The weakest memory of a chip. Its waves run one at a time: a gang has one."""

    LINE = 128
    DIES = 8

    def __init__(self, tensors: Mapping[str, Bytes], alignment: Mapping[str, int], chip: str):
        super().__init__(tensors, alignment)
        self._writes_through = chip == "gfx90a"
        self._before: Bytes | None = None
        self._caches: dict[int, _Cache] = {}
        self._writing: list[Callable[[], None]] = []
        self._flying: dict[tuple[int, int], list[tuple[NDArray[np.int64], Bytes, list[bool]]]] = {}

    def _cache(self, waves: Waves) -> _Cache:
        number = waves.die if self._writes_through else waves.die % self.DIES
        if self._before is None:  # at the first access of the grid
            self._before = self.bytes.copy()
        if number not in self._caches:
            self._caches[number] = _Cache(self._before)
        return self._caches[number]

    def _wave(self, waves: Waves) -> tuple[int, int]:
        return waves.die, int(waves.place[0])

    def load(self, address: Any, size: int, waves: Waves) -> Bytes:
        """Return what is in the cache of the die, which is filled line by line."""
        at = self._at(address, size, "load")
        cache = self._cache(waves)
        self._own_first(waves, at, size)
        lines = np.unique(np.concatenate([at // self.LINE, (at + size - 1) // self.LINE]))
        places = (lines[:, None] * self.LINE + np.arange(self.LINE)).ravel()
        places = places[places < len(self.bytes)]
        missing = places[~cache.has[places]]
        cache.bytes[missing] = self.bytes[missing]
        cache.has[missing] = True
        return self._gather(cache.bytes, at, size)

    def _own_first(self, waves: Waves, at: NDArray[np.int64], size: int) -> None:
        """A wave sees its own stores."""
        flying = self._flying.get(self._wave(waves), [])
        touched = at[:, None] + np.arange(size)
        if any(np.isin(touched, places).any() for places, _, _ in flying):
            for flight in flying:
                self._land(waves.die, flight)

    def store(self, address: Any, data: Bytes, waves: Waves) -> Callable[[], None]:
        """Put bytes on their way; return what lets them arrive in the cache."""
        at = self._at(address, data.shape[1], "store")[:, None] + np.arange(data.shape[1])
        flight = (at, data.copy(), [False])
        self._flying.setdefault(self._wave(waves), []).append(flight)
        die = waves.die
        self._cache(waves)
        return lambda: self._land(die, flight)

    def _land(self, die: int, flight: tuple[NDArray[np.int64], Bytes, list[bool]]) -> None:
        at, data, landed = flight
        if landed[0]:
            return
        landed[0] = True
        cache = self._caches[die if self._writes_through else die % self.DIES]
        cache.bytes[at] = data
        cache.has[at] = True
        if self._writes_through:
            self.bytes[at] = data
        else:
            cache.dirty[at] = True

    def write_back(self, waves: Waves) -> Callable[[], None]:
        """Begin to write what is dirty: of stores, only those that have arrived."""
        cache = self._cache(waves)
        places = np.nonzero(cache.dirty)[0]
        data = cache.bytes[places].copy()
        cache.dirty[places] = False
        left = [True]

        def write() -> None:
            if left.pop() if left else False:
                self.bytes[places] = data

        self._writing.append(write)
        return write

    def invalidate(self, waves: Waves) -> None:
        """Forget every line that is not dirty."""
        cache = self._cache(waves)
        cache.has[~cache.dirty] = False

    def finish(self) -> None:
        """Let everything arrive and be written."""
        for write in self._writing:
            write()
        for (die, _), flights in self._flying.items():
            for flight in flights:
                self._land(die, flight)
        for cache in self._caches.values():
            self.bytes[cache.dirty] = cache.bytes[cache.dirty]
