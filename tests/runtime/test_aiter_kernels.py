"""The kernels that prepare what aiter's read."""

from __future__ import annotations

import pytest
import torch

from hf_rewrite_runtime.aiter import latent as aiter_latent
from hf_rewrite_runtime.aiter import unified as aiter_unified
from hf_rewrite_runtime.core import backend


@pytest.mark.parametrize(("rows", "capacity", "last"), [(1, 32, 0), (3, 256, 100), (2, 65536, 65535)])
def test_page_tables(device: torch.device, rows: int, capacity: int, last: int) -> None:
    position = torch.tensor([last], device=device)
    given = position, torch.arange(rows, device=device) * 5, (rows, 2, capacity)
    got = aiter_unified.page_tables(*given)
    with backend.use_backend("reference"):
        wanted = aiter_unified.page_tables(*given)
    assert all(map(torch.equal, got, wanted))
    assert all(x.dtype == torch.int32 for x in (*got, *wanted))


@pytest.mark.parametrize(("rows", "capacity", "last"), [(1, 32, 0), (3, 256, 100), (5, 1024, 1023)])
def test_slot_lists(device: torch.device, rows: int, capacity: int, last: int) -> None:
    given = torch.tensor([last], device=device), torch.arange(rows, device=device) * 5, capacity
    got = aiter_latent.slot_lists(*given)
    with backend.use_backend("reference"):
        wanted = aiter_latent.slot_lists(*given)
    assert all(map(torch.equal, got, wanted))
    assert all(x.dtype == torch.int32 for x in (*got, *wanted))
