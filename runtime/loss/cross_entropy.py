"""Cross-entropy of the product with the vocabulary, without its logits: a few thousand rows of them at a time.

T tokens, H hidden size, V vocabulary; x `[T, H]`, W `[V, H]`, b `[V]`, labels y `[T]`:

    z = x Wᵀ + b                        in the dtype in which the head computes, and rounded as it rounds
    v = outer * tanh(inner * z)         or inner * z, where nothing is capped; in fp32, as all that follows
    loss = Σ_t  log Σ_j exp(v_tj) - v_t,y_t       over the tokens whose label is not the ignored one

    dv = exp(v - log Σ exp(v)) - onehot(y),   dz = dv * dv/dz, rounded to the dtype of z
    dx = dz W,   dW = dzᵀ x,   db = Σ_t dz    added up in fp32 over all rows

The gradients need what the loss needs, and the loss is the last thing that is computed: they are made with it, for a
gradient of 1, and the backward multiplies them by the one that comes (as in Liger Kernel, Hsu et al., 2024). What is
kept is dx and dW in fp32. In fp16, whose smallest number is 6e-8, dz is taken 1,024 times as large.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import HIP, WAVE, Kernel

CASES = """
def losses(model, dtype=torch.bfloat16, **form):
    rows = many(256)
    logits = tensor(rows, model.vocabulary).to(dtype)
    labels = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    losses_and_gradients(logits, labels, -100, Shape(**form))

for model in LLAMAS:
    case(model.name, losses, model)
case("Gemma 9B, capped", losses, GEMMA_9B, inner=1 / 30, outer=30.0, capped=True)
case("1B, fp32", losses, LLAMA_1B, torch.float32)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.elementary import tanh

    @triton.jit
    def _value(z, inner, outer, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
        if CAPPED:
            return outer * tanh(inner * z)
        return inner * z

    @triton.jit(do_not_specialize=["ignore_index"])
    def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        labels_ptr,
        picked_ptr,
        losses_ptr,
        ignore_index,
        inner,
        outer,
        lift,
        V: tl.constexpr,
        CAPPED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write the loss of a row, and over its logits the gradient; `picked` is the logit of its label."""
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * V
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            for start in range(0, V, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(row_ptr + col, tl.zeros((BLOCK,), DTYPE), mask=col < V)
            tl.store(losses_ptr + row, 0.0)
            return
        largest = float("-inf")
        total = 0.0
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            z = tl.load(row_ptr + col, mask=col < V, other=0.0).to(tl.float32)
            v = tl.where(col < V, _value(z, inner, outer, CAPPED), float("-inf"))
            higher = tl.maximum(largest, tl.max(v, axis=0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(v - shift), axis=0)
            largest = higher
        norm = largest + tl.log(total)
        picked = tl.load(picked_ptr + row).to(tl.float32)
        tl.store(losses_ptr + row, norm - _value(picked, inner, outer, CAPPED))
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            z = tl.load(row_ptr + col, mask=col < V, other=0.0).to(tl.float32)
            slope = tl.exp(_value(z, inner, outer, CAPPED) - norm) - tl.where(col == label, 1.0, 0.0)
            if CAPPED:
                t = tanh(inner * z)
                slope *= outer * (1.0 - t * t)
            tl.store(row_ptr + col, (slope * (inner * lift)).to(DTYPE), mask=col < V)

    cross_entropy_kernel = Kernel(_cross_entropy_kernel)

CHUNK_BYTES = 1 << 29
"""Logits that are there at once. Fewer make the products small and add the weight's gradient up more often, which is
read and written each time."""
CHUNK_GRANULE = 256
"""Rows of a chunk are a multiple of this, for the tiles of the products."""
FP16_LIFT = 1024.0
"""What dz is multiplied by in fp16: most of it is smaller than the format's smallest number, none is larger than 1."""


class Shape(NamedTuple):
    """What is done to the logits, in the terms of the formula above."""

    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False

    def of(self, logits: Tensor) -> Tensor:
        """Return v."""
        return self.outer * torch.tanh(self.inner * logits) if self.capped else self.inner * logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return dv/dz."""
        if not self.capped:
            return self.inner
        capped = torch.tanh(self.inner * logits)
        return self.inner * self.outer * (1.0 - capped * capped)


def total_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int = -100,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum of the losses of all tokens, in fp32 (fp64 for fp64), differentiable by the first three.

    Args:
        hidden_states: `[T, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        labels: `[T]`, int64, each below V or `ignore_index`.
        ignore_index: the label of tokens that do not count.
        shape: what is done to the logits; nothing where it is None.
        dtype: in which the product is computed; that of the hidden states where it is None.
    """
    form = shape or Shape()
    given = (hidden_states, weight, bias, labels, ignore_index, *form, dtype or hidden_states.dtype)
    total: Tensor = _TotalLoss.apply(*given)
    return total


class _TotalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        inner: float,
        outer: float,
        capped: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        total, *gradients = _op(
            hidden_states, weight, bias, labels, ignore_index, inner, outer, capped, dtype, *ctx.needs_input_grad[:3]
        )
        ctx.save_for_backward(hidden_states, weight, bias, labels, *gradients)
        ctx.form = (ignore_index, Shape(inner, outer, capped), dtype)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, *gradients = ctx.saved_tensors
        inputs, needed = (hidden_states, weight, bias), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            form = ctx.form
            found = backend.again(lambda x, w, b: _plain(x, w, b, labels, *form), inputs, needed, [gradient])
        else:
            triples = zip(inputs, needed, gradients, strict=True)
            found = [_times(made, gradient, x.dtype) if need and x is not None else None for x, need, made in triples]
        return (*found, None, None, None, None, None, None)


def _times(made: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply, and round once, without a product in fp32 in between."""
    if made.dtype == dtype:
        return made * gradient
    return torch.mul(made, gradient, out=torch.empty_like(made, dtype=dtype))


def _plain(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    shape: Shape,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the loss from all logits at once, by torch's operators."""
    product = F.linear(hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    values = shape.of(product.to(accumulator(dtype)))
    return F.cross_entropy(values, labels, ignore_index=ignore_index, reduction="sum")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
    capped: bool,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = Shape(inner, outer, capped)
    x, w = hidden_states.to(dtype), weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    total, *gradients = _fake(
        hidden_states, weight, bias, labels, ignore_index, *shape, dtype, for_hidden, for_weight, for_bias
    )
    dx, dw, db = gradients
    if not x.shape[0]:
        dw.zero_()
    db.zero_()
    total.zero_()
    rows = chunk_rows(w.shape[0], w.element_size())
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, x.shape[0], rows):
            here = x[start : start + rows]
            dz = F.linear(here, w, b)
            total += losses_and_gradients(dz, labels[start : start + rows], ignore_index, shape).sum()
            if for_hidden:
                _product(dz, w, dx[start : start + rows])
            if for_weight:  # the first part is written, and not added to zeros that are as large as the weight
                (_add_product if start else _product)(dz.T, here, dw)
            if for_bias:
                db += dz.sum(0, dtype=db.dtype)
            del dz  # before the next ones are made
    if (lift := _lift(dtype, shape)) != 1.0:
        for made in gradients:
            made /= lift
    return total, dx, dw, db


def chunk_rows(vocabulary: int, element_size: int) -> int:
    """Return of how many tokens the logits are there at once."""
    rows = CHUNK_BYTES // (vocabulary * element_size)
    return max(rows // CHUNK_GRANULE, 1) * CHUNK_GRANULE


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write `a @ b`, without a rounding to their dtype where the device's library can."""
    if a.dtype != out.dtype and _sums_in_fp32(a.device, a.dtype):
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(a @ b)


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _sums_in_fp32(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:  # rounds each chunk's part, whose errors together are those of one rounding of the sum
        total += a @ b


@functools.cache
def _sums_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a product of 16-bit matrices to one in fp32 here: newer ones do, through cuBLAS."""
    if device.type != "cuda" or HIP:
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.mm.dtype_out(ones, ones, total.dtype, out=total)
        torch.ops.aten.addmm.dtype_out(total, ones, ones, total.dtype, out=total)
    except RuntimeError:  # torch 2.8 has the operators and refuses such a sum
        return False
    return bool((total == 32.0).all())


def losses_and_gradients(logits: Tensor, labels: Tensor, ignore_index: int, shape: Shape) -> Tensor:
    """Return the loss of each row, and put over its logits their gradient, times the dtype's lift.

    Args:
        logits: `[T, V]`, contiguous.
        labels: `[T]`, int64.
        ignore_index: the label of rows whose loss and gradient are zero.
        shape: what is done to the logits first.

    Returns:
        `[T]`, in fp32 (fp64 for fp64).
    """
    lift = _lift(logits.dtype, shape)
    ignored = labels == ignore_index
    # a label beyond the vocabulary fails here as it fails in torch's own loss
    picked = logits.gather(1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    if not (backend.uses_triton(logits) and logits.dtype in KERNEL_DTYPES):
        return _reference(logits, labels, ignored, picked, shape, lift)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if losses.numel():
        vocabulary = logits.shape[1]
        block = min(8192, 1 << (vocabulary - 1).bit_length())
        with backend.device_guard(logits):
            cross_entropy_kernel.launch(
                (logits.shape[0], 1, 1),
                max(block // 16 // WAVE, 1),
                (logits, labels, picked, losses),
                (ignore_index,),
                (),
                (shape.inner, shape.outer, lift),
                (vocabulary, shape.capped, block),
            )
    return losses


def _reference(logits: Tensor, labels: Tensor, ignored: Tensor, picked: Tensor, shape: Shape, lift: float) -> Tensor:
    z = logits.to(accumulator(logits.dtype))
    values = shape.of(z)
    norm = values.logsumexp(-1)
    losses = (norm - shape.of(picked.to(z.dtype))).masked_fill(ignored, 0.0)
    slope = (values - norm[:, None]).exp()
    slope.scatter_add_(1, labels.masked_fill(ignored, 0)[:, None], torch.full_like(norm, -1.0)[:, None])
    logits.copy_((slope * shape.slope(z) * lift).masked_fill(ignored[:, None], 0.0))
    return losses


def _lift(dtype: torch.dtype, shape: Shape) -> float:
    return FP16_LIFT if dtype == torch.float16 and abs(shape.inner * shape.outer) <= 16 else 1.0


def _fake(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
    capped: bool,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = accumulator(dtype)
    return (
        hidden_states.new_empty((), dtype=made),
        hidden_states.new_empty(hidden_states.shape if for_hidden else (0,), dtype=made),
        weight.new_empty(weight.shape if for_weight else (0,), dtype=made),
        weight.new_empty(weight.shape[:1] if for_bias else (0,), dtype=made),
    )


_op = backend.register(
    "total_loss",
    "(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, float inner, float outer,"
    " bool capped, ScalarType dtype, bool for_hidden, bool for_weight, bool for_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
