"""Heads that a step fills up with zeros before attention and cuts behind it: neither is done.

B rows, H heads, S slots, D head_dim, P zeros:

    attention(pad(q), pad(k), pad(v))[..., :D]   =   attention(q, k, v)        scaled as the file says, or by D + P

Zeros add nothing to a score, and those of the values are what is cut. Moonshine fills up keys and values of the whole
cache, and of its encoder, at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..lazy.lazy_mode import Deferred
from ..lazy.pointwise_fusion import FUNCTIONS
from ..lazy.step_products import StepProducts
from .masked_attention import takes_rows


@dataclass(eq=False)
class Padded(Deferred):
    """Heads with `count` zeros behind the numbers of each."""

    heads: Tensor
    """`[B, H, n, D]`."""
    count: int
    settle: Callable[[Tensor], None]

    @property
    def reads(self) -> Sequence[Tensor]:
        """The heads."""
        return [self.heads]

    def compute(self, out: Tensor) -> None:
        """Fill them up."""
        self.settle(self.heads)
        out.copy_(F.pad(self.heads, (0, self.count)))


def padded(step: StepProducts, heads: Tensor, count: int) -> Tensor:
    """Return what stands for heads `[B, H, n, D]` with `count` zeros behind each."""
    return step.put_off(Padded(heads, count, step.settle), (*heads.shape[:-1], heads.shape[-1] + count), heads)


def unpadded(step: StepProducts, *heads: Tensor) -> tuple[list[Tensor], int]:
    """Return queries, keys and values before they were filled up, and by how much; as they are, and 0, else."""
    found = [step.of(one) for one in heads]
    counts = {one.count if isinstance(one, Padded) else 0 for one in found}
    if len(counts) > 1 or 0 in counts or heads[0].shape[2] != 1:
        return [*heads], 0
    return [one.heads for one in found if isinstance(one, Padded)], counts.pop()


def _pad(
    step: StepProducts, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor | None:
    behind = len(pad) == 2 and pad[0] == 0 and pad[1] > 0 and mode == "constant" and not value
    if not behind or not isinstance(input, Tensor) or input.dim() != 4 or not takes_rows(input):
        return None
    return padded(step, input, pad[1])


def _item(step: StepProducts, tensor: Tensor, index: Any) -> Tensor | None:
    """Take the first numbers of what attention gave for heads that were filled up."""
    found = step.of(tensor)
    if isinstance(found, Padded) and isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
        width = found.heads.shape[-1]
        if index[1] in (slice(None, -found.count), slice(None, width)) and found.heads.is_contiguous():
            step.settle(found.heads)
            return found.heads.view(*tensor.shape[:-1], width)
    return FUNCTIONS[torch.Tensor.__getitem__](step, tensor, index)


HANDLERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {F.pad: _pad, torch.Tensor.__getitem__: _item}
"""What a step asks, by functions of torch, before chains of functions."""
