"""What is in an output folder, and that it is the same everywhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.package import vendored_files
from rewrite.package.assemble import public_names
from rewrite.package.lock import read_lock, sha256

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_folder_holds_what_the_lock_lists(package: Path) -> None:
    lock = read_lock(package)
    found = contents(package)
    assert set(found) == {*lock.files, "rewrite.lock", ".gitattributes"}
    assert all(sha256(found[name]) == digest for name, digest in lock.files.items())
    kept = zipfile.ZipFile(package / ".rewrite" / "texts.zip")
    names = "__init__.py", "modeling_tiny.py", "modeling_tiny.py.original"
    original = (package.parent / "modeling_tiny.py").read_bytes()
    assert [kept.read(name) for name in names] == [found[names[0]], found[names[1]], original]
    assert lock.source.target == "../modeling_tiny.py"
    assert set(lock.rules) == {"fuse_qkv"}
    (report,) = lock.transforms
    assert report.rewritten == ("TinyLlamaAttention.forward: q_proj, k_proj, v_proj",)


def test_a_lock_is_read_back_as_it_was_written(package: Path) -> None:
    text = (package / "rewrite.lock").read_text()
    assert read_lock(package).to_json() == text
    assert json.loads(text)["schema"] == 3


def test_bytes_are_the_same_on_any_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = contents(_made(here))
    other = here / "other place"
    other.mkdir()
    shutil.copy(here / "modeling_tiny.py", other)
    monkeypatch.chdir(other)
    assert contents(_made(other)) == first
    assert not [name for name, data in first.items() if str(here).encode() in data]


def test_the_way_a_file_of_transformers_is_named_does_not_show(here: Path) -> None:
    options = ("--out", "out", "--no-verify", "--only", "fuse_qkv", "--force")
    assert rewrite("llama", *options).code == 0
    first = contents(here / "out")
    assert rewrite("transformers.models.llama.modeling_llama", *options).code == 0
    assert contents(here / "out") == first


def _made(folder: Path) -> Path:
    done = rewrite("modeling_tiny.py", "--out", folder / "out", "--no-verify", "--only", "fuse_qkv")
    assert done.code == 0, done.err
    return folder / "out"


def test_generated_files_are_formatted_and_lint_free(package: Path) -> None:
    ours = [package / "__init__.py"]
    for command in (["check", "--select", "E,F,W,I", "--ignore", "F403"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "119"]
        done = subprocess.run([*ruff, *ours], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_pull_request_is_a_few_short_files(here: Path) -> None:
    assert rewrite("llama", "--out", "out", "--no-verify").code == 0
    shown = {name for name in contents(here / "out") if name != "modeling_llama.py"}
    assert shown == {"__init__.py", "rewrite.lock", ".gitattributes", ".rewrite/texts.zip"}
    assert len((here / "out" / "__init__.py").read_text().splitlines()) <= 60
    assert sum(len((here / "out" / name).read_text().splitlines()) for name in ("__init__.py", "rewrite.lock")) < 250


def test_it_imports_the_runtime_by_file(here: Path) -> None:
    """A façade would import everything for one name, and a file named like its function is a module."""
    assert rewrite("llama", "--out", "out", "--no-verify").code == 0
    text = (here / "out" / "modeling_llama.py").read_text()
    taken = re.findall(r"^from (hf_rewrite_runtime\.\S+) import", text, re.MULTILINE)
    assert "hf_rewrite_runtime.norms.rms_norm" in taken
    assert all(name.count(".") == 2 for name in taken)
    assert "from ." not in text


def test_the_runtime_beside_a_package(here: Path, package: Path) -> None:
    edited = (package / "modeling_tiny.py").read_text() + "\n\nMINE = 1\n"
    (package / "modeling_tiny.py").write_text(edited)
    done = rewrite("vendor", package)
    assert (done.code, "_runtime: " in done.out) == (0, True)
    assert (package / "_runtime" / "linear" / "packing.py").is_file()
    text = (package / "modeling_tiny.py").read_text()
    assert "from ._runtime.linear.packing import packed_linear" in text
    assert "MINE = 1" in text
    for path in (package / "_runtime").rglob("*.py"):
        ours = ROOT / "runtime" / path.relative_to(package / "_runtime")
        assert path.read_bytes() == ours.read_bytes()
    assert rewrite("vendor", package).code == 0
    assert rewrite("check", package).code == 0
    assert rewrite("sync", package, "--no-verify").code == 0
    assert "MINE = 1" in (package / "modeling_tiny.py").read_text()
    assert rewrite("diff", package, "--edits").out.count("MINE") == 1
    code = "import sys, out\nassert not any(name.startswith('hf_rewrite') for name in sys.modules), 'installed one'"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rewrite("undo", package).code == 0
    assert "MINE" not in (package / "modeling_tiny.py").read_text()


def test_the_installed_runtime_is_another(here: Path, package: Path) -> None:
    lock = json.loads((package / "rewrite.lock").read_text())
    assert lock["runtime"] == dict(zip(("version", "sha256"), vendored_files.runtime(), strict=True))
    text = (package / "rewrite.lock").read_text().replace('"version": "0.2.0"\n  }', '"version": "0.0.9"\n  }')
    (package / "rewrite.lock").write_text(text.replace(lock["runtime"]["sha256"], "0" * 64))
    assert "made with hf-rewrite-runtime" in rewrite("check", package).out
    lock["runtime"]["version"] = "0.0.9"
    (package / "rewrite.lock").write_text(json.dumps(lock))
    warned = subprocess.run([sys.executable, "-c", "import out"], cwd=here, capture_output=True, text=True)
    assert (warned.returncode, warned.stderr.count("made with hf-rewrite-runtime 0.0.9")) == (0, 1), warned.stderr
    environment = {**os.environ, "REWRITE_GUARD": "strict"}
    strict = subprocess.run(
        [sys.executable, "-c", "import out"], cwd=here, capture_output=True, text=True, env=environment
    )
    assert (strict.returncode, "rewrite sync out makes it anew" in strict.stderr) == (1, True)


def test_a_reason_is_explained() -> None:
    said = rewrite("explain", "step_differs").out
    assert "- `generate`: a step against fixed-size buffers computes something else" in said


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("__all__ = ['b', 'A']\nclass A: ...\nclass C: ...\n", ["A", "b"]),
        ("class A: ...\ndef _f(): ...\ndef g(): ...\nX = 1\n", ["A", "g"]),
    ],
)
def test_exports_are_those_of_the_file(text: str, names: list[str]) -> None:
    assert public_names(text) == names


def test_the_package_imports_and_registers(package: Path) -> None:
    code = (
        "import out, torch, transformers\n"
        "model = out.TinyLlamaForCausalLM(out.TinyLlamaConfig()).eval()\n"
        "assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 128)\n"
        "print(out.explain(model))\n"
        "assert not {'libcst', 'click', 'rewrite'} & set(__import__('sys').modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "backend: auto" in done.stdout


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a'b", "a\\b", 'a"""b', "{x}", "x\udcff"])
def test_an_odd_name_breaks_no_file(here: Path, name: str) -> None:
    source = here / f"modeling_{name}.py"
    source.write_bytes((here / "modeling_tiny.py").read_bytes())
    options = ("--no-verify", "--only", "fuse_qkv", "--diff", "none", "--out", name)
    if not name.isascii():
        assert "not UTF-8" in rewrite(source, *options).err
        source = here / "modeling_tiny.py"
    assert rewrite(source, *options).code == 0
    assert rewrite("check", name).code == 0
    assert rewrite("eject", name).code == 0
    assert "guard" not in ast.unparse(ast.parse((here / name / "__init__.py").read_bytes()))
    assert ast.parse(next((here / name).glob("modeling_*.py")).read_bytes())
