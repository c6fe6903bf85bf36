"""Whether the host is the slower one: then a kernel that saves memory traffic costs more than it saves.

A launch of torch's own takes the host 5 µs, one of Triton's with the questions before it 30 to 40 µs. Where tensors
are small the device waits for the host, so two or three launches of torch's are sooner. Not so inside a graph, where
the host launches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend, lazy_hooks
from ..launching.launch import collects, rehearses

SMALL = 1 << 22
"""Elements up to which a call is short: reading and writing 8 MiB takes an H200 5 µs."""


def is_launch_bound(tensor: object) -> bool:
    """Return whether an operator on `tensor` is launched by the host now, and is soon over.

    Not where kernels were asked for by name, nor in training, where a kernel also saves memory.
    """
    return (
        type(tensor) is Tensor
        and tensor.is_cuda
        and not torch.is_grad_enabled()
        and backend.named_none()
        and tensor.numel() < SMALL
        and not (lazy_hooks.defers() or rehearses() or collects())
        and not torch.cuda.is_current_stream_capturing()
    )
