"""`rewrite undo`, `rewrite eject`, and the review comment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rewrite
from kept_verdicts import keep

from rewrite.package.lock import read_lock
from rewrite.sync import review
from rewrite.verify import Check

from .conftest import Releases, edit
from .test_releases import DROPOUT


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_undo_restores_every_generated_file_and_keeps_the_edits_beside(package: Path, releases: Releases) -> None:
    assert rewrite("vendor", package).code == 0
    before = contents(package)
    assert "as it was generated" in rewrite("undo", package).out
    mine = edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    (package / "__init__.py").write_text("# mine\n")
    (package / "_runtime" / "linear" / "packing.py").write_text("# mine\n")
    (package / "_runtime" / "core" / "backend.py").unlink()
    (package / ".rewrite" / "texts.zip").write_bytes(before[".rewrite/texts.zip"][:-1])
    (package / "notes.txt").write_text("mine")
    done = rewrite("undo", package)
    assert done.code == 1  # the text of __init__.py is nowhere
    assert contents(package)["__init__.py"] == b"# mine\n"
    (package / ".rewrite" / "texts.zip").write_bytes(before[".rewrite/texts.zip"])
    assert rewrite("undo", package).code == 0
    after = contents(package)
    assert {name: data for name, data in after.items() if name in before} == before
    assert after["modeling_tiny.py.undone"].decode() == mine
    assert set(after) - set(before) == {
        "modeling_tiny.py.undone", "__init__.py.undone", "_runtime/linear/packing.py.undone", "notes.txt",
    }  # fmt: skip
    assert rewrite("check", package, "--transformers", releases("6.0.0")).code == 0


def test_undo_says_what_it_cannot_restore(package: Path) -> None:
    (package / ".rewrite" / "texts.zip").write_text("mine")
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    before = contents(package)
    done = rewrite("undo", package)
    assert (done.code, "modeling_tiny.py" in done.err) == (1, True)
    assert contents(package) == before


def single_quotes(text: str) -> str:
    return text.replace('"""', "<>").replace('"', "'").replace("<>", '"""')


def test_eject_leaves_plain_files_that_still_import(here: Path) -> None:
    assert rewrite("llama", "--out", "mine", "--no-verify", "--diff", "none", "--only", "fuse_qkv").code == 0
    edit(here / "mine" / "modeling_llama.py", "class LlamaMLP", "# mine\nclass LlamaMLP")
    (here / "mine").rename(here / "another")
    (here / "another" / "__init__.py").write_text(single_quotes((here / "another" / "__init__.py").read_text()))
    assert rewrite("eject", "another").code == 0
    assert not (here / "another" / "rewrite.lock").exists()
    assert not (here / "another" / ".rewrite").exists()
    assert "# mine\n" in (here / "another" / "modeling_llama.py").read_text()
    assert "rewrite.lock" not in (here / "another" / "modeling_llama.py").read_text()
    init = (here / "another" / "__init__.py").read_text()
    assert ("guard" in init, "made_from" in init, "rewrite sync" in init) == (False, False, False)
    assert "from .modeling_llama import *" in init
    assert not list((here / "another" / "_runtime").glob("compat/guard.py"))
    code = "import sys, another\nassert not any(name.startswith('hf_rewrite') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = rewrite("sync", "another")
    assert (refused.code, "has no rewrite.lock" in refused.err) == (2, True)


def test_a_review_comment(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# ``` mine\nclass TinyLlamaMLP")
    text = rewrite("diff", package, "--format", "markdown").out
    for part in ("| made from | transformers 6.0.0, `models/tiny/modeling_tiny.py`", "| `fuse_qkv` | 1 | 0 |"):
        assert part in text
    assert "| own edits | `modeling_tiny.py` |" in text
    assert "**Verdict**: not verified" in text
    assert text.count("<details>") == text.count("</details>") >= 2
    assert "<summary><code>TinyLlamaAttention</code> +" in text
    assert "+# ``` mine" in text
    assert re.findall(r"^(`{4,})diff$", text, re.MULTILINE)  # the fence is longer than what it holds
    assert "+        q, k, v = packed_linear" in text


@pytest.mark.parametrize(("passed", "word"), [(True, "passed, but out of date"), (False, "**failed**")])
def test_the_verdict_in_a_comment(package: Path, passed: bool, word: str) -> None:
    figures = {"max": 1e-7, "bound": 2e-6}
    logits = Check("logits", "passed", figures=figures) if passed else Check("logits", "failed", "planted")
    keep(package, logits, Check("graphs", "not run", "no GPU"))
    edit(package / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    text = rewrite("diff", package, "--format", "markdown").out
    assert f"**Verdict**: {word} (device cpu, torch 2.13)." in text
    if passed:
        assert "| parity | passed | 1 not run, 1 passed | max 1e-07 of 2e-06 (logits) |" in text
    else:
        assert "gate 2 (parity): logits: planted." in text
        assert "| parity | failed | 1 failed, 1 not run |  |" in text


def test_a_comment_is_never_too_long_for_github(package: Path) -> None:
    lock = read_lock(package)
    after = (
        "class A:\n"
        + "".join(f"    x{number} = {number}\n" for number in range(9000))
        + "# same\n" * 9
        + "class B:\n    y = 1\n"
    )
    text = review.markdown(package, lock, "class A:\n    pass\n" + "# same\n" * 9 + "class B:\n    y = 2\n", after)
    assert len(text) < 65_536
    assert "Too long for a comment: A (" in text
    assert "<code>B</code>" in text


def test_the_formats_of_check(package: Path, releases: Releases) -> None:
    tree = releases("6.1.0", DROPOUT)
    assert rewrite("vendor", package).code == 0
    with (package / "_runtime" / "linear" / "packing.py").open("a") as file:
        file.write("# mine\n")
    edited = len((package / "_runtime" / "linear" / "packing.py").read_text().splitlines())
    moved = (package / "modeling_tiny.py").read_text().split("\n").index("        self.attention_dropout = 0.0") + 1
    arguments = ("check", package, "--transformers", tree, "--format")
    github = rewrite(*arguments, "github").out.splitlines()
    assert any(
        f"packing.py,line={edited},endLine={edited},title=rewrite check%2C edited-runtime::" in li for li in github
    )
    assert any(f"modeling_tiny.py,line={moved},endLine={moved}," in li and "6.0.0 → 6.1.0" in li for li in github)
    sarif = json.loads(rewrite(*arguments, "sarif").out)
    (run,) = sarif["runs"]
    assert sarif["version"] == "2.1.0"
    assert {result["ruleId"] for result in run["results"]} == {"edited-runtime", "transformers-moved"}
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} >= {result["ruleId"] for result in run["results"]}
    for result in run["results"]:
        for location in result["locations"]:
            assert not location["physicalLocation"]["artifactLocation"]["uri"].startswith("/")
            assert location["physicalLocation"]["region"]["startLine"] >= 1
    text = rewrite(*arguments, "text")
    assert text.code == 1
    assert len([line for line in text.out.splitlines() if line.startswith("out of date out: ")]) == 1
    listed = json.loads(rewrite(*arguments, "json").out)["packages"]["out"]
    assert {finding["kind"] for finding in listed} == {"edited-runtime", "transformers-moved"}


def test_lines_are_found_in_an_edited_file(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaConfig", "# mine\n# mine\nclass TinyLlamaConfig")
    line = (package / "modeling_tiny.py").read_text().split("\n").index("        self.attention_dropout = 0.0") + 1
    done = rewrite("check", package, "--transformers", releases("6.1.0", DROPOUT), "--format", "github")
    assert f"line={line},endLine={line}" in done.out


def test_check_reads_and_nothing_else(package: Path, releases: Releases, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rewrite.cli import run\n"
        f"assert run(['check', '--transformers', {str(releases('6.1.0', DROPOUT))!r}]) == 1\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules), sys.modules\n"
    )
    before = contents(package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(package) == before


def test_what_is_not_what_the_lock_says(package: Path, releases: Releases) -> None:
    tree = releases("6.0.0")
    assert rewrite("check", package, "--transformers", tree, "--full").code == 0
    assert rewrite("vendor", package).code == 0
    (package / "_runtime" / "core" / "backend.py").unlink()
    assert "_runtime/core/backend.py is missing" in rewrite("check", package, "--transformers", tree).out
    assert rewrite("sync", package, "--transformers", tree).code == 0
    assert rewrite("check", package, "--transformers", tree).code == 0
