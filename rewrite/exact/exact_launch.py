"""One launch of a kernel, as `kernel_cases.entries` collects it, on random elements and against its reference.

The tensors that the launch was collected with are replaced: floats of any width by fp32 whose bits are random
elements, 8-bit codes and bytes by random ones, positions and numbers of experts by what the reference says that they
may be. So each kernel is tried by itself, with the grid, the strides and the constants that its operator gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rewrite_runtime.launching.launch import Launch
from rewrite.finite import ring
from rewrite.finite.ring_tensor import RingTensor

from .interpreted_ring import payload

_CODES = (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
Integers = Callable[["Arguments"], Tensor]


@dataclass(frozen=True)
class Reference:
    """What a kernel computes, in plain torch, and what it may be given."""

    kernel: str
    computes: Callable[[Arguments], Mapping[str, Tensor]]
    """From its arguments before the launch to its outputs, each with the elements that its tensor has."""
    integers: Mapping[str, Integers] = field(default_factory=dict)
    """What its tensors of integers hold, by the names of their arguments."""
    scratch: tuple[str, ...] = ()
    """Arguments whose contents nobody reads afterwards."""
    unseen: Callable[[Arguments], str] = lambda given: ""
    """Why a launch has no meaning in the ring, if it has none."""


class Arguments:
    """Arguments of a launch by their names: tensors as `RingTensor`s, numbers as they are, floats as elements."""

    def __init__(self, names: list[str], values: tuple[Any, ...]):
        self.values = dict(zip(names, values, strict=True))
        self.tensors: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        found = self.tensors[name] if name in self.tensors else self.values[name]
        if isinstance(found, Tensor):
            return RingTensor(payload(found.numpy())) if found.dtype == torch.float32 else found
        return RingTensor(ring.elements(torch.tensor(found, dtype=torch.float32))) if type(found) is float else found


class Differs(AssertionError):
    """A kernel gives other bits than its reference."""


def run(launch: Launch, reference: Reference) -> str:
    """Interpret a launch. Returns why it could not be, or "".

    Raises:
        Differs: with the names of the arguments that differ, and how many of their elements.
    """
    function = launch.kernel.jit_function
    names = list(function.arg_names)
    given = Arguments(names, launch.arguments)
    _leave_out_assembly(given.values)
    if why := reference.unseen(given):
        return why
    for name, value in given.values.items():
        if isinstance(value, Tensor):
            given.tensors[name] = _filled(name, value, reference, given)
    before = {name: tensor.clone() for name, tensor in given.tensors.items()}
    expected = reference.computes(given)
    function[launch.grid](*[given.tensors.get(name, given.values[name]) for name in names], num_warps=4)
    wrong = []
    for name, tensor in given.tensors.items():
        if name in reference.scratch:
            continue
        wanted = expected.get(name)
        wanted = before[name] if wanted is None else wanted
        if count := _differing(tensor, wanted):
            wrong.append(f"{count} of {tensor.numel()} elements of {name}")
    if wrong:
        raise Differs(f"{' and '.join(wrong)} differ")
    return ""


def form(launch: Launch) -> str:
    """Return the constants of a launch that say how it divides its work, for people."""
    named = zip(launch.kernel.jit_function.arg_names, launch.arguments, strict=True)
    return ", ".join(f"{name} {value}" for name, value in named if name.isupper() and not isinstance(value, bool))


def _leave_out_assembly(values: dict[str, Any]) -> None:
    """Take the branches that are the same in Triton's own operations: nothing interprets instructions of a chip."""
    if "WAIT" in values:
        values["WAIT"] = ""
    if values.get("PTX"):
        values |= {"PTX": False} | ({"DECODE": True} if "DECODE" in values else {})


def _filled(name: str, like: Tensor, reference: Reference, given: Arguments) -> Tensor:
    """Return a tensor of the size and strides of one that was collected, with something in it."""
    seed = f"{reference.kernel} {name}"
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    extent = extent if like.numel() else 0
    if like.dtype in (torch.bfloat16, torch.float16, torch.float32):
        base = ring.random((extent,), seed).to(torch.int32).view(torch.float32)
    elif like.dtype in _CODES or name == "values_ptr":
        size = 4 if like.dtype == torch.int32 else 1
        codes = ring.random((extent * size,), seed).to(torch.uint8)
        if like.dtype == torch.bool:
            base = codes % 3 > 0
        else:  # no code of e4m3 that is no number, and no exponent beyond what one of two scales of
            base = torch.where(codes % 128 > 126, 1, codes) if "scale" not in name else 120 + codes % 16
            base = torch.where(base == 128, 1, base).to(torch.uint8)
            base = base.view(like.dtype)
    else:
        base = torch.zeros(extent, dtype=like.dtype)
        if name in reference.integers:
            filled = torch.as_strided(base, like.shape, like.stride())
            return filled.copy_(reference.integers[name](given).expand(like.shape))
        if name != "arrived_ptr":
            raise NotImplementedError(f"{reference.kernel}: what does {name} hold?")
    return torch.as_strided(base, like.shape, like.stride())


def _differing(found: Tensor, wanted: Tensor) -> int:
    if isinstance(wanted, RingTensor):
        return int((payload(found.numpy()).flatten() != wanted.elements.flatten()).sum())
    if found.dtype == torch.float32:
        return int((found.reshape(-1).view(torch.int32) != wanted.reshape(-1).view(torch.int32)).sum())
    if found.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
    return int((found.flatten() != wanted.flatten()).sum())
