"""Edits that people make to a package: named by a check, shown by a diff, and never a bug of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import rewrite
from kept_verdicts import keep

NORM = "class TinyLlamaRMSNorm"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_check_names_what_was_edited(package: Path) -> None:
    assert rewrite("check", "out").out == "unverified  out: never verified (rewrite verify out)\n"
    edit(package / "modeling_tiny.py", "return self.down_proj(", "return 2.0 * self.down_proj(")
    places = "your edits in TinyLlamaMLP.forward"
    assert rewrite("check", "out").out == f"unverified  out: {places}, never verified (rewrite verify out)\n"
    keep(package)
    assert rewrite("check", "out").out == f"up to date  out: {places}, verified\n"


def test_a_package_that_is_out_of_date_names_its_edits(here: Path, package: Path) -> None:
    edit(package / "modeling_tiny.py", "return self.down_proj(", "return 2.0 * self.down_proj(")
    edit(here / "modeling_tiny.py", "class TinyLlamaMLP", "GONE = 1\n\n\nclass TinyLlamaMLP")
    checked = rewrite("check", "out")
    assert checked.code == 1
    assert checked.out.splitlines()[0].startswith("out of date out: ")
    assert checked.out.splitlines()[0].endswith("; your edits in TinyLlamaMLP.forward")


def test_many_edits_are_counted(package: Path) -> None:
    (package / "modeling_tiny.py").write_text("")
    assert re.search(r"__init__, \d+ more, never verified", rewrite("check", "out").out)


def test_what_a_function_reads_and_an_edit_took_away(package: Path) -> None:
    path = package / "modeling_tiny.py"
    edit(path, f"{NORM}(", "class MyNorm(")
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "TinyLlamaRMSNorm(" in text)
    checked = rewrite("check", "out")
    said = (
        f"modeling_tiny.py:{line} reads TinyLlamaRMSNorm, which nothing defines any more: mend it, or rewrite undo out"
    )
    assert (checked.code, said in checked.out) == (1, True)
    edit(path, "TinyLlamaRMSNorm(", "MyNorm(")
    assert rewrite("check", "out").code == 0


def test_an_edit_of_init_is_an_edit(package: Path) -> None:
    edit(package / "__init__.py", '"explain", ', "")
    assert "your edits in __init__.py, never" in rewrite("check", "out").out
    shown = rewrite("diff", "out", "--edits")
    assert "--- a/__init__.py" in shown.out
    assert "modeling_tiny.py" not in shown.out
    report = json.loads(rewrite("diff", "out", "--edits", "--json").out)
    assert [place["where"] for place in report["places"]] == ["(top of the file)"]
    assert "+++ b/__init__.py" in report["patch"]


@pytest.mark.parametrize("command", [("check",), ("diff", "--edits"), ("sync", "--dry-run"), ("undo",)])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("modeling_tiny.py", "TinyLlamaForCausalLM", "MyModel"),
        ("modeling_tiny.py", '"TinyLlamaModel", ', ""),
        ("__init__.py", "with made_from(__name__):", "if True:"),
        ("__init__.py", "__all__ = [", "__all__ = {"),
        ("__init__.py", "from", "form"),
    ],
)
def test_no_edit_is_a_bug_of_ours(package: Path, name: str, before: str, after: str, command: tuple[str, ...]) -> None:
    edit(package / name, before, after)
    done = rewrite(command[0], "out", *command[1:])
    assert done.code in (0, 1), done
    assert "Traceback" not in done.err
