"""Attention, and what stands between the projections and it."""

from .decode_attention import decode_attention
from .native_gqa import grouped_matmul, native_gqa
from .qkv_step import qkv_step
from .rotary import rotary, rotary_single
from .rotary_rows import rotary_rows

__all__ = ["decode_attention", "grouped_matmul", "native_gqa", "qkv_step", "rotary", "rotary_rows", "rotary_single"]
