"""A package that leaves a call to the original's way is asked whether it had to: what crashes there is a failure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.generate.decode_loop import DecodeLoop
from rewrite.verify import Options
from rewrite.verify.calls import captured_replays
from rewrite.verify.generation import loop_checks
from rewrite.verify.judging.compare import Mismatch, NotRun

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
REFUSED = NotRun("the original's loop ran: step_fails")


def crash(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What both ask a workbench for."""
    for module in (loop_checks, captured_replays):
        monkeypatch.setattr(module, "comparable", lambda bench: True)
    config = BertConfig(**SIZES, max_position_embeddings=64)
    return SimpleNamespace(
        options=Options(),
        base=SimpleNamespace(inputs=("input_ids",)),
        subject=SimpleNamespace(name="Bert", accepts=lambda name: False),
        implementations=lambda: ("sdpa",),
        fresh=lambda *_: SimpleNamespace(original=BertModel(config).eval()),
        seed_for=lambda *_: 0,
    )


def written(model: Any) -> Any:
    return model.generate(torch.arange(5)[None], max_new_tokens=4, do_sample=False)


def asked_of_the_loop(bench: Any, run: Callable[[Any], Any] = written) -> None:
    loop_checks.needless(bench, LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), run, REFUSED)


def test_a_refusal_that_was_needless_is_told(bench: Any) -> None:
    with pytest.raises(Mismatch, match="the original's step runs in a decode loop"):
        asked_of_the_loop(bench)
    with pytest.raises(Mismatch, match="the original's forward can be captured"):
        captured_replays._needless(bench, "float32", "nothing was replayed")


def test_a_crash_of_what_captures_is_none_of_the_original_s(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeLoop, "run", crash)
    with pytest.raises(RuntimeError, match="planted"):
        asked_of_the_loop(bench)
    monkeypatch.setattr("hf_rewrite_runtime.forward.captured._called", crash)
    with pytest.raises(RuntimeError, match="planted"):
        captured_replays._needless(bench, "float32", "nothing was replayed")


def test_what_the_original_cannot_is_no_fault(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of_the_loop(bench, crash)
    monkeypatch.setattr(BertModel, "forward", crash)
    with pytest.raises(NotRun, match="planted"):
        captured_replays._needless(bench, "float32", "nothing was replayed")
