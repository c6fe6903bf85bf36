"""Runs the launches that operators make on a pretended chip: compiled by Triton's own compiler, executed here."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_rewrite_runtime.launching import launch
from rewrite.kernels.chips import CHIPS

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


@dataclass
class Emulator:
    """Runs launches for one chip.

    Args:
        chip: of `chips.CHIPS`.
        weak: whether memory is the weakest that the chip may have; waves run one at a time then.
        change: of every kernel's assembly.
    """

    chip: str
    weak: bool = False
    change: Change = lambda text: text
    order: Order = Order()
    executed: list[Executed] = field(default_factory=list)
    _programs: dict[str, Program] = field(default_factory=dict)

    def __call__(self, planned: launch.Launch) -> None:
        """Compile a launch and run it on its tensors.

        Raises:
            Fault: the kernel does what it may not.
            UnknownInstruction: the emulator does not know one of its instructions.
        """
        compiled = planned()
        name = planned.kernel.jit_function.__name__.strip("_").removesuffix("_kernel")
        text = self.change(compiled.asm["amdgcn"])
        program = self._programs.get(text)
        if program is None:
            program = self._programs[text] = Program(text)
        threads = compiled.metadata.num_warps * CHIPS[self.chip].wave
        tensors = _Tensors(planned, compiled.src.signature)
        memory = self._memory(tensors, program.listing.arguments_size)
        tensors.write_arguments(memory, program, planned.grid, threads)
        order = Order(self.order.seed, alone=True) if self.weak else self.order
        try:
            count = program.run(planned.grid, threads, memory, compiled.metadata.shared, order)
        except Fault as fault:
            fault.add_note(f"{name} of {planned.grid} workgroups of {threads} threads on {self.chip}")
            raise
        tensors.take_back(memory)
        self.executed.append(Executed(name, planned.grid, threads, count))

    def _memory(self, tensors: _Tensors, arguments: int) -> DeviceMemory:
        held = {**tensors.storages, ARGUMENTS: np.zeros(arguments + 64, np.uint8)}
        if self.weak:
            return WeakMemory(held, tensors.alignment, self.chip)
        return DeviceMemory(held, tensors.alignment)

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call an operator; what it launches is run. Return its result."""
        launch.collect(lambda key, planned: self(planned))
        try:
            with torch.no_grad():
                return function(*arguments, **keywords)
        finally:
            launch.collect(None)


class _Tensors:
    """The arguments of a launch: the storages of its tensors, each once, and its numbers."""

    def __init__(self, planned: launch.Launch, signature: dict[str, str]):
        given = dict(zip(planned.kernel.jit_function.arg_names, planned.arguments, strict=True))
        self._arguments = [(name, kind, given[name]) for name, kind in signature.items() if kind != "constexpr"]
        self.storages: dict[str, Bytes] = {}
        self.alignment: dict[str, int] = {}
        self._names: dict[int, str] = {}
        for name, kind, value in self._arguments:
            if kind.startswith("*"):
                self._take(name, value)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        begin = tensor.untyped_storage().data_ptr()
        if begin not in self._names:
            self._names[begin] = name
            self.storages[name] = _bytes_of(tensor)
            self.alignment[name] = begin

    def write_arguments(
        self, memory: DeviceMemory, program: Program, grid: tuple[int, int, int], threads: int
    ) -> None:
        """Write what the kernel is given to the memory: addresses, numbers, and what the driver adds."""
        packed = bytearray()
        for _, kind, value in self._arguments:
            if kind.startswith("*"):
                begin = value.untyped_storage().data_ptr()
                _pack(packed, "Q", memory.address(self._names[begin]) + value.data_ptr() - begin)
            else:
                _pack(packed, _FORMATS[kind], value)
        packed.extend(bytes(max(program.listing.arguments_size - len(packed), 0)))
        known = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
        known |= {
            "hidden_group_size_x": threads,
            "hidden_group_size_y": 1,
            "hidden_group_size_z": 1,
            "hidden_grid_dims": 3,
        }
        for offset, size, kind in program.listing.hidden:
            if kind in known:
                struct.pack_into({2: "<H", 4: "<I", 8: "<Q"}[size], packed, offset, known[kind])
        memory.tensor(ARGUMENTS)[: len(packed)] = np.frombuffer(bytes(packed), np.uint8)

    def take_back(self, memory: DeviceMemory) -> None:
        """Write to the tensors what the kernel left in memory."""
        for name, storage in self.storages.items():
            storage[:] = memory.tensor(name)


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
