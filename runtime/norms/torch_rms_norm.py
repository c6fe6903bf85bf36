"""torch's own RMSNorm, for operators that compute one over the last dimension."""

from __future__ import annotations

import torch
from torch import nn

_FORWARD = nn.RMSNorm.forward


def torch_rms_norm(norm: nn.Module) -> tuple[torch.Tensor | None, float] | None:
    """Return weight and eps of torch's RMSNorm, which multiplies by the weight before it rounds.

    None for any other module, over several dimensions, and without an eps, which is another one in each dtype. A class
    of its own that has torch's `forward` computes the same.
    """
    if not isinstance(norm, nn.RMSNorm) or type(norm).forward is not _FORWARD:
        return None
    return (norm.weight, norm.eps) if norm.eps is not None and len(norm.normalized_shape) == 1 else None
