"""Files inside installed packages: their neighbours are imported from there, and nothing of them is copied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.package.lock import read_lock
from rewrite.source import importable
from rewrite.source.resolve import resolve

MODEL = '''"""A block that stands two folders deep."""

import torch
from torch import nn

from ...settings import WIDTH
from .. import scales
from ..scales import doubled


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        from .late import LATE

        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return doubled(torch.softmax(q @ k.mT, dim=-1) @ v) * scales.ONE * LATE
'''
FILES = {
    "library/tinylib/__init__.py": "",
    "library/tinylib/settings.py": "WIDTH = 8\n",
    "library/tinylib/models/__init__.py": "",
    "library/tinylib/models/scales.py": "ONE = 1\n\n\ndef doubled(x):\n    return x + x\n",
    "library/tinylib/models/blocks/attention.py": MODEL,
    "library/tinylib/models/blocks/late.py": "LATE = 1\n",
}
FILE = "library/tinylib/models/blocks/attention.py"
NAME = "tinylib.models.blocks.attention"


@pytest.fixture
def library(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks in, with a package in it that has a folder without an `__init__.py`."""
    for name, text in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here / "library")])
    monkeypatch.setenv("PYTHONPATH", str(here / "library"), prepend=":")
    return here


@pytest.mark.parametrize("target", [FILE, NAME])
def test_it_imports_its_neighbours_absolutely(library: Path, target: str) -> None:
    assert rewrite(target, "--out", "out", "--no-verify").code == 0
    text = (library / "out" / "modeling_attention.py").read_text()
    for line in (
        "from tinylib.settings import WIDTH",
        "from tinylib.models import scales",
        "from tinylib.models.scales import doubled",
        "from tinylib.models.blocks.late import LATE",
        "packed_linear(x, self.q_proj, self.k_proj, self.v_proj)",
    ):
        assert line in text
    lock = read_lock(library / "out")
    assert (lock.source.target, lock.source.path) == (NAME, "attention.py")
    assert set(lock.upstream) == {"attention.py"}
    assert not (library / "out" / "scales.py").exists()
    assert rewrite("check", "out").code == 0


def test_a_file_whose_layers_are_elsewhere_says_where(library: Path) -> None:
    """The files that define layers which it builds, not what else it imports, nor what it builds of other kinds."""
    text = """from torch import nn

from .blocks.attention import Attention
from .scales import doubled


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = doubled(4)
        self.block = Attention()

    def forward(self, x):
        return self.block(x)
"""
    (library / "library/tinylib/models/model.py").write_text(text)
    done = rewrite("tinylib.models.model", "--out", "out", "--no-verify")
    assert done.code == 1
    assert done.said[-1].endswith(f"Its layers are in {NAME}: rewrite {NAME}")
    (library / "model.py").write_text(text.replace(".blocks.attention", ".layers").replace(".scales", "math"))
    layer = "from torch import nn\n\n\nclass Attention(nn.Module):\n    def forward(self, x):\n        return x\n"
    (library / "layers.py").write_text(layer)
    done = rewrite("model.py", "--out", "out", "--no-verify")
    assert done.said[-1].endswith("Its layers are in layers.py: rewrite layers.py")


def test_a_changed_original_is_seen(library: Path) -> None:
    assert rewrite(FILE, "--out", "out", "--no-verify").code == 0
    (library / FILE).write_text(MODEL.replace("A block", "The block"))
    assert rewrite("check", "out").code == 1
    assert rewrite("sync", "out", "--no-verify").code == 0
    assert "The block" in (library / "out" / "modeling_attention.py").read_text()


def test_what_lies_in_the_working_folder_alone_is_not_installed(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that only the place where Python was started makes importable: another process may not find it."""
    monkeypatch.setattr(sys, "path", ["", *(place for place in sys.path if not place.endswith("library"))])
    monkeypatch.chdir(library / "library")
    path = Path("tinylib/models/blocks/attention.py")
    assert importable.name_of(path) is None
    assert resolve(str(path)).inside is None
    done = rewrite(str(path), "--out", "out", "--no-verify")
    assert done.code == 2
    assert "which lies above its folder" in done.err


def test_a_file_that_no_package_holds_has_no_name(library: Path) -> None:
    (library / "library" / "alone.py").write_text(MODEL)
    (library / "library" / "scripts").mkdir()
    (library / "library" / "scripts" / "model.py").write_text(MODEL)
    assert importable.name_of(library / "library" / "alone.py") is None
    assert importable.name_of(library / "library" / "scripts" / "model.py") is None
    assert importable.name_of(library / "library" / "tinylib" / "__init__.py") is None
