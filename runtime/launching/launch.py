"""Launch a Triton kernel: with what options on which chip, and with less Python per call than `kernel[grid](...)`.

Triton decides on every call which compiled variant the arguments need. Here the variant is remembered under a key made
of what Triton specialises on: dtypes, 16-byte alignment of pointers, strides that are 1 or divisible by 16 or need 64
bits, and the constants. On ROCm Triton also specialises on the size of each tensor's storage; there its own path runs.

What depends on the chip is decided here and nowhere else: the size of a wave (`WAVE`: a kernel's file says how many
threads it wants, and divides), the options that only AMD's compiler knows (`options`), the 8-bit float of its matrix
units (`fp8_dtype`). `pretend` makes all of it that of another chip, so that what is compiled ahead of time is what
would be launched there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import precompiled

HIP = torch.version.hip is not None
WAVE = 64 if HIP else 32
"""Threads of a warp. The data-centre chips that this is for have 64; on AMD's other cards a block is half as large."""
_REMEMBERS = not HIP


@dataclass(frozen=True)
class Target:
    """A chip, by the names that Triton has for it."""

    backend: str
    """`cuda` or `hip`."""
    arch: str
    """`sm_90`, `gfx942`."""
    processors: int = 132
    """Multiprocessors, or compute units; an H100's where nobody says."""
    shared: int = 227 << 10
    """Bytes of shared memory that a program can have; an H100's where nobody says."""

    @property
    def wave(self) -> int:
        """Threads of a warp."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start before the one before it has ended: NVIDIA's from compute capability 9."""
        return self.backend == "cuda" and int(self.arch.removeprefix("sm_")) >= 90 and _compiles_waits()


@functools.cache
def _compiles_waits() -> bool:
    """Return whether Triton compiles a kernel's wait for the one before it: 3.4 cannot call its own functions."""
    from triton.language.extra import cuda

    return "_semantic" in inspect.signature(cuda.gdc_wait).parameters


@functools.cache
def target(device: int) -> Target:
    """Return the chip of a CUDA or HIP device."""
    if HIP:
        return Target("hip", str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", f"sm_{major}{minor}")


def processors(device: int | None) -> int:
    """Return how many multiprocessors (compute units) programs are divided among.

    Args:
        device: its index; None for the interpreter, whose forms are an H100's.
    """
    if _pretended is not None:
        return _pretended.processors
    if device is None:
        return Target.processors
    return _processors(device)


def shared_memory(device: int | None) -> int:
    """Return how many bytes of shared memory a program can have; of the interpreter (None) an H100's."""
    if _pretended is not None:
        return _pretended.shared
    return Target.shared if device is None else _shared_memory(device)


@functools.cache
def _shared_memory(device: int) -> int:
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block)


@functools.cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fp8_dtype(arch: str) -> torch.dtype:
    """Return the 8-bit format with 3 mantissa bits that a chip's matrix units take.

    MI300's (gfx940 to gfx942) have no negative zero and no infinity, and end at 240; MI350's and NVIDIA's are the
    Open Compute Project's, which ends at 448. The bits of one mean half as much in the other.
    """
    return torch.float8_e4m3fnuz if arch.startswith("gfx94") else torch.float8_e4m3fn


def options(chip: Target, dot: bool) -> dict[str, int]:
    """Return what a kernel is compiled with on a chip, besides its number of warps.

    A product and a sum are one instruction, which Triton 3.9 no longer does by itself: kernels of few rows would take
    two for each weight. Nothing else of NVIDIA's compiler: it refuses a launch with options that it does not know.
    AMD's keeps subnormals, which weights in 4 bits are read as (`linear.blocks`). `waves_per_eu` is left to it, so
    that it aims at the most waves that the registers allow. A kernel with products (`dot`) gets 16 x 16 matrix
    instructions, since its tiles have 16 rows; before gfx950 two of their inner steps share one read of shared memory.
    Not with Triton 3.4 (nor 3.5, which was not tried): where a product has one inner step, of 16, it multiplies other
    numbers (attention over tiles of 16 slots, 16 rotated columns; executed on an emulator of gfx942).
    """
    if chip.backend != "hip":
        return {"enable_fp_fusion": True}
    given = {"enable_fp_fusion": True, "allow_flush_denorm": False, "waves_per_eu": 0}
    return given | (
        {"matrix_instr_nonkdim": 16, "kpack": 1 if chip.arch == "gfx950" or _before_3_6() else 2} if dot else {}
    )


@functools.cache
def _before_3_6() -> bool:
    """Return whether the installed Triton is 3.4 or 3.5."""
    return importlib.metadata.version("triton").startswith(("3.4.", "3.5."))


_pretended: Target | None = None


def pretend(chip: Target) -> None:
    """Act as on another chip for the rest of the process: operators on any tensor choose the kernels they would there.

    Nothing can be launched then; `collect` says what would be. Before the operators are imported, which take `WAVE`
    and `HIP` from here.

    Raises:
        RuntimeError: if one is imported already.
    """
    global HIP, WAVE, _pretended
    runtime = __name__.rsplit(".", 2)[0]
    late = [name for name, module in sys.modules.items() if name.startswith(f"{runtime}.") and _took(module)]
    if late:
        raise RuntimeError(f"already imported for this machine: {', '.join(sorted(late))}")
    HIP, WAVE, _pretended = chip.backend == "hip", chip.wave, chip


def _took(module: Any) -> bool:
    return module.__name__ != __name__ and not {"WAVE", "HIP"}.isdisjoint(vars(module))


def pretends() -> bool:
    """Return whether `pretend` was called."""
    return _pretended is not None


def chip_of(tensor: torch.Tensor) -> Target | None:
    """Return the chip that operators on a tensor are for; None on a CPU."""
    return _pretended or (target(tensor.get_device()) if tensor.is_cuda else None)


def _use_shipped(tensor: torch.Tensor) -> None:
    """Let kernels that were compiled ahead be found before one is compiled."""
    if tensor.is_cuda and _pretended is None:
        precompiled.use(target(tensor.get_device()).arch)


def describe(model: torch.nn.Module) -> list[str]:
    """Return a line on kernels that were compiled ahead, for `explain`."""
    device: Any = getattr(model, "device", None)
    if device is None or device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return []
    line = precompiled.use(target(torch.cuda.current_device() if device.index is None else device.index).arch)
    return [line] if line else []


class LauncherNotBuilt(RuntimeError):
    """The C compiler failed on the function with which Triton launches a kernel."""

    def __init__(self, error: subprocess.CalledProcessError):
        command = error.cmd[0] if isinstance(error.cmd, (list, tuple)) else error.cmd
        super().__init__(
            f"Triton could not build the C function that launches a kernel: {command} failed, as it said above. It "
            "needs a C compiler and the headers of this Python (Debian, Ubuntu: apt install gcc python3-dev). With "
            "REWRITE_BACKEND=reference the package runs without kernels, slower."
        )


@dataclass(frozen=True)
class Launch:
    """One launch that a collector was told of; called, it compiles the kernel and returns what Triton made of it."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, int]
    """What the compiler is given, `num_warps` included."""

    @property
    def length(self) -> int:
        """Characters of its source, by which one may guess how long it takes to compile."""
        return len(self.kernel.jit_function.src)

    def __call__(self) -> Any:
        """Compile."""
        _use_shipped(self.arguments[0])
        return self.kernel.jit_function.warmup(*self.arguments, grid=self.grid, **self.options)


LOADING = threading.RLock()
"""Held where Triton may load the C function that launches a kernel. All are modules of one name: of two threads that
load some at once, one may be given the other's ("function takes exactly 40 arguments (33 given)")."""
Collector = Callable[[tuple[object, ...], Launch], object]


class _Thread(threading.local):
    """What this thread's launches do."""

    rehearses: bool = False
    collector: Collector | None = None


_THREAD = _Thread()


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Launch as inside a graph: the same variants, so that each is compiled once and before the capture."""
    before, _THREAD.rehearses = _THREAD.rehearses, True
    try:
        yield
    finally:
        _THREAD.rehearses = before


def rehearses() -> bool:
    """Return whether this thread is inside `rehearsing`."""
    return _THREAD.rehearses


def wait_for_stores(tensor: torch.Tensor) -> str:
    """Return the instruction by which a wave waits until its stores are done; none where a barrier orders them."""
    chip = chip_of(tensor)
    if chip is None or chip.backend != "hip":
        return ""
    if chip.arch.startswith("gfx12"):
        return "s_wait_storecnt 0"
    return "s_waitcnt_vscnt null, 0" if chip.arch.startswith(("gfx10", "gfx11")) else "s_waitcnt vmcnt(0)"


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether a kernel may start before the one before it has ended (programmatic dependent launch).

    Only inside a captured graph or its rehearsal, where nothing but the step's own kernels writes: what is loaded
    before the wait (weights, older cache slots) was there when the step began.
    """
    if not tensor.is_cuda:
        return _pretended is not None and _THREAD.rehearses and _pretended.has_dependent_launch
    return (_THREAD.rehearses or torch.cuda.is_current_stream_capturing()) and target(
        tensor.get_device()
    ).has_dependent_launch


def grid(blocks: int, row_count: int) -> tuple[int, int, int]:
    """Return a grid of all blocks of all rows, the blocks of a row next to each other.

    A row is `program_id(2) * num_programs(1) + program_id(1)`, as an axis but the first ends at 65,535. With the rows
    first, neighbouring programs touch distant memory: 7% slower at 768 MiB (H100).
    """
    return blocks, min(row_count, 32768), -(-row_count // 32768)


def collect(collector: Collector | None) -> None:
    """Launch nothing in this thread: tell `collector` of every variant, by a key, and how to compile it.

    None launches again. `compile_ahead` is the user of this.
    """
    _THREAD.collector = collector


def collects() -> bool:
    """Return whether this thread's launches are told to a collector."""
    return _THREAD.collector is not None


class Kernel:
    """A kernel whose signature is pointers, counts (not specialised), strides, floats, constants, in this order.

    `dot` says that it has matrix products (`tl.dot`), `contracts` that a product and a sum may be rounded once.
    """

    def __init__(self, jit_function: Any, *, dot: bool = False, contracts: bool = True):
        self.jit_function = jit_function
        self.dot = dot
        self.contracts = contracts
        self._variants: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        num_warps: int,
        tensors: tuple[torch.Tensor, ...],
        counts: tuple[int, ...],
        strides: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[object, ...],
        *,
        overlap: bool = False,
    ) -> None:
        """Run the kernel on the current device and stream, with `overlap` as a programmatic dependent launch.

        Raises:
            LauncherNotBuilt: if there is no working C compiler, or no header of Python.
        """
        key = (
            num_warps,
            overlap,
            constants,
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % 16 == 0 for tensor in tensors],
            *[stride if stride < 2 else (stride % 16 == 0, stride >> 31) for stride in strides],
        )
        arguments = (*tensors, *counts, *strides, *floats, *constants)
        if _THREAD.collector is not None:
            planned = Launch(self, grid, arguments, self._options(num_warps, overlap, tensors[0]))
            _THREAD.collector((self, *key), planned)
            return
        variant = self._variants.get(key)
        if variant is not None:
            variant[grid](*arguments)
            return
        _use_shipped(tensors[0])
        try:
            with LOADING:
                variant = self.jit_function[grid](*arguments, **self._options(num_warps, overlap, tensors[0]))
        except subprocess.CalledProcessError as error:
            raise LauncherNotBuilt(error) from error
        if _REMEMBERS and variant is not None:  # the interpreter returns None
            self._variants[key] = variant

    def _options(self, num_warps: int, overlap: bool, tensor: torch.Tensor) -> dict[str, int]:
        given = {"num_warps": num_warps} | ({"launch_pdl": True} if overlap else {})
        if not (tensor.is_cuda or pretends()):  # the interpreter takes CPU tensors and no options
            return given
        given |= options(_pretended or target(tensor.get_device()), self.dot)
        return given if self.contracts else given | {"enable_fp_fusion": False}
