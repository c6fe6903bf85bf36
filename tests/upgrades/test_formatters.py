"""A team's formatter, run over a package, is no edit: check stays green, sync merges, and the layout stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import rewrite
from kept_verdicts import keep

from rewrite.package import syntax
from rewrite.sync.styles import Style, style_of

from .conftest import Releases, edit

DROPOUT = ("attention_dropout = 0.0", "attention_dropout = 0.1")
WIDE = ("--line-length", "120")
SINGLE = ("--config", 'format.quote-style = "single"')


def ruff(*arguments: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache", "--quiet", str(folder)]
        subprocess.run(command, check=True)

    return run


def crlf(folder: Path) -> None:
    for path in folder.rglob("*.py*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def by_hand(folder: Path) -> None:
    """Lay out as no formatter of ours does."""
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text().replace(" = self.", " =  self."))


FORMATTERS = {
    "88": ruff("format"),
    "120": ruff("format", *WIDE),
    "100, single quotes": ruff("format", "--line-length", "100", *SINGLE),
    "79, commas": ruff("format", "--line-length", "79", "--config", "format.skip-magic-trailing-comma = true"),
    "imports": ruff("check", "--fix", "--select", "I,F"),
    "newlines": crlf,
    "by hand": by_hand,
}


def text_of(folder: Path) -> str:
    return (folder / "modeling_tiny.py").read_bytes().decode()


@pytest.mark.parametrize("name", FORMATTERS)
def test_a_formatter_is_no_edit(name: str, package: Path, releases: Releases) -> None:
    before = text_of(package)
    FORMATTERS[name](package)
    assert text_of(package) != before or name in ("120", "imports")
    formatted = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    tree = releases("6.0.0")
    checked = rewrite("check", package, "--transformers", tree, "--full")
    assert checked.code == 0, checked.out
    assert "up to date" in rewrite("sync", package, "--transformers", tree).out
    assert "as it was generated" in rewrite("undo", package).out
    assert rewrite("diff", package, "--edits").out == ""
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == formatted


@pytest.mark.parametrize("name", FORMATTERS)
def test_an_upgrade_keeps_the_layout(name: str, package: Path, releases: Releases) -> None:
    FORMATTERS[name](package)
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    before = text_of(package)
    tree = releases("6.1.0", DROPOUT)
    done = rewrite("sync", package, "--transformers", tree)
    assert done.code == 0, done.err
    changed = [line for line in text_of(package).split("\n") if line not in before.split("\n")]
    assert len(changed) == (4 if name == "by hand" else 3), changed  # a line beside a change has ours
    assert "# mine" in text_of(package)
    assert rewrite("check", package, "--transformers", tree).code == 0


@pytest.mark.parametrize("name", ["79, commas", "100, single quotes", "by hand"])
def test_upstream_changes_lines_that_the_formatter_changed(name: str, package: Path, releases: Releases) -> None:
    """The line is one where it was generated and three after the formatter; an edit stands right beside it."""
    FORMATTERS[name](package)
    edit(
        package / "modeling_tiny.py",
        "layer_idx\n        self.head_dim",
        "layer_idx\n        self.mine = 1\n        self.head_dim",
    )
    o_proj = (
        "self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim",
        "self.o_proj = Out(config.hidden_size",
    )
    tree = releases("6.1.0", DROPOUT, o_proj)
    done = rewrite("sync", package, "--transformers", tree)
    assert done.code == 0, done.err
    text = text_of(package)
    assert ("self.mine = 1" in text, "Out(" in text, "# mine" in text) == (True, True, False)
    FORMATTERS[name](package)
    assert text_of(package).count("\n") == text.count("\n")


def test_a_real_conflict_is_shown_in_the_layout_of_the_team(package: Path, releases: Releases) -> None:
    FORMATTERS["100, single quotes"](package)
    edit(package / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    done = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT))
    copy = (package / "modeling_tiny.py.conflict").read_text()
    assert (done.code, copy.count("<<<<<<< ")) == (1, 1)
    begin, end = copy.index("<<<<<<< "), copy.index(">>>>>>> ")
    shown = [line.strip() for line in copy[begin:end].split("\n")]
    assert [line for line in shown if line.startswith("self.")] == [
        f"self.attention_dropout = {value}" for value in ("0.5", "0.0", "0.1")
    ]


def test_a_verdict_holds_for_every_layout(package: Path, releases: Releases) -> None:
    keep(package)
    FORMATTERS["88"](package)
    tree = releases("6.0.0")
    assert rewrite("check", package, "--transformers", tree).code == 0
    edit(package / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    assert "has changed since it was verified" in rewrite("check", package, "--transformers", tree).out


def test_an_edit_is_still_an_edit(package: Path, releases: Releases) -> None:
    tree = releases("6.0.0")
    assert rewrite("vendor", package).code == 0
    file = package / "_runtime" / "linear" / "packing.py"
    FORMATTERS["88"](package)
    file.write_text(file.read_text() + "\n# mine\n")
    checked = rewrite("check", package, "--transformers", tree)
    assert (checked.code, "packing.py was edited" in checked.out) == (1, True)
    refused = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT))
    assert (refused.code, "--replace _runtime/linear/packing.py" in refused.err) == (1, True)


CODE = (
    """# licence
import b
import a  # noqa

@wrapped
def f(x, *, y="q"):
    """
    + '"""Do it.\n\n    Twice.\n    """'
    + """
    del x
    return {"a": f"{x} 'b'", "c": g(x, y)}  # why
"""
)
SAME = {
    "quotes": ('"q"', "'q'"),
    "commas": ("g(x, y)", "g(\n        x,\n        y,\n    )"),
    "order of imports": ("import b\nimport a  # noqa", "import a  # noqa\nimport b"),
    "one import": ("import b\nimport a  # noqa", "import a, b  # noqa"),
    "brackets": ("del x", "del (x)"),
    "docstring": ("    Twice.\n", "    Twice.  \n\n"),
    "comment": ("# why", "#why"),
    "blank lines": ("@wrapped", "\n\n@wrapped"),
    "newlines": ("\n", "\r\n"),
}
OTHER = {
    "comment": ("# why", "# why not"),
    "comment gone": ("  # why", ""),
    "comment moved": ("# licence\n", ""),
    "comment at another line": ("    del x\n", "    # why\n    del x\n"),
    "string": ('"q"', '"r"'),
    "number": ("{x}", "{y}"),
    "tuple": ("g(x, y)", "(g(x, y),)"),
    "import": ("import b", "import c"),
    "annotation": ("f(x,", "f(x: int,"),
    "docstring": ("Twice", "Once"),
    "default": ('y="q"', "y"),
}


@pytest.mark.parametrize("name", SAME)
def test_layout(name: str) -> None:
    assert CODE.replace(*SAME[name]) != CODE
    assert digest(CODE.replace(*SAME[name])) == digest(CODE)


@pytest.mark.parametrize("name", OTHER)
def test_no_layout(name: str) -> None:
    assert CODE.replace(*OTHER[name]) != CODE
    assert digest(CODE.replace(*OTHER[name])) != digest(CODE)


def test_what_is_no_python_is_compared_by_its_lines() -> None:
    assert syntax.digest("a.original", b"x = 1\r\n") == syntax.digest("a.original", b"x = 1\n")
    assert syntax.digest("a.original", b"x = 1\n") != syntax.digest("a.original", b"x =  1\n")
    assert syntax.digest("a.py", b"x = = 1\n") != syntax.digest("a.py", b"x =  = 1\n")


def test_the_style_of_a_project_is_read_from_its_settings(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 40\n")
    text = "result = function(argument, another, the_third)\nother = function(argument, another, the_fourth)\n"
    narrow = Style((("format", "--isolated", "--line-length", "40"),)).of(text)
    style = style_of(text, narrow, tmp_path / "a.py")
    assert style.of(text) == narrow != text


def digest(text: str) -> str:
    return syntax.digest("a.py", text.encode())
