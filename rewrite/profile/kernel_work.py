"""The work of our own kernels, which torch's profiler knows nothing of but a name: from the tensors of each launch.

Weights count in full, those of experts by the share that a step's tokens choose; keys and values count by what the
cache holds where attention reads them, and by one token where they are written; of other tables a step reads a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rewrite.measure import categories, limits

from .operator_work import Amount
from .parts import part_of
from .places import Place, Places

WORK = "kernel"
"""Stands where a place has its function's name: the place of a launch, whose number leads to its work."""
FEWEST_OF_A_TABLE = 1024
"""Rows from which a matrix that is no weight is a table, of cosines say, of which a token reads one."""


@dataclass(frozen=True)
class Held:
    """What the caches of a step hold: tokens of a row, and slots."""

    tokens: int
    slots: int


class Launches:
    """The work of each launch, by the annotation around it."""

    def __init__(self, model: Any, places: Places, held: Held | None, rows: int):
        self._model, self._places, self._held, self._rows = model, places, held, rows
        self._weights = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        config = model.config.get_text_config()
        count, active = limits.experts(config)
        self._experts = 1 - (1 - active / count) ** rows if count else 1.0
        heads = getattr(config, "num_attention_heads", None) or 1
        self._groups = heads / (getattr(config, "num_key_value_heads", None) or heads)
        self.amounts: dict[int, Amount] = {}
        """By the number of a place."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Annotate every launch of the package's own kernels with its work; an original has none."""
        part = part_of(self._model, "launching/launch")
        if part is None:
            yield
            return
        kernel = part.Kernel
        original, launches = kernel.launch, self

        def launch(self: Any, *given: Any, **named: Any) -> Any:
            span = launches._opened(self, *given, **named)
            try:
                return original(self, *given, **named)
            finally:
                span.__exit__(None, None, None)

        kernel.launch = launch
        try:
            yield
        finally:
            kernel.launch = original

    def _opened(self, kernel: Any, grid: Any, num_warps: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        name = str(getattr(kernel.jit_function, "__name__", kernel.jit_function))
        number = len(self._places.list)
        place = Place(name, number, WORK, self._module(tensors))
        span = self._places.opened(place)
        self.amounts[number] = self._amount(name, tensors)
        return span

    def _amount(self, name: str, tensors: Any) -> Amount:
        kind = categories.category(name)
        moved = operations = 0.0
        seen: set[int] = set()
        for tensor in tensors:
            if tensor.data_ptr() in seen or not tensor.numel():
                continue
            seen.add(tensor.data_ptr())
            share = self._share(tensor, kind)
            moved += share * tensor.numel() * tensor.element_size()
            if kind == categories.GEMM and tensor.dim() >= 2 and self._is_weight(tensor):
                rows = self._rows if tensor.dim() == 2 else self._rows / max(self._rows * self._experts, 1)
                operations += 2.0 * rows * share * tensor.numel()
            elif kind == categories.ATTENTION and self._is_cache(tensor):
                operations += 2.0 * self._groups * share * tensor.numel()
        return Amount(moved, operations)

    def _share(self, tensor: Any, kind: str) -> float:
        """The part of a tensor that a launch moves."""
        if self._is_weight(tensor):
            return self._experts if tensor.dim() == 3 else 1.0
        if self._held is None or self._held.slots not in tensor.shape:
            table = tensor.dim() == 2 and tensor.shape[0] >= max(FEWEST_OF_A_TABLE, tensor.shape[1])
            return self._rows / tensor.shape[0] if table else 1.0
        return (self._held.tokens if kind == categories.ATTENTION else 1) / self._held.slots

    def _module(self, tensors: Any) -> str:
        """The module whose weight a kernel is given; `?` where it is given none."""
        names = [self._weights.get(t.data_ptr()) or self._weights.get(t.untyped_storage().data_ptr()) for t in tensors]
        return next((name.rpartition(".")[0] for name in names if name), "?")

    def _is_weight(self, tensor: Any) -> bool:
        return tensor.data_ptr() in self._weights or (tensor.dim() >= 2 and _of_a_weight(tensor, self._weights))

    def _is_cache(self, tensor: Any) -> bool:
        return self._held is not None and tensor.dim() >= 3 and self._held.slots in tensor.shape


def _of_a_weight(tensor: Any, weights: dict[int, str]) -> bool:
    """Whether a tensor begins where the storage of a parameter does: projections that lie in one memory."""
    return tensor.untyped_storage().data_ptr() in weights


def held_by(model: Any) -> Held | None:
    """What the cache of the graph used last holds; None where a package keeps none."""
    store = part_of(model, "decode/graph_cache")
    graphs = [] if store is None else list(store.store_of(model).graphs.values())
    return Held(int(graphs[-1].cache.length), int(graphs[-1].cache.capacity)) if graphs else None
