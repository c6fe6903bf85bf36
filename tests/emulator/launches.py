"""Runs what Triton launches: a driver without a GPU, whose launches are executed on tensors of the CPU."""

from __future__ import annotations

import ctypes
import gc
import importlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewrite.kernels.chips import CHIPS
from rewrite.kernels.compile_work import Driver

from .device_memory import Bytes, DeviceMemory, WeakMemory
from .isa_errors import Fault
from .machine import ARGUMENTS, Order, Program

_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d", "f64": "d",
}  # fmt: skip
"""Of the arguments of a kernel, by Triton's names of their types."""
Change = Callable[[str], str]
"""What becomes of a kernel's assembly before it is run: for faults that are planted."""


@dataclass(frozen=True)
class Executed:
    """One launch that was run."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    instructions: int
    """That all waves executed."""
    undecided: int = 0
    """See `Shared.undecided`."""
    counts: bool = False
    """Whether its programs count themselves."""


@dataclass
class Emulator:
    """Runs launches for one chip, once it is Triton's driver (`install`).

    Args:
        chip: of `chips.CHIPS`.
        weak: whether memory is the weakest that the chip may have; waves run one at a time then.
        alone: whether waves run one at a time in any case, to the next barrier.
        change: of every kernel's assembly.
        seed: of the order of workgroups and waves.
    """

    chip: str
    weak: bool = False
    alone: bool = False
    change: Change = lambda text: text
    seed: int = 0
    record: Callable[[Recorded], None] | None = None
    """Told of every launch that was run."""
    executed: list[Executed] = field(default_factory=list)
    programs: dict[str, Program] = field(default_factory=dict)

    def install(self) -> None:
        """Be the driver of this process's Triton, on a chip that the runtime was told of (`launch.pretend`)."""
        importlib.import_module("triton").runtime.driver.set_active(EmulatedDriver(self))

    def program(self, text: str) -> Program:
        """Return a kernel that was read once."""
        if text not in self.programs:
            self.programs[text] = Program(text)
        return self.programs[text]

    def run(self, call: Call) -> None:
        """Execute a launch.

        Raises:
            Fault: the kernel does what it may not.
            UnknownInstruction: the emulator does not know one of its instructions.
        """
        if 0 in call.grid:  # Triton's own launcher does nothing then
            return
        program = self.program(self.change(call.text))
        threads = call.metadata.num_warps * CHIPS[self.chip].wave
        tensors = _Tensors(call.arguments)
        memory = self._memory(tensors, program.listing.arguments_size)
        tensors.write(memory, program, call.grid, threads)
        kept = tensors.copies() if self.record is not None and not tensors.has_tables else None
        # in a weak memory each launch has another order
        order = Order(self.seed + self.weak * len(self.executed), alone=self.weak or self.alone)
        kernel = call.metadata.name.strip("_").removesuffix("_kernel")
        try:
            count = program.run(call.grid, threads, memory, call.metadata.shared, order)
        except Fault as fault:
            fault.where = f"{kernel} of {call.grid} workgroups of {threads} threads on {self.chip}"
            raise
        tensors.take_back(memory)
        if self.record is not None and kept is not None:
            after = {name: storage.copy() for name, storage in tensors.storages.items()}
            self.record(Recorded(kernel, replace(call, arguments=kept), after))
        self.executed.append(Executed(kernel, call.grid, threads, count, program.undecided, "_atomic_" in call.text))

    def _memory(self, tensors: _Tensors, arguments: int) -> DeviceMemory:
        held = {**tensors.storages, ARGUMENTS: np.zeros(arguments + 64, np.uint8)}
        if self.weak:
            return WeakMemory(held, tensors.alignment, self.chip)
        return DeviceMemory(held, tensors.alignment)


@dataclass(frozen=True)
class Call:
    """A launch as Triton's driver is asked for it."""

    text: str
    """The assembly."""
    metadata: Any
    grid: tuple[int, int, int]
    arguments: Sequence[tuple[str, str, Any]]
    """Name, type and value of what is no constant."""


@dataclass(frozen=True)
class Recorded:
    """A launch that was run: with copies of its tensors as they were before, and what they held after."""

    kernel: str
    call: Call
    after: dict[str, Bytes]

    def again(self, emulator: Emulator) -> dict[str, Bytes]:
        """Run it once more from the same tensors; return what they hold then."""
        tensors = _Tensors(self.call.arguments)
        arguments = tensors.copies()
        emulator.run(replace(self.call, arguments=arguments))
        return {name: storage.copy() for name, storage in _Tensors(arguments).storages.items()}


class EmulatedDriver(Driver):
    """What Triton asks of a driver in order to compile and to launch.

    Args:
        emulator: which runs the launches.
    """

    def __init__(self, emulator: Emulator):
        super().__init__(CHIPS[emulator.chip])
        self.emulator = emulator
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the bytes of LDS of a workgroup."""
        return {"max_shared_mem": self.chip.shared_of_group, "multiprocessor_count": self.chip.processors}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[str, str, int, int, int]:
        """Load nothing: what is run is the assembly."""
        return name, name, 0, 0, 1024

    def unload_module(self, module: str) -> None:
        """Let go of nothing."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches a kernel."""
        text = _assembly(metadata)

        def launch(*given: Any) -> None:
            """Take the grid, six things that are a GPU's, and the arguments."""
            kinds, values = source.signature.items(), given[9:]
            arguments = [(n, kind, v) for (n, kind), v in zip(kinds, values, strict=True) if kind != "constexpr"]
            self.emulator.run(Call(text, metadata, given[:3], arguments))

        return launch


def _assembly(metadata: Any) -> str:
    """Return a compiled kernel's assembly, of Triton's cache: a driver is only given the binary."""
    cache = importlib.import_module("triton.runtime.cache").get_cache_manager(metadata.hash)
    return Path(cache.get_file(f"{metadata.name}.amdgcn")).read_text("utf-8")


class _Tensors:
    """The arguments of a launch: the storages of its tensors, each once, and its numbers."""

    def __init__(self, arguments: Sequence[tuple[str, str, Any]]):
        self._arguments = arguments
        self.storages: dict[str, Bytes] = {}
        self.alignment: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._tables: list[torch.Tensor] = []
        self._translated: list[tuple[Any, Any, int, int]] = []
        for name, kind, value in arguments:
            if kind.startswith("*"):
                self._take(name, value)
        for name, kind, value in arguments:
            if kind == "*i64":
                self._take_table(name, value)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        begin = tensor.untyped_storage().data_ptr()
        if begin not in self._names:
            self._names[begin] = name
            self.storages[name] = _bytes_of(tensor)
            self.alignment[name] = begin

    def _take_table(self, name: str, table: torch.Tensor) -> None:
        """Take the tensors whose addresses an argument holds."""
        addresses = set(table.flatten()[:4096].tolist())
        if not any(address > 1 << 40 for address in addresses):
            return
        for number, tensor in enumerate(_at(addresses)):
            self._take(f"{name}[{number}]", tensor)
        self._tables.append(table)

    @property
    def has_tables(self) -> bool:
        """Whether an argument holds addresses."""
        return bool(self._tables)

    def copies(self) -> list[tuple[str, str, Any]]:
        """Return the arguments with tensors in storages of their own, which share what these share."""
        storages: dict[int, torch.UntypedStorage] = {}
        found = []
        for name, kind, value in self._arguments:
            if kind.startswith("*"):
                storage = value.untyped_storage()
                own = storages.setdefault(storage.data_ptr(), storage.clone())
                value = torch.zeros(0, dtype=value.dtype).set_(
                    own, value.storage_offset(), value.shape, value.stride()
                )
            found.append((name, kind, value))
        return found

    def _address(self, memory: DeviceMemory, tensor_at: int, begin: int) -> int:
        return memory.address(self._names[begin]) + tensor_at - begin

    def write(self, memory: DeviceMemory, program: Program, grid: tuple[int, int, int], threads: int) -> None:
        """Write what the kernel is given to the memory: addresses, numbers, and what the driver adds."""
        packed = bytearray()
        for _, kind, value in self._arguments:
            if kind.startswith("*"):
                begin = value.untyped_storage().data_ptr()
                _pack(packed, "Q", self._address(memory, value.data_ptr(), begin))
            else:
                _pack(packed, _FORMATS[kind], value)
        packed.extend(bytes(max(program.listing.arguments_size - len(packed), 0)))
        known = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
        known |= {"hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
        known |= {"hidden_grid_dims": 3}
        for offset, size, kind in program.listing.hidden:
            if kind in known:
                struct.pack_into({2: "<H", 4: "<I", 8: "<Q"}[size], packed, offset, known[kind])
        memory.tensor(ARGUMENTS)[: len(packed)] = np.frombuffer(bytes(packed), np.uint8)
        for table in self._tables:
            self._translate(memory, table)

    def _translate(self, memory: DeviceMemory, table: torch.Tensor) -> None:
        name = self._names[table.untyped_storage().data_ptr()]
        entries = memory.tensor(name)[: self.storages[name].nbytes // 8 * 8].view(np.int64)
        for tensor in _at(set(table.flatten().tolist())):
            at, begin = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
            address = self._address(memory, at, begin)
            self._translated.append((entries, entries == at, address, at))
            entries[entries == at] = address

    def take_back(self, memory: DeviceMemory) -> None:
        """Write to the tensors what the kernel left in memory; addresses in tables become again what they were."""
        for entries, where, address, at in self._translated:
            entries[where & (entries == address)] = at
        for name, storage in self.storages.items():
            storage[:] = memory.tensor(name)


def _at(addresses: set[int]) -> Iterator[torch.Tensor]:
    """Yield a living tensor for each address at which one begins."""
    found: dict[int, torch.Tensor] = {}
    for one in gc.get_objects():
        if (
            type(one) in (torch.Tensor, torch.nn.Parameter)
            and one.device.type == "cpu"
            and one.layout == torch.strided
        ):
            at = one.data_ptr()
            if at in addresses:
                found.setdefault(at, one)
    yield from (found[at] for at in sorted(found))


def _pack(packed: bytearray, kind: str, value: Any) -> None:
    size = struct.calcsize(kind)
    packed.extend(bytes(-len(packed) % size))
    packed.extend(struct.pack(f"<{kind}", value))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the storage of a tensor, as bytes that are written to it."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.zeros(0, np.uint8)
    pointer = ctypes.cast(storage.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (storage.nbytes(),))
