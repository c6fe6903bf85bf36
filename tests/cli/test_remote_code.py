"""Modeling files as published beside checkpoints, written for a transformers 4.x: rewritten by path, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.errors import UsageError
from rewrite.package.lock import read_lock
from rewrite.source import neighbours

REMOTE = Path(__file__).parents[2] / "fixtures" / "remote"


@pytest.fixture
def published(here: Path) -> Path:
    """The working folder with the files in it."""
    for path in REMOTE.glob("*.py"):
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
def test_a_published_file_is_rewritten_and_verified(published: Path, name: str, sites: dict[str, int]) -> None:
    done = rewrite(f"modeling_{name}.py", "--out", name, "--quick", "--json", "report.json")
    assert done.code == 0, done.out + done.err
    report = json.loads((published / "report.json").read_text())
    found = {transform: len(result["rewritten"]) for transform, result in report["transforms"].items()}
    assert {transform: found.get(transform) for transform in sites} == sites
    assert report["verify"]["passed"]


def test_a_file_whose_neighbour_is_not_there_is_refused(published: Path) -> None:
    done = rewrite("modeling_heron.py", "--out", "heron", "--no-verify")
    assert done.code == 2
    assert "from .configuration_heron import HeronConfig" in done.err
    assert "no configuration_heron.py beside it: put that file there" in done.err
    assert not (published / "heron").exists()


def test_the_neighbours_of_a_file_go_with_it(published: Path) -> None:
    """Through packaging, an edit, an upgrade and an export into the checkpoint's own folder."""
    names = ("configuration_cedar.py", "modeling_cedar_output.py")
    assert rewrite("modeling_cedar.py", "--out", "out", "--no-verify").code == 0
    for name in names:
        assert (published / "out" / name).read_bytes() == (published / name).read_bytes()
    lock = read_lock(published / "out")
    assert lock.modeling == "modeling_cedar.py"
    assert set(lock.upstream) == {"modeling_cedar.py", *names}
    assert rewrite("check", "out").code == 0

    with (published / "out" / names[0]).open("a") as file:
        file.write("MINE = 1\n")
    assert f"{names[0]} was edited" in rewrite("check", "out").out
    assert rewrite("undo", "out").code == 0
    (published / "out" / f"{names[0]}.undone").unlink()

    path = published / names[0]
    path.write_text(path.read_text() + "THEIRS = 1\n")
    assert f"upstream {names[0]}: changed" in rewrite("check", "out").out
    assert rewrite("sync", "out").code == 0
    assert (published / "out" / names[0]).read_bytes() == path.read_bytes()
    assert rewrite("check", "out").code == 0

    for folder in (published, published / "out"):
        (folder / "cedar_kernels.py").write_text("attention = None\n")
    assert rewrite("sync", "out").code == 0
    assert "cedar_kernels.py" in read_lock(published / "out").upstream
    shutil.copytree(published, published.parent / "hub", ignore=shutil.ignore_patterns("out", "modeling_*"))
    done = rewrite("export", "out", "--hub", published.parent / "hub")
    assert done.code == 0, done.err
    assert (published.parent / "hub" / names[0]).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"modeling_x.py": "from ..above import a"}, "which lies above its folder"),
        ({"modeling_x.py": "from ._runtime import a"}, "a package has something else as '_runtime'"),
        ({"modeling_x.py": "from .a import b", "a.py": "from .gone import c"}, "there is no gone.py beside it"),
        ({"modeling_x.py": "from . import a, gone", "a.py": ""}, "there is no gone.py beside it"),
        ({"modeling_x.py": "from .a import b", "a.py": "def"}, "a.py:1: does not parse"),
        ({"x.py": "from .a import b", "a.py": "from .x import c"}, "it will be modeling_x.py in a package"),
    ],
)
def test_a_neighbour_that_cannot_come_along(here: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (here / name).write_text(text)
    path = here / next(iter(files))
    with pytest.raises(UsageError, match=said):
        neighbours.of(path, path.read_text())


def test_neighbours_are_found_through_each_other(here: Path) -> None:
    files = {
        "modeling_x.py": "from .a import b\ntry:\n    from .gone import c\nexcept ImportError:\n    pass",
        "a.py": "def f():\n    from .sub.layers import Layer\n    from .modeling_x import Model",
        "sub/layers.py": "from ..b import c\nfrom . import norms",
        "sub/norms.py": "",
        "b.py": "import a_library",
        "stranger.py": "",
    }
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    found = neighbours.of(here / "modeling_x.py", files["modeling_x.py"])
    assert [file.name for file in found] == ["a.py", "b.py", "sub/layers.py", "sub/norms.py"]


def test_a_file_that_needs_a_removed_helper_is_refused_with_its_name(published: Path) -> None:
    path = published / "modeling_river.py"
    old = "from transformers.utils import logging"
    path.write_text(path.read_text().replace(old, f"{old}, is_torch_fx_proxy_of_old"))
    done = rewrite("modeling_river.py", "--out", "river", "--quick")
    assert done.code == 2, done
    assert "modeling_river.py itself cannot be imported here" in done.err
    assert "is_torch_fx_proxy_of_old" in done.err
    assert not (published / "river").exists()
