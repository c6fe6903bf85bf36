"""The command line itself: default command, help, tables, completion, pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rewrite

import rewrite as hf_rewrite
from rewrite.commands.apply import apply

ROOT = Path(__file__).parents[2]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rewrite.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_shows_the_default_command_and_the_others(arguments: tuple[str, ...]) -> None:
    shown = rewrite(*arguments)
    assert shown.code == 0
    for part in ("rewrite MODEL --out DIR", "--no-verify", "explain", "--version"):
        assert part in shown.out
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert lines.index("Commands:") < next(number for number, line in enumerate(lines) if line.startswith("Options"))
    assert sum(line.lstrip().startswith("-") for line in lines) <= 12


def test_the_model_says_every_option_of_a_rewrite() -> None:
    shown = rewrite("llama", "--help").out
    assert shown.startswith("Usage: rewrite MODEL --out DIR")
    options = [name for parameter in apply.params for name in parameter.opts if name.startswith("--")]
    assert [name for name in options if f"{name} " not in shown] == []


def test_the_versions_of_both_distributions() -> None:
    lines = rewrite("--version").out.splitlines()
    assert [line.split()[0] for line in lines] == ["hf-rewrite", "hf-rewrite-runtime"]
    assert lines[0].split()[1] == hf_rewrite.__version__


def test_every_command_has_help() -> None:
    from rewrite.cli import COMMANDS

    for name, short in COMMANDS.items():
        shown = rewrite(name, "--help")
        assert shown.code == 0
        assert shown.out.startswith(f"Usage: rewrite {'MODEL' if name == 'apply' else name}")
        assert short


def test_options_may_stand_before_the_model(here: Path) -> None:
    assert rewrite("--dry-run", "--only", "fuse_qkv", "modeling_tiny.py").code == 0


def test_models_are_listed_with_their_files() -> None:
    lines = dict(line.split("\t") for line in rewrite("models", "llama").out.splitlines())
    assert lines["llama"] == "models/llama/modeling_llama.py"
    assert json.loads(rewrite("models", "llama", "--json", "-").out)["models"] == lines


def test_transforms_are_listed_and_explained() -> None:
    listed = json.loads(rewrite("explain", "--json", "-").out)["transforms"]
    names = [line.split("\t")[0] for line in rewrite("explain").out.splitlines()]
    assert set(names) == set(listed)
    for name in names:
        shown = rewrite("explain", name)
        assert shown.code == 0
        assert all(f"| `{reason}` |" in shown.out for reason in listed[name]["reasons"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rewrite lla", "plain,llama"),
        ("rewrite expl", "plain,explain"),
        ("rewrite --no-ver", "plain,--no-verify"),
        ("rewrite explain fuse_q", "plain,fuse_qkv"),
        ("rewrite llama --only fuse_q", "plain,fuse_qkv"),
        ("rewrite llama --diff side", "plain,side-by-side"),
    ],
)
def test_completion(words: str, expected: str) -> None:
    position = str(len(words.split()) - 1)
    shown = process(_REWRITE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=position)
    assert expected in shown.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    script = rewrite("completion", shell)
    assert script.code == 0
    assert f"_REWRITE_COMPLETE={shell}_complete" in script.out


def test_a_closed_pipe_is_no_error() -> None:
    command = f"'{sys.executable}' -m rewrite.cli models | head -1; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_polite_kill_leaves_nothing_behind(here: Path) -> None:
    code = (
        "import os, signal\n"
        "from rewrite import cli\nfrom rewrite.delivery import precheck as gate\n"
        "gate.check_text = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main(['modeling_tiny.py', '--no-verify', '--only', 'fuse_qkv', '--out', 'out'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 130
    assert sorted(path.name for path in here.iterdir()) == ["modeling_tiny.py"]


def shell(line: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell in which `rewrite` is the command."""
    line = line.replace("rewrite ", f"{sys.executable} -m rewrite.cli ", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["sh", "-c", line], cwd=here, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", ["--help", "models", "models --json -"])
def test_a_full_output_is_said(here: Path, arguments: str) -> None:
    done = shell(f"rewrite {arguments} > /dev/full", here)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("error: cannot write to standard output: No space left on device")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nobodys_loss(here: Path, closed: str) -> None:
    done = shell(f"rewrite modeling_tiny.py --out out --no-verify --only fuse_qkv {closed}", here)
    assert done.returncode == 0, done.stderr
    assert "Rewritten by" in (here / "out" / "modeling_tiny.py").read_text()


def test_an_error_that_cannot_be_said_still_has_its_code(here: Path) -> None:
    assert shell("rewrite nonsense --out out 2> /dev/full", here).returncode == 2


def test_a_locale_without_our_characters(here: Path) -> None:
    line = "PYTHONIOENCODING=ascii LC_ALL=C rewrite modeling_tiny.py --out ünï --no-verify --only fuse_qkv"
    done = shell(line, here)
    assert done.returncode == 0, done.stderr
    assert "modeling_tiny.py - sha256" in done.stdout
    assert "..." in done.stdout
