"""A model whose `forward` knows no cache is compiled too: it is not told to do without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewrite.verify.calls.compiled import _prompts_read
from rewrite.verify.models.subjects import Subject


class Encoder(nn.Module):
    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (input_ids.float(),)


class Passing(nn.Module):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor]:
        assert kwargs == {"use_cache": False}
        return (input_ids.float(),)


class Decoder(nn.Module):
    def forward(self, input_ids: Tensor, use_cache: bool = True) -> tuple[Tensor]:
        assert not use_cache
        return (input_ids.float(),)


@pytest.mark.parametrize("kind", [Encoder, Passing, Decoder])
def test_reads_prompts(kind: type[nn.Module]) -> None:
    subject = Subject(kind, kind, causal=False)
    options = SimpleNamespace(device="cpu")
    bench: Any = SimpleNamespace(subject=subject, options=options, seed_for=lambda *names: 0)
    variant: Any = SimpleNamespace(vocab_size=7)
    found = _prompts_read(bench, variant)(kind())
    assert [*found] == ["logits#0", "logits#1", "logits#2"]
    assert all(isinstance(logits, torch.Tensor) for logits in found.values())
