"""Rotary position embedding of queries and keys (Su et al., 2021), both in one kernel.

B batch, S sequence, H and Hk heads, D head_dim, R <= D the rotated columns, i a pair of columns (a, b):

    half layout          a = i, b = i + R/2         Llama's rotate_half
    interleaved layout   a = 2i, b = 2i + 1         Cohere, GLM, GPT-J

    out[a] = x[a] * cos[a] - x[b] * sin[a]
    out[b] = x[b] * cos[b] + x[a] * sin[b]
    out[c] = x[c]                                   for c >= R

Gradients take the transposed rotation by the same tables, and nothing else is kept. The products and the sum are each
rounded to torch's promotion of the dtypes of x and cos, or kept in fp32 until the
end with `in_fp32`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core import backend
from ..core.probe import INPUT
from ..device import row_tiles
from ..launching.launch import WAVE, grid, overlaps

CASES = """
def rotate(model, columns, table=None, **form):
    packed = tensor(1, PROMPT, model.heads + model.kv_heads, model.head_dim).transpose(1, 2)
    q, k = torch.split(packed, [model.heads, model.kv_heads], 1)
    cos, sin = tensor(1, PROMPT, table or columns), tensor(1, PROMPT, table or columns)
    return rotary(q, k, cos, sin, **form)

for model in (LLAMA_8B, LLAMA_1B, GEMMA_9B):
    case(model.name, rotate, model, model.head_dim)
case("8B, 96 of 128 columns", rotate, LLAMA_8B, 96, partial=True)
case("8B, interleaved", rotate, LLAMA_8B, 128, interleaved=True)
case("8B, half table", rotate, LLAMA_8B, 128, 64, interleaved=True, half_table=True)
"""

if backend.triton_installed():
    from .rotary_kernel import rotary_kernel

# Of 1 to 32 heads and 1 to 8 warps a program, 8 and 4 are within 3% of the best from 1 to 8,192 tokens (H100,
# triton 3.6).
BLOCK_HEADS = 8


class Form(NamedTuple):
    """Which of the rotary embeddings of transformers is meant; see `rotary`."""

    unsqueeze_dim: int
    interleaved: bool
    half_table: bool
    deinterleave: bool
    in_fp32: bool
    keep_dtype: bool
    partial: bool
    stacked: bool = False
    as_given: bool = False

    @property
    def joins(self) -> bool:
        """Whether the original joins parts to its result, which then lies in the order of its dimensions."""
        beside = self.half_table and not self.interleaved and not self.as_given
        return self.partial or self.deinterleave or self.stacked or beside


class RotaryForm(NamedTuple):
    """What a function that calls `rotary` answers where its queries and keys are `core.probe.INPUT`."""

    form: Form
    chunked: bool
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def options(self) -> dict[str, bool] | None:
        """The same as `qkv_step` is told; None where it does not know the form."""
        if self.form.unsqueeze_dim != 1 or self.form.deinterleave:
            return None
        given = {"chunked": self.chunked}
        return given | {
            name: getattr(self.form, name) for name in ("interleaved", "half_table", "in_fp32", "keep_dtype")
        }


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    unsqueeze_dim: int | None = 1,
    *,
    interleaved: bool = False,
    half_table: bool = False,
    deinterleave: bool = False,
    in_fp32: bool = False,
    keep_dtype: bool = False,
    partial: bool = False,
    stacked: bool = False,
    as_given: bool = False,
    flatten_from: int | None = -2,
    chunked: bool = False,
    to_query_dtype: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q: `[B, H, S, D]` (`unsqueeze_dim=1`) or `[B, S, H, D]` (2 or -2); also without B. Any strides.
        k: `[B, Hk, S, D]` or `[B, S, Hk, D]`, likewise.
        cos: `[B or 1, S, D]`, with `partial` `[B or 1, S, R]`. Without B as q.
        sin: as `cos`. None: `cos` has complex numbers, `cos + i sin`.
        unsqueeze_dim: where the tables get their head dimension. None: they are broadcast as they come, as
            `[B or 1, 1, S, D]` and `[S, D]` for heads before tokens, `[B or 1, S, 1, D]` and `[S, 1, D]` else.
        interleaved: pairs are neighbouring columns, not columns R/2 apart.
        half_table: the tables are `[B or 1, S, R/2]`, one column a pair.
        deinterleave: with `interleaved`, write all first halves of the pairs, then all second ones (DeepSeek-V3).
        in_fp32: compute in fp32 and round once, to the dtypes of `q` and `k`.
        keep_dtype: round the result to the dtypes of `q` and `k`, where torch would promote to that of `cos`.
        partial: R < D rotates the first R columns and passes the rest.
        stacked: with `interleaved`, the pairs were stacked to a new tensor.
        as_given: with `half_table`, both halves were written into a tensor that lies as the given one.
        flatten_from: with `interleaved`, from which dimension on the pairs were flattened; None: to the shape of `q`.
        chunked: halves are those of `torch.chunk`, of which the first is the longer one where columns are odd.
        to_query_dtype: round both to the dtype of `q`.

    Returns:
        The rotated `(q, k)`, shaped as given, with the strides of what the original returns: those of the usual
        transposed views, or those of a new tensor where it joins parts. Differentiable in q and k, by the kernel or in
        the torch form, which runs where torch would broadcast one of the tensors to another shape, too.
    """
    form = Form(
        unsqueeze_dim or 0,
        interleaved,
        half_table,
        deinterleave,
        in_fp32,
        keep_dtype,
        partial,
        stacked,
        as_given,
    )
    cos, sin = _real(cos) if sin is None else (cos, sin)
    if q is INPUT:
        return None if to_query_dtype else RotaryForm(form, chunked, cos, sin)  # type: ignore[return-value]
    if unsqueeze_dim is None:
        placed = _placed(cos, sin, q, k)
        if placed is None:
            backend.count_fallback("rotary", "broadcast")
            q_turned, k_turned = (
                _rotated(x, cos, sin, form, chunked=chunked, flatten_from=flatten_from) for x in (q, k)
            )
            return q_turned, k_turned
        axis, cos, sin = placed
        form = form._replace(unsqueeze_dim=axis)
    reason = _broadcasts(q, cos, sin, form) or _broadcasts(k, cos, sin, form)
    if reason is None and _tokens(q, form) != _tokens(k, form):
        reason = "broadcast"
    if reason is None and to_query_dtype and q.dtype != k.dtype:
        reason = "dtype"
    if reason is None and backend.composes():
        reason = "compiled"
    elif reason is None and backend.wants_gradient(q, k, cos, sin):
        reason = _not_learned(q, k, cos, sin, form)
        if reason is None:
            turned: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(q, k, cos, sin, form)
            return turned
    if reason is not None:
        backend.count_fallback("rotary", reason)
        return _reference(q, k, cos, sin, form, q.dtype if to_query_dtype else k.dtype, chunked=chunked)
    return _op(q, k, cos, sin, *form)


def rotary_single(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    unsqueeze_dim: int | None = 1,
    *,
    interleaved: bool = False,
    half_table: bool = False,
    deinterleave: bool = False,
    in_fp32: bool = False,
    keep_dtype: bool = False,
    partial: bool = False,
    stacked: bool = False,
    as_given: bool = False,
    flatten_from: int | None = -2,
    chunked: bool = False,
) -> torch.Tensor:
    """Rotate one tensor, for files that call the embedding once for queries and once for keys; see `rotary`."""
    form = Form(
        unsqueeze_dim or 0,
        interleaved,
        half_table,
        deinterleave,
        in_fp32,
        keep_dtype,
        partial,
        stacked,
        as_given,
    )
    cos, sin = _real(cos) if sin is None else (cos, sin)
    if unsqueeze_dim is None:
        placed = _placed(cos, sin, x)
        if placed is None:
            backend.count_fallback("rotary", "broadcast")
            return _rotated(x, cos, sin, form, chunked=chunked, flatten_from=flatten_from)
        axis, cos, sin = placed
        form = form._replace(unsqueeze_dim=axis)
    reason = _broadcasts(x, cos, sin, form)
    learns = reason is None and not backend.composes() and backend.wants_gradient(x, cos, sin)
    if reason is None and backend.composes():
        reason = "compiled"
    if learns:
        reason = _not_learned(x, x, cos, sin, form)
    if reason is not None:
        backend.count_fallback("rotary", reason)
        return _rotated(x, *_tables(cos, sin, form), form, chunked=chunked)
    shape = [*x.shape]
    shape[_head_axis(x, form)] = 0
    no_heads = x.new_empty(shape)  # no view: fake tensors give the empty copy of one other strides than torch does
    if learns:
        turned: torch.Tensor = _Rotary.apply(x, no_heads, cos, sin, form)[0]
        return turned
    return _op(x, no_heads, cos, sin, *form)[0]


class _Rotary(torch.autograd.Function):
    """The rotation, and its transpose of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.form, ctx.dtype = form, q.dtype
        return _launch(q, k, cos, sin, form)

    @staticmethod
    def backward(ctx: Any, of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # linear in both, so that any tensors will do to differentiate it at
            reference = lambda q, k: _reference(q, k, cos, sin, ctx.form, ctx.dtype)
            at = [torch.zeros_like(x, dtype=ctx.dtype).requires_grad_() for x in (of_q, of_k)]
            found = backend.again(reference, at, ctx.needs_input_grad[:2], [of_q, of_k])
            return (*found, None, None, None)
        back = ctx.form._replace(in_fp32=True, keep_dtype=True)
        turned = _launch(_dense(of_q), _dense(of_k), cos, sin, back, inverse=True)
        return (*(x.to(ctx.dtype) for x in turned), None, None, None)


def _real(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of a table of complex numbers; real numbers are complex ones without a sine."""
    return (table.real, table.imag) if table.is_complex() else (table, torch.zeros_like(table))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return a gradient as it lies, or contiguous where it is expanded or its rows are not dense."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _not_learned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(q, k, cos, sin):
        return "gradient_wanted"
    if cos.requires_grad or sin.requires_grad:
        return "tables_learned"
    return "deinterleaved" if form.deinterleave else _refusal(q, k, cos, sin, form)


def _broadcasts(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> str | None:
    """Return `"broadcast"` where the rotation is not that of each head by its token's row of the tables."""
    axis = _head_axis(x, form)
    if x.dim() not in (3, 4) or cos.dim() != x.dim() - 1 or axis not in (x.dim() - 3, x.dim() - 2):
        return "broadcast"
    columns = cos.shape[-1] * (2 if form.half_table else 1)
    wide = columns <= x.shape[-1] if form.partial else columns == x.shape[-1]
    same = cos.shape == sin.shape and cos.shape[-2] in (1, x.shape[_token_axis(x, form)])
    batches = x.dim() == 3 or cos.shape[0] in (1, x.shape[0])
    return None if wide and columns % 2 == 0 and columns > 0 and same and batches else "broadcast"


def _token_axis(x: torch.Tensor, form: Form) -> int:
    return 2 * x.dim() - 5 - _head_axis(x, form)


def _tokens(x: torch.Tensor, form: Form) -> tuple[int, ...]:
    """Return batch, where there is one, and number of tokens."""
    return (*x.shape[:-3], x.shape[_token_axis(x, form)])


def _tables(cos: torch.Tensor, sin: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    return cos.unsqueeze(form.unsqueeze_dim), sin.unsqueeze(form.unsqueeze_dim)


def _of_columns(table: torch.Tensor, x: torch.Tensor, form: Form) -> torch.Tensor:
    """Return a table with a column for each column that is turned; a single one is broadcast, unless it turns two."""
    if not form.half_table or not isinstance(table, torch.Tensor) or table.dim() == 0:
        return table
    if table.shape[-1] == 1 and x.shape[-1] % 2 == 0 and not form.partial:
        return table
    return table.repeat_interleave(2, dim=-1) if form.interleaved else torch.cat((table, table), dim=-1)


def _placed(
    cos: torch.Tensor, sin: torch.Tensor, *tensors: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """Return the axis of the heads and tables without it, of tables that are broadcast as they come.

    None where they are not `[B or 1, 1, S, D]`, `[B or 1, S, 1, D]` or these with fewer dimensions in front, and where
    an argument is no tensor.
    """
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor) or cos.shape != sin.shape:
        return None
    if not 2 <= cos.dim() <= 4 or any(x.dim() != 4 for x in tensors):
        return None
    whole = (1,) * (4 - cos.dim()) + cos.shape
    axis = 1 if whole[1] == 1 else 2
    if whole[axis] != 1:
        return None
    return axis, cos[(None,) * (4 - cos.dim())].squeeze(axis), sin[(None,) * (4 - sin.dim())].squeeze(axis)


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    form: Form,
    dtype: torch.dtype | None = None,
    *,
    chunked: bool = False,
    flatten_from: int | None = -2,
) -> torch.Tensor:
    cos, sin = _of_columns(cos, x, form), _of_columns(sin, x, form)
    rotary_dim = cos.shape[-1] if form.partial else x.shape[-1]
    turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    if form.in_fp32:
        turning = turning.float()
    if form.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        partner = torch.stack((-second, first), dim=-1).flatten(3 if flatten_from == 3 and not form.half_table else -2)
    else:
        middle = (rotary_dim + chunked) // 2
        first, second = turning[..., :middle], turning[..., middle:]
        partner = torch.cat((-second, first), dim=-1)
    turned = (turning * cos) + (partner * sin)
    if flatten_from is None:
        turned = turned.reshape(x.shape)
    elif flatten_from == 3 and form.half_table:
        turned = turned.unflatten(-1, (-1, 2)).flatten(3)
    if form.deinterleave:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    if form.in_fp32 or form.keep_dtype:
        turned = turned.to(dtype or x.dtype)
    if form.partial:
        return torch.cat((turned, passing), dim=-1)
    return turned.contiguous() if form.joins else turned


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    form: Form,
    dtype: torch.dtype,
    *,
    chunked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as torch does; with `dtype` for keys where the result is rounded."""
    cos, sin = _tables(cos, sin, form)
    return _rotated(q, cos, sin, form, chunked=chunked), _rotated(k, cos, sin, form, dtype, chunked=chunked)


def _forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *form: int
) -> tuple[torch.Tensor, torch.Tensor]:
    named = Form(*form)  # type: ignore[arg-type]
    if backend.uses_triton(q):
        reason = _refusal(q, k, cos, sin, named)
        if reason is None:
            return _launch(q, k, cos, sin, named)
        backend.count_fallback("rotary", reason)
    rotated_q, rotated_k = _reference(q, k, cos, sin, named, k.dtype)
    q_out, k_out = _fake(q, k, cos, sin, *form)
    return _laid_out(rotated_q, q_out), _laid_out(rotated_k, k_out)


def _laid_out(computed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `computed` with the strides of `like`; copied where its elements lie in another order."""
    pairs = zip(computed.shape, computed.stride(), like.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in pairs):
        return computed.as_strided(like.shape, like.stride())
    return like.copy_(computed)


def _head_axis(q: torch.Tensor, form: Form) -> int:
    return form.unsqueeze_dim if form.unsqueeze_dim >= 0 else q.ndim + form.unsqueeze_dim


def _refusal(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> str | None:
    if q.dtype != k.dtype or cos.dtype != sin.dtype or not {q.dtype, cos.dtype} <= row_tiles.KERNEL_DTYPES:
        return "dtype"
    if k.shape[-1] != q.shape[-1]:
        return "shape"
    if not form.joins and (q.stride(-1) != 1 or k.stride(-1) != 1):
        return "layout"  # and so would the result's last dimension lie
    return None if q.device == k.device == cos.device == sin.device else "device"


def _strides(x: torch.Tensor, head_axis: int) -> tuple[int, int, int]:
    return x.stride(0) if x.ndim == 4 else 0, x.stride(2 * x.ndim - 5 - head_axis), x.stride(head_axis)


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form, *, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = _fake(q, k, cos, sin, *form)
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    axis = _head_axis(q, form)
    tokens = q.shape[2 * q.ndim - 5 - axis]
    batch = q.shape[0] if q.ndim == 4 else 1
    head_dim = q.shape[-1]
    rotary_dim = cos.shape[-1] * (2 if form.half_table else 1)
    q_heads, k_heads = q.shape[axis], k.shape[axis]
    overlap = overlaps(q)
    with backend.device_guard(q):
        rotary_kernel.launch(
            grid(-(-q_heads // BLOCK_HEADS) - (-k_heads // BLOCK_HEADS), batch * tokens),
            128 // WAVE,
            (q, k, cos, sin, q_out, k_out),
            (batch * tokens, tokens, q_heads, k_heads),
            (
                *_strides(q, axis),
                *_strides(k, axis),
                *_strides(q_out, axis),
                *_strides(k_out, axis),
                cos.stride(0) if cos.ndim == 3 and cos.shape[0] > 1 else 0,
                cos.stride(-2) if cos.shape[-2] > 1 else 0,
            ),
            (),
            (
                head_dim,
                rotary_dim,
                batch == 1,
                form.interleaved,
                form.half_table,
                form.deinterleave,
                q.dtype != torch.float32 and q.dtype == cos.dtype and not form.in_fp32,
                inverse,
                BLOCK_HEADS,
                1 << (rotary_dim // 2 - 1).bit_length(),
                1 << (max(head_dim - rotary_dim, 1) - 1).bit_length(),
                overlap,
            ),
            overlap=overlap,
        )
    return q_out, k_out


def _fake(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *form: int
) -> tuple[torch.Tensor, torch.Tensor]:
    named = Form(*form)  # type: ignore[arg-type]

    def empty(x: torch.Tensor) -> torch.Tensor:
        keep = named.in_fp32 or named.keep_dtype or x.dtype == cos.dtype
        dtype = x.dtype if keep else torch.promote_types(x.dtype, cos.dtype)
        if named.joins:
            return torch.empty(x.shape, dtype=dtype, device=x.device)
        return torch.empty_like(x, dtype=dtype)

    return empty(q), empty(k)


_op = backend.register(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim, bool interleaved, bool half_table,"
    " bool deinterleave, bool in_fp32, bool keep_dtype, bool partial, bool stacked,"
    " bool as_given) -> (Tensor, Tensor)",
    _forward,
    _fake,
)
