"""No tensor is made on the device that is the default of the process: that is the caller's to choose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.generate.generation import GraphGeneration

RUNTIME = Path(__file__).parents[2] / "runtime"
ALLOCATING = {f"{kind.__module__ or 'torch'}.{kind.__name__}" for kind in _device_constructors()}
ALLOCATING |= {f"torch.{kind.__name__}" for kind in _device_constructors()} | {"torch.Generator", "torch.Tensor"}
"""What `torch.set_default_device` gives a device to, and what is on the CPU where the others are not."""


def without_device(text: str) -> list[int]:
    """Return the lines of a file that allocate without saying where."""
    tree = ast.parse(text)
    names = dict(_imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _meant(node.func, names) in ALLOCATING:
            given = {keyword.arg for keyword in node.keywords}  # None for what is handed on
            by_place = _meant(node.func, names) == "torch.Generator" and node.args
            if not given & {"device", None} and not by_place:
                found.append(node.lineno)
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (
                    name.asname or name.name.partition(".")[0],
                    name.name if name.asname else name.name.partition(".")[0],
                )
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _meant(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    return f"{_meant(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


@pytest.mark.parametrize("path", sorted(RUNTIME.rglob("*.py")), ids=lambda path: str(path.relative_to(RUNTIME)))
def test_every_tensor_is_made_on_a_device(path: Path) -> None:
    assert without_device(path.read_text(encoding="utf-8")) == []


def test_the_lint_reads_names() -> None:
    text = """
import torch as t, torch.nn.functional
from torch import zeros as made, Tensor, Generator
from torch.nn import functional
t.ones(3)
made(3)
torch.arange(3)
t.full((2,), 1.0, device="cpu")
Tensor([1])
Generator()
Generator("cpu")
t.zeros_like(x)
t.zeros(3, **given)
x.new_zeros(3)
zeros(3)
"""
    assert without_device(text) == [5, 6, 7, 9, 10]


DEFAULTS = ["meta", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = not torch.cuda.is_available()


SETTINGS = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 5, "min_new_tokens": 3, "eos_token_id": 5, "sequence_bias": [[[7], 3.5]]},
    "no pair twice": {"do_sample": False, "no_repeat_ngram_size": 2, "eos_token_id": [5, 6]},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("default", DEFAULTS)
def test_another_default_device_changes_nothing(default: str, settings: str) -> None:
    """`meta` shows on a CPU what `cuda` is on a GPU; before the first call, and after one."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    model = Llama(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    original = LlamaForCausalLM(config).eval().to(model.device)
    original.load_state_dict(model.state_dict())
    rows = 1 if settings == "looked up" else 2
    ids = torch.randint(3, 97, (rows, 9)).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def said(one: LlamaForCausalLM, by: str) -> torch.Tensor:
        torch.manual_seed(3)
        with torch.device(by):
            tokens: torch.Tensor = one.generate(
                ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **SETTINGS[settings]
            )
        return tokens

    backend.reset_fallbacks()
    wanted = said(original, default)
    for by in (default, "cpu", default):
        assert torch.equal(said(model, by), wanted)
    assert not backend.fallbacks()
