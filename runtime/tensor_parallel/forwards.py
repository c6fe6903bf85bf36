"""What a module computes on a rank's own part, and the communication that belongs to it.

transformers wraps the `forward` of each module that a plan names, and deals its parameters as DTensors. While a model
runs as plain modules of each rank (`shards.local`), one of these stands in the wrapper's place and does once what the
wrapper does once: it sums, gathers, or deals. A module whose wrapper does nothing in a forward without gradients has
none, and operators read its weights like any other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.sharded_models import Local
from .ranks import Ranks


class Forward(Local):
    """Stands in for the `forward` of a module.

    Args:
        module: that it computes.
        ranks: that have the other parts.
        splits: whether the input is whole and each rank takes its columns.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, splits: bool = False):
        self.module, self.ranks, self.splits = module, ranks, splits

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module."""
        raise NotImplementedError

    def plain(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module's own code on this rank's part."""
        return type(self.module).forward(self.module, *arguments, **keywords)


class SummedForward(Forward):
    """The module computes a part of a sum: experts of which each rank has some columns."""

    @property
    def some(self) -> ExpertsForward | None:
        """Which experts are here, where the others are whole on other ranks."""
        return None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the sum."""
        return self.ranks.sum(self.plain(*arguments, **keywords))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Let the module compute its part, for who sums afterwards."""
        parameters = self.module._parameters
        bias = parameters.get("bias") if isinstance(self, RowForward) else None
        del self.module.__dict__["forward"]
        if bias is not None:
            parameters["bias"] = None
        try:
            yield
        finally:
            self.module.__dict__["forward"] = self
            if bias is not None:
                parameters["bias"] = bias

    def finished(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """Return the sum of the ranks' parts and what each rank adds by itself, once."""
        return self.ranks.sum(part, residual)


class ExpertsForward(SummedForward):
    """Experts of which each rank has some, whole; tokens bring the numbers that the router gave to all.

    Args:
        module: that computes this rank's, numbered from 0; a number beyond them is another rank's.
        ranks: that have the others, as many each.
        count: how many this rank has.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, count: int):
        super().__init__(module, ranks)
        self.count, self.first = count, ranks.rank * count

    @property
    def some(self) -> ExpertsForward | None:
        """Those of this module."""
        return self

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any) -> Tensor:
        """Return what all ranks' experts make of the tokens."""
        part: Tensor = self.plain(hidden_states, *self.own(top_k_index, top_k_weights))
        return self.ranks.sum(part.to(hidden_states.dtype))

    def own(self, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' numbers here and their weights: another rank's expert has number `count`, weight 0."""
        index = top_k_index - self.first
        other = (index < 0) | (index >= self.count)
        return index.masked_fill(other, self.count), top_k_weights.masked_fill(other, 0.0)


class RowForward(SummedForward):
    """A linear layer of which each rank has some of the input's columns; the bias is added to the sum."""

    def __call__(self, input: Tensor, *_: Any) -> Tensor:
        """Return the whole product."""
        with self.lifted():
            part = self.plain(self.ranks.part(input) if self.splits else input)
        return self.finished(part, None)

    def finished(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product, with bias and residual."""
        bias = self.module._parameters.get("bias")
        if bias is None:
            return self.ranks.sum(part, residual)
        total = self.ranks.sum(part) + bias
        return total if residual is None else residual + total


class GatheredForward(Forward):
    """Each rank has some of the output's columns, and all are wanted.

    Args:
        module: that it computes.
        ranks: that have the other parts.
        size: columns of the whole output.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, size: int):
        super().__init__(module, ranks)
        self.size = size

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the whole output."""
        return self.ranks.gather(self.plain(*arguments, **keywords), self.size)


class VocabularyForward(Forward):
    """An embedding of which each rank has some of the rows."""

    def __init__(self, module: nn.Module, ranks: Ranks, rows: int):
        super().__init__(module, ranks)
        width = -(-rows // ranks.size)
        self.start, self.end = min(ranks.rank * width, rows), min((ranks.rank + 1) * width, rows)

    def __call__(self, input: Tensor, *_: Any) -> Tensor:
        """Return each token's row, which one rank has."""
        mine = (input >= self.start) & (input < self.end)
        found: Tensor = self.plain(torch.where(mine, input - self.start, 0))
        return self.ranks.sum(torch.where(mine[..., None], found, 0.0).to(found.dtype))


def summed(module: nn.Module) -> SummedForward | None:
    """Return what a module computes a part of, and who sums it; None for a module of its own."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, SummedForward) else None
