"""A transformers that is not installed, in as many versions as a test wants, and a package made from it."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
import command_line

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"
MAPPINGS = 'CONFIG_MAPPING_NAMES = {"tiny": "TinyLlamaConfig"}\n'


@pytest.fixture(autouse=True)
def _captured(capfd: pytest.CaptureFixture[str]) -> None:
    command_line.captured = capfd


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Releases:
    """Unpacked trees of transformers with one model, `tiny`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, version: str, *changes: tuple[str, str]) -> Path:
        """Write a release whose modeling file is the fixture with `changes`, and return the folder it lies in."""
        text = FIXTURE.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        tree = self.folder / version
        files = {
            "__init__.py": f'__version__ = "{version}"\n',
            "models/auto/auto_mappings.py": MAPPINGS,
            "models/tiny/modeling_tiny.py": text,
        }
        for name, content in files.items():
            path = tree / "transformers" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tree

    def wheel(self, version: str, *changes: tuple[str, str]) -> Path:
        """Write the same as a wheel."""
        tree = self(version, *changes)
        path = self.folder / f"transformers-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(tree.rglob("*.py")):
                archive.write(file, file.relative_to(tree).as_posix())
        return path


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    return Releases(tmp_path / "releases")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package made from release 6.0.0 with two rules."""
    from rewrite.cli import run

    folder = tmp_path_factory.mktemp("made")
    original = Releases(folder)("6.0.0") / "transformers" / "models" / "tiny" / "modeling_tiny.py"
    arguments = [str(original), "--out", str(folder / "out"), "--no-verify", "--diff", "none"]
    assert run([*arguments, "--only", "fuse_qkv", "--only", "fuse_gate_up"]) == 0
    return folder / "out"


@pytest.fixture
def package(here: Path, made: Path) -> Path:
    """A copy of that package in `here/out`."""
    shutil.copytree(made, here / "out")
    return Path("out")


def edit(path: Path, old: str, new: str) -> str:
    """Replace a piece of a file, and return the whole text."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path.read_text()
