"""Edits that import of the runtime what is not there: found, and refused by name."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.package.lock import read_lock
from rewrite.sync import formats, runtime_names

from .conftest import Releases, edit

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "packages" / "runtime_in_the_package.tar.gz"
"""A package as the last version with a runtime in each made it, 2026-11-28, with an edit."""
NORM = "hf_rewrite_runtime.norms.rms_norm"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"from {NORM} import rms_norm, reference as r", None),
        ("from hf_rewrite_runtime.norms import rms_norm", None),
        ("from hf_rewrite_runtime import explain, norms", None),
        (f"from {NORM} import *", None),
        ("from ._runtime.norms.rms_norm import rms_norm", None),
        ("from .runtimes.norms import other", None),
        ("from torch.runtime.norms import other", None),
        (f"from {NORM} import other", f"imports other of {NORM}, which does not have it"),
        ("from hf_rewrite_runtime.norms import other",
         "imports other of hf_rewrite_runtime.norms, which does not have it"),
        ("from hf_rewrite_runtime.no.where import x",
         "imports hf_rewrite_runtime.no.where, which the runtime does not have"),
        (
            "from .runtime.norms import rms_norm",
            f"imports .runtime.norms, which is gone: write `from {NORM} import rms_norm`",
        ),
        ("from .runtime.core import x", "imports .runtime.core, which is gone: see hf_rewrite_runtime"),
    ],
)  # fmt: skip
def test_an_import_that_finds_nothing_is_named(line: str, said: str | None) -> None:
    found = runtime_names.lacking(f"import torch\n\n\ndef function():\n    {line if '*' not in line else 'pass'}\n")
    assert [(one.line, one.said) for one in found] == ([] if said is None else [(5, said)])


def test_an_edit_that_imports_what_is_not_there(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "import torch\n", f"import torch\nfrom {NORM} import nothing\n")
    old = ("--transformers", releases("6.0.0"))
    assert f"imports nothing of {NORM}, which does not have it" in " ".join(
        rewrite("check", package, *old).out.split()
    )


@pytest.fixture
def older(here: Path) -> Path:
    """That package, beside its original."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(here, filter="data")
    return here / "packed"


def test_a_package_with_its_runtime_inside_is_synced_once(older: Path) -> None:
    assert (older / "runtime" / "core.py").is_file()
    assert "# an edit of the user's" in (older / "modeling_tiny_llama.py").read_text()
    checked = rewrite("check", older, "--format", "json").out
    assert ('"tool-moved"' in checked, '"edited-import"' in checked) == (True, False)
    assert rewrite("sync", older, "--no-verify").code == 0
    text = (older / "modeling_tiny_llama.py").read_text()
    assert "# an edit of the user's" in text
    assert "from hf_rewrite_runtime.linear.packing import packed_linear" in text
    assert not (older / "runtime").exists()
    assert read_lock(older).runtime.version
    assert rewrite("check", older).code == 0


def test_an_edit_that_imports_from_it_is_refused_with_the_way(older: Path) -> None:
    path = older / "modeling_tiny_llama.py"
    path.write_text(f"{path.read_text()}\n\nfrom .runtime.norms import rms_norm as mine\n")
    done = rewrite("sync", older, "--no-verify")
    assert (done.code, f"write `from {NORM} import rms_norm`" in " ".join(done.err.split())) == (1, True)


def test_lines_of_a_check_are_broken_at_words() -> None:
    text = "out of date optimized_llama: modeling_llama.py has changed since it was verified: rewrite verify there\n"
    broken = formats.wrapped(f"{text}short\n", 60)
    assert " ".join(broken.split()) == " ".join(f"{text}short".split())
    assert max(map(len, broken.splitlines())) <= 60
    assert broken.splitlines()[1].startswith(" " * 12)
