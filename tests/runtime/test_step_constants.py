"""What a step computes of parameters alone: once, anew for every call, and never where the model writes into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_rewrite_runtime.decode import constant_folding
from hf_rewrite_runtime.decode.constant_folding import StepConstants
from hf_rewrite_runtime.linear.packing import packed_linear


class Rates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(4))
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        decay = -self.rates.float().exp() * F.softplus(x + self.bias.double().float())
        return decay * (1.0 + self.bias)[None, :].expand(3, -1)


def step(model: Callable[[Tensor], Tensor], kept: StepConstants, x: Tensor) -> Tensor:
    with torch.no_grad(), kept:
        return model(x)


def test_they_are_computed_once_and_anew_when_asked() -> None:
    model, kept, x = Rates(), StepConstants(), torch.rand(3, 4)
    torch.testing.assert_close(step(model, kept, x), model(x))
    calls = _calls_in(lambda: step(model, kept, x))
    assert not {"exp", "neg", "double", "expand"} & calls, calls
    assert "softplus" in calls  # of the input
    with torch.no_grad():
        model.rates.data.mul_(2)
        model.bias.add_(1)
    assert not torch.allclose(step(model, kept, x), model(x))
    kept.refresh()
    torch.testing.assert_close(step(model, kept, x), model(x))


def test_a_bias_of_which_a_part_is_missing_is_made_once() -> None:
    """Whisper's keys have none, its values have one, and both are one product."""
    keys, values, kept = nn.Linear(8, 4, bias=False), nn.Linear(8, 4), StepConstants()
    x = torch.rand(1, 1, 8)

    def both(x: Tensor) -> Tensor:
        return torch.cat(packed_linear(x, keys, values), -1)

    wanted = torch.cat([keys(x), values(x)], -1)
    torch.testing.assert_close(step(both, kept, x), wanted)
    assert kept.nbytes == 8 * 4
    with torch.no_grad():
        values.bias.add_(1)
    kept.refresh()
    torch.testing.assert_close(step(both, kept, x), wanted + torch.tensor([0.0] * 4 + [1.0] * 4))
    assert kept.nbytes == 8 * 4


def test_a_parameter_that_moved_is_another_one() -> None:
    model, kept, x = Rates(), StepConstants(), torch.rand(3, 4)
    step(model, kept, x)
    model.rates.data = torch.rand(4)
    model.bias = nn.Parameter(torch.rand(4))
    torch.testing.assert_close(step(model, kept, x), model(x))


def test_what_a_model_writes_into_is_its_own_in_every_step() -> None:
    weight, kept, x = nn.Parameter(torch.rand(4)), StepConstants(), torch.rand(4)

    def writes(x: Tensor) -> Tensor:
        total = weight.double().float()
        total[0] = 3
        total += x
        return total.exp_()

    for _ in range(3):
        torch.testing.assert_close(step(writes, kept, x), writes(x))
        torch.testing.assert_close(step(lambda x: weight.exp().unsqueeze(0)[0].mul_(x), kept, x), weight.exp() * x)


def test_large_results_are_computed_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, x = Rates(), StepConstants(), torch.rand(3, 4)
    monkeypatch.setattr(constant_folding, "LARGEST", 8)
    torch.testing.assert_close(step(model, kept, x), model(x))
    assert kept.nbytes == 0
    monkeypatch.setattr(constant_folding, "LARGEST", 64)
    monkeypatch.setattr(constant_folding, "BUDGET", 40)
    torch.testing.assert_close(step(model, kept, x), model(x))
    assert 0 < kept.nbytes <= 40


def _calls_in(run: Callable[[], object]) -> set[str]:
    from torch.overrides import TorchFunctionMode

    seen: set[str] = set()

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Notes():
        run()
    return seen


def test_a_parameter_of_which_a_view_was_kept_may_be_swapped() -> None:
    """As `to()` does with `torch.__future__.set_swap_module_params_on_conversion`, where no view may be left."""
    model, kept, x = Rates(), StepConstants(), torch.rand(3, 4)

    def row(x: Tensor) -> Tensor:
        return x * model.rates[:, None].expand(4, 4)[:3]

    step(row, kept, x)
    assert kept._kept
    torch.utils.swap_tensors(model.rates, nn.Parameter(torch.rand(4)))
    torch.testing.assert_close(step(row, kept, x), row(x))
