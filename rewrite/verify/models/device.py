"""Which devices torch can use."""

from __future__ import annotations

from dataclasses import dataclass

from rewrite.errors import UsageError


def usable_device(name: str | None) -> str:
    """`name`; without one `cuda` (which is also what torch calls a ROCm device) if there is one, else `cpu`.

    Raises:
        UsageError: torch cannot use the device asked for.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from error
    return name


@dataclass(frozen=True)
class Devices:
    """Devices of one kind, as torch names them, and the card they are."""

    names: tuple[str, ...] = ("cpu",)
    card: str = "a CPU"


def every(device: str) -> Devices:
    """`cpu`, one device, or with `cuda` all cards.

    Raises:
        UsageError: torch cannot use it.
    """
    if device == "cpu":
        return Devices()
    import torch

    card = torch.cuda.get_device_name(usable_device(device))
    if device != "cuda":
        return Devices((device,), card)
    return Devices(tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())), card)
