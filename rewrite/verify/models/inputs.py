"""Prompts: fresh random tokens per check and seed, padded left or right, and masks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIRST_TOKEN = 4
Padding = Literal["none", "left", "right"]


@dataclass(frozen=True)
class Batch:
    """`input_ids`, `mask` and `position_ids` are [batch, length]; `mask` is None without padding."""

    input_ids: Tensor
    mask: Tensor | None
    position_ids: Tensor

    @property
    def real(self) -> Tensor:
        """[batch, length] bool: which tokens are not padding."""
        import torch

        return torch.ones_like(self.input_ids, dtype=torch.bool) if self.mask is None else self.mask.bool()


@functools.cache
def _cpu_alone() -> bool:
    import torch

    return not torch.cuda.is_available()


def seed_all(seed: int) -> None:
    """Seed what a model draws from: torch, and numpy, which Wav2Vec2 masks frames with as it trains.

    Where there is no GPU, the CPU's generator alone: for those to come `torch.manual_seed` writes down its callers,
    which takes a millisecond.
    """
    import numpy
    import torch

    numpy.random.seed(seed % (1 << 32))
    if _cpu_alone():
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the caller's random state back, of GPUs too where this process uses one.

    A process that has not begun to does not begin here: those that are forked from it could use none.
    """
    import numpy
    import torch

    in_use = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    drawn = numpy.random.get_state()
    with torch.random.fork_rng(devices=in_use):
        try:
            yield
        finally:
            numpy.random.set_state(drawn)


def tokens(seed: int, vocab: int, batch: int, length: int, device: str) -> Tensor:
    """Random token ids [batch, length], none of them special."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, vocab, (batch, length), generator=generator).to(device)


def prompt(seed: int, vocab: int, batch: int, length: int, padding: Padding, device: str) -> Batch:
    """A random batch; with padding, row i has i × 3 pad tokens (at most length - 2)."""
    import torch

    input_ids = tokens(seed, vocab, batch, length, device)
    positions = torch.arange(length, device=device).expand(batch, length).contiguous()
    if padding == "none":
        return Batch(input_ids, None, positions)
    pads = torch.tensor([[min(3 * row, length - 2)] for row in range(batch)], device=device)
    order = positions if padding == "left" else positions.flip(1)
    mask = (order >= pads).long()
    if padding == "left":
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Batch(torch.where(mask.bool(), input_ids, torch.zeros_like(input_ids)), mask, positions)


def prefix_mask(batch: int, length: int, prefix: int, dtype: torch.dtype, device: str) -> Tensor:
    """An additive mask [batch, 1, length, length]: causal, but the first `prefix` tokens see each other."""
    import torch

    positions = torch.arange(length, device=device)
    allowed = (positions[None, :] <= positions[:, None]) | (positions[None, :] < prefix)
    mask = torch.zeros(length, length, dtype=dtype, device=device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min).expand(batch, 1, length, length).contiguous()


def positions_of(model: Any, most: int) -> int:
    """How many tokens a text may have, `most` at most: a model may have fewer positions."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "seq_length")
    known = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 3]
    return min([most, *known])
