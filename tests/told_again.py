"""What a graph does, without a GPU: a step is run once, and what the device was told is told again for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Recorded(TorchDispatchMode):
    """Keeps what the device is told, and can tell it again."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.told.append((function, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Tell it again, without any Python of the model."""
        for function, args, kwargs, found in self.told:
            inputs = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if _is_tensor(t)}
            again = function(*args, **kwargs)
            for kept, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                if _is_tensor(kept) and kept.untyped_storage().data_ptr() not in inputs:
                    kept.copy_(new)


def replays(program: Any) -> None:
    """Stand in for the `replay` of a `Program`."""
    if not hasattr(program, "recorded"):
        program.recorded = Recorded()
        with program.recorded:
            program._run()
    else:
        program.recorded.replay()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
