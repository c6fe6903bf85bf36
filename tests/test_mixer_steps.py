"""Mixers that keep states get a step with norm and residual inside their products, and layers decode with them."""

from __future__ import annotations

import pytest

from rewrite.codemod.passes import rewrite_text
from rewrite.transforms import select

torch = pytest.importorskip("torch")

from soundness.observe import load, unload  # noqa: E402

TEXT = """
import torch
from torch import nn
from torch.nn import functional as F


def unpadded(states, mask):
    if mask is not None:
        states = (states * mask[:, :, None]).to(states.dtype)
    return states


def stepped_window(x, window, taps):
    seen = torch.cat([window, x], dim=-1)
    window.copy_(seen[:, :, 1:])
    return (seen[:, :, 1:] * taps).sum(-1, keepdim=True)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, size))
        self.eps = 1e-6

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Mixer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number = number
        self.into = nn.Linear(8, 16)
        self.taps = nn.Parameter(torch.randn(8, 3))
        self.out = nn.Linear(8, 8)
        self.doubled = True

    def forward(self, x, states=None, mask=None, **kwargs):
        rows, tokens, _ = x.shape
        window = states.get_conv_state(self.number) if states is not None else None
        options = kwargs | {"limit": 1}
        if self.training and states is None:
            return self.fused(x, **options)
        x = unpadded(x, mask)
        a, b = self.into(x).chunk(2, dim=-1)
        a = a.transpose(1, 2)
        if window is not None and tokens == 1 and not states.is_recording_past(self.number):
            a = stepped_window(a, window, self.taps)
        else:
            a = self.long(a, states, **kwargs)
        a = a.transpose(1, 2)
        if self.doubled:
            a = a * 2
        result = self.out(a * F.silu(b))
        return result


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.norm = Norm(8)
        self.mixer = Mixer(config, number)

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mixer(hidden_states, states=past_key_values, mask=attention_mask, **kwargs)
        return residual + hidden_states


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, number) for number in range(2)])

    def forward(self, hidden_states, past_key_values=None):
        for layer in self.layers:
            hidden_states = layer(hidden_states, past_key_values=past_key_values)
        return hidden_states
"""


class States:
    """A cache of one layer that has a window."""

    def __init__(self) -> None:
        self.window = torch.linspace(-1, 1, 48).reshape(2, 8, 3)

    def get_conv_state(self, number: int) -> torch.Tensor:
        return self.window

    def is_recording_past(self, number: int) -> bool:
        return False


def rewritten(text: str) -> tuple[str, list[str]]:
    """Return the new text and why layers were left alone."""
    result = rewrite_text(text, select(("fuse_rms_norm", "decode_layers")))
    reports = {report.name: report for report in result.transforms}
    return result.text, [f"{skip.reason}: {skip.detail}" for skip in reports["decode_layers"].skipped]


def test_a_mixer_steps_with_norm_and_residual_in_its_products() -> None:
    text, skipped = rewritten(TEXT)
    assert not skipped
    step = text.split("class Mixer")[1].split("def decode_residual")[1].split("class Layer")[0]
    assert "linear(x" not in step
    assert "linear(hidden_states, self.into, norm=norm).chunk(2, dim=-1)" in step
    assert "return linear(a * F.silu(b), self.out, residual=residual)" in step
    for left_out in ("training", "unpadded", "is_recording_past", "self.long", "kwargs", "options", "tokens =="):
        assert left_out not in step
    assert "if self.doubled:" in step


@pytest.mark.parametrize("changed", ["", "reads the input"])
def test_the_step_computes_what_the_layer_does(changed: str) -> None:
    text = TEXT.replace("a = a * 2", "a = a * 2 + x.sum()") if changed else TEXT
    module = load(rewritten(text)[0])
    try:
        torch.manual_seed(0)
        layer, x = module.Layer(None, 0).eval(), torch.randn(2, 1, 8)
        one, other = States(), States()
        with torch.no_grad():
            ours, theirs = layer.decode(x, None, one), layer(x, past_key_values=other)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(one.window, other.window)
    finally:
        unload(module)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("        return result\n", "        return result * 2\n", "returns is no projection"),
        ("a = a * 2", "return self.out(a)", "returns under a condition"),
        ("a = a * 2", "a = a * mask.sum()", "reads mask"),
        ("(states * mask[:, :, None])", "(states + mask[:, :, None])", "reads mask"),
        ("a = a * 2", "a = kwargs['a']", "reads kwargs"),
        ("a = a * 2", "norm = a * 2", "has a local norm"),
        ("self.out = nn.Linear(8, 8)", "self.out = config.product", "returns is no projection"),
        ("    def forward(self, x, states", "    @torch.compile\n    def forward(self, x, states", "is decorated"),
    ],
)
def test_other_mixers_are_left_alone(old: str, new: str, why: str) -> None:
    assert old in TEXT
    text, skipped = rewritten(TEXT.replace(old, new))
    assert "def decode(" not in text
    assert any(why in reason for reason in skipped), skipped
