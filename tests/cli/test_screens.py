"""Screens: the help of every command, what is quiet, reports, and the line that shows how far long work is."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import click
import pytest
from command_line import Outcome, rewrite, tool
from rich.console import Console

from rewrite import program
from rewrite.cli import COMMANDS, cli
from rewrite.console.progress import Work, duration, in_pipe
from rewrite.console.progress_steps import Step
from rewrite.delivery import json_report, summary
from rewrite.options.shared_options import Command

WIDTH = 80
SCRIPT_ONLY = {"completion"}
"""Commands that report nothing."""


def command(name: str) -> Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_and_has_an_example(name: str) -> None:
    _help_fits(rewrite(*([name] if name else []), "--help"), "rewrite ")


@pytest.mark.parametrize("name", ["sweep", "kernels"])
def test_help_of_a_maintainers_program_fits_and_has_an_example(name: str) -> None:
    _help_fits(tool(name, "--help"), f"python -m rewrite.{name} ")


def _help_fits(shown: Outcome, program: str) -> None:
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    head = next(number for number, line in enumerate(lines) if line in ("Example:", "Examples:"))
    assert lines[head + 1].startswith(f"  {program}")
    assert "\\b" not in shown.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name: str) -> None:
    options = {option for parameter in command(name).params for option in parameter.opts}
    assert {"--quiet", "-q", "--no-config"} <= options
    assert ("--json" in options) is (name not in SCRIPT_ONLY)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_words_that_the_command_takes(name: str) -> None:
    """Every example is parsed, without running anything."""
    for example in command(name).examples:
        words = example.split("|")[0].split(">")[0].replace('"', "").split()[1:]
        asked = words[1:] if words[0] == name else words
        asked = [word for word in asked if word not in ("logits", "are", "capped", "at")]
        command(name).make_context(name, asked, resilient_parsing=False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_help_of_completion_says_how_to_install_it(shell: str) -> None:
    lines = [line.split() for line in rewrite("completion", "--help").out.splitlines()]
    (line,) = [words for words in lines if words[:1] == [shell]]
    assert line[1:5] == ["rewrite", "completion", shell, ">" if shell == "fish" else ">>"]


def test_quiet_is_nothing_or_a_line(here: Path) -> None:
    made = rewrite("modeling_tiny.py", "--out", "out", "--no-verify", "--only", "fuse_qkv", "--quiet")
    assert (made.code, made.out, made.err) == (0, "", "")
    for arguments, lines in (
        (("check", "out"), 0),
        (("diff", "out"), 1),
        (("sync", "out"), 0),
        (("undo", "out"), 0),
        (("explain", "fuse_qkv"), 1),
        (("models", "youtu"), 1),
        (("eject", "out"), 0),
    ):
        done = rewrite(*arguments, "-q")
        assert (done.code, len(done.out.splitlines()), done.err) == (0, lines, ""), arguments


def test_quiet_says_what_fails_on_standard_error(here: Path, package: Path) -> None:
    (here / "modeling_tiny.py").write_text((here / "modeling_tiny.py").read_text() + "# changed\n")
    for arguments in (("check", "out"), ("diff", "out"), ("explain", "nothing")):
        loud, quiet = rewrite(*arguments), rewrite(*arguments, "--quiet")
        assert quiet.code == loud.code != 0
        assert (quiet.out, bool(quiet.err)) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("modeling_tiny.py", "--dry-run", "--only", "fuse_qkv"), {"source", "transforms", "sites"}),
        (("modeling_tiny.py", "--out", "two", "--no-verify", "--only", "fuse_qkv"), {"written", "verify"}),
        (("diff", "out"), {"path", "places", "patch"}),
        (("check", "out"), {"packages", "unverified"}),
        (("sync", "out"), {"packages"}),
        (("undo", "out"), {"folder", "restored"}),
        (("eject", "out"), {"folder", "dropped"}),
        (("explain", "fuse_qkv"), {"transform"}),
        (("explain",), {"transforms"}),
        (("models", "llama"), {"transformers", "models"}),
    ],
)
def test_a_report_is_alone_on_standard_output(package: Path, arguments: tuple[str, ...], keys: set[str]) -> None:
    done = rewrite(*arguments, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert keys <= set(report)
    assert report["version"] == 1
    assert report["command"] == (arguments[0] if arguments[0] in COMMANDS else "apply")


def test_diff_takes_a_style_or_none(here: Path) -> None:
    asked = ("--dry-run", "--only", "fuse_qkv")
    patch = rewrite("modeling_tiny.py", *asked).out
    assert patch.startswith("--- a/modeling_tiny.py")
    assert rewrite(*asked, "--diff", "modeling_tiny.py").out == patch
    assert rewrite(*asked, "modeling_tiny.py", "--diff").out == patch
    assert " places changed, " in rewrite("modeling_tiny.py", *asked, "--diff", "stat").out
    assert "@@" not in rewrite("modeling_tiny.py", *asked, "--diff", "none").out
    made = rewrite("modeling_tiny.py", "--out", "out", "--no-verify", "--only", "fuse_qkv")
    assert " places changed, " in made.out


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_says_what_is_left_and_counts_down() -> None:
    clock = Clock()
    work = Work("verifying", clock)
    clock.now = 20.0
    work(Step("structure", 1, 5))
    assert work.facts() == "1 of 5, 0:20"  # what came before says nothing of the parts
    clock.now = 30.0
    work(Step("parity: a", 2, 5))
    assert work.facts() == "2 of 5, 0:30, about 0:30 left"
    clock.now = 40.0
    work("what has no place keeps the count")
    assert work.facts() == "2 of 5, 0:40, about 0:20 left"
    work(Step("parity: b", 3, 5, beside=2))
    assert work.facts() == "3 of 5, 0:40, about 0:07 left"
    clock.now = 75.0
    assert work.facts() == "3 of 5, 1:15"
    assert (duration(59.6), duration(3725)) == ("1:00", "1:02:05")


def test_the_line_on_a_terminal_is_one_line_whose_beginning_stays() -> None:
    work = Work("verifying", Clock())
    work(Step("parity: " + "a long name " * 20, 3, 24))
    console = Console(width=WIDTH, force_terminal=True, file=io.StringIO())
    (line,) = console.render_lines(work, pad=False)
    shown = "".join(segment.text for segment in line)
    assert len(shown) <= WIDTH
    assert shown.endswith("…")
    assert shown.startswith("verifying  3 of 24, 0:00  parity: a long name")


def test_in_a_pipe_there_is_a_line_now_and_then_and_one_at_the_end() -> None:
    clock, said = Clock(), list[str]()
    work = Work("verifying", clock)
    with in_pipe(said.append, work) as progress:
        for second in range(100):
            clock.now = float(second)
            progress(Step(f"check {second}", second, 100))
    assert [line.split(":")[-1].split()[-1] for line in said[:-1]] == ["5", "15", "35", "75"]
    assert said[-1] == "verifying … done: 100 of 100, 1:39"


def test_a_verdict_has_a_line_for_each_check() -> None:
    check = {"name": "é", "detail": "", "figures": {"max": 0.0}, "status": "passed"}
    data = {
        "gates": [{"checks": [check, {**check, "detail": "x" * 240}], "name": "parity"}],
        "missed": ["a"] * 99,
        "none": [],
    }
    text = json_report.by_the_line(data)
    assert json.loads(text) == data
    lines = text.splitlines()
    assert '        {"detail": "", "figures": {"max": 0.0}, "name": "é", "status": "passed"},' in lines
    assert sum("missed" in line for line in lines) == 1
    assert len(lines) == 18


def test_a_class_that_generates_is_named_once() -> None:
    loops = {"First": "yes", "Second": "yes", "Third": "yes, as far as it goes", "Fourth": "no: it has none"}
    assert [*summary._loops(loops, "First")] == [
        "in a captured graph, on a GPU: First, Second",
        "in a captured graph, on a GPU: Third, as far as it goes",
        "not in a graph: Fourth: it has none",
    ]


@pytest.mark.parametrize("loaded", [True, False])
def test_what_triton_made_is_freed(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr("signal.signal", lambda *given: None)
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "triton", sys)
    with pytest.raises(SystemExit):
        program.leave(lambda: 0)
    assert frozen == ([] if loaded else [True])
