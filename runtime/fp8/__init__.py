"""The same products with weights in 8 bits."""

from .add_rms_norm import fp8_add_norm
from .linear import fp8_gated_linear, fp8_gated_product, fp8_linear, fp8_packed_linear
from .qkv_step import fp8_qkv_step

__all__ = ["fp8_add_norm", "fp8_gated_linear", "fp8_gated_product", "fp8_linear", "fp8_packed_linear", "fp8_qkv_step"]
