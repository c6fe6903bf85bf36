"""A case of the catalogue, and the launches that its operator makes: collected, not run.

Import this after `launch.pretend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rewrite_runtime.launching import launch

LONGEST = 24
"""Characters of a name: the figures beside it need the rest of a line."""


@dataclass(frozen=True)
class Case:
    """One call of an operator, as of a decode step: launches overlap where the chip can.

    Raises:
        ValueError: if its name is longer than `LONGEST`.
    """

    shape: str
    call: Callable[[], object]

    def __post_init__(self) -> None:
        if len(self.shape) > LONGEST:
            raise ValueError(f"'{self.shape}' leaves no room for the figures: at most {LONGEST} characters")


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor that nothing reads: the system gives it no memory before it is written."""
    return torch.empty(shape, dtype=dtype)


def int64(*shape: int) -> Tensor:
    """Return such a tensor of positions or tokens."""
    return tensor(*shape, dtype=torch.int64)


@dataclass(frozen=True)
class Entry:
    """A launch of a case: what is compiled."""

    kernel: str
    shape: str
    launch: launch.Launch


def entries(cases: Sequence[Case]) -> list[Entry]:
    """Return the launches of cases, each variant once: models whose launches are the same share the first one's."""
    found: dict[object, Entry] = {}
    with torch.no_grad(), launch.rehearsing():
        for case in cases:

            def take(key: tuple[object, ...], planned: launch.Launch, shape: str = case.shape) -> None:
                name = planned.kernel.jit_function.__name__.strip("_").removesuffix("_kernel")
                found.setdefault(key, Entry(name, shape, planned))

            launch.collect(take)
            try:
                case.call()
            finally:
                launch.collect(None)
    return list(found.values())
