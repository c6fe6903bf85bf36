"""What is read of experts: their gate computes what the runtime makes of the form that was read, or none is.

Loops over hit experts are read as what they compute, and refused where they compute something else.
"""

from __future__ import annotations

from typing import Any

import libcst as cst
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_rewrite_runtime.moe.form import ExpertsForm, gated, gating
from rewrite.analysis.moe.all_experts import every_expert, every_form
from rewrite.analysis.moe.mixture import form_of
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.tree.module import Module
from rewrite.transform import Found
from rewrite.transforms.decode.fixed_count_loops import FixedCountLoops

EXPERTS = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import use_experts_implementation


{decorator}
class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 12))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.down_proj_bias = nn.Parameter(torch.randn(4, 8))
        self.act_fn = nn.GELU()
        self.top, self.low, self.steep = 0.6, -0.6, 1.7

    def forward(self, hidden_states, index, weights):
        return hidden_states

    def _apply_gate(self, both):
{gate}
"""
HALVES = "gate, up = both.chunk(2, dim=-1)"
READ = {
    "own activation": (HALVES, "return self.act_fn(gate) * up"),
    "in fp32": (HALVES, "return (up.float() * self.act_fn(gate.float())).to(gate.dtype)"),
    "silu": (HALVES, "return F.silu(gate) * up"),
    "bounded": (HALVES, "gate = gate.clamp(max=self.top)", "return F.silu(gate) * up.clamp(-self.top, self.top)"),
    "steep": (HALVES, "return up * (gate * torch.sigmoid(self.steep * gate))"),
    "by turns": ("gate, up = both[..., ::2], both[..., 1::2]", "return self.act_fn(gate) * up"),
    "all of it": (
        "up = both[..., 1::2].clamp(min=-self.top, max=self.top)", "gate = both[..., 0::2].clamp(max=self.top)",
        "return (up + 1) * (gate * torch.sigmoid(gate * self.steep))",
    ),
}  # fmt: skip
OTHERS = {
    "halves swapped": ("up, gate = both.chunk(2, dim=-1)", "return self.act_fn(gate) * up"),
    "bounded from below": (
        HALVES, "gate = gate.clamp(min=self.low, max=self.top)", "return F.silu(gate) * up.clamp(-self.top, self.top)",
    ),
    "gate bounded alone": (HALVES, "return F.silu(gate.clamp(max=self.top)) * up"),
    "up bounded alone": (HALVES, "return F.silu(gate) * up.clamp(-self.top, self.top)"),
    "up bounded otherwise": (HALVES, "return F.silu(gate.clamp(max=self.top)) * up.clamp(self.low, self.top)"),
    "bounded late": (HALVES, "return F.silu(gate).clamp(max=self.top) * up.clamp(-self.top, self.top)"),
    "shifted before": (
        HALVES, "gate = gate.clamp(max=self.top)", "return F.silu(gate) * (up + 1).clamp(-self.top, self.top)",
    ),
    "shifted by a sum": (HALVES, "return F.silu(gate) * (up + gate)"),
    "sigmoid of up": (HALVES, "return up * (gate * torch.sigmoid(self.steep * up))"),
    "sigmoid alone": (HALVES, "return up * torch.sigmoid(gate)"),
    "twice": (HALVES, "return self.act_fn(gate) * up * up"),
    "in half precision": (HALVES, "return self.act_fn(gate.to(torch.bfloat16)) * up"),
    "by threes": ("gate, up = both[..., :6:3], both[..., 1::3]", "return self.act_fn(gate) * up"),
    "along the tokens": ("gate, up = both.chunk(2, dim=0)", "return self.act_fn(gate) * up"),
    "one half by turns": ("gate, _ = both.chunk(2, dim=-1)", "return self.act_fn(gate) * both[..., 1::2]"),
}  # fmt: skip


def experts(lines: tuple[str, ...], decorator: str = "@use_experts_implementation") -> Module:
    gate = "\n".join(f"        {line}" for line in lines)
    return Module(cst.parse_module(EXPERTS.format(gate=gate, decorator=decorator)))


def computed(lines: tuple[str, ...], both: torch.Tensor) -> Any:
    """Run the lines of a gate, of an object with the attributes that they read."""
    holder = nn.Module()
    holder.act_fn, holder.top, holder.low, holder.steep = nn.GELU(), 0.6, -0.6, 1.7
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec("def gate(self, both):\n" + "\n".join(f"    {line}" for line in lines), names)
    return names["gate"](holder, both), holder


def of_form(arguments: tuple[str, ...], holder: nn.Module, both: torch.Tensor) -> torch.Tensor:
    form = eval(f"ExpertsForm({', '.join(arguments)})", {"ExpertsForm": ExpertsForm, "self": holder})
    how = gating(form)
    assert how is not None
    gate, up = (both[..., ::2], both[..., 1::2]) if how.interleaved else both.chunk(2, dim=-1)
    return gated(gate, up, how)


@pytest.mark.parametrize("name", READ)
def test_the_form_computes_what_the_gate_does(name: str) -> None:
    module = experts(READ[name])
    both = torch.randn(64, 12)
    wanted, holder = computed(READ[name], both)
    torch.testing.assert_close(of_form(form_of(module.classes["Experts"], module), holder, both), wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_another_gate_has_no_form(name: str) -> None:
    module = experts(OTHERS[name])
    with pytest.raises(NotComputable):
        form_of(module.classes["Experts"], module)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("is_transposed=True", ("self.act_fn", "transposed=True")),
        ("is_transposed=True, has_bias=True", ("self.act_fn", "transposed=True", "biased=True")),
        ("is_concatenated=False, is_transposed=False", ("self.act_fn",)),
        ("has_gate=False", None),
        ("has_post_expert_norm=True", None),
        ("is_transposed=LATER", None),
    ],
)
def test_the_decorator_says_how_the_weights_lie(given: str, wanted: tuple[str, ...] | None) -> None:
    module = experts(READ["own activation"], f"@use_experts_implementation({given})")
    if wanted is None:
        with pytest.raises(NotComputable):
            form_of(module.classes["Experts"], module)
    else:
        assert form_of(module.classes["Experts"], module) == wanted


BLOCK = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.width = 4, 8
        self.gate_up_proj = nn.Parameter(torch.randn(4, 8, 12))
        self.down_proj = nn.Parameter(torch.randn(4, 6, 8))
        self.act_fn = nn.SiLU()

    def forward(self, tokens):
        tokens = tokens.view(self.count, -1, self.width)
        gate, up = torch.bmm(tokens, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(self.act_fn(gate) * up, self.down_proj).view(-1, self.width)


class Router(nn.Linear):
    def __init__(self, config):
        super().__init__(8, 4, bias=False)
        self.top_k = 1

    def forward(self, tokens):
        logits = super().forward(tokens)
        best, place = torch.topk(logits, self.top_k, dim=1)
        shares = torch.full_like(logits, float("-inf")).scatter_(1, place, best)
        return torch.sigmoid(shares.float()).to(shares.dtype), logits


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.experts = Experts(config)
        self.router = Router(config)

    def forward(self, tokens):
        shares, logits = self.router(tokens)
        many = tokens.repeat(shares.shape[1], 1) * shares.transpose(0, 1).reshape(-1, 1)
        return self.experts(many).reshape(shares.shape[1], -1, 8).sum(dim=0), logits
"""
CHANGES = {
    "no weight is zero": ('float("-inf")', "0.0"),
    "softer": ("torch.sigmoid(shares.float())", "torch.tanh(shares.float())"),
    "the smallest": ("topk(logits, self.top_k, dim=1)", "topk(logits, self.top_k, dim=1, largest=False)"),
    "of other logits": ("torch.full_like(logits,", "torch.full_like(logits * 2,"),
    "tokens by turns": ("tokens.repeat(shares.shape[1], 1)", "tokens.repeat_interleave(shares.shape[1], 0)"),
    "shares by token": ("shares.transpose(0, 1).reshape", "shares.reshape"),
    "tokens changed": ("tokens.repeat(shares", "(tokens + 1).repeat(shares"),
    "more than a product": ("self.experts(many)", "self.experts(many + 1)"),
    "a sum in the experts": (".chunk(2, dim=-1)", ".add(1).chunk(2, dim=-1)"),
    "experts in another order": (
        "view(self.count, -1, self.width)",
        "view(-1, self.count, self.width).transpose(0, 1)",
    ),
}


def test_experts_for_all_tokens_are_read() -> None:
    module = Module(cst.parse_module(BLOCK))
    assert every_form(module.classes["Experts"], module) == ("self.act_fn", "transposed=True", "every_expert=True")
    found = every_expert(module.classes["Block"], module)
    assert found is not None
    assert (found.scores, found.top_k) == ("shares", "self.router.top_k")


@pytest.mark.parametrize("name", CHANGES)
def test_other_experts_for_all_tokens_are_not(name: str) -> None:
    old, new = CHANGES[name]
    assert old in BLOCK
    module = Module(cst.parse_module(BLOCK.replace(old, new)))
    assert every_expert(module.classes["Block"], module) is None


_FILE = """
import torch
from torch.nn import functional as F

class Bank:
    def forward(self, states, chosen, scale):
        total = torch.zeros_like(states)
        with torch.no_grad():
            {search}
        for number in {hit}:
            {opening}
            share = F.linear(states[rows], self.down[number]) * scale[rows, ranks, None]
            total.index_add_(0, rows, share)
        return total
"""
_SEARCH = "mask = F.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)"
_HIT = "torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()"
_OPENING = "number = number[0]; ranks, rows = torch.where(mask[number])"
_GUARD = "number = number[0]\n            if {}:\n                continue\n            {}"
_WHERE = "ranks, rows = torch.where(mask[number])"


def _is_found(search: str, hit: str, opening: str) -> bool:
    module = Module(cst.parse_module(_FILE.format(search=search, hit=hit, opening=opening)))
    transform = FixedCountLoops()
    (candidate,) = transform.candidates(module)
    return isinstance(transform.match(candidate, module), Found)


@pytest.mark.parametrize(
    ("search", "hit", "opening"),
    [
        (_SEARCH, _HIT, _OPENING),
        ("mask = torch.permute(F.one_hot(chosen, self.count), dims=(2, 1, 0))", _HIT, _OPENING),
        ("hot = F.one_hot(chosen, self.count); mask = hot.transpose(0, 2)", _HIT, _OPENING),
        (_SEARCH, "torch.nonzero(mask.sum((1, 2)) > 0)", _OPENING),
        (_SEARCH, "torch.nonzero(0 < torch.sum(mask, dim=(-2, -1)), as_tuple=False).squeeze(-1)", _OPENING),
        (f"{_SEARCH}; sums = mask.sum((1, 2)); hits = torch.gt(sums, 0)", "hits.nonzero()", _OPENING),
        (_SEARCH, _HIT, _GUARD.format("self.count == number", _WHERE)),
        (_SEARCH, _HIT, _GUARD.format("not number != self.count", _WHERE)),
        (_SEARCH, _HIT, "number = number[0]; own = mask[number]; both = torch.where(own); ranks, rows = both"),
        (_SEARCH, _HIT, "number = number.item(); ranks, rows = mask[number].nonzero(as_tuple=True)"),
    ],
)
def test_other_spellings_are_the_same_loop(search: str, hit: str, opening: str) -> None:
    assert _is_found(search, hit, opening)


@pytest.mark.parametrize(
    ("search", "hit", "opening"),
    [
        ("mask = F.one_hot(chosen, self.count).permute(1, 2, 0)", _HIT, _OPENING),
        (_SEARCH, "torch.greater(mask.sum(dim=(-1, -2)), 1).nonzero()", _OPENING),
        (_SEARCH, "torch.greater(mask.sum(dim=(0, -2)), 0).nonzero()", _OPENING),
        (f"{_SEARCH}; self.note(states)", _HIT, _OPENING),
        (f"{_SEARCH}; noted = self.note(states)", _HIT, _OPENING),
        (_SEARCH, _HIT, _OPENING.replace("mask[number]", "mask[0]")),
        (_SEARCH, _HIT, _GUARD.format("number == self.first", _WHERE)),
        (_SEARCH, _HIT, f"{_OPENING}; rows = rows + mask.sum()"),
    ],
)
def test_other_loops_stay(search: str, hit: str, opening: str) -> None:
    assert not _is_found(search, hit, opening)
