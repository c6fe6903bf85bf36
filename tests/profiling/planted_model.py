"""A model with one thing of each kind that need not be computed, and beside each a twin that is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Table(nn.Module):
    """Turns a frequency table into cosines, anew in every call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, size))
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        table = torch.cos(self.frequencies * 3.0)  # planted: recomputed
        return hidden * table + torch.sin(hidden.mean(-1, keepdim=True) * self.scale)  # depends on the input: needed


class Constants(nn.Module):
    """A mask that is made of lengths alone, and a copy of what depends on the input."""

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        square = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
        causal = square.tril()  # planted: recomputed
        own, attend = hidden[:, None], functional.scaled_dot_product_attention
        attended = attend(own, own, own, attn_mask=causal[None, None])  # planted: recomputed
        return attended[:, 0] + hidden.clone()


class Unread(nn.Module):
    """A product whose result goes nowhere, and one that is only looked at by the host."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.unused = nn.Linear(size, size)
        self.used = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        self.unused(hidden)  # planted: unread
        gate = self.used(hidden)
        if gate.abs().sum().tolist() < 0:  # read by the host: needed
            return hidden
        return hidden * gate


class Repeated(nn.Module):
    """A tower over an image, and one whose image is scaled by a number that the host reads of the other argument."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tower = nn.Linear(size, 4 * size)
        self.scaled = nn.Linear(size, 4 * size)
        self.turns = 0

    def forward(self, hidden: Tensor, image: Tensor) -> Tensor:
        seen = self.tower(image)  # planted: repeated
        scale = hidden.mean().tolist()
        other = self.scaled(image * scale)  # the host knows the other argument: needed
        self.turns += 1
        return hidden + (seen + other).mean()


class Planted(nn.Module):
    """All of them, one after the other."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, size)
        self.repeated = Repeated(size)
        parts: list[Any] = [Table(size), Constants(), Unread(size)]
        self.parts = nn.ModuleList(parts)

    def forward(self, input_ids: Tensor, image: Tensor) -> Tensor:
        hidden: Tensor = self.repeated(self.embed(input_ids), image)
        for part in self.parts:
            hidden = part(hidden)
        return hidden
