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


class Copies(nn.Module):
    """Copies that change nothing, and copies that do."""

    def forward(self, hidden: Tensor) -> Tensor:
        same = hidden.clone()  # planted: copy
        summed = same + 1.0
        kept = summed.clone()  # written below: needed
        kept[..., 0] = 0.0
        turned = kept.transpose(0, 1).contiguous()  # another order: needed
        return turned.transpose(0, 1) + summed


class Casts(nn.Module):
    """A cast to a wider type and back, and one between which something happens."""

    def forward(self, hidden: Tensor) -> Tensor:
        narrow = hidden.to(torch.bfloat16)
        wide = narrow.to(torch.float32)
        back = wide.to(torch.bfloat16)  # planted: cast
        softened = functional.silu(narrow.to(torch.float32)).to(torch.bfloat16)  # computed between: needed
        return (back * softened).to(torch.float32)


class Masked(nn.Module):
    """Attention over slots that nothing was written to, and causal attention, in which some query sees every key.

    Both masks are made of lengths alone, and torch turns them into numbers in every call.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, size = hidden.shape
        keys = hidden.new_zeros(rows, 1, self.slots, size)
        keys[:, :, :length] = hidden[:, None]
        slots = torch.arange(self.slots, device=hidden.device)
        seen = slots < length  # planted: recomputed
        mask = seen[None, None, None].expand(rows, 1, length, -1)
        own, attend = hidden[:, None], functional.scaled_dot_product_attention
        attended = attend(own, keys, keys, attn_mask=mask)  # planted: masked, recomputed
        square = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
        causal = square.tril()  # planted: recomputed
        needed = attend(own, own, own, attn_mask=causal[None, None])  # planted: recomputed
        return (attended + needed)[:, 0]


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


class Loop(nn.Module):
    """One image after another, and one step after another."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        images = []
        for row in range(hidden.shape[0]):
            image = self.project(hidden[row])  # planted: loop
            images.append(torch.tanh(image))
        found = torch.stack(images)
        state = found[:, 0]
        for step in range(1, found.shape[1]):
            state = torch.tanh(state * 0.5 + found[:, step])  # needs the step before: no finding
        return found + state[:, None]


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
        parts: list[Any] = [Table(size), Copies(), Casts(), Masked(32), Unread(size), Loop(size)]
        self.parts = nn.ModuleList(parts)

    def forward(self, input_ids: Tensor, image: Tensor) -> Tensor:
        hidden: Tensor = self.repeated(self.embed(input_ids), image)
        for part in self.parts:
            hidden = part(hidden)
        return hidden
