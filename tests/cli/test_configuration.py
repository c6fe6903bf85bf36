"""`[tool.rewrite]`: defaults for the options of every command, with the command line before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import rewrite


def configure(here: Path, text: str) -> None:
    (here / "pyproject.toml").write_text(text)


def test_the_command_line_wins(here: Path) -> None:
    configure(here, '[tool.rewrite]\nverify = false\nonly = ["fuse_qkv"]\nquiet = true\n')
    done = rewrite("modeling_tiny.py", "--out", "out")
    assert (done.code, done.out, done.err) == (0, "", "")
    lock = json.loads((here / "out" / "rewrite.lock").read_text())
    assert lock["options"]["only"] == ["fuse_qkv"]
    assert rewrite("modeling_tiny.py", "--out", "two", "--only", "fuse_rms_norm").code == 0
    assert json.loads((here / "two" / "rewrite.lock").read_text())["options"]["only"] == ["fuse_rms_norm"]
    assert "unverified" in rewrite("check", "out", "--no-config").out


def test_a_table_of_a_command_goes_before_the_general_one(
    here: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        here, '[tool.rewrite]\njson = "other.json"\n\n[tool.rewrite.diff]\ndiff = "stat"\njson = "report.json"\n'
    )
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    assert " places changed, " in rewrite("diff", "../out").out
    report = json.loads((here / "report.json").read_text())  # paths are relative to the file
    assert (report["version"], report["command"]) == (1, "diff")


def test_a_typed_option_of_the_verification_turns_it_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(here, "[tool.rewrite]\nverify = false\n")
    monkeypatch.setattr("rewrite.delivery.precheck.missing_libraries", lambda: ["torch"])
    done = rewrite("modeling_tiny.py", "--out", "out", "--quick", "--only", "fuse_qkv")
    assert (done.code, "torch is not installed" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.rewrite]\nquiett = true", "[tool.rewrite] quiett: there is no such option: did you mean quiet?"),
        ("[tool.rewrite]\ntrust_remote_code = true", "did you mean trust-remote-code?"),
        ("[tool.rewrite]\nno-verify = true", "did you mean verify?"),
        ("[tool.rewrite.chek]\nfull = true", "[tool.rewrite.chek]: there is no such command: did you mean check?"),
        ("[tool.rewrite.check]\nseed = 1", "[tool.rewrite.check] seed: there is no such option"),
        ("[tool.rewrite]\nquiet = 1", "[tool.rewrite] quiet: it should be true or false"),
        ('[tool.rewrite.check]\nformat = "xml"', "[tool.rewrite.check] format: 'xml' is not one of"),
        ("[tool.rewrite\n", "it cannot be read"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_place(here: Path, text: str, said: str) -> None:
    configure(here, text)
    done = rewrite("diff", "nowhere")
    assert (done.code, len(done.said)) == (2, 1)
    assert "pyproject.toml" in done.err
    assert said in done.err
    assert "pyproject.toml" not in rewrite("diff", "nowhere", "--no-config").err


def test_numbers_may_be_a_list(here: Path) -> None:
    configure(here, "[tool.rewrite.bench]\nbatch = [1, 8]\n")
    done = rewrite("bench", "nowhere")
    assert (done.code, "no model 'nowhere'" in done.err) == (2, True)
    configure(here, '[tool.rewrite.bench]\nbatch = ["x"]\n')
    assert "numbers from 1 with commas" in rewrite("bench", "nowhere").err


def test_an_option_of_all_commands_is_converted_for_the_one_that_runs(here: Path) -> None:
    configure(here, '[tool.rewrite]\ndtype = "float32"\n')  # `compile` has it, `verify` has not
    assert rewrite("diff", "nowhere").err.count("pyproject.toml") == 0
    configure(here, '[tool.rewrite.verify]\ndtype = "float32"\n')
    assert "'float32' is not one of" in rewrite("explain").err
