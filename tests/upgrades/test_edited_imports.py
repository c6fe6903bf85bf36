"""Edits that import of the runtime what is not there, or will not be after a sync: found, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine

from rewrite.sync import formats, imports

from .conftest import Releases, edit
from .test_older_packages import LAYOUTS, Layout, unpacked

RUNTIME = {
    "runtime/__init__.py": b"from .norms import rms_norm\n",
    "runtime/norms.py": b"def rms_norm(): ...\n\n\nif True:\n    EPS = 1\n",
}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from .runtime.norms import rms_norm, EPS as eps", None),
        ("from .runtime import norms, rms_norm", None),
        ("from .runtime.norms import *", None),
        ("from .runtimes.norms import other", None),
        ("from . import runtime", None),
        ("from torch.runtime.norms import other", None),
        ("from .runtime.norms import other", "imports other of .runtime.norms, which does not have it"),
        ("from .runtime import other", "imports other of .runtime, which does not have it"),
        ("from .runtime.nowhere import x", "imports .runtime.nowhere, which this package's runtime does not have"),
        (
            "from .runtime.norms.rms_norm import rms_norm",
            "imports .runtime.norms.rms_norm, a file of an older layout: write "
            "`from .runtime.norms import rms_norm`",
        ),
        (
            "from .runtime.rms_norm import rms_norm as n",
            "imports .runtime.rms_norm, a file of an older layout: write `from .runtime.norms import rms_norm as n`",
        ),
        (
            "from .runtime.core.place import FOLDER",
            "imports .runtime.core.place, a file of an older layout: write "
            "`from .runtime.core import PLACE_FOLDER as FOLDER`",
        ),
        (
            "from .runtime.norms.rms_norm import gone",
            "imports .runtime.norms.rms_norm, a file of an older layout: a room is one file now, .runtime.norms",
        ),
    ],
)  # fmt: skip
def test_an_import_that_finds_nothing_is_named(line: str, said: str | None) -> None:
    found = imports.lacking(f"import torch\n\n\ndef function():\n    {line if '*' not in line else 'pass'}\n", RUNTIME)
    assert [(one.line, one.said) for one in found] == ([] if said is None else [(5, said)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.archive)
def test_an_edit_of_an_older_package_is_warned_of_and_refused(
    layout: Layout, tmp_path: Path, rewrite: CommandLine
) -> None:
    package = unpacked(layout, tmp_path)
    module = layout.norm.removesuffix(".py").replace("/", ".")
    path = package / "modeling_pebble.py"
    path.write_text(f"{path.read_text()}\n\nfrom .{module} import rms_norm as mine\n")
    line = len(path.read_text().splitlines())
    said = f"imports .{module}, a file of an older layout: write `from .runtime.norms import rms_norm as mine`"
    assert f"modeling_pebble.py, line {line}, {said}" in rewrite("check", package).out
    done = rewrite("sync", package, "--no-verify")
    assert (done.code, f"line {line} {said}" in " ".join(done.err.split())) == (1, True)
    path.write_text(path.read_text().replace(f"from .{module} import", "from .runtime.norms import"))
    assert rewrite("sync", package, "--no-verify").code == 0


def test_what_an_older_version_generated_is_no_edit(tmp_path: Path, rewrite: CommandLine) -> None:
    package = unpacked(LAYOUTS[0], tmp_path)
    path = package / "modeling_pebble.py"
    path.write_text(f"# mine\n{path.read_text()}")
    found = rewrite("check", package, "--format", "json").out
    assert ('"tool-moved"' in found, '"edited-import"' in found) == (True, False)
    path.write_text(f"{path.read_text()}\nfrom .runtime.rms_norm import rms_norm\n")  # as it has one, and yours
    assert rewrite("check", package, "--format", "json").out.count('"edited-import"') == 1


def test_an_edit_that_takes_more_of_a_room_than_it_has(
    package: Path, releases: Releases, rewrite: CommandLine
) -> None:
    edit(package / "modeling_tiny.py", "import torch\n", "import torch\nfrom .runtime.products import nothing\n")
    old = ("--transformers", releases("6.0.0"))
    assert "imports nothing of .runtime.products, which does not have it" in rewrite("check", package, *old).out


def test_lines_of_a_check_are_broken_at_words() -> None:
    text = "out of date optimized_llama: modeling_llama.py has changed since it was verified: rewrite verify there\n"
    broken = formats.wrapped(f"{text}short\n", 60)
    assert " ".join(broken.split()) == " ".join(f"{text}short".split())
    assert max(map(len, broken.splitlines())) <= 60
    assert broken.splitlines()[1].startswith(" " * 12)
