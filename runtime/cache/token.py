"""Writes one token's key and value into a layer's buffers by one kernel, where `index_copy_` is two.

B rows, n tokens, Hk key/value heads, S capacity, D and Dv head_dim of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import backend, lazy_hooks
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import Kernel, overlaps
from ..lazy.lazy_mode import Deferred

CASES = """
kept = [tensor(1, 8, CONTEXT, 128) for _ in range(2)]
case("8 heads of 128", write_token, *kept, tensor(1, 8, 1, 128), tensor(1, 8, 1, 128), int64(1))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["capacity"])
    def _write_token_kernel(  # type: ignore[no-untyped-def]
        key_ptr,
        value_ptr,
        position_ptr,
        keys_ptr,
        values_ptr,
        capacity,
        key_row_stride,
        key_head_stride,
        value_row_stride,
        value_head_stride,
        HK: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        position = tl.load(position_ptr)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64) // HK
        head = tl.program_id(0) % HK
        column = tl.arange(0, BLOCK)
        slot = tl.program_id(0).to(tl.int64) * capacity + position
        key = tl.load(key_ptr + row * key_row_stride + head * key_head_stride + column, mask=column < D, other=0.0)
        tl.store(keys_ptr + slot * D + column, key, mask=column < D)
        value_at = value_ptr + row * value_row_stride + head * value_head_stride + column
        value = tl.load(value_at, mask=column < DV, other=0.0)
        tl.store(values_ptr + slot * DV + column, value, mask=column < DV)

    write_token_kernel = Kernel(_write_token_kernel)


@dataclass(eq=False)
class Write(Deferred):
    """A write that waits for whoever reads the keys and values: attention can do it."""

    keys: Tensor
    values: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    done: bool = False

    @property
    def reads(self) -> Sequence[Tensor]:
        """What it copies, and where to."""
        return self.key, self.value, self.position

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Write both, whichever was asked for."""
        self.run()

    def run(self) -> None:
        """Write both, once."""
        if not self.done:
            _launch(self.keys, self.values, self.key, self.value, self.position)
        self.done = True


def write_token(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, position: Tensor) -> None:
    """Write `key` `[B, Hk, n, D]` and `value` `[B, Hk, n, Dv]` into `[B, Hk, S, …]` at `position` `[n]`."""
    if not _fits(keys, values, key, value):
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
    elif not lazy_hooks.write(Write(keys, values, key, value, position), keys, values):
        _launch(keys, values, key, value, position)


def _launch(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, position: Tensor) -> None:
    batch, heads, capacity, head_dim = keys.shape
    overlap = overlaps(key)
    block = 1 << (max(head_dim, values.shape[3]) - 1).bit_length()
    with backend.device_guard(key):
        write_token_kernel.launch(
            (batch * heads, 1, 1),
            1,
            (key, value, position, keys, values),
            (capacity,),
            (*key.stride()[:2], *value.stride()[:2]),
            (),
            (heads, head_dim, values.shape[3], overlap, block),
            overlap=overlap,
        )


def _fits(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> bool:
    pairs = ((keys, key), (values, value))
    return (
        key.dtype in KERNEL_DTYPES
        and all(new.dim() == 4 and new.shape[2] == 1 and new.stride(3) == 1 for _, new in pairs)
        and all(new.shape[:2] == kept.shape[:2] and new.shape[3] == kept.shape[3] for kept, new in pairs)
        and all(kept.is_contiguous() and kept.dtype == new.dtype and kept.device == new.device for kept, new in pairs)
        and backend.nothing_watches(key)
        and not backend.wants_gradient(key, value)
        and backend.uses_triton(key)
    )
