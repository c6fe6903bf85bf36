"""The states of torch's generators, as a call finds them."""

from __future__ import annotations

import torch
from torch import Tensor


def random_states(device: torch.device) -> tuple[Tensor, torch.device, Tensor | None]:
    """Return the states of the host's generator and of a device's."""
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), device, of_device


def set_random_states(states: tuple[Tensor, torch.device, Tensor | None]) -> None:
    """Put the generators back to where they were."""
    of_host, device, of_device = states
    torch.set_rng_state(of_host)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)
