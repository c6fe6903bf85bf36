"""Where kernels run: a GPU, or the CPU under Triton's interpreter (see test_interpreted.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rewrite.runtime import backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device on which kernels run here."""
    if INTERPRETED:
        with backend.use_backend("triton"):
            yield torch.device("cpu")
    elif torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        pytest.skip("needs a CUDA or ROCm device; test_interpreted.py runs the same tests on the CPU")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every tensor that an operator allocates with NaN, so that an element left unwritten shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    return poisoned


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    backend.reset_fallbacks()
