"""The memory layouts in which operators meet their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def packed(x: torch.Tensor) -> torch.Tensor:
    """A column slice of a wider tensor, as the projections of a packed GEMM are."""
    other = torch.full_like(x, torch.nan)
    return torch.cat((other, x, other), dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]


def offset(x: torch.Tensor) -> torch.Tensor:
    """Storage that does not start on 16 bytes."""
    buffer = x.new_full((x.numel() + 1,), torch.nan)
    return buffer[1:].view(x.shape).copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1, :].expand_as(x)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Neighbours in a row are two elements apart."""
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    layout.__name__: layout for layout in (contiguous, packed, offset, transposed, expanded, strided)
}
