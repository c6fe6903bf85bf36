"""Bad input: one clear message, the right exit code, nothing lost, no traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, rewrite, tool
from kept_verdicts import keep

MISSING = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec.__func__
def without(cls, name, *rest):
    return None if name.split(".")[0] in {names} else find(cls, name, *rest)
importlib.machinery.PathFinder.find_spec = classmethod(without)
"""


def fails(done: Outcome, code: int, *parts: str) -> None:
    assert done.code == code, done
    assert "Traceback" not in done.err
    assert len(done.said) == 1, done
    assert done.said[0].startswith("error: ")
    for part in parts:
        assert part in done.err


BAD = """
rewrite lama --out o | did you mean llama
rewrite LlamaForCausalML --out o | did you mean LlamaForCausalLM
rewrite transformers.models.lama --out o | did you mean llama
rewrite json --out o | it is no model type or class
rewrite org/name/x --out o | no model 'org/name/x'
rewrite https://huggingface.co/a/b --out o | is named ORG/NAME, without the address
rewrite ./nowhere --out o | no model './nowhere': there is no such file or folder
rewrite modeling_none.py --out o | there is no such file
rewrite .. --out o | it has no config.json
rewrite '' --out o | MODEL is empty
rewrite --out o | Missing argument 'MODEL'
rewrite llama | --out DIR is missing
rewrite llama ./x | the folder stands behind --out: rewrite llama --out ./x (
rewrite llama './x y' --quick | rewrite llama --quick --out './x y' (
rewrite llama --out o x | 'x' is one word too many: a rewrite takes one MODEL
rewrite llama --out | '--out' requires an argument
rewrite llama --otu o | '--out'?
rewrite llama --out modeling_tiny.py | modeling_tiny.py is a file
rewrite llama --out modeling_tiny.py/sub | cannot lie in modeling_tiny.py, which is a file
rewrite llama --out . | the folder you are in
rewrite llama --out / | the root of the file system
rewrite llama --out ~ | your home folder
rewrite llama --out o --frob | No such option '--frob'
rewrite llama --out o --only fuse_qvk | did you mean fuse_qkv
rewrite llama --out o --with fuse_qvk | did you mean fuse_qkv
rewrite llama --out o --skip nothing | no transform 'nothing': known: batch
rewrite llama --out o --only | '--only' requires an argument
rewrite llama --out o --transformers nowhere | no transformers 'nowhere'
rewrite llama --out o --revision main | --revision is for a model on the Hub
rewrite llama --out o --no-verify --device cpu | drop --no-verify
rewrite llama --out o --device nonsense | device 'nonsense' cannot be used
rewrite llama --out o --device cuda:99 | device 'cuda:99' cannot be used
rewrite llama --out o --dtype float3 | 'float3'
rewrite llama --out o --seed x | Invalid value for '--seed'
rewrite llama --out o --seed -1 | -1 is not in the range
rewrite llama --out o --weights nowhere | cannot use the checkpoint nowhere
rewrite llama --out o --diff=sideways | 'sideways' is not one of 'unified'
rewrite llama --out o --commit --dry-run | which of them?
rewrite llama --out o --commit --no-verify | it lies in no git repository
rewrite llama --out o --json nowhere/r.json | there is no folder nowhere
rewrite llama --out o --json . | File '.' is a directory
rewrite --frob | No such option '--frob'
rewrite verfy out | did you mean `rewrite verify`?
rewrite chek | did you mean `rewrite check`?
rewrite Snyc --out o | did you mean `rewrite sync`?
rewrite verify | rewrite verify --help
rewrite verify nowhere | there is no such folder
rewrite verify a b c | give one package, or two files or packages
rewrite verify modeling_tiny.py | it is a file
rewrite diff | Missing argument 'DIR'
rewrite diff nowhere | there is no such folder
rewrite diff . | it has no rewrite.lock
rewrite diff . --format xml | 'xml' is not one of
rewrite check nowhere | there is no such folder
rewrite check modeling_tiny.py | modeling_tiny.py is not a rewritten package: it is a file
rewrite check | no folder in it has a rewrite.lock
rewrite sync nowhere | there is no such folder
rewrite sync . --show x | 'x' is not one of 'upstream'
rewrite sync a b --original x | --original is for one DIR
rewrite accept . | Missing option '--reason'
rewrite accept . --reason '' | --reason is empty
rewrite accept nowhere --reason x | there is no such folder
rewrite undo nowhere | there is no such folder
rewrite eject nowhere | there is no such folder
rewrite vendor nowhere | there is no such folder
rewrite export nowhere --hub o | there is no such folder
rewrite export . | Missing option '--hub'
rewrite bench nowhere | no model 'nowhere'
rewrite bench . | it has no rewrite.lock
rewrite bench llama --batch 1,x | '--batch': '1,x' should be whole numbers from 1 with commas
rewrite bench llama --device nonsense | 'nonsense'
rewrite profile | give either DIR|MODEL or --trace FILE
rewrite profile --trace nowhere.json | there is no such file
rewrite tune nowhere | nowhere is not a rewritten package
rewrite tune . --batch 0 | numbers from 1 with commas
rewrite compile . --target H100 | it has no rewrite.lock
rewrite compile . --target H101 | 'H101' is not one of
rewrite explain nothing | no transform 'nothing'
rewrite explain a b | unexpected extra argument
rewrite models zzzzzz | no model 'zzzzzz'
rewrite completion tcsh | 'tcsh'
"""
"""A call, and a part of what is said: one line, exit code 2, and nothing is written."""


def test_at_least_sixty_of_them() -> None:
    assert len(set(BAD.strip().splitlines())) >= 60


@pytest.mark.parametrize("row", BAD.strip().splitlines(), ids=lambda row: row.partition(" | ")[0])
def test_usage(here: Path, row: str) -> None:
    line, _, said = row.partition(" | ")
    fails(rewrite(*shlex.split(line)[1:]), 2, said)
    assert sorted(path.name for path in here.iterdir()) == ["modeling_tiny.py"]


@pytest.mark.parametrize("option", ["--against", "--beside"])
def test_no_table_of_a_sweep(here: Path, option: str) -> None:
    done = tool("sweep", "llama", option, "modeling_tiny.py")
    fails(done, 2, "is no table of `python -m rewrite.sweep --json`")


def test_a_file_that_does_not_parse_names_the_line(here: Path) -> None:
    (here / "modeling_bad.py").write_text("x = 1\n\ndef f(:\n    pass\n")
    fails(rewrite("modeling_bad.py", "--out", "o", "--no-verify"), 2, "modeling_bad.py:3")
    assert not (here / "o").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "(" * 3000 + "1" + ")" * 3000, "too many nested parentheses"),
        ("x = " + "1 + " * 5000 + "1", "nested too deeply"),
        ("a = [\n" + "1,\n" * 150_000 + "]", "too large to be rewritten"),
        ("x = 1\0", "null bytes"),
    ],
    ids=["parentheses", "operators", "literals", "null"],
)
def test_a_file_that_would_end_the_parser(here: Path, text: str, message: str) -> None:
    (here / "modeling_bad.py").write_text(text)
    fails(rewrite("modeling_bad.py", "--out", "o", "--no-verify"), 2, "modeling_bad.py", message)


def test_a_chain_of_elifs_names_its_line(here: Path) -> None:
    text = (here / "modeling_tiny.py").read_text()
    chain = "".join(f"        elif self.x == {i}:\n            y = {i}\n" for i in range(1500))
    head = "    def forward(self, hidden_states):\n"
    text = text.replace(head, f"{head}        if self.x is None:\n            y = 0\n{chain}", 1)
    (here / "modeling_bad.py").write_text(text)
    line = text.splitlines().index("        elif self.x == 0:") + 1
    failed = rewrite("modeling_bad.py", "--out", "o", "--no-verify", "--only", "fuse_qkv")
    fails(failed, 2, "nested too deeply to be rewritten", "elif")
    assert line < int(failed.said[0].split(":")[2]) < line + 150


def test_a_rule_that_runs_out_of_levels_is_no_bug_of_ours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(*arguments: Any) -> None:
        raise RecursionError

    chain = "".join(f"elif a == {i}:\n    a = 1\n" for i in range(100))
    (here / "modeling_tiny.py").write_text(
        (here / "modeling_tiny.py").read_text() + f"\na = 0\nif a:\n    a = 1\n{chain}"
    )
    monkeypatch.setattr("rewrite.transforms.fuse_qkv.FuseQKV.match", deep)
    fails(rewrite("modeling_tiny.py", "--out", "o", "--no-verify", "--only", "fuse_qkv"), 2, "nested too deeply")


def test_a_pipe_is_no_modeling_file(here: Path) -> None:
    os.mkfifo(here / "modeling_pipe.py")
    fails(rewrite("modeling_pipe.py", "--out", "o", "--no-verify"), 2, "no regular file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ["llama"]}', "model_type in its config.json should be a string"),
        ('{"model_type": "llama", "architectures": [3]}', "architectures in its config.json"),
        ('{"model_type": "llama", "architectures": {"a": 1}}', "architectures in its config.json"),
        ('{"model_type": "llama", "auto_map": [1]}', "auto_map in its config.json"),
        ('{"model_type": "llama", "auto_map": {"AutoModel": []}}', "auto_map in its config.json"),
        ("[" * 20_000, "nested without end"),
    ],
)
def test_a_malformed_configuration(here: Path, text: str, message: str) -> None:
    (here / "c").mkdir()
    (here / "c" / "config.json").write_text(text)
    fails(rewrite("./c", "--out", "o", "--no-verify"), 2, "cannot use the checkpoint c", message)
    fails(rewrite("llama", "--out", "o", "--weights", "c"), 2, "cannot use the checkpoint c", message)


@pytest.mark.parametrize("command", ["diff", "check", "sync", "undo", "verify", "tune"])
def test_a_path_that_is_too_long(here: Path, command: str) -> None:
    fails(rewrite(command, "x" * 300), 2, "cannot use the path", "...", "File name too long")
    fails(rewrite("modeling_tiny.py", "--out", "x" * 300, "--no-verify"), 2, "File name too long")


def test_a_package_of_the_same_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rewrite.DISTRIBUTION")
    fails(rewrite("--version"), 2, "has that name too")


def test_no_site_is_said_and_nothing_written(here: Path) -> None:
    (here / "modeling_plain.py").write_text("x = 1\n")
    fails(rewrite("modeling_plain.py", "--out", "o", "--no-verify"), 1, "nothing to rewrite", "Nothing was written")
    assert not (here / "o").exists()
    for where in (("--dry-run",), ("--out", "o", "--no-verify")):
        reported = rewrite("modeling_plain.py", *where, "--json", "-")
        report = json.loads(reported.out)
        assert (reported.code, report["sites"], report["written"]) == (1, 0, False)


def test_a_source_already_rewritten(package: Path) -> None:
    fails(rewrite(package / "modeling_tiny.py", "--out", "o", "--no-verify"), 2, "already rewritten")
    fails(rewrite(package, "--out", "o", "--no-verify"), 2, "already rewritten")


def test_weights_of_another_architecture(here: Path) -> None:
    (here / "c").mkdir()
    (here / "c" / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    fails(rewrite("llama", "--out", "o", "--weights", "c"), 2, "holds a 'qwen3' model")


def test_a_report_that_cannot_be_written(here: Path) -> None:
    arguments = ("modeling_tiny.py", "--dry-run", "--diff", "none", "--only", "fuse_qkv", "--json", "/dev/full")
    done = rewrite(*arguments)
    assert done.code == 1
    assert "error: cannot write /dev/full" in done.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}', "\\xff"])
def test_a_broken_lock(package: Path, text: str) -> None:
    (package / "rewrite.lock").write_text(text)
    fails(rewrite("diff", package), 2, "rewrite.lock")


@pytest.mark.parametrize("name", ["modeling_tiny.py", ".rewrite/texts.zip"])
def test_a_package_with_a_file_gone(package: Path, name: str) -> None:
    (package / name).unlink()
    fails(rewrite("diff", package, "--generated"), 2, name)
    if name.startswith("."):  # the text is made anew, so a merge has what it starts from
        assert rewrite("sync", package).code == 0
        assert (package / name).is_file()
    else:
        fails(rewrite("sync", package), 2, name)


def test_a_broken_verdict(package: Path) -> None:
    keep(package)
    path = package / "verify.json"
    whole = json.loads(path.read_text())
    assert rewrite("check", package).code == 0
    earlier = {"passed": True, "rewritten": {"files": {}, "runtime": {}}, "gates": []}
    kinds = ({**whole, name: 5} for name in ("covers", "form", "gates", "options", "original", "passed", "quick"))
    for text in ("[", *map(json.dumps, ({**whole, "failed": [{}]}, earlier, *kinds))):
        path.write_text(text)
        said = rewrite("check", package)
        assert said.code == 1
        assert (
            f"verify.json cannot be read, or is of another version of hf-rewrite: rewrite verify {package}" in said.out
        )


def test_a_bug_of_ours_is_one_line_and_a_log(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("rewrite.codemod.build.tried", broken)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    done = rewrite("modeling_tiny.py", "--out", "o", "--no-verify")
    fails(done, 3, "bug of ours (ZeroDivisionError: planted)")
    log = Path(done.err.rsplit(" ", 1)[1].strip())
    assert "Traceback" in log.read_text()
    assert not (here / "o").exists()


def in_process(here: Path, missing: set[str], *arguments: str, program: str = "rewrite.cli") -> Outcome:
    (here / "sitecustomize.py").write_text(MISSING.format(names=missing))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=here,
        env={"PYTHONPATH": f"{here}:{root}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_without_torch_everything_but_verification_works(here: Path) -> None:
    done = in_process(here, {"torch"}, "llama", "--out", "o", "--no-verify", "--only", "fuse_qkv")
    assert done.code == 0, done.err
    assert (here / "o" / "modeling_llama.py").is_file()
    fails(in_process(here, {"torch"}, "llama", "--out", "p"), 2, "pip install 'hf-rewrite[verify]'", "--no-verify")
    assert not (here / "p").exists()
    for command in ("verify", "bench", "tune", "accept --reason x", "sync --verify"):
        name, *options = command.split()
        fails(in_process(here, {"torch"}, name, "o", *options), 2, "torch is not", "pip install 'hf-rewrite[verify]'")
    swept = in_process(here, {"torch"}, "llama", program="rewrite.sweep")
    fails(swept, 2, "torch is not", "pip install 'hf-rewrite[verify]'")


def test_without_transformers_it_says_what_to_install(here: Path) -> None:
    for arguments in (("llama", "--out", "o", "--no-verify"), ("models",)):
        done = in_process(here, {"transformers"}, *arguments)
        fails(done, 2, "pip install 'hf-rewrite[verify]'", "--transformers VERSION")
    arguments = ("modeling_tiny.py", "--out", "o", "--no-verify", "--only", "fuse_qkv")
    assert in_process(here, {"transformers", "torch"}, *arguments).code == 0


def test_the_report_says_what_was_done(here: Path) -> None:
    done = rewrite("modeling_tiny.py", "--out", "o", "--no-verify", "--only", "fuse_qkv", "--json", "-")
    report = json.loads(done.out)
    assert report["written"] is True
    assert report["sites"] == 1
    assert report["transforms"]["fuse_qkv"]["rewritten"] == ["TinyLlamaAttention.forward: q_proj, k_proj, v_proj"]


PLAIN = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (PLAIN, 1, "no model class with a configuration"),
        (f"from transformers import gone_with_a_release\n{PLAIN}", 2, "itself cannot be imported here"),
    ],
    ids=["no model", "another release"],
)
def test_an_original_that_cannot_be_verified_is_no_transforms_fault(
    here: Path, text: str, code: int, said: str
) -> None:
    (here / "modeling_plain.py").write_text(text)
    done = rewrite("modeling_plain.py", "--out", "out", "--quick")
    assert done.code == code, done
    assert said in done.err
    assert "--no-verify writes the package" in done.err
    assert "at fault" not in done.out + done.err
    assert [path.name for path in here.iterdir() if path.name.startswith(("out", ".out"))] == []
    assert rewrite("modeling_plain.py", "--out", "out", "--no-verify").code == 0


@pytest.mark.slow
def test_a_neighbour_imported_as_if_it_were_installed_is_named(here: Path) -> None:
    (here / "sizes_of_plain.py").write_text("WIDTH = 4\n")
    (here / "modeling_plain.py").write_text(f"from sizes_of_plain import WIDTH\n{PLAIN}")
    done = rewrite("modeling_plain.py", "--out", "out", "--quick")
    assert done.code == 2, done
    assert "sizes_of_plain.py lies beside it: `from .sizes_of_plain import …` takes it along" in done.err


def test_a_folder_of_modeling_files_is_told_to_name_one(here: Path) -> None:
    (here / "own").mkdir()
    (here / "own" / "modeling_plain.py").write_text(PLAIN)
    done = rewrite("own", "--out", "out", "--no-verify")
    assert done.code == 2, done
    assert "for a modeling file, name it: own/modeling_plain.py" in done.err


TEXTS = {
    "conflict markers": (b"<<<<<<< yours\n=======\n>>>>>>> theirs\n", "conflict markers in line 1"),
    "another encoding": (b"# caf\xe9\n", "modeling_tiny.py:1 does not parse (byte 5 is not UTF-8)"),
    "a null byte": (b"\0", "null bytes"),
    "no end": (b"x = (\n", "modeling_tiny.py:1 does not parse"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_edit_that_is_no_python(package: Path, name: str) -> None:
    before, said = TEXTS[name]
    path = package / "modeling_tiny.py"
    path.write_bytes(before + path.read_bytes())
    done = rewrite("check", package)
    assert done.code == 1
    assert said in done.out
    for options in ((), ("--edits",), ("--format", "markdown")):
        assert rewrite("diff", package, *options).code == (2 if name == "another encoding" else 0)
    assert rewrite("undo", package).code == 0
    assert (package / "modeling_tiny.py.undone").read_bytes().startswith(before)


def test_a_byte_order_mark_is_no_error(package: Path) -> None:
    path = package / "modeling_tiny.py"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert rewrite("check", package).code == 0
    assert rewrite("diff", package, "--edits", "--quiet").code == 0


def test_what_a_sync_cannot_mend_is_not_sent_to_it(package: Path) -> None:
    (package / "modeling_tiny.py").unlink()
    done = rewrite("check", package)
    assert done.code == 1
    assert "modeling_tiny.py is missing: rewrite undo" in done.out
    assert "rewrite sync" not in done.out
    fails(rewrite("sync", package), 2, "it is not there (`rewrite undo")
    assert rewrite("undo", package).code == 0
    assert rewrite("check", package).code == 0
    (package / "rewrite.lock").write_text("")
    done = rewrite("check", package)
    assert done.code == 1
    assert "--force" in done.out
    assert "rewrite sync" not in done.out


@pytest.mark.parametrize("text", ["", "[]"])
def test_what_measures_says_that_a_lock_is_broken(package: Path, text: str) -> None:
    (package / "rewrite.lock").write_text(text)
    fails(rewrite("bench", package, "--device", "cpu"), 2, "its rewrite.lock cannot be read")


def test_a_verdict_of_the_wrong_kind_is_shown_as_that(package: Path) -> None:
    (package / "verify.json").write_text('{"passed": "yes", "environment": 5, "gates": [7, {"checks": 3}]}')
    done = rewrite("diff", package, "--format", "markdown")
    assert done.code == 0, done.err
    assert "verify.json cannot be read" in done.out


def test_links_that_go_round(here: Path) -> None:
    (here / "loop").symlink_to("loop")
    for arguments in (("modeling_tiny.py", "--out", "loop", "--no-verify"), ("check", "loop")):
        fails(rewrite(*arguments), 2, "loop")


def test_a_report_named_in_the_configuration(package: Path, here: Path) -> None:
    (here / "pyproject.toml").write_text('[tool.rewrite]\njson = "report.json"\n')
    assert rewrite("check", package).code == 0
    assert json.loads((here / "report.json").read_text())["command"] == "check"
    (here / "pyproject.toml").write_text('[tool.rewrite]\njson = "nowhere/report.json"\n')
    fails(rewrite("check", package), 2, "[tool.rewrite] json", "there is no folder nowhere")
