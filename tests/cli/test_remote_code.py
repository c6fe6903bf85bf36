"""Modeling files as published beside checkpoints, written for a transformers 4.x: rewritten by path, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import CommandLine

REMOTE = Path(__file__).parents[2] / "fixtures" / "remote"


@pytest.fixture
def published(here: Path) -> Path:
    """The working folder with the three files in it."""
    for path in REMOTE.glob("modeling_*.py"):
        shutil.copy(path, here)
    return here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("river", {"fuse_qkv": 1, "fuse_gate_up": 1, "fuse_rms_norm": 1, "fuse_add_norm": 1, "native_gqa": 2}),
        ("cedar", {"fuse_qkv": 1, "fuse_add_norm": 2}),
    ],
)
def test_a_published_file_is_rewritten_and_verified(
    published: Path, rewrite: CommandLine, name: str, sites: dict[str, int]
) -> None:
    done = rewrite(f"modeling_{name}.py", "--out", name, "--quick", "--json", "report.json")
    assert done.code == 0, done.out + done.err
    report = json.loads((published / "report.json").read_text())
    found = {transform: len(result["rewritten"]) for transform, result in report["transforms"].items()}
    assert {transform: found.get(transform) for transform in sites} == sites
    assert report["verify"]["passed"]


def test_a_file_that_imports_its_neighbour_is_refused(published: Path, rewrite: CommandLine) -> None:
    done = rewrite("modeling_heron.py", "--out", "heron", "--no-verify")
    assert done.code == 2
    assert "from .configuration_heron import HeronConfig" in done.err
    assert not (published / "heron").exists()


def test_a_file_that_needs_a_removed_helper_is_refused_with_its_name(published: Path, rewrite: CommandLine) -> None:
    path = published / "modeling_river.py"
    old = "from transformers.utils import logging"
    path.write_text(path.read_text().replace(old, f"{old}, is_torch_fx_proxy_of_old"))
    done = rewrite("modeling_river.py", "--out", "river", "--quick")
    assert done.code == 2, done
    assert "modeling_river.py itself cannot be imported here" in done.err
    assert "is_torch_fx_proxy_of_old" in done.err
    assert not (published / "river").exists()
