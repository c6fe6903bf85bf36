"""The distribution: every package is listed, the links are there, the wheel holds every module."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rewrite.package import runtime_files

ROOT = Path(__file__).parents[1]
MAPPED = {"transforms": "rewrite/transforms", "runtime": "rewrite/runtime"}


def modules() -> set[str]:
    """Return the path in the wheel of every module in the source folders."""
    own = {path for path in (ROOT / "rewrite").rglob("*.py") if not _below_link(path)}
    found = {path.relative_to(ROOT).as_posix() for path in own}
    for folder, place in MAPPED.items():
        found |= {f"{place}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return found


def _below_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def test_every_package_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"([^"]+)"', listed.group(1)))
    assert names == {str(Path(module).parent).replace("/", ".") for module in modules()}


@pytest.mark.parametrize("folder", MAPPED)
def test_the_links_for_editors_are_relative(folder: str) -> None:
    link = ROOT / "rewrite" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    archive = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    for name in archive.stdout.decode().split("\0"):
        if name and not (ROOT / name).is_symlink() and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules() <= names
    assert "rewrite/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_runtime_of_a_package_exports_what_it_has() -> None:
    plain = runtime_files.init(runtime_files.closure_of(["norms.rms_norm"], "cuda"))
    assert plain == (
        '"""What the modeling file beside this folder calls. Generated with it: edit the modeling file instead."""\n\n'
        "from .core import explain, get_backend, set_backend, use_backend\n\n"
        '__all__ = ["explain", "get_backend", "set_backend", "use_backend"]\n'
    )
    decoding = runtime_files.init(runtime_files.closure_of(["decode.GraphGeneration"], "cuda"))
    assert "from .decode import DecodeGraph, release_graphs\n" in decoding
    assert '__all__ = ["DecodeGraph", "explain", ' in decoding
