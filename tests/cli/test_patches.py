"""Diffs: what git makes of a patch, and what fits a terminal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import rewrite
from rich.console import Console

from rewrite.console import differences
from rewrite.console.console import Screen, folded

BEFORE = "".join(f"line {number}\n" for number in range(30))
CASES = {
    "changed": (BEFORE, BEFORE.replace("line 7\n", "other\n").replace("line 25\n", "")),
    "carriage_returns": (BEFORE.replace("\n", "\r\n"), BEFORE.replace("\n", "\r\n").replace("line 3", "x")),
    "no_newline_before": (BEFORE[:-1], BEFORE),
    "no_newline_after": (BEFORE, BEFORE[:-1]),
    "no_newline_at_all": (BEFORE[:-1], BEFORE[:-2]),
    "form_feed_and_separators": ("a\n\x0cb\u2028c\nd\n", "a\n\x0cb\u2028c\ne\n"),
    "byte_order_mark": ("\ufeffa\nb\n", "a\nc\n"),
    "to_nothing": ("a\n", ""),
}


def apply(folder: Path, patch: str) -> None:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, input=patch.encode(), check=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["file.py", "with space/ünï code.py"])
def test_git_applies_the_patch(tmp_path: Path, case: str, name: str) -> None:
    before, after = CASES[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(before.encode())
    apply(tmp_path, differences.unified(before, after, name))
    assert path.read_bytes() == after.encode()


def test_equal_texts_have_no_patch() -> None:
    assert differences.unified(BEFORE, BEFORE, "x.py") == ""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_dry_run_in_a_pipe_is_a_patch_of_the_source(here: Path, newline: str) -> None:
    path = here / "modeling_tiny.py"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_text().replace("\n", newline).encode())
    shown = rewrite("modeling_tiny.py", "--dry-run", "--only", "fuse_qkv")
    assert shown.code == 0
    assert shown.out.startswith("--- a/modeling_tiny.py\n+++ b/modeling_tiny.py\n@@ ")
    assert "sites      1 of 1 rewritten, by 1 transform\n" in shown.err
    assert sorted(p.name for p in here.iterdir()) == ["modeling_tiny.py"]
    apply(here, shown.out)
    changed = path.read_bytes()
    assert b"packed_linear" in changed
    assert changed.count(b"\r\n") == (changed.count(b"\n") if newline == "\r\n" else 0)


def test_the_diff_of_a_package_turns_the_original_into_it(here: Path, package: Path) -> None:
    shown = rewrite("diff", package)
    assert shown.code == 0
    apply(here, shown.out)
    assert (here / "modeling_tiny.py").read_bytes() == (package / "modeling_tiny.py").read_bytes()


def test_a_changed_original_is_an_error_with_code_1(here: Path, package: Path) -> None:
    with (here / "modeling_tiny.py").open("a") as file:
        file.write("# changed\n")
    shown = rewrite("diff", package)
    assert shown.code == 1
    assert "was made from another content of" in shown.err
    (here / "modeling_tiny.py").unlink()
    gone = rewrite("diff", package)
    assert gone.code == 1
    assert "--original FILE" in gone.err


def test_own_edits_are_shown_apart(package: Path) -> None:
    assert rewrite("diff", package, "--generated").out == ""
    path = package / "modeling_tiny.py"
    path.write_text(path.read_text() + "# mine\n")
    assert "+# mine" in rewrite("diff", package, "--generated").out


def test_statistics_are_by_class_and_function() -> None:
    before = "import a\n\nclass A:\n    x = 1\n\n    @deco\n    def f(self):\n        return 1\n\ndef g():\n    pass\n"
    after = before.replace("return 1", "return 2").replace("import a", "import b").replace("    @deco\n", "")
    assert differences.statistics(before, after) == [
        differences.Change("(top of the file)", 1, 1),
        differences.Change("A.f", 1, 2),
    ]


def test_long_lines_fold_at_spaces_with_a_deeper_indent() -> None:
    line = "+        attn_output = attention_interface(self, query_states, key_states, value_states, mask, x=1)"
    pieces = folded(line, 80)
    assert len(pieces) == 2
    assert all(len(piece) <= 80 for piece in pieces)
    assert pieces[1].startswith(" " * 17)
    assert "".join(piece.strip() for piece in pieces).replace(" ", "") == line.replace(" ", "")
    assert all(len(piece) <= 80 for piece in folded("-" + "x" * 300, 80))


@pytest.mark.parametrize(("width", "columns"), [(80, False), (120, True)])
def test_side_by_side_needs_a_hundred_columns(width: int, columns: bool) -> None:
    screen = Screen()
    screen.output = Console(width=width, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    screen.show_diff(*CASES["changed"], "x.py", "side-by-side")
    text = screen.output.export_text()
    assert ("--- a/x.py" in text) is not columns
    assert all(len(line) <= width for line in text.splitlines())
