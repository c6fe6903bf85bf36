"""A generated file is as well kept as its original: what passes transformers' formatter and linter still passes.

A few models of each kind; `pytest tests/test_formatted.py --every-model -n auto` takes all that are installed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from rewrite.codemod.build import build
from rewrite.errors import NothingToRewrite
from rewrite.package.lock import engine_digest
from rewrite.source.installed import find_transformers
from rewrite.source.resolve import resolve
from rewrite.transforms import select

pytest.importorskip("transformers")

SETTINGS = """\
line-length = 119
target-version = "py310"
[lint]
select = ["I", "F"]
[lint.isort]
known-first-party = ["transformers"]
lines-after-imports = 2
"""
"""Those of transformers, of the rules that a rewriting could break."""
MODELS = ("bart", "bert", "gemma3", "gpt_neox", "gptj", "llama", "mixtral", "idefics2", "qwen3_moe")


COMMANDS = (("format", "--check"), ("check", "--output-format", "concise"))


def complaints(folder: Path, name: str, text: str) -> list[list[str]]:
    """Return what ruff's formatter and its linter say of a file with transformers' settings."""
    (folder / "ruff.toml").write_text(SETTINGS)
    (folder / name).write_text(text)
    said = []
    for command in COMMANDS:
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", "ruff.toml", name]
        done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
        said.append([] if done.returncode == 0 else done.stdout.splitlines())
    return said


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        installed = find_transformers() if metafunc.config.getoption("--every-model") else None
        files = sorted((installed.root / "models").glob("*/modeling_*.py")) if installed is not None else []
        metafunc.parametrize("model", [str(file) for file in files] or MODELS)


def test_what_passed_the_formatter_still_does(model: str, tmp_path: Path) -> None:
    source = resolve(model)
    original = complaints(tmp_path, source.path.name, source.text)
    if all(original):
        pytest.skip(f"the original itself passes neither: {original[0][0]}, {original[1][0]}")
    try:
        built = build(source, select())
    except NothingToRewrite:
        pytest.skip("nothing is rewritten in it")
    now = complaints(tmp_path, source.path.name, built.rewritten.text)
    assert [new for new, old in zip(now, original, strict=True) if not old and new] == []


def test_a_file_that_is_not_formatted_is_seen(tmp_path: Path) -> None:
    text = "from transformers.utils import b\nfrom transformers import a\n\n\nx = [a,b]\n"
    formatter, linter = complaints(tmp_path, "modeling_bad.py", text)
    assert any("I001" in line for line in linter)
    assert any("reformat" in line for line in formatter)


def test_a_private_method_that_nothing_reads_is_gone() -> None:
    text = build(resolve("gemma3"), select()).rewritten.text
    assert "def _norm(" in resolve("gemma3").text
    assert "def _norm(" not in text


def test_another_formatter_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_digest.__wrapped__()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "999.0")
    assert engine_digest.__wrapped__() != before
