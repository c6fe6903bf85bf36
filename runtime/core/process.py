"""What a process is set to, as far as it decides what a call computes, or which kernels do."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..guards.provenance import has_own_methods
from . import backend

_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)
"""From torch 2.9 on. Where that was set by one of its names, asking by the older one raises."""
_PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def settings() -> Hashable:
    """Return the settings of the process that a graph was captured under, as kernels were chosen by them."""
    return (
        backend.get_backend(),
        *backend.named_besides.values(),
        torch.get_default_dtype(),
        _default_devices(),
        _precisions(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _precisions() -> Hashable:
    """Return how precise products of fp32 are."""
    if _PRECISION is None:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return tuple(_PRECISION(*place) for place in _PRECISIONS)


def _default_devices() -> Hashable:
    """Return what `torch.set_default_device` and `with torch.device(...)` have set."""
    if not _len_torch_function_stack():
        return ()
    modes = _get_current_function_mode_stack()
    return tuple(str(mode.device) for mode in modes if isinstance(mode, DeviceContext))


def is_watched() -> bool:
    """Return whether a mode of torch, a transform or a tracer takes part in what runs: it would not see a replay.

    So it is with a method of tensors that somebody replaced.

    The mode that sets a default device takes part in nothing else, and is one of the `settings`. One that says
    `is_captured_along` has models of its own, which no call without it is given: the verifier's.
    """
    if _len_torch_dispatch_stack() or backend.interposed() or torch._C._get_tracing_state() is not None:
        return True
    if not has_own_methods():
        return True
    if not _len_torch_function_stack():
        return False
    return not all(
        isinstance(mode, DeviceContext) or getattr(mode, "is_captured_along", False)
        for mode in _get_current_function_mode_stack()
    )
