"""A small modeling file to rewrite, and a package made from it."""

from __future__ import annotations

from pathlib import Path

import command_line
import pytest
from command_line import rewrite

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"


@pytest.fixture(autouse=True)
def _captured(capfd: pytest.CaptureFixture[str]) -> None:
    command_line.captured = capfd


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder that holds `modeling_tiny.py`, and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    return tmp_path


@pytest.fixture
def package(here: Path) -> Path:
    """A package in `here/out`, made with one transform."""
    done = rewrite("modeling_tiny.py", "--out", "out", "--no-verify", "--only", "fuse_qkv")
    assert done.code == 0, done.err
    return here / "out"
