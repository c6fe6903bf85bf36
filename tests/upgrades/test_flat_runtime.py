"""A package that was made while the runtime was one flat folder is understood by this version."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "packages" / "flat_runtime.tar.gz"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    assert (tmp_path / "pebble" / "runtime" / "rms_norm.py").is_file()
    return tmp_path / "pebble"


def test_check_says_that_the_tool_moved(rewrite, package: Path) -> None:
    done = rewrite("check", package, "--format", "json")
    assert done.code == 1, done.err
    assert '"tool-moved"' in done.out
    assert '"edited-runtime"' not in done.out


def test_sync_moves_it_into_rooms_and_keeps_edits(rewrite, package: Path) -> None:
    modeling = package / "modeling_pebble.py"
    modeling.write_text(modeling.read_text() + "\n\nMINE = 1\n")
    done = rewrite("sync", package, "--no-verify")
    assert done.code == 0, done.err
    assert "def rms_norm(" in (package / "runtime" / "norms.py").read_text()
    assert not (package / "runtime" / "rms_norm.py").exists()
    text = modeling.read_text()
    assert "from .runtime.norms import rms_norm" in text
    assert text.endswith("MINE = 1\n")
    assert rewrite("check", package).code == 0


def test_undo_puts_the_modeling_file_back(rewrite, package: Path) -> None:
    modeling = package / "modeling_pebble.py"
    generated = modeling.read_text()
    modeling.write_text(generated + "\nMINE = 1\n")
    assert rewrite("undo", package).code == 0
    assert modeling.read_text() == generated


def test_eject_leaves_plain_files(rewrite, package: Path) -> None:
    assert rewrite("eject", package).code == 0
    assert not (package / "rewrite.lock").exists()
    assert (package / "runtime" / "rms_norm.py").is_file()
    assert not (package / "runtime" / "guard.py").exists()
    assert "guard" not in (package / "__init__.py").read_text()
    assert "    PebbleMix,\n" in (package / "__init__.py").read_text()
