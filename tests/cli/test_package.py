"""What is in an output folder, and that it is the same everywhere."""

from __future__ import annotations

import ast
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import CommandLine
from rewrite.package.targets import of_machine

from rewrite.package import runtime_files, targets
from rewrite.package.assemble import public_names
from rewrite.package.lock import read_lock, sha256


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
    assert json.loads(text)["schema"] == 2


def test_bytes_are_the_same_on_any_machine(here: Path, rewrite: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = contents(_made(rewrite, here))
    other = here / "other place"
    other.mkdir()
    shutil.copy(here / "modeling_tiny.py", other)
    monkeypatch.chdir(other)
    assert contents(_made(rewrite, other)) == first
    assert not [name for name, data in first.items() if str(here).encode() in data]


def test_the_way_a_file_of_transformers_is_named_does_not_show(here: Path, rewrite: CommandLine) -> None:
    options = ("--out", "out", "--no-verify", "--only", "fuse_qkv", "--force")
    assert rewrite("llama", *options).code == 0
    first = contents(here / "out")
    assert rewrite("transformers.models.llama.modeling_llama", *options).code == 0
    assert contents(here / "out") == first


def _made(rewrite: CommandLine, folder: Path) -> Path:
    done = rewrite("modeling_tiny.py", "--out", folder / "out", "--no-verify", "--only", "fuse_qkv")
    assert done.code == 0, done.err
    return folder / "out"


def test_generated_files_are_formatted_and_lint_free(package: Path) -> None:
    ours = [package / "__init__.py", *(package / "runtime").rglob("*.py")]
    for command in (["check", "--select", "E,F,W,I"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "119"]
        done = subprocess.run([*ruff, *ours], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_package_carries_the_runtime_files_it_imports_and_no_others(package: Path) -> None:
    runtime = package / "runtime"
    present = {path.stem for path in runtime.glob("*.py")} - {"__init__", "upstream"}
    assert present == set(runtime_files.closure_of(["products.packed_linear"], of_machine()).rooms)
    assert {"core", "products"} <= present
    assert "attention" not in present


def test_the_target_is_kept_and_decides_what_comes_along(here: Path, package: Path, rewrite: CommandLine) -> None:
    given = ("modeling_tiny.py", "--no-verify", "--only", "fuse_rms_norm")
    for target, more in (("cuda", set()), ("rocm", {"aiter.py", "rocm.py"})):
        assert rewrite(*given, "--out", here / target, "--target", target).code == 0
        assert {path.name for path in (here / target / "runtime").iterdir()} & {"aiter.py", "rocm.py"} == more
        assert read_lock(here / target).options.target == target
        assert rewrite("check", here / target).code == 0


def test_what_is_left_out_is_kept_in_the_lock_and_by_sync(here: Path, package: Path, rewrite: CommandLine) -> None:
    given = ("modeling_tiny.py", "--no-verify", "--out", here / "small", "--only", "fuse_qkv")
    assert rewrite(*given, "--without", "ranks", "--without", "formats", "--without", "ranks").code == 0
    assert read_lock(here / "small").options.without == ON_REQUEST
    made = {path.name: path.read_bytes() for path in (here / "small" / "runtime").iterdir()}
    assert rewrite("check", here / "small").code == 0
    assert rewrite("sync", here / "small").code == 0
    assert {path.name: path.read_bytes() for path in (here / "small" / "runtime").iterdir()} == made
    done = rewrite("verify", here / "small", "--tp", "2")
    assert (done.code, f"rewrite sync {here / 'small'} --with ranks" in done.err) == (2, True)
    done = rewrite("bench", here / "small", "--tp", "2")
    assert (done.code, "was made without ranks: rewrite sync" in done.err) == (2, True)
    done = rewrite("tune", here / "small", "--attention")
    assert (done.code, f"rewrite sync {here / 'small'} --with attention" in done.err) == (2, True)
    lock = json.loads((here / "small" / "rewrite.lock").read_text())
    lock["options"]["without"] = ["thing"]
    (here / "small" / "rewrite.lock").write_text(json.dumps(lock))
    assert "leaves 'thing' out, which this version does not know" in rewrite("check", here / "small").out
    assert rewrite(*given, "--without", "thing").code == 2
    assert rewrite(*given, "--force").code == 0
    assert read_lock(here / "small").options.without == ON_REQUEST


def test_a_package_has_what_nobody_asked_for_if_it_had_it(here: Path, package: Path, rewrite: CommandLine) -> None:
    place = here / "small"
    given = ("modeling_tiny.py", "--no-verify", "--out", place, "--only", "fuse_qkv")

    def left_out() -> tuple[str, ...]:
        assert rewrite("check", place).code == 0
        return read_lock(place).options.without

    done = rewrite(*given)
    assert left_out() == ON_REQUEST
    shown = " ".join(done.out.split())
    assert "runtime without attention, eager, formats, fp8_cache, inputs, ragged, ranks, upload: --with NAME" in shown
    assert rewrite("sync", place, "--with", "ranks", "--without", "training").code == 0
    assert left_out() == ("attention", "eager", "formats", "fp8_cache", "inputs", "ragged", "training", "upload")
    assert (place / "runtime" / "core.py").read_text().count("RANKS: bool = False") == 0
    assert rewrite(*given, "--without", "chains").code == 0  # a package keeps its choice until told
    assert left_out() == (
        "attention",
        "chains",
        "eager",
        "formats",
        "fp8_cache",
        "inputs",
        "ragged",
        "training",
        "upload",
    )
    assert rewrite("sync", place, "--without", "ranks", "--with", "chains", "--with", "formats").code == 0
    assert left_out() == ("attention", "eager", "fp8_cache", "inputs", "ragged", "ranks", "training", "upload")
    lock = place / "rewrite.lock"
    lock.write_text(
        lock.read_text().replace(
            '"without": ["attention", "eager", "fp8_cache", "inputs", "ragged", "ranks", "training", "upload"]',
            '"without": []',
        )
    )
    assert rewrite("sync", place).code == 0  # as one of a version in which all came along
    assert left_out() == ()
    assert "--with NAME" not in rewrite(*given).out
    assert left_out() == ()


def test_what_is_wanted_and_not_wanted_is_said(here: Path, package: Path, rewrite: CommandLine) -> None:
    given = ("modeling_tiny.py", "--no-verify", "--out", here / "small", "--only", "fuse_qkv")
    done = rewrite(*given, "--with", "ranks", "--without", "ranks")
    assert (done.code, "--with ranks and --without ranks: which of them?" in done.err) == (2, True)
    done = rewrite("sync", here / "package", "--with", "fp8")
    assert (done.code, "transforms are those of the lock" in done.err) == (2, True)
    assert "did you mean training?" in rewrite(*given, "--with", "trainin").err
    assert "did you mean training?" in rewrite("explain", "trainin").err
    assert "`rewrite sync DIR --with ranks`" in rewrite("explain", "ranks").out
    assert (
        "- `decode`: a step against fixed-size buffers computes something else"
        in rewrite("explain", "step_differs").out
    )
    (here / "pyproject.toml").write_text('[tool.rewrite]\nwithout = ["ranks"]\nwith = ["fp8", "training"]\n')
    assert rewrite("modeling_tiny.py", "--no-verify", "--out", here / "small", "--with", "ranks").code == 0
    typed_goes_before_written = ("attention", "eager", "formats", "fp8_cache", "inputs", "ragged", "upload")
    assert read_lock(here / "small").options.without == typed_goes_before_written
    assert rewrite("sync", here / "small").code == 0
    assert read_lock(here / "small").options.without == ON_REQUEST


def test_what_is_seen_to_be_needed_comes_along(
    here: Path, package: Path, rewrite: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = here / "checkpoint"
    checkpoint.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    done = rewrite(checkpoint, "--no-verify", "--out", here / "eight")
    assert read_lock(here / "eight").options.without == (
        "attention",
        "eager",
        "fp8_cache",
        "inputs",
        "ragged",
        "ranks",
        "upload",
    )
    assert "runtime    with formats: its config.json has weight_block_size" in done.out
    assert rewrite(checkpoint, "--no-verify", "--out", here / "plain", "--without", "formats").code == 0
    assert read_lock(here / "plain").options.without == ON_REQUEST
    monkeypatch.setattr(targets, "cards", lambda: 2)
    done = rewrite("deepseek_v3", "--no-verify", "--out", here / "dealt")
    assert read_lock(here / "dealt").options.without == (
        "attention",
        "eager",
        "fp8_cache",
        "inputs",
        "ragged",
        "upload",
    )
    assert "runtime    with formats: its checkpoints are published in FP8 with a scale for each block" in done.out
    assert "runtime    with ranks: this machine has 2 GPUs" in done.out


def test_gpus_are_counted_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "DEVICES", tmp_path)
    assert targets.cards() == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert targets.cards() == 2


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


def test_the_guard_names_a_command_that_makes_the_package_anew(here: Path, rewrite: CommandLine) -> None:
    assert rewrite("llama", "--out", "my llama", "--no-verify", "--only", "fuse_qkv").code == 0
    tree = ast.parse((here / "my llama" / "__init__.py").read_text())
    commands = [k.value for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "command"]
    assert [ast.literal_eval(command) for command in commands] == ['rewrite sync "my llama"']


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a'b", "a\\b", 'a"""b', "{x}", "x\udcff"])
def test_an_odd_name_breaks_no_file(here: Path, rewrite: CommandLine, name: str) -> None:
    source = here / f"modeling_{name}.py"
    source.write_bytes((here / "modeling_tiny.py").read_bytes())
    options = ("--no-verify", "--only", "fuse_qkv", "--diff", "none", "--out", name)
    if not name.isascii():
        assert "not UTF-8" in rewrite(source, *options).err
        source = here / "modeling_tiny.py"
    assert rewrite(source, *options).code == 0
    assert rewrite("check", name).code == 0
    tree = ast.parse((here / name / "__init__.py").read_bytes())
    keywords = [k for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "command"]
    words = shlex.split(ast.literal_eval(keywords[0].value))
    assert words[words.index("sync") + 1] == name
    assert rewrite("eject", name).code == 0
    assert "guard" not in ast.unparse(ast.parse((here / name / "__init__.py").read_bytes()))
    assert ast.parse(next((here / name).glob("modeling_*.py")).read_bytes())
