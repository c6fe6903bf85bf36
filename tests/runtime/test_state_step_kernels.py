"""The steps of mixers: kernel beside reference, and what the kernel leaves to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import KERNEL_DTYPES
from torch import Tensor

from rewrite.runtime.mixers import conv_step, delta_rule_step, state_space_step

WIDTHS = [(1, 16, 4), (3, 300, 3), (2, 256, 2)]
HEADS = [(1, 2, 2, 16, 16), (2, 2, 6, 24, 40), (1, 1, 3, 128, 20)]
"""Rows, key heads, value heads, widths of keys and values."""
SPACES = [(1, 4, 16, 1, 16), (2, 6, 24, 3, 20), (1, 1, 40, 1, 16)]
"""Rows, heads, channels, groups, size of the state."""
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Relative: fp32 sums in another order; fp16 is rounded once by the kernel and step by step by the reference."""


def conv(rows: int, channels: int, width: int, dtype: torch.dtype, bias: bool = True) -> list[Any]:
    x = torch.randn(rows, 1, channels).transpose(1, 2).to(dtype)
    window, weight = torch.randn(rows, channels, width).to(dtype), torch.randn(channels, width).to(dtype)
    return [x, window, weight, torch.randn(channels).to(dtype) if bias else None, "silu" if bias else None]


def delta(rows: int, groups: int, heads: int, width: int, columns: int, dtype: torch.dtype) -> list[Any]:
    packed = torch.randn(rows, 1, (2 * groups * width) + heads * columns).to(dtype)
    query, key, value = packed.split([groups * width, groups * width, heads * columns], dim=-1)
    query, key = (x.reshape(rows, 1, groups, width) for x in (query, key))
    gates = -torch.rand(rows, 1, heads), torch.rand(rows, 1, heads).to(dtype)
    return [query, key, value.reshape(rows, 1, heads, columns), *gates, torch.randn(rows, heads, width, columns), True]


def space(rows: int, heads: int, channels: int, groups: int, size: int, dtype: torch.dtype) -> list[Any]:
    rates = -torch.rand(heads)[:, None, None].expand(heads, channels, size)
    per_head = torch.randn(heads, 1).to(dtype).expand(heads, channels)
    dt = torch.randn(rows, heads, 1).to(dtype).expand(rows, heads, channels)
    enters, reads = (torch.randn(rows, groups, size).to(dtype) for _ in range(2))
    x, state = torch.randn(rows, heads, channels).to(dtype), torch.randn(rows, heads, channels, size)
    return [state, x, dt, rates, enters, reads, per_head, torch.randn(heads, 1).expand(heads, channels), True]


def copied(arguments: list[Any], device: torch.device) -> list[Any]:
    """Return arguments on a device, states as copies; the others keep their strides."""
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    return [a.clone() if isinstance(a, Tensor) and a.is_contiguous() else a for a in moved]


def assert_close(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    for mine, expected in zip(*(o if isinstance(o, tuple) else (o,) for o in (ours, theirs)), strict=True):
        assert mine.dtype == expected.dtype
        assert mine.shape == expected.shape
        error = (mine.double() - expected.double()).norm() / expected.double().norm()
        assert error < TOLERANCES[dtype], error


dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


def check(operator: Callable[..., Any], module: Any, arguments: list[Any], device: torch.device, written: int) -> None:
    """Compare result and written state of the operator with those of its reference."""
    mine, theirs = copied(arguments, device), copied(arguments, device)
    dtype = arguments[1].dtype
    ours = operator(*mine)
    assert ours is not None
    assert_close(ours, module.reference(*theirs), dtype)
    assert_close(mine[written], theirs[written], dtype)


@dtypes
@pytest.mark.parametrize("sizes", WIDTHS)
@pytest.mark.parametrize("bias", [True, False])
def test_conv_step(
    device: torch.device, poisoned: None, sizes: tuple[int, int, int], dtype: torch.dtype, bias: bool
) -> None:
    check(conv_step.conv_step, conv_step, conv(*sizes, dtype, bias), device, written=1)


@dtypes
@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("norm", [True, False])
def test_delta_rule_step(
    device: torch.device, poisoned: None, sizes: tuple[int, ...], dtype: torch.dtype, norm: bool
) -> None:
    arguments = [*delta(*sizes, dtype), norm]
    check(delta_rule_step.delta_rule_step, delta_rule_step, arguments, device, written=5)


@dtypes
@pytest.mark.parametrize("sizes", SPACES)
@pytest.mark.parametrize("softplus", [True, False])
def test_state_space_step(
    device: torch.device, poisoned: None, sizes: tuple[int, ...], dtype: torch.dtype, softplus: bool
) -> None:
    arguments = [*space(*sizes, dtype)[:-1], softplus]
    if not softplus:  # a rate for each number of the state, as Mamba has
        arguments[3] = -torch.rand(*sizes[1:3], sizes[4])
    check(state_space_step.state_space_step, state_space_step, arguments, device, written=0)


def test_what_the_kernels_do_not_take_is_left_to_torch(device: torch.device) -> None:
    x, window, weight, bias, kind = copied(conv(1, 16, 4, torch.float32), device)
    assert conv_step.conv_step(torch.cat([x, x], dim=-1), window, weight, bias, kind) is None
    assert conv_step.conv_step(x, window[:, :, 1:].contiguous(), weight, bias, kind) is None
    assert conv_step.conv_step(x, window, weight, bias, "tanh") is None
    rule = copied(delta(1, 2, 2, 16, 16, torch.float32), device)
    assert delta_rule_step.delta_rule_step(*rule[:5], None, True) is None
    assert delta_rule_step.delta_rule_step(*rule[:5], rule[5].double(), True) is None
    assert delta_rule_step.delta_rule_step(rule[0].requires_grad_(), *rule[1:6], True) is None
    step = copied(space(1, 4, 16, 1, 16, torch.float32), device)
    assert state_space_step.state_space_step(*step, z=step[1]) is None
    assert state_space_step.state_space_step(step[0].transpose(2, 3), *step[1:]) is None


def test_without_a_gpu_torch_runs() -> None:
    assert conv_step.conv_step(*conv(1, 16, 4, torch.float32)) is None
