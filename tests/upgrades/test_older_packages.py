"""Packages in older layouts are understood: a runtime of one flat folder, and rooms that are folders."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hf_rewrite_runtime.package.flat import flat_files, flat_name

ARCHIVES = Path(__file__).parents[2] / "fixtures" / "packages"


@dataclass(frozen=True)
class Layout:
    """Where a package of one version has its runtime."""

    archive: str
    norm: str
    guard: str


LAYOUTS = (
    Layout("flat_runtime", "runtime/rms_norm.py", "runtime/guard.py"),
    Layout("rooms_as_folders", "runtime/norms/rms_norm.py", "runtime/origin/guard.py"),
)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.archive)
def layout(request: pytest.FixtureRequest) -> Layout:
    found: Layout = request.param
    return found


@pytest.fixture
def package(layout: Layout, tmp_path: Path) -> Path:
    return unpacked(layout, tmp_path)


def unpacked(layout: Layout, tmp_path: Path) -> Path:
    """Return a package of a layout."""
    with tarfile.open(ARCHIVES / f"{layout.archive}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert (tmp_path / "pebble" / layout.norm).is_file()
    return tmp_path / "pebble"


def test_check_says_that_the_tool_moved(rewrite, package: Path) -> None:
    done = rewrite("check", package, "--format", "json")
    assert done.code == 1, done.err
    assert '"tool-moved"' in done.out
    assert '"edited-runtime"' not in done.out


def test_sync_makes_a_file_of_a_room_and_keeps_edits(rewrite, package: Path, layout: Layout) -> None:
    modeling = package / "modeling_pebble.py"
    modeling.write_text(modeling.read_text() + "\n\nMINE = 1\n")
    done = rewrite("sync", package, "--no-verify")
    assert done.code == 0, done.err
    assert "def rms_norm(" in (package / "runtime" / "norms.py").read_text()
    assert (package / "runtime" / "aiter.py").is_file()  # it had aiter, and keeps it
    assert not (package / layout.norm).exists()
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


def test_an_edited_runtime_that_this_version_does_not_have_is_said(rewrite, package: Path, layout: Layout) -> None:
    (package / layout.norm).write_text("# mine\n")
    checked = rewrite("check", package)
    assert (checked.code, f"{layout.norm} was edited" in checked.out) == (1, True)
    undone = rewrite("undo", package)
    assert (undone.code, layout.norm in undone.err) == (1, True)


def test_it_has_a_flat_form(package: Path, layout: Layout) -> None:
    files = flat_files(package, "modeling_pebble.py")
    assert flat_name(layout.norm) in files
    assert f"from .{flat_name(layout.guard).removesuffix('.py')} import made_from" in files["modeling_pebble.py"]


def test_eject_leaves_plain_files(rewrite, package: Path, layout: Layout) -> None:
    assert rewrite("eject", package).code == 0
    assert not (package / "rewrite.lock").exists()
    assert (package / layout.norm).is_file()
    assert not (package / layout.guard).exists()
    assert "guard" not in (package / "__init__.py").read_text()
    assert "    PebbleMix,\n" in (package / "__init__.py").read_text()
