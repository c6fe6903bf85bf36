"""Runs a model and notes every operator: what it reads and writes, where it was asked for, and what became of it.

Data is followed by storage: views of one storage are one value. What reads a tensor without an operator (`tolist`,
numpy, a pointer) is seen as well, so a value that nobody reads is one that nobody reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PARAMETER, BUFFER, INPUT, UNKNOWN, MADE = "parameter", "buffer", "input", "unknown", "made"
KEPT_BYTES = 2**30
"""Of results that are kept to be compared with those of the next call."""
_READERS = frozenset(
    [
        "tolist",
        "numpy",
        "__array__",
        "item",
        "data_ptr",
        "__dlpack__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__len__",
    ]
)


@dataclass(frozen=True)
class Frame:
    """A function of the modeling file on the stack, while an operator runs."""

    serial: int
    """Of this call of the function."""
    line: int
    function: str
    module: str


@dataclass(eq=False)
class Value:
    """What lies in one storage, from its making to its end."""

    kind: str
    name: str = ""
    maker: int | None = None
    sources: frozenset[str] = frozenset()
    """Names of the inputs of the call that it depends on; `?` for what is not known."""
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    """After it was made."""
    escapes: bool = False
    """Whether something holds it when the call has ended, or somebody read it without an operator."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator read or gave back."""

    value: Value
    shape: tuple[int, ...]
    bytes: int


@dataclass(eq=False)
class Op:
    """One operator of a call."""

    index: int
    name: str
    """`aten::mm`."""
    frames: tuple[Frame, ...]
    """Of the modeling file, the outermost first."""
    reads: tuple[Operand, ...]
    gives: tuple[Operand, ...]
    view: bool
    random: bool
    sources: frozenset[str] = frozenset()
    """Names of the inputs that its result, or that it runs at all, depends on; `?` for what is not known."""
    digest: bytes | None = None
    """Of what came out, where it depends on inputs alone."""
    result: Tensor | None = None
    """A copy of what came out, where every input was constant."""

    @property
    def constant(self) -> bool:
        """Whether what it reads depends on no input."""
        return not self.random and all(not operand.value.sources for operand in self.reads)

    @property
    def bytes(self) -> int:
        """What it moves; of a table that rows are taken from, those rows."""
        if self.name.rpartition("::")[2] in ("embedding", "index_select", "gather", "index"):
            return 2 * sum(operand.bytes for operand in self.gives)
        return sum(operand.bytes for operand in (*self.reads, *self.gives))

    @property
    def line(self) -> int:
        """The innermost line of the modeling file; 0 outside."""
        return self.frames[-1].line if self.frames else 0


@dataclass
class Watched:
    """The operators of one call."""

    ops: list[Op] = field(default_factory=list)
    inputs: dict[str, bytes] = field(default_factory=dict)
    """A digest of each."""


class _Stack:
    """The calls of a file's functions that are under way in this thread."""

    def __init__(self, file: str, model: Any):
        self._file, self._calls = file, 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._frames: list[tuple[int, FrameType, str]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(
            Frame(serial, frame.f_lineno, frame.f_code.co_name, module) for serial, frame, module in self._frames
        )

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace_lines = False
        self._calls += 1
        module = self._names.get(id(frame.f_locals.get("self")), "")
        self._frames.append((self._calls, frame, module))
        return self._left

    def _left(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "return" and self._frames and self._frames[-1][1] is frame:
            self._frames.pop()
        return self._left


class _Readers(TorchFunctionMode):
    """Notes what reads a tensor's memory without an operator."""

    def __init__(self, watcher: Watcher):
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            for argument in args:
                if isinstance(argument, Tensor):
                    self._watcher.read_aside(argument, values=func.__name__ != "__len__")
        return func(*args, **(kwargs or {}))


class Watcher(TorchDispatchMode):
    """Notes the operators of the calls of one model, call by call."""

    def __init__(self, model: Any, file: str):
        super().__init__()
        self._stack = _Stack(file, model)
        self._values: dict[int, tuple[Any, Value]] = {}
        self._known = {p.untyped_storage()._cdata: (PARAMETER, n) for n, p in model.named_parameters()}
        self._known |= {b.untyped_storage()._cdata: (BUFFER, n) for n, b in model.named_buffers()}
        self._inputs: dict[int, frozenset[str]] = {}
        self._changed: set[str] = set()
        self._asked: frozenset[str] = frozenset()
        self._kept = 0
        self.calls: list[Watched] = []
        self._current: Watched | None = None

    @contextlib.contextmanager
    def call(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Watch one call; the results that the block still holds when it ends are not dead."""
        given = {name: list(_tensors(value)) for name, value in inputs.items()}
        self._current = Watched(inputs={name: _digest(tensors) for name, tensors in given.items() if tensors})
        self.calls.append(self._current)
        self._values.clear()
        self._asked, self._inputs = frozenset(), {}
        for name, tensors in given.items():
            for tensor in tensors:
                place = tensor.untyped_storage()._cdata
                self._inputs[place] = self._inputs.get(place, frozenset()) | {name}
        try:
            with self._stack.followed(), _Readers(self), self:
                yield
        finally:
            self._current = None

    def ended(self) -> None:
        """Note which values are held by something now that the call has ended."""
        for reference, value in self._values.values():
            if value.kind != MADE or not reference.expired():
                value.escapes = True
            if value.kind in (PARAMETER, BUFFER) and value.writes:
                self._changed.add(value.name)
        self._values.clear()

    def read_aside(self, tensor: Tensor, values: bool) -> None:
        """Note that somebody reads a tensor without an operator; its values, or only how long it is."""
        value = self._value(tensor)
        value.escapes = True
        if values:
            self._asked |= value.sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        current = self._current
        if current is None:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        reads = tuple(self._operand(tensor) for tensor in given)
        out = func(*args, **kwargs)
        found = list(_tensors(out))
        index = len(current.ops)
        written = {
            id(tensor)
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        }
        view = bool(found) and not written and all(_shares(tensor, given) for tensor in found)
        random = _draws(func, args, kwargs)
        for operand, tensor in zip(reads, given, strict=True):
            operand.value.reads.append(index)
            if id(tensor) in written:
                operand.value.writes.append(index)
                operand.value.sources |= frozenset().union(*(each.value.sources for each in reads))
        sources = frozenset().union(*(operand.value.sources for operand in reads)) if reads else frozenset[str]()
        sources |= {"?"} if random else set()
        if _tells_host(func, given):
            self._asked |= sources
        gives = tuple(self._operand(tensor, index, sources) for tensor in found)
        op = Op(index, func._schema.name, self._stack.frames, reads, gives, view, random)
        op.sources = sources | self._asked
        self._look_at(op, found)
        current.ops.append(op)
        return out

    def _operand(self, tensor: Tensor, maker: int | None = None, sources: frozenset[str] = frozenset()) -> Operand:
        value = self._value(tensor, maker, sources)
        size = tensor.element_size()
        count = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= length if stride else min(length, 1)
        return Operand(value, tuple(tensor.shape), count * size)

    def _value(self, tensor: Tensor, maker: int | None = None, sources: frozenset[str] = frozenset()) -> Value:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._values.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        if maker is not None:
            value = Value(MADE, maker=maker, sources=sources)
        elif key in self._inputs:
            names = self._inputs[key]
            value = Value(INPUT, " and ".join(sorted(names)), sources=names, escapes=True)
        elif key in self._known:
            kind, name = self._known[key]
            value = Value(kind, name, sources=frozenset("?" if name in self._changed else ()), escapes=True)
        else:
            value = Value(UNKNOWN, sources=frozenset({"?"}), escapes=True)
        self._values[key] = (StorageWeakRef(storage), value)
        return value

    def _look_at(self, op: Op, found: list[Tensor]) -> None:
        """Keep what can only be seen now."""
        if op.constant and not op.view and len(found) == 1 and self._kept < KEPT_BYTES:
            op.result = found[0].clone()
            self._kept += op.result.nbytes
        if op.sources and "?" not in op.sources and not op.view:
            op.digest = _digest(found)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)


def _digest(tensors: list[Tensor]) -> bytes:
    """Of the bits of tensors, their shapes and types."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a single number may have any stride
        found.update(flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8).numpy().data)
    return found.digest()


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention is one that may, and does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    dropout = [argument for argument in func._schema.arguments if argument.name == "dropout_p"]
    given = [value for argument, value in _arguments(func, args, kwargs) if argument.name == "dropout_p"]
    return not dropout or bool(given[0] if given else dropout[0].default_value)


def _tells_host(func: Any, given: list[Tensor]) -> bool:
    """Whether what an operator gives back, or its shape, tells the host of the values that it read."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    by_mask = any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
    return torch.Tag.dynamic_output_shape in func.tags and (func._schema.name != "aten::index" or by_mask)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _shares(tensor: Tensor, given: list[Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(storage == each.untyped_storage()._cdata for each in given)
