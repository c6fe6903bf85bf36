"""A package that is imported once more in a process, as notebooks do, and two versions of it beside each other."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_package
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verify.copies import with_runtime

from rewrite.measure.runtime_part import runtime_part

NAME = "again_llama"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=1)
IDS = torch.arange(12).view(2, 6)


def modules() -> list[str]:
    return [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]


def forget() -> None:
    for name in modules():
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with_runtime(made_package.write("llama", tmp_path / NAME))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()


def answers(package: Any, original: Any) -> Any:
    """Return a model of the package that computes what the original does, its operators too."""
    model = package.LlamaForCausalLM(CONFIG).eval()
    model.load_state_dict(original.state_dict())
    with torch.no_grad():
        wanted = original(IDS).logits
        torch.testing.assert_close(model(IDS).logits, wanted)
        whole = torch.compile(model, backend="eager", fullgraph=True)  # every operator by its name
        torch.testing.assert_close(whole(IDS).logits, wanted)
    return model


def check(model: Any, original: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, original(IDS).logits)


def test_imported_again(folder: Path) -> None:
    original = LlamaForCausalLM(CONFIG).eval()
    first = importlib.import_module(NAME)
    kept = answers(first, original)
    space = runtime_part(NAME, "core/backend").NAMESPACE
    forget()
    second = importlib.import_module(NAME)
    assert second is not first
    answers(second, original)
    assert {space, runtime_part(NAME, "core/backend").NAMESPACE} == {NAME, f"{NAME}_2"}
    check(kept, original)


def test_every_module_reloaded(folder: Path) -> None:
    original = LlamaForCausalLM(CONFIG).eval()
    package = importlib.import_module(NAME)
    kept = answers(package, original)
    for name in modules():
        importlib.reload(sys.modules[name])
    answers(package, original)
    check(kept, original)


def test_two_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaForCausalLM(CONFIG).eval()
    kept = answers(importlib.import_module(NAME), original)
    forget()
    (folder / "other").mkdir()
    shutil.copytree(folder / NAME, folder / "other" / NAME)
    monkeypatch.syspath_prepend(folder / "other")
    other = importlib.import_module(NAME)
    assert "other" in Path(other.__file__).parts
    answers(other, original)
    check(kept, original)
