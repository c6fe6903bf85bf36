"""Transforms that a user brings: listed, explained, run, locked and verified like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rewrite

OUTSIDE = Path(__file__).parents[2] / "fixtures" / "outside"
RULE = OUTSIDE / "src" / "scaled_tanh" / "transform.py"
MODEL = """\
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.cap = 30.0

    def scores(self, x):
        return self.query(x) - self.key(x)

    def forward(self, x):
        logits = self.proj(x)
        return self.cap * torch.tanh(logits / self.cap)

    def other(self, x):
        return torch.tanh(x / 2) * self.cap
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose pyproject names the example's rule, and a modeling file."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "cap_logits.py").write_bytes(RULE.read_bytes())
    (tmp_path / "pyproject.toml").write_text('[tool.rewrite]\ntransforms = ["rules/cap_logits.py"]\n')
    (tmp_path / "modeling_head.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(OUTSIDE / "src")
    return tmp_path


def test_it_is_listed_and_explained(project: Path) -> None:
    listed = rewrite("explain", "--json", "-")
    found = json.loads(listed.out)["transforms"]
    assert not found["cap_logits"]["own"]
    assert found["fuse_qkv"]["own"]
    assert "other_divisor" in rewrite("explain", "cap_logits").out


def test_it_rewrites_and_is_locked_with_the_hash_of_its_source(project: Path) -> None:
    done = rewrite("modeling_head.py", "--out", "out", "--no-verify")
    assert done.code == 0, done.err
    text = (project / "out" / "modeling_head.py").read_text()
    assert "return scaled_tanh(logits, self.cap)" in text
    assert text.count("from scaled_tanh import scaled_tanh\n") == 1
    lock = json.loads((project / "out" / "rewrite.lock").read_text())
    assert lock["transforms"]["cap_logits"] == {
        "rewritten": ["Head.forward"],
        "skipped": [{"site": "Head.other", "reason": "other_divisor", "detail": "2"}],
    }
    before = lock["rules"]["cap_logits"]
    assert rewrite("check", "out").code == 0
    rule = project / "rules" / "cap_logits.py"
    rule.write_text(rule.read_text().replace('{module.code(cap)})")', 'cap={module.code(cap)})")'))
    code = "import sys; from rewrite.cli import run; sys.exit(run(sys.argv[1:]))"
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(OUTSIDE / "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    for command, expected in (("check", 1), ("sync", 0), ("check", 0)):
        more = ["--no-verify"] if command == "sync" else []
        run = [sys.executable, "-c", code, command, "out", *more]
        again = subprocess.run(run, capture_output=True, text=True, env=environment)
        assert again.returncode == expected, (command, again.stdout, again.stderr)
    assert json.loads((project / "out" / "rewrite.lock").read_text())["rules"]["cap_logits"] != before


def test_a_package_without_its_rule_is_not_current(project: Path) -> None:
    assert rewrite("modeling_head.py", "--out", "out", "--no-verify").code == 0
    (project / "pyproject.toml").write_text("[tool.rewrite]\ntransforms = []\n")
    done = rewrite("check", "out")
    assert done.code == 1
    assert "cap_logits" in done.out + done.err


@pytest.mark.parametrize(
    ("table", "text", "said"),
    [
        ('transforms = ["rules/gone.py"]', None, "no such file"),
        ('transforms = "rules/mine.py"', None, "a list of paths"),
        ('transforms = ["rules/mine.py"]', "import does_not_exist_anywhere\n", "ModuleNotFoundError"),
        ('transforms = ["rules/mine.py"]', "x = 1\n", "no class that derives from"),
        (
            'transforms = ["rules/mine.py"]',
            "from rewrite.transform import Transform\nclass Mine(Transform):\n    name = 'mine'\n",
            "Mine has no summary, numerics, reasons, candidates, match",
        ),
    ],
)
def test_one_that_cannot_be_loaded_is_one_clear_error(project: Path, table: str, text: str, said: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.rewrite]\n{table}\n")
    if text is not None:
        (project / "rules" / "mine.py").write_text(text)
    done = rewrite("explain")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_name_that_is_taken_is_refused(project: Path) -> None:
    rule = project / "rules" / "cap_logits.py"
    rule.write_text(rule.read_text().replace('name = "cap_logits"', 'name = "fuse_qkv"'))
    done = rewrite("explain")
    assert (done.code, "'fuse_qkv' already" in done.err) == (2, True)


def test_an_unknown_operator_is_one_clear_error(project: Path) -> None:
    rule = project / "rules" / "cap_logits.py"
    uses = 'uses=("norms.scaled_tanh",)'
    rule.write_text(rule.read_text().replace('imports=("from scaled_tanh import scaled_tanh",)', uses))
    done = rewrite("modeling_head.py", "--out", "out", "--no-verify")
    assert (done.code, "norms.scaled_tanh" in done.err) == (2, True)
    assert not (project / "out").exists()


@pytest.mark.slow
def test_an_installed_example_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """The example package is installed as a user installs it, into a folder of its own."""
    source = tmp_path / "source"
    for path in OUTSIDE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = source / path.relative_to(OUTSIDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    installed = subprocess.run([*pip, "--target", tmp_path / "site", source], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "modeling_head.py").write_text(MODEL)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path / "site")])
    code = "import sys; from rewrite.cli import run; sys.exit(run(sys.argv[1:]))"
    run = [sys.executable, "-c", code, "modeling_head.py", "--out", "out", "--no-verify", "--only", "cap_logits"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "scaled_tanh(logits, self.cap)" in (tmp_path / "out" / "modeling_head.py").read_text()
