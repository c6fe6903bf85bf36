"""Loops over hit experts are read as what they compute, and refused where they compute something else."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.tree.module import Module
from rewrite.transform import Found
from rewrite.transforms.decode.fixed_count_loops import FixedCountLoops

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
