"""The steps of mixers: kernel beside reference, and what the kernel leaves to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import KERNEL_DTYPES
from torch import Tensor

from hf_rewrite_runtime.guards.overwriting import overwriting, steps
from hf_rewrite_runtime.recurrent import (
    conv_step,
    delta_rule_step,
    gated_norm,
    log_decay,
    selective_scan_step,
    state_space_step,
)

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


def test_a_step_overwrites_the_states_that_its_cache_keeps(device: torch.device) -> None:
    """What comes after them is then nothing to copy; any other state stays as it is."""
    arguments = copied(delta(2, 2, 4, 16, 16, torch.float32), device)
    state, before = arguments[5], arguments[5].clone()
    out, after = delta_rule_step.delta_rule_step(*arguments)
    assert torch.equal(state, before)
    with overwriting([torch.zeros_like(state)]):
        assert delta_rule_step.delta_rule_step(*arguments)[1] is not state
    assert torch.equal(state, before)
    with overwriting([state]):
        same, there = delta_rule_step.delta_rule_step(*arguments)
    assert there is state
    assert torch.equal(state, after)
    assert torch.equal(same, out)


@dtypes
@pytest.mark.parametrize("sizes", SPACES)
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_state_space_step(
    device: torch.device, poisoned: None, sizes: tuple[int, ...], dtype: torch.dtype, softplus: bool, gated: bool
) -> None:
    rows, heads, channels = sizes[:3]
    gate = torch.randn(rows, 2 * heads * channels).to(dtype)[:, heads * channels :].view(rows, heads, channels)
    arguments = [*space(*sizes, dtype)[:-1], softplus, gate if gated else None]
    if not softplus:  # a rate for each number of the state, as Mamba has
        arguments[3] = -torch.rand(*sizes[1:3], sizes[4])
    check(state_space_step.state_space_step, state_space_step, arguments, device, written=0)


def scan(rows: int, channels: int, size: int, dtype: torch.dtype, gated: bool) -> list[Any]:
    x, dt, z = (torch.randn(rows, 2 * channels).to(dtype)[:, channels:] for _ in range(3))
    enters, reads = torch.randn(rows, 2 * size).to(dtype).split(size, dim=-1)
    rates, skip, bias = -torch.rand(channels, size), torch.randn(channels).to(dtype), torch.randn(channels)
    state = torch.randn(rows, channels, size)
    return [state, x, dt, rates, enters, reads, skip, bias, True, z if gated else None]


@dtypes
@pytest.mark.parametrize("sizes", [(1, 40, 16), (3, 24, 5)])
@pytest.mark.parametrize("gated", [True, False])
def test_selective_scan_step(
    device: torch.device, poisoned: None, sizes: tuple[int, int, int], dtype: torch.dtype, gated: bool
) -> None:
    arguments = scan(*sizes, dtype, gated)
    check(selective_scan_step.selective_scan_step, selective_scan_step, arguments, device, written=0)


@dtypes
@pytest.mark.parametrize(("rows", "groups", "size"), [(1, 1, 40), (3, 4, 16), (5, 2, 127)])
@pytest.mark.parametrize("order", ["gate_first", "weight_in_fp32", "weight_rounded"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=str)
def test_gated_norm(
    device: torch.device, poisoned: None, rows: int, groups: int, size: int, dtype: torch.dtype, order: str,
    weight_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    columns = groups * size
    x, gate = torch.randn(rows, columns).to(dtype), torch.randn(rows, 3 * columns).to(dtype)[:, columns : 2 * columns]
    weight = torch.randn(columns).to(weight_dtype or dtype)
    kind = "sigmoid" if order == "weight_in_fp32" else "silu"
    flags = {"gate_first": order == "gate_first", "weight_in_fp32": order == "weight_in_fp32"}
    for given in (gate, None):
        on_device = copied([x, given, weight], device)
        ours = gated_norm.gated_norm(*on_device, 1e-5, kind, size, **flags)
        assert ours is not None
        assert_close(ours, gated_norm.reference(*on_device, 1e-5, kind, size, **flags), dtype)


def test_gated_norm_leaves_other_rows_to_torch(device: torch.device) -> None:
    x, weight = torch.randn(2, 3, 8, device=device), torch.ones(8, device=device)
    for other in (x.transpose(0, 1), x.double(), x[..., :5], x.clone().requires_grad_()):
        assert gated_norm.gated_norm(other, other, weight, 1e-5, "silu") is None
    assert gated_norm.gated_norm(x, x, weight, 1e-5, "silu", 3) is None
    assert gated_norm.gated_norm(x, x, weight, 1e-5, "tanh") is None
    assert gated_norm.gated_norm(x, x[:1], weight, 1e-5, "silu") is None


@dtypes
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (3, 33)])
def test_log_decay(device: torch.device, poisoned: None, rows: int, heads: int, dtype: torch.dtype) -> None:
    packed = torch.randn(rows, 1, 3 * heads).to(dtype) * 8
    arguments = copied([packed, torch.randn(heads).to(dtype), torch.randn(heads)], device)
    x = arguments[0][..., heads : 2 * heads]
    ours = log_decay.log_decay(x, *arguments[1:])
    assert ours.is_contiguous()
    assert_close(ours, log_decay.reference(x, *arguments[1:]), dtype)


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
    assert state_space_step.state_space_step(*step, z=step[1].transpose(1, 2)) is None
    assert state_space_step.state_space_step(step[0].transpose(2, 3), *step[1:]) is None


def test_without_a_gpu_torch_runs() -> None:
    assert conv_step.conv_step(*conv(1, 16, 4, torch.float32)) is None


def test_a_state_is_read_ahead_once_a_step(device: torch.device) -> None:
    """Not where something in the step has written it, and not of a tensor that the step does not know."""
    state, other = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
    assert not steps(state)
    for _ in range(2):
        with overwriting([state]):
            assert not steps(other)
            assert steps(state.unsqueeze(1))
            assert not steps(state)
    with overwriting([state]):
        state.unsqueeze(1).add_(1.0)
        assert not steps(state)
    with overwriting([state]), overwriting([other]):
        assert not steps(state)
    assert not steps(state)
