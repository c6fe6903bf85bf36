"""The summary that ends the main command: the class that people load, and what was not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import rewrite
from rich.console import Console

from rewrite.codemod.build import build
from rewrite.console.console import Screen
from rewrite.delivery import summary
from rewrite.delivery.main_class import headline
from rewrite.source.resolve import resolve
from rewrite.transforms import select

WIDTH = 80


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ("bert", "BertForMaskedLM"),
        ("vit", "ViTModel"),
    ],
)
def test_the_class_that_people_load(model: str, expected: str) -> None:
    assert headline(resolve(model), []) == expected


def test_of_a_file_that_transformers_does_not_know(here: Path) -> None:
    source = resolve("modeling_tiny.py")
    assert headline(source, ["TinyLlamaForCausalLM"]) == "TinyLlamaForCausalLM"
    assert headline(source, []) == "TinyLlamaModel"


def test_it_comes_last_and_fits(here: Path) -> None:
    file, loop = here / "modeling_tiny.py", "        for layer in self.layers:\n"
    assert file.read_text("utf-8").count(loop) == 1
    file.write_text(file.read_text("utf-8").replace(loop, f"        self.seen = causal_mask is None\n{loop}"), "utf-8")
    done = rewrite("modeling_tiny.py", "--out", "out", "--no-verify")
    labels = [line[:11].strip() for line in done.out.splitlines() if line[:1].isalpha()]
    assert labels == ["source", "model", "generate", "sites", "left out", "written", "needs", "verify", "next"]
    assert "sites      13 of 14 rewritten, by 11 transforms" in done.out
    assert "left out   operator by operator in a step of the graph, not in few kernels a layer:\n" in done.out
    assert "decode_masks × 1: the mask is read by more than the calls of layers (TinyLlama" in done.out
    source, transforms = resolve("modeling_tiny.py"), select()
    screen = Screen()
    screen.said = Console(width=WIDTH, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    summary.show_build(screen, build(source, transforms), transforms)
    lines = screen.said.export_text().splitlines()
    assert all(len(line.rstrip()) <= WIDTH for line in lines)
    assert lines[0].split() == ["model", "TinyLlamaForCausalLM"]
