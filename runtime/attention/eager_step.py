"""Attention of a step that a model writes out, as one kernel: products with keys, masks, softmax, product with values.

    scores = q kᵀ * scaling + mask + …          weights = softmax(scores)          out = weights v

Each is put off (`lazy.pending_ops`) until the next asks for it; where the last one does, `masked_attention` computes
all of it, and where something else does, torch's own functions run one after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..lazy.lazy_mode import Deferred
from ..lazy.step_products import StepProducts
from .masked_attention import masked_attention, takes_rows


@dataclass(eq=False)
class Written(Deferred):
    """Scores of one query a head, `[…, 1, S]`, or their softmax."""

    query: Tensor
    """`[…, 1, D]`."""
    keys: Tensor
    """`[…, D, S]`."""
    scaling: float
    masks: tuple[Tensor, ...]
    """What was added, each of the shape of the scores or of four dimensions that broadcast."""
    weights: bool
    """Whether the softmax is taken."""
    function: Callable[..., Any]
    """By which torch computes it, with an argument `out`."""
    operands: tuple[Any, ...]
    settle: Callable[[Tensor], None]

    @property
    def reads(self) -> Sequence[Tensor]:
        """Queries, keys, masks and the operands."""
        given = [operand for operand in self.operands if isinstance(operand, Tensor)]
        return [self.query, self.keys, *self.masks, *given]

    def compute(self, out: Tensor) -> None:
        """Run torch's function."""
        for operand in self.operands:
            if isinstance(operand, Tensor):
                self.settle(operand)
        self.function(*self.operands, out=out)


def _matmul(step: StepProducts, first: Tensor, second: Tensor) -> Tensor | None:
    found = step.of(first)
    if isinstance(found, Written) and found.weights:
        return _attended(step, found, first, second)
    sizes = first.shape[:-2] == second.shape[:-2] and first.dim() in (3, 4) and first.shape[-2] == 1
    if (
        not sizes
        or not takes_rows(first)
        or first.dtype != second.dtype
        or second.stride(-2) != 1
        or not second.shape[-1] > 1
    ):
        return None
    return _scores(step, first, second, 1.0, (), torch.matmul, (first, second))


def _baddbmm(
    step: StepProducts, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor | None:
    full = input.shape == (*batch1.shape[:2], batch2.shape[-1]) and batch1.shape[1] == 1
    if not full or not takes_rows(batch1) or beta != 1.0 or input.dtype != batch1.dtype or batch2.stride(-2) != 1:
        return None

    def function(*operands: Tensor, out: Tensor) -> None:
        torch.baddbmm(*operands, beta=beta, alpha=alpha, out=out)

    return _scores(step, batch1, batch2, alpha, (input,), function, (input, batch1, batch2))


def _scores(
    step: StepProducts, query: Tensor, keys: Tensor, scaling: float, masks: tuple[Tensor, ...],
    function: Callable[..., Any], operands: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    for operand in operands:
        step.settle(operand)
    written = Written(query, keys, scaling, masks, False, function, operands, step.settle)
    return step.put_off(written, (*query.shape[:-1], keys.shape[-1]), query)


def _scaled(step: StepProducts, first: Any, second: Any, function: Callable[..., Any]) -> Tensor | None:
    scores, number = (first, second) if isinstance(first, Tensor) else (second, first)
    found = step.of(scores)
    if not isinstance(found, Written) or found.weights or found.masks or not isinstance(number, (int, float)):
        return None
    if function is torch.div and scores is second:
        return None
    scaling = found.scaling * number if function is torch.mul else found.scaling / number
    return _next(step, found, scores, function, (first, second), scaling=scaling)


def _added(step: StepProducts, first: Any, second: Any) -> Tensor | None:
    for scores, mask in ((first, second), (second, first)):
        found = step.of(scores)
        if not isinstance(found, Written) or found.weights or not isinstance(mask, Tensor):
            continue
        if isinstance(step.of(mask), Written):
            continue
        full = mask.shape == scores.shape
        broadcast = (
            mask.dim() == 4 == scores.dim() and torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
        )
        if mask.dtype == scores.dtype and (full or broadcast):
            return _next(step, found, scores, torch.add, (first, second), masks=(*found.masks, mask))
    return None


def _softmax(
    step: StepProducts, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor | None:
    found = step.of(input)
    if not isinstance(found, Written) or found.weights or dim not in (-1, input.dim() - 1):
        return None

    def function(scores: Tensor, out: Tensor) -> None:
        torch.softmax(scores, -1, dtype=out.dtype, out=out)

    return _next(step, found, input, function, (input,), dtype or input.dtype, weights=True)


def _torch_softmax(step: StepProducts, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor | None:
    return _softmax(step, input, dim, dtype=dtype)


def _cast(step: StepProducts, input: Tensor, dtype: Any) -> Tensor | None:
    found = step.of(input)
    if not isinstance(found, Written) or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    if dtype == input.dtype:
        return input
    return _next(step, found, input, _copied, (input,), dtype)


def _copied(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _next(
    step: StepProducts, found: Written, like: Tensor, function: Callable[..., Any], operands: tuple[Any, ...],
    dtype: torch.dtype | None = None, **changes: Any,
) -> Tensor:  # fmt: skip
    """Put off what follows, in the shape that the model sees."""
    for operand in operands:
        if isinstance(operand, Tensor) and step.of(operand) is not found:
            step.settle(operand)
    written = replace(found, function=function, operands=operands, **changes)
    return step.put_off(written, like.shape, like, dtype)


def _attended(step: StepProducts, found: Written, weights: Tensor, values: Tensor) -> Tensor | None:
    """Return the result of attention, None where the kernel does not take it."""
    if values.shape[:-2] != weights.shape[:-2] or weights.shape[-2] != 1 or weights.dim() not in (3, 4):
        return None
    if weights.dtype != values.dtype or values.shape[-2] != weights.shape[-1]:
        return None
    step.settle(values)
    rows = (1, *weights.shape[:-2])[-2:]
    query, keys, value = (t.reshape(*rows, *t.shape[-2:]) for t in (found.query, found.keys.transpose(-1, -2), values))
    masks = [mask if mask.dim() == 4 else mask.reshape(*rows, *mask.shape[-2:]) for mask in found.masks]
    mask = step.sum_of(masks) if masks else None
    out = masked_attention(query, keys, value, mask, scale=found.scaling)
    return None if out is None else out.reshape(*weights.shape[:-1], values.shape[-1])


def _taking(handler: Callable[..., Tensor | None], *more: Any) -> Callable[..., Tensor | None]:
    """Return a handler that is also told `more`, and takes no call of another form than its own."""
    signature = inspect.signature(handler)
    positional = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    wanted = sum(one.default is one.empty for one in positional) - len(more)
    most = len(positional) - len(more)

    def taking(*args: Any, **given: Any) -> Tensor | None:
        if given or not wanted <= len(args) <= most:
            try:
                signature.bind(*args, *more, **given)
            except TypeError:  # arguments that it knows nothing of
                return None
        return handler(*args, *more, **given)

    return taking


HANDLERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.matmul: _taking(_matmul),
    torch.Tensor.matmul: _taking(_matmul),
    torch.bmm: _taking(_matmul),
    torch.Tensor.bmm: _taking(_matmul),
    torch.baddbmm: _taking(_baddbmm),
    torch.Tensor.baddbmm: _taking(_baddbmm),
    torch.mul: _taking(_scaled, torch.mul),
    torch.Tensor.mul: _taking(_scaled, torch.mul),
    torch.div: _taking(_scaled, torch.div),
    torch.Tensor.div: _taking(_scaled, torch.div),
    torch.add: _taking(_added),
    torch.Tensor.add: _taking(_added),
    F.softmax: _taking(_softmax),
    torch.softmax: _taking(_torch_softmax),
    torch.Tensor.softmax: _taking(_torch_softmax),
    torch.Tensor.to: _taking(_cast),
    torch.Tensor.float: _taking(_cast, torch.float32),
}
"""What a step asks first, by functions of torch that are called with tensors and numbers."""
