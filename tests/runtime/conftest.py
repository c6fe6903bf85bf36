"""Where kernels run: a GPU, or the CPU under Triton's interpreter (see test_interpreted.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
    empty, empty_like, empty_strided = torch.empty, torch.empty_like, torch.empty_strided
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    monkeypatch.setattr(
        torch, "empty_strided", lambda *args, **options: empty_strided(*args, **options).fill_(torch.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(torch.nan))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    backend.reset_fallbacks()
