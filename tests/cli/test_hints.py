"""What a message tells to run runs: built from the call at hand, quoted, and it does what the message says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
import pytest
from command_line import Outcome, rewrite

from rewrite.options.shared_options import Command
from rewrite.typed import again, typed


def hinted(text: str, command: str = "") -> list[str]:
    """The words of the last call of `rewrite` that a message shows, up to the end of its line or its backtick."""
    line = next(line for line in reversed(text.splitlines()) if f"rewrite {command}" in line)
    said = line[line.index(f"rewrite {command}") :].split(" (")[0].split("`")[0]
    return shlex.split(said)[1:]


def follows(done: Outcome, command: str = "") -> Outcome:
    return rewrite(*hinted(done.out + done.err, command))


def test_words_are_quoted() -> None:
    assert typed("verify", Path("my models/out")) == "rewrite verify 'my models/out'"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["x", "--only", "a", "--only", "b c"], "rewrite x --only a --only 'b c' --more"),
        (["--no-verify", "x", "--dry-run"], "rewrite x --no-verify --more"),
        (["x", "-q"], "rewrite x --quiet --more"),
    ],
)
def test_a_call_is_said_again(given: list[str], expected: str) -> None:
    options = [
        click.Argument(["model"]),
        click.Option(["--only"], multiple=True),
        click.Option(["--verify/--no-verify"], default=True),
        click.Option(["--dry-run"], is_flag=True),
        click.Option(["--quiet", "-q"], is_flag=True),
    ]
    with Command("apply", params=options).make_context("MODEL", given):
        assert again("--more", without=("--dry-run",)) == expected


def test_a_dry_run_says_the_call_that_writes(here: Path) -> None:
    done = rewrite("modeling_tiny.py", "--dry-run", "--only", "fuse_qkv", "--no-verify", "--diff", "none")
    assert follows(done).code == 0
    assert json.loads((here / "optimized_tiny" / "rewrite.lock").read_text())["options"]["only"] == ["fuse_qkv"]


def test_a_folder_as_a_second_word(here: Path) -> None:
    done = rewrite("modeling_tiny.py", "my out", "--only", "fuse_qkv", "--no-verify")
    assert done.code == 2
    assert follows(done).code == 0
    assert (here / "my out" / "modeling_tiny.py").is_file()


def test_a_folder_with_a_space_is_verified_next(here: Path) -> None:
    done = rewrite("modeling_tiny.py", "--out", "my out", "--only", "fuse_qkv", "--no-verify")
    assert hinted(done.out) == ["verify", "my out"]


def test_what_a_check_says_mends(here: Path, package: Path) -> None:
    package.rename(here / "my out")
    package = here / "my out"
    (package / "modeling_tiny.py").unlink()
    checked = rewrite("check", package)
    assert hinted(checked.out, "undo")[:2] == ["undo", str(package)]
    assert rewrite("undo", package).code == 0
    (package / "modeling_tiny.py").rename(package / "modeling_tiny.py.conflict")
    (package / "modeling_tiny.py").write_text((package / "modeling_tiny.py.conflict").read_text())
    checked = rewrite("check", package)
    assert checked.code == 1
    assert follows(checked, "sync").code == 0
    assert rewrite("check", package).code == 0


def test_a_stale_package_is_made_anew_by_the_line_that_a_check_ends_with(here: Path, package: Path) -> None:
    original = here / "modeling_tiny.py"
    original.write_text(original.read_text() + "\n\nADDED = 1\n")
    checked = rewrite("check", "out")
    assert checked.code == 1
    assert hinted(checked.out) == ["sync", "out"]
    assert follows(checked).code == 0
    assert rewrite("check", "out").code == 0


def test_a_check_of_another_transformers_says_so_to_the_sync(package: Path) -> None:
    from rewrite.sync import formats
    from rewrite.sync.package_check import Finding

    found = {"out": [Finding("transformers-moved", "moved", ())]}
    assert formats.as_text(found, "5.24.0").splitlines()[-1].endswith(": rewrite sync out --transformers 5.24.0")


def test_a_sync_says_its_options_again(here: Path, package: Path) -> None:
    """An edit and upstream change the same line; the call has an option that has to stay."""
    path, original = package / "modeling_tiny.py", here / "modeling_tiny.py"
    line = "        attended, weights = attention_interface("
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, f"        # mine\n{line}"))
    original.write_text(original.read_text().replace(line, f"        # theirs\n{line}"))
    dry = rewrite("sync", "out", "--diff", "none", "--dry-run")
    assert dry.code == 1
    done = follows(dry)
    assert hinted(done.out) == ["sync", "out", "--diff", "none", "--resolved", "out/modeling_tiny.py.conflict"]
    copy = package / "modeling_tiny.py.conflict"
    copy.write_text(
        "".join(one for one in copy.read_text().splitlines(True) if one[:3] not in ("<<<", "===", ">>>", "|||"))
    )
    assert follows(done).code == 0
    assert rewrite("check", "out").code == 0


def test_no_transformers_is_neither_up_to_date_nor_out_of_date(
    package: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rewrite("llama", "--out", "of_library", "--no-verify", "--only", "fuse_qkv").code == 0
    for place in ("package.original", "source.release"):
        monkeypatch.setattr(f"rewrite.{place}.find_transformers", lambda: None)
    done = rewrite("check", "of_library")
    assert (done.code, done.out.startswith("cannot tell of_library: ")) == (2, True)
    assert "rewrite sync" not in done.out
    both = rewrite("check", "of_library", "out")
    assert (both.code, "cannot tell of_library" in both.out, "unverified  out" in both.out) == (2, True, True)
    (here / "modeling_tiny.py").write_text("changed = 1\n")
    assert rewrite("check", "of_library", "out").code == 1
