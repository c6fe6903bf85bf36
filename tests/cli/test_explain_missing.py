"""`--explain-missing` names the line and the change, and a file that was changed so has nothing missing."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import rewrite

MODEL = '''"""A block whose norm follows a sum that is written in place."""

from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mixer = nn.Linear(width, width)

    def forward(self, x):
        y = self.mixer(x)
        y += x
        return self.norm(y) + y
'''


def test_the_line_and_the_change(here: Path) -> None:
    (here / "block.py").write_text(MODEL)
    done = rewrite("block.py", "--explain-missing", "--json", "missing.json")
    assert done.code == 0
    assert "fuse_add_norm × 1" in done.out
    assert "write the sum to a name" in done.out
    assert "line 14, Block.forward: norm: y += x" in done.out
    (found,) = json.loads((here / "missing.json").read_text())["missing"]
    assert found["places"] == [{"line": 14, "site": "Block.forward: norm", "detail": "y += x"}]
    assert not (here / "optimized_block").exists()


def test_nothing_is_missing_once_it_is_changed(here: Path) -> None:
    (here / "block.py").write_text(MODEL.replace("y += x", "y = x + y"))
    done = rewrite("block.py", "--explain-missing")
    assert "sites      1 rewritten, 0 left as they are" in done.out
    assert "missing" not in done.out
