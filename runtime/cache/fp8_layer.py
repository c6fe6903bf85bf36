"""One layer's keys and values in 8 bits: e4m3, with a power of two for each head of each token.

B batch, Hk key/value heads, S capacity, D and Dv head_dim of keys and values, n new tokens:

    keys[b, h, s] ≈ key_scale[b, h, s] code[b, h, s]        as `device.e4m3` quantises rows; values likewise

What a token's bytes are follows from its key and value alone, rounded to the model's dtype before, and no scale has to
be found in a calibration. `scale code` is a number of that dtype, so that whoever reads a slot, a kernel or plain
torch, has the same bits. A head of 128 takes 130 bytes where it took 256.

A text's first tokens attend to their own keys and values in the model's dtype; every later token, to what is kept, its
own included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core import backend, prefill_context
from ..device.e4m3 import Quantized, as_read, dtype_for, scales
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import WAVE, Kernel
from .layers import CacheFull, PreallocatedLayer, choose_rows

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache

CASES = """
def keep(model, tokens):
    new = [tensor(1, tokens, model.kv_heads, model.head_dim).transpose(1, 2) for _ in range(2)]
    return launch_keep(fp8_cache(model, 1, CONTEXT), *new, 0)

case("8B, 512 tokens", keep, LLAMA_8B, 512)
case("Gemma 9B, 512 tokens", keep, GEMMA_9B, 512)
"""

SMALLEST = 2.0**-24
"""Rows with no larger number have the scale of this one: it is the least fp16, and the inverse of a scale is one by
which sums of weights stay in fp32's range."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.e4m3 import encode, magnitude, scale_of
    from ..linear.blocks import widened

    @triton.jit
    def kept(keys, values, scale_ptr, slot, there, dtype: tl.constexpr, DECODE: tl.constexpr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return keys and values `[slots, columns]`, loaded as codes, in a dtype, and three numbers of each slot.

        The scale of its key; the logarithm of that of its value, and the inverse of that. A weight times the scale of
        its value has the logarithm in its exponent, where the largest of them is made 1: what is left for a product
        of matrices has the range of fp16, and the sum of weights takes each times the inverse.
        """
        both = tl.load(scale_ptr + slot, mask=there, other=0x3F803F80)
        value_scale = both & -65536
        no_number = value_scale.to(tl.float32, bitcast=True) * 0.0
        shift = ((value_scale >> 23) - 127).to(tl.float32) * 0.6931471805599453 + no_number
        inverse = (0x7F000000 - value_scale).to(tl.float32, bitcast=True)
        keys = widened(keys, DECODE, FNUZ).to(dtype)
        values = widened(values, DECODE, FNUZ).to(dtype)
        return keys, values, (both << 16).to(tl.float32, bitcast=True), shift, inverse

    @triton.jit
    def in_range(query, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return rows `[heads, columns]` in a dtype, each over a power of two, and these: bf16 is exact in fp16 so."""
        exponent = tl.max(magnitude(query.to(tl.float32)), 1) >> 23
        exponent = tl.where(exponent < 1, 127, exponent)
        times = (exponent << 23).to(tl.float32, bitcast=True)
        over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return (query.to(tl.float32) * over[:, None]).to(dtype), times

    @triton.jit
    def scale_of_row(largest, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return scale and inverse of rows, from the bits of their largest magnitudes; 2^-24 where these are less."""
        return scale_of(tl.where(largest < 0x33800000, 0x33800000, largest), FNUZ)

    @triton.jit
    def kept_pairs(first, second, scale_ptr, dtype: tl.constexpr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the scale of one head, whose fp32 columns are `first` and `second`, and return their codes."""
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
        scale, inverse = scale_of_row(tl.max(tl.maximum(magnitude(first), magnitude(second)), 0), FNUZ)
        tl.store(scale_ptr, scale.to(scale_ptr.dtype.element_ty))
        return encode(first * inverse, FNUZ), encode(second * inverse, FNUZ)

    @triton.jit(do_not_specialize=["capacity", "tokens", "start"])
    def _keep_kernel(  # type: ignore[no-untyped-def]
        key_ptr,
        value_ptr,
        keys_ptr,
        values_ptr,
        scale_ptr,
        capacity,
        tokens,
        start,
        key_row_stride,
        key_head_stride,
        key_token_stride,
        value_row_stride,
        value_head_stride,
        value_token_stride,
        HK: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        FNUZ: tl.constexpr,
        BLOCK_TOKENS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write some tokens of a head: their keys or their values."""
        row = tl.program_id(1).to(tl.int64) // HK
        head = tl.program_id(1) % HK
        token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        there = token < tokens
        column = tl.arange(0, BLOCK)[None, :]
        slot = tl.program_id(1).to(tl.int64) * capacity + start + token
        if tl.program_id(2) == 0:
            at = (
                key_ptr
                + row * key_row_stride
                + head * key_head_stride
                + token.to(tl.int64)[:, None] * key_token_stride
            )
            mask = there[:, None] & (column < D)
            x = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
            scale, inverse = scale_of_row(tl.max(magnitude(x), axis=1), FNUZ)
            tl.store(keys_ptr + slot[:, None] * D + column, encode(x * inverse[:, None], FNUZ), mask=mask)
            tl.store(scale_ptr + 2 * slot, scale.to(scale_ptr.dtype.element_ty), mask=there)
        else:
            at = value_ptr + row * value_row_stride + head * value_head_stride
            at += token.to(tl.int64)[:, None] * value_token_stride
            mask = there[:, None] & (column < DV)
            x = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
            scale, inverse = scale_of_row(tl.max(magnitude(x), axis=1), FNUZ)
            tl.store(values_ptr + slot[:, None] * DV + column, encode(x * inverse[:, None], FNUZ), mask=mask)
            tl.store(scale_ptr + 2 * slot + 1, scale.to(scale_ptr.dtype.element_ty), mask=there)

    keep_kernel = Kernel(_keep_kernel)


class Fp8Slots(NamedTuple):
    """Keys and values as kernels read and write them."""

    keys: Tensor
    """`[B, Hk, S, D]` e4m3 where the chip converts it, else its bytes."""
    values: Tensor
    """`[B, Hk, S, Dv]`, likewise."""
    scales: Tensor
    """`[B, Hk, S, 2]` bf16, which has every power of two there may be: of a slot's key, and of its value."""
    fnuz: bool

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values as bytes, and their scales."""
        return self.keys.view(torch.uint8), self.values.view(torch.uint8), self.scales

    @property
    def pairs(self) -> Tensor:
        """Both scales of a slot as one integer `[B, Hk, S, 1]`: loads of two bytes are not started ahead of a loop."""
        return self.scales.view(torch.int32)

    @property
    def form(self) -> tuple[bool, bool, bool]:
        """`FP8_CACHE`, `DECODE` and `FNUZ` of the kernels that read."""
        return True, self.keys.dtype == torch.uint8, self.fnuz


class Fp8Layer(PreallocatedLayer):
    """One layer's keys and values in 8 bits."""

    def __init__(self, cache: PreallocatedCache):
        super().__init__(cache)
        self.scales: Tensor | None = None
        self.value_dtype: torch.dtype | None = None
        self._prompt: tuple[Tensor, Tensor] | None = None
        """Keys and values of the prompt that a step's functions read, as they were written."""

    @property
    def slots(self) -> Fp8Slots:
        """What kernels are given."""
        keys, values, scales = self._buffers
        return Fp8Slots(as_read(keys), as_read(values), scales, keys.dtype == torch.float8_e4m3fnuz)

    @property
    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        assert self.scales is not None
        return self.keys, self.values, self.scales

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the buffers for keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` of this kind."""
        values = key_states if value_states is None else value_states
        self.allocate(key_states.shape[1], key_states.shape[3], values.shape[3], key_states.dtype, key_states.device)
        self.value_dtype = values.dtype

    def allocate(self, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate zeroed buffers."""
        shape = self.cache.batch_size, heads, self.cache.capacity
        with torch.inference_mode(False):
            self.scales = torch.zeros(*shape, 2, dtype=torch.bfloat16, device=device)
            kind = dtype_for(self.scales)
            self.keys, self.values = (
                torch.zeros(*shape, size, dtype=torch.uint8, device=device).view(kind) for size in (key_dim, value_dim)
            )
        self.dtype, self.value_dtype, self.device = dtype, dtype, device
        self.is_initialized = True

    def free(self) -> None:
        """Give the buffers back."""
        super().free()
        self.scales = self._prompt = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, Hk, n, D]` and `[B, Hk, n, Dv]` behind what is there; return what attention may read.

        In a step that is a copy of every slot, for layers whose attention does not take its method for one token.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache.stepping:
            for buffer, new in self._quantized(key_states, value_states):
                buffer.index_copy_(2, self.cache.slots, new)
            return self.read(self.cache.capacity)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.cache.capacity:
            raise CacheFull(end, self.cache.capacity)
        self.write(key_states, value_states, start)
        self.length = end
        if start:
            return self.read(end)
        if prefill_context.of(self.cache) is not None:
            self._prompt = key_states, value_states
        return key_states, value_states

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Write `[B, Hk, n, D]` and `[B, Hk, n, Dv]` from a slot on."""
        if (
            {key.dtype, value.dtype} <= KERNEL_DTYPES
            and key.stride(3) == value.stride(3) == 1
            and backend.nothing_watches(key)
            and not backend.wants_gradient(key, value)
            and backend.uses_triton(key)
        ):
            launch_keep(self.slots, key, value, start)
            return
        for buffer, new in self._quantized(key, value):
            buffer[:, :, start : start + new.shape[2]] = new

    def _quantized(self, key: Tensor, value: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each buffer and what belongs into it, in plain torch."""
        keys, values, scales = self._buffers
        for number, (codes, new) in enumerate(((keys, key), (values, value))):
            found = _rounded(new, codes.dtype)
            yield codes.view(torch.uint8), found.values.view(torch.uint8)
            yield scales[..., number], found.scale.to(scales.dtype)

    def read(self, end: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return copies of the slots from `start` to `end`, in the model's dtype."""
        keys, values, scales = (buffer[:, :, start:end] for buffer in self._buffers)
        key = Quantized(keys, scales[..., 0]).dequantized(self.dtype)
        return key, Quantized(values, scales[..., 1]).dequantized(self.value_dtype or self.dtype)

    def of_prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return what a prompt that a step's functions read attends to: its own keys and values, to the first reader.

        Later ones, layers that share the keys of this one, get what is kept.
        """
        found, self._prompt = self._prompt, None
        return self.read(tokens) if found is None else found

    @property
    def buffers(self) -> list[Tensor]:
        """Codes of keys and of values as bytes, and their scales."""
        if self.keys is None or self.values is None or self.scales is None:
            return []
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), self.scales]

    def of_slots(self, slots: Tensor) -> list[Tensor]:
        """Return what some slots `[n]` hold, in fp32."""
        if self.keys is None:
            return []
        return [kept.index_select(2, slots).float() for kept in self.read(self.cache.capacity)]

    def spoil(self, start: int, value: float) -> None:
        """Fill the values of every slot from `start` on."""
        if self.values is not None:
            _, values, scales = self.buffers
            found = _rounded(torch.full((1,), value, device=values.device), self.values.dtype)
            values[:, :, start:] = found.values.view(torch.uint8)
            scales[:, :, start:, 1] = found.scale

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, in place."""
        for buffer in self.buffers:
            choose_rows(buffer[:, :, : self.length], beam_idx)

    def take(self, other: Any, length: int) -> None:
        """Take over what another layer holds of the first `length` tokens: all of them, or the last ones."""
        self.rewind(length)
        if other.keys is None or other.values is None or not other.keys.numel():
            return
        if not isinstance(other, Fp8Layer):
            if not self.is_initialized:
                self.lazy_initialization(other.keys, other.values)
            start = max(length - other.keys.shape[2], 0)
            self.write(other.keys[:, :, : length - start], other.values[:, :, : length - start], start)
            return
        if not self.is_initialized:
            sizes = other.keys.shape[1], other.keys.shape[3], other.values.shape[3]
            self.allocate(*sizes, other.dtype, other.device)
            self.value_dtype = other.value_dtype
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine[:, :, :length] = theirs[:, :, :length]

    def give(self, growing: Any, start: int, stop: int) -> None:
        """Make a growing layer of transformers' hold the tokens from `start` to `stop`, in the model's dtype."""
        if self.keys is None:
            return
        keys, values = self.read(stop, start)
        if not growing.is_initialized:
            growing.lazy_initialization(keys, values)
        growing.keys, growing.values = keys, values


def _rounded(rows: Tensor, dtype: torch.dtype) -> Quantized:
    """Return rows `[..., D]` in 8 bits, in plain torch."""
    wide = rows.to(torch.float32)
    scale, inverse = scales(wide.abs().amax(-1).clamp_min(SMALLEST), dtype)
    return Quantized((wide * inverse.unsqueeze(-1)).to(dtype), scale)


def launch_keep(slots: Fp8Slots, key: Tensor, value: Tensor, start: int) -> None:
    """Write `key` `[B, Hk, n, D]` and `value` `[B, Hk, n, Dv]` from a slot on; each head's numbers are dense."""
    batch, heads, tokens, head_dim = key.shape
    value_dim, capacity = value.shape[3], slots.keys.shape[2]
    block = 1 << (max(head_dim, value_dim) - 1).bit_length()
    block_tokens = max(1, 2048 // block)
    with backend.device_guard(key):
        keep_kernel.launch(
            (-(-tokens // block_tokens), batch * heads, 2),
            128 // WAVE,
            (key, value, *slots.written),
            (capacity, tokens, start),
            (*key.stride()[:3], *value.stride()[:3]),
            (),
            (heads, head_dim, value_dim, slots.fnuz, block_tokens, block),
        )
