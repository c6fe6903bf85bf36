"""Projections of one input that make their own gradients: the originals' values, in each module's own `.grad`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from differentiated import all_as_exact
from tolerances import assert_same_gradient
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.recompute import origin
from hf_rewrite_runtime.linear import linear_autograd
from hf_rewrite_runtime.linear.packing import packed_linear
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


class Block(nn.Module):
    """A norm, behind a sum or alone, and projections of it."""

    def __init__(self, added: bool = True, bias: bool = True):
        super().__init__()
        self.norm = nn.Parameter(1 + 0.1 * torch.randn(32))
        self.q, self.k, self.v = (nn.Linear(32, size, bias=bias and size == 8) for size in (24, 8, 8))
        self.added = added

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        normed, summed = add_rms_norm(x, y, self.norm, EPS) if self.added else (rms_norm(x, self.norm, EPS), x)
        return *packed_linear(normed, self.q, self.k, self.v), summed

    def exact(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Compute the same in the dtype of the inputs."""
        summed = y + x if self.added else x
        normed = self.norm * (summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + EPS))
        return self.q(normed), self.k(normed), self.v(normed), summed


def derived(block: Block, call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of inputs and parameters."""
    block.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = call(*leaves)
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]
    torch.autograd.backward(outputs, directions)
    return [x.grad for x in (*leaves, *block.parameters()) if x.grad is not None]


@dtypes
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_gradients(device: torch.device, poisoned: None, added: bool, dtype: torch.dtype) -> None:
    block = Block(added).to(device, dtype)
    inputs = [torch.randn(2, 9, 32, device=device).to(dtype) for _ in range(2)]
    ours = derived(block, block, inputs)
    assert not backend.fallbacks()
    with backend.use_backend("reference"):
        theirs = derived(block, block, inputs)
    if added and dtype != torch.float32:  # the sum is rounded, which fp64 does not show
        inputs = [(inputs[1] + inputs[0]), torch.zeros_like(inputs[1])]
    wide = copy.deepcopy(block).double()
    exact = derived(wide, wide.exact, [x.double() for x in inputs])
    all_as_exact(theirs, ours, exact)


def kept_by(call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        out = call(*inputs)
    del out
    return kept


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_the_norm_is_not_kept(device: torch.device, added: bool) -> None:
    """Of the size of the input nothing but the sum is, twice the same memory; a norm that was changed is."""
    block = Block(added).to(device)
    inputs = [torch.randn(9, 32, device=device).requires_grad_() for _ in range(2)]
    large = lambda kept: {x.data_ptr() for x in kept if x.shape == (9, 32)}
    assert len(large(kept_by(block, *inputs))) == 1

    def changed(x: Tensor, y: Tensor) -> Any:
        normed, summed = add_rms_norm(x, y, block.norm, EPS)
        assert origin(normed) is not None
        normed.mul_(2.0)
        assert origin(normed) is None
        return packed_linear(normed, block.q, block.k, block.v), summed

    assert len(large(kept_by(changed, *inputs))) == 2


def test_a_source_that_is_gone_is_not_asked(device: torch.device) -> None:
    block = Block().to(device)
    normed = add_rms_norm(*torch.randn(2, 9, 32, device=device), block.norm, EPS)[0]
    assert origin(normed) is None
    sum(out.sum() for out in packed_linear(normed, block.q, block.k, block.v)).backward()
    assert block.q.weight.grad is not None


@pytest.mark.parametrize("frozen", ["weights", "one", "norm"])
def test_what_is_frozen_has_no_gradient(device: torch.device, frozen: str) -> None:
    block = Block().to(device)
    parts = {"weights": [block.q, block.k, block.v], "one": [block.k], "norm": []}[frozen]
    for part in parts:
        part.requires_grad_(False)
    block.norm.requires_grad_(frozen != "norm")
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]
    ours = derived(block, block, inputs)
    assert not backend.fallbacks()
    with backend.use_backend("reference"):
        theirs = derived(block, block, inputs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_same_gradient(wanted, mine)
    if frozen == "weights":
        large = {x.data_ptr() for x in kept_by(block, *[x.requires_grad_() for x in inputs]) if x.shape == (9, 32)}
        assert len(large) == 1


def test_an_output_that_nobody_reads(device: torch.device) -> None:
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]
    ours = derived(block, lambda *given: block(*given)[1:2], inputs)
    with backend.use_backend("reference"):
        theirs = derived(block, lambda *given: block(*given)[1:2], inputs)
    assert block.q.weight.grad is None
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_same_gradient(wanted, mine)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_gradient_checkpointing(device: torch.device, reentrant: bool) -> None:
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]
    plain = derived(block, block, inputs)
    again = derived(block, lambda *given: checkpoint(block, *given, use_reentrant=reentrant), inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Products in autocast's dtype of weights in fp32, whose gradients stay in fp32."""
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]

    def cast(*given: Tensor) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return block(*given)

    ours = derived(block, cast, inputs)
    assert not backend.fallbacks()
    assert {out.dtype for out in cast(*inputs)} == {dtype, torch.float32}
    with backend.use_backend("reference"):
        theirs = derived(block, cast, inputs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype
        assert_same_gradient(wanted, mine, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="one process on a CPU; more of them need more cards")
def test_fully_sharded(device: torch.device, tmp_path: Path) -> None:
    """FSDP2 frees the gathered weights after the forward, and gathers them again before they are asked for."""
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]
    plain = derived(block, block, inputs)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = fully_shard(copy.deepcopy(block), mesh=mesh)
        backend.reset_fallbacks()
        again = derived(sharded, sharded, inputs)
        assert not backend.fallbacks()
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in again]
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))


class Adapted(nn.Linear):
    """What an adapter puts in a projection's place."""


@pytest.mark.parametrize("what", ["hook", "adapter", "subclass", "dtype"])
def test_what_is_watched_is_called(device: torch.device, what: str) -> None:
    block = Block().to(device)
    seen: list[int] = []
    if what == "hook":
        block.k.register_forward_hook(lambda *_: seen.append(1))
    elif what == "adapter":
        block.k = Adapted(32, 8).to(device)
    elif what == "subclass":
        kind = type("Sharded", (nn.Parameter,), {})
        block.k.weight = kind(block.k.weight.detach())
    else:
        block.half()
    x = torch.randn(9, 32, device=device, requires_grad=True)
    assert linear_autograd.learned_projections(x, [block.q, block.k, block.v]) is None
    if what != "dtype":
        packed_linear(x, block.q, block.k, block.v)[1].sum().backward()
        assert bool(seen) == (what == "hook")
        assert block.k.weight.grad is not None


def test_differentiated_twice(device: torch.device) -> None:
    """Also by what the norm is made of, which alone was kept."""
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]

    def second() -> list[Tensor]:
        leaves = [*[x.clone().requires_grad_() for x in inputs], *block.parameters()]
        total = torch.stack([out.square().sum() for out in block(*leaves[:2])]).sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return [*first, *torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)]

    ours = second()
    with backend.use_backend("reference"):
        theirs = second()
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_same_gradient(wanted, mine)


def stale(source: Tensor, weight: Tensor | None) -> Tensor:
    return rms_norm(source, weight, EPS) * 1.001


def test_planted_bug_is_caught(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is not what the products saw is another gradient of their weights."""
    block = Block().to(device)
    inputs = [torch.randn(9, 32, device=device) for _ in range(2)]
    right = derived(block, block, inputs)
    monkeypatch.setattr(
        linear_autograd, "origin", lambda x: made._replace(again=stale) if (made := origin(x)) else None
    )
    wrong = derived(block, block, inputs)
    with pytest.raises(AssertionError):
        assert_same_gradient(right[3], wrong[3])
