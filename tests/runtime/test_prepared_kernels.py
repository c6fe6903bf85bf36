"""Queries, keys and values that attention prepares itself: the same numbers, and one kernel fewer."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from torch import Tensor, nn

from rewrite.runtime.attention import prepared as prepared_module
from rewrite.runtime.attention.decode_attention import Split, decode_attention
from rewrite.runtime.attention.qkv_step import projected_step
from rewrite.runtime.cache.preallocated import PreallocatedCache
from rewrite.runtime.core import launch, tiles
from rewrite.runtime.products.prologue import Prologue
from rewrite.runtime.products.step_products import StepProducts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SLOTS = 96
KV_HEADS, GROUP = 2, 3


class HeadNorm(nn.Module):
    """An RMSNorm over one head."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    def prologue(self) -> Prologue:
        """Say what is computed."""
        return Prologue(self.weight, 1e-6)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    names: list[str] = []
    run = launch.Kernel.launch

    def recorded(kernel: launch.Kernel, *arguments: Any, **options: Any) -> None:
        run(kernel, *arguments, **options)
        names.append(kernel.jit_function.__name__.strip("_").removesuffix("_kernel"))

    monkeypatch.setattr(launch.Kernel, "launch", recorded)
    return names


Reads = Callable[[Tensor, PreallocatedCache, int], Tensor]


def attends(query: Tensor, cache: PreallocatedCache, layer: int) -> Tensor:
    return decode_attention(query, cache, layer, scaling=0.2)


def reads_the_query(query: Tensor, cache: PreallocatedCache, layer: int) -> Tensor:
    return decode_attention(query + 1.0, cache, layer, scaling=0.2)


def reads_it_afterwards(query: Tensor, cache: PreallocatedCache, layer: int) -> Tensor:
    return decode_attention(query, cache, layer, scaling=0.2) + query.flatten(1)[:, None].sum()


def reads_the_keys(query: Tensor, cache: PreallocatedCache, layer: int) -> Tensor:
    total = cache.layers[layer].keys[:, :, : int(cache.position) + 1].sum()
    return decode_attention(query, cache, layer, scaling=0.2) + total


def says_nothing(query: Tensor, cache: PreallocatedCache, layer: int) -> Tensor:
    return torch.zeros(query.shape[0], 1, 1, device=query.device)


def step(
    form: Reads, rows: int, position: int, rotation: dict[str, Any], normed: bool, head_dim: int, device: torch.device,
    defers: bool, dtype: torch.dtype = torch.float32, **given: Any,
) -> list[Tensor]:  # fmt: skip
    """Return what two layers give, and their buffers."""
    torch.manual_seed(1)
    cache = PreallocatedCache(2, rows, SLOTS, device)
    for layer in cache.attention_layers:
        layer.allocate(KV_HEADS, head_dim, head_dim, dtype, device)
        for held in layer.buffers:
            held.normal_()
            held[:, :, position:] = torch.nan  # nothing has written there
    cache.position.fill_(position)
    cache.starts.copy_(torch.arange(rows) * position // 2)
    packed = [torch.randn(rows, 1, KV_HEADS * (GROUP + 2) * head_dim, device=device).to(dtype) for _ in range(2)]
    columns = rotation["columns"]
    angle = torch.rand(rows, 1, max(columns // (2 if rotation.get("half_table") else 1), 1), device=device)
    tables = (angle.cos().to(dtype), angle.sin().to(dtype)) if columns else None
    norms = {"q_norm": HeadNorm(head_dim).to(device, dtype), "k_norm": HeadNorm(head_dim).to(device, dtype)}
    out = []
    with torch.no_grad(), cache.step(), StepProducts(poisons=True) if defers else contextlib.nullcontext():
        for number, one in enumerate(packed):
            query = projected_step(
                one, tables, cache, number, head_dim=head_dim, num_key_value_heads=KV_HEADS,
                interleaved=rotation.get("interleaved", False), half_table=rotation.get("half_table", False),
                **(norms if normed else {}), **given,
            )  # fmt: skip
            out.append(form(query, cache, number))
            del query
            gc.collect()  # the interpreter holds what a kernel was given in a cycle
    written = [buffer[:, :, : position + 1] for buffer in cache.buffers]
    assert all(buffer[:, :, position + 1 :].isnan().all() for buffer in cache.buffers)
    return [*out, *written]


def check(ours: list[Tensor], theirs: list[Tensor], close: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


ROTATIONS: dict[str, dict[str, Any]] = {
    "none": {"columns": 0},
    "whole": {"columns": 16},
    "part": {"columns": 8},
    "interleaved": {"columns": 16, "interleaved": True},
    "part, interleaved": {"columns": 8, "interleaved": True},
    "half tables": {"columns": 16, "half_table": True},
    "half tables, interleaved": {"columns": 16, "half_table": True, "interleaved": True},
}


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_attention_prepares_what_it_reads(
    rotation: str, normed: bool, device: torch.device, kernels: list[str]
) -> None:
    given = (attends, 2, 70, ROTATIONS[rotation], normed, 16, device)
    ours = step(*given, True)
    assert kernels == ["decode_attention"] * 2
    check(ours, step(*given, False))
    assert kernels[2:] == ["rope_cache", "decode_attention"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("split", [Split(3, 4, 16, True, 1), Split(1, 8, 16, False, 1), Split(3, 1, 32, True, 1)])
@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 95), (3, 64)])
def test_however_attention_is_divided(
    rows: int, position: int, split: Split, dtype: torch.dtype, device: torch.device
) -> None:
    tiles.try_out({tiles.attention_key(rows, KV_HEADS, GROUP, 24, SLOTS): split})
    given = (attends, rows, position, {"columns": 16}, True, 24, device)
    try:
        ours, theirs = (step(*given, defers, dtype) for defers in (True, False))
    finally:
        tiles.try_out({})
    check(ours, theirs, 1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize(
    ("form", "launched"),
    [
        (reads_the_query, ["rope_cache", "decode_attention"]),
        (reads_it_afterwards, ["decode_attention", "rope_cache"]),
        (reads_the_keys, ["rope_cache", "decode_attention"]),
        (says_nothing, ["rope_cache"]),
    ],
)
def test_whatever_else_reads_it_gets_it(
    form: Reads, launched: list[str], device: torch.device, kernels: list[str]
) -> None:
    given = (form, 2, 40, {"columns": 16}, True, 16, device)
    ours = step(*given, True)
    assert sorted(kernels) == sorted(launched * 2)
    assert form is says_nothing or kernels == launched * 2
    check(ours, step(*given, False))


def test_a_write_that_was_left_out_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module.Prepared, "fill", lambda *given: None)
    given = (reads_the_keys, 2, 40, {"columns": 16}, True, 16, device)
    with pytest.raises(AssertionError):
        check(step(*given, True), step(*given, False))
