"""Edits that name what is not there, of the runtime or of the package: found, and refused by name."""

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
    assert rewrite("sync", older, "--no-verify", "--accept", "fuse_add_norm").code == 0  # it is part of decode_layers
    text = (older / "modeling_tiny_llama.py").read_text()
    assert "# an edit of the user's" in text
    assert "from hf_rewrite_runtime.rope.qkv_rope_cache import qkv_rope_cache" in text
    assert not (older / "runtime").exists()
    assert read_lock(older).runtime.version
    assert rewrite("check", older).code == 0


def test_an_edit_that_imports_from_it_is_refused_with_the_way(older: Path) -> None:
    path = older / "modeling_tiny_llama.py"
    path.write_text(f"{path.read_text()}\n\nfrom .runtime.norms import rms_norm as mine\n")
    done = rewrite("sync", older, "--no-verify", "--accept", "fuse_add_norm")
    assert (done.code, f"write `from {NORM} import rms_norm`" in " ".join(done.err.split())) == (1, True)


CLASS, LISTED = "class TinyLlamaForCausalLM(", '__all__ = ["TinyLlamaConfig", "TinyLlamaForCausalLM", '


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (((CLASS, "class Mine("),), "lists TinyLlamaForCausalLM in `__all__`, and nothing defines it"),
        (((CLASS, "class Mine("), (LISTED, '__all__ = ["TinyLlamaConfig", "Mine", ')), None),
        (
            (("class TinyLlamaPreTrainedModel(", "class Base("),),
            "reads TinyLlamaPreTrainedModel, which nothing defines",
        ),
        ((("import torch\n", "import torch\nfrom .beside import mine\n"),), None),
        (
            (("import torch\n", "import torch\nfrom .beside import other\n"),),
            "imports other from beside.py, which does not have it",
        ),
        ((("import torch\n", "import torch\nfrom .beside import *\n"), (CLASS, "class Mine(")), None),
    ],
)
def test_a_package_that_does_not_import_says_so_and_nothing_of_its_verification(
    package: Path, releases: Releases, edits: tuple[tuple[str, str], ...], said: str | None
) -> None:
    path, old = package / "modeling_tiny.py", ("--transformers", releases("6.0.0"))
    (package / "beside.py").write_text("mine = 1\n")
    (package / "verify.json").write_text("{}")  # which is said to be no verdict
    for before, after in edits:
        edit(path, before, after)
    edited = path.read_bytes()
    checked = " ".join(rewrite("check", package, *old).out.split())
    assert ((said or "rewrite verify out") in checked, "verify.json" in checked) == (True, said is None), checked
    for command in (("sync", package, "--resolved", path, *old), ("sync", package, *old), ("vendor", package)):
        done = rewrite(*command)
        assert (done.code, (said or "") in " ".join(done.err.split())) == (int(said is not None), True), done.err
        assert said is None or path.read_bytes() == edited


def test_an_init_that_takes_a_class_by_its_former_name(package: Path, releases: Releases) -> None:
    init, path = package / "__init__.py", package / "modeling_tiny.py"
    edit(init, "from .modeling_tiny import *", "from .modeling_tiny import TinyLlamaForCausalLM, TinyLlamaModel")
    path.write_text(path.read_text().replace("TinyLlamaForCausalLM", "Mine"))
    said = "imports TinyLlamaForCausalLM from modeling_tiny.py, which does not have it"
    for command in (("check",), ("sync", "--resolved", path), ("sync",)):
        done = rewrite(command[0], package, *command[1:], "--transformers", releases("6.0.0"))
        assert (done.code, said in " ".join(f"{done.out} {done.err}".split())) == (1, True), done


def test_lines_of_a_check_are_broken_at_words() -> None:
    text = "out of date optimized_llama: modeling_llama.py has changed since it was verified: rewrite verify there\n"
    broken = formats.wrapped(f"{text}short\n", 60)
    assert " ".join(broken.split()) == " ".join(f"{text}short".split())
    assert max(map(len, broken.splitlines())) <= 60
    assert broken.splitlines()[1].startswith(" " * 12)
