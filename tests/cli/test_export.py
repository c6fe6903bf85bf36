"""`rewrite export`: flat files that load elsewhere, without this tool and without the package."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine

from hf_rewrite_runtime.package.flat import NotFlat, flat_files, flat_name
from rewrite.package import parts, runtime_files
from rewrite.package.closure import closure
from rewrite.upstream.auto_classes import auto_classes
from rewrite.upstream.installed import find_transformers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITHOUT_THE_TOOL = """
import runpy, sys
sys.modules["rewrite"] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def checkpoint(here: Path) -> Path:
    """A checkpoint's folder without weights, which exporting does not read."""
    (here / "c").mkdir()
    config = {"model_type": "tiny_llama", "architectures": ["TinyLlamaForCausalLM"], "note": "mine"}
    (here / "c" / "config.json").write_text(json.dumps(config))
    return here / "c"


def test_what_is_exported_loads_elsewhere_and_computes_the_same(here: Path, rewrite: CommandLine) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained("bert")
    for name in ("llama", "bert"):
        done = rewrite(name, "--out", f"{name}_out", "--no-verify", "--diff", "none", "--with", "upload")
        assert done.code == 0, done.err
        done = rewrite("export", f"{name}_out", "--hub", f"hub_{name}_out", "--checkpoint", name)
        assert done.code == 0, done.err
        shutil.copy(here / name / "model.safetensors", here / f"hub_{name}_out")
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(here), *others]), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(here / "hf"), "HF_MODULES_CACHE": str(here / "modules"),
    }  # fmt: skip
    command = [sys.executable, "-c", WITHOUT_THE_TOOL, str(HERE / "loads_flat.py")]
    command += ["llama_out AutoModelForCausalLM LlamaForCausalLM", "bert_out AutoModelForMaskedLM BertForMaskedLM"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here)
    assert ran.returncode == 0, ran.stderr
    for name, line in zip(("llama", "bert"), ran.stdout.splitlines(), strict=True):
        found = json.loads(line)
        flat, nested, saved = found["modules"]
        assert flat.startswith(f"transformers_modules.hub_{name}_out")
        assert flat.endswith(f"modeling_{name}")
        assert nested == f"{name}_out.modeling_{name}"
        assert saved.startswith(f"transformers_modules.saved_{name}_out")
        assert found["equal"]


def test_the_files_say_what_they_are(package: Path, checkpoint: Path, here: Path, rewrite: CommandLine) -> None:
    text = (package / "modeling_tiny.py").read_text()
    (package / "modeling_tiny.py").write_text("# Copyright 2020 Somebody. Licensed to all.\n" + text)
    done = rewrite("export", package, "--hub", "a/hub", "--checkpoint", checkpoint)
    assert done.code == 0, done.err
    assert "AutoModelForCausalLM → TinyLlamaForCausalLM" in done.out
    hub = here / "a" / "hub"
    modeling = (hub / "modeling_tiny.py").read_text()
    assert "# Copyright 2020 Somebody. Licensed to all." in modeling
    assert "rewrite.lock" not in modeling
    marks = {path.read_text().splitlines()[0] for path in hub.glob("rewrite_*.py")}
    assert "# Flat copy by hf-rewrite (Apache-2.0) of runtime/products.py" in marks
    config = json.loads((hub / "config.json").read_text())
    assert config["note"] == "mine"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_tiny.TinyLlamaForCausalLM"
    assert config["auto_map"]["AutoConfig"] == "modeling_tiny.TinyLlamaConfig"
    assert "auto_map" not in json.loads((checkpoint / "config.json").read_text())


def test_transformers_finds_every_file_in_the_modeling_file(package: Path, here: Path, rewrite: CommandLine) -> None:
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    assert rewrite("export", package, "--hub", "hub").code == 0
    others = {path.stem for path in (here / "hub").glob("*.py")} - {"modeling_tiny"}
    assert set(dynamic.get_relative_imports(here / "hub" / "modeling_tiny.py")) == others
    for path in (here / "hub").glob("*.py"):
        assert set(dynamic.get_relative_imports(path)) <= others


def test_the_whole_runtime_has_a_flat_form(tmp_path: Path) -> None:
    files = runtime_files.files(closure(parts.final_names()))
    names = [name.removeprefix("runtime/").removesuffix(".py") for name in files if "__" not in name]
    for name, data in {**files, "runtime/upstream.py": b"CALLED = IMPORTED = {}\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    imports = [f"from .runtime.{name.replace('/', '.')} import __doc__" for name in names]
    (tmp_path / "modeling_all.py").write_text("\n".join(imports))
    flat = flat_files(tmp_path, "modeling_all.py")
    assert set(map(flat_name, (f"runtime/{name}.py" for name in names))) <= set(flat)
    for text in flat.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                wanted = [node.module] if node.module else [alias.name for alias in node.names]
                assert (node.level, {f"{name}.py" for name in wanted} <= set(flat)) == (1, True)


@pytest.mark.parametrize(
    ("statement", "flat"),
    [
        ("from .runtime.room import first, third as x", "from .rewrite_runtime_room import first, third as x"),
        (
            "from .runtime.room import (\n    first,  # why\n)  # noqa",
            "from .rewrite_runtime_room import first  # noqa",
        ),
        ("from .runtime.room.second import *", "from .rewrite_runtime_room_second import *"),
        ("from .runtime.room import second as s", "from . import rewrite_runtime_room_second as s"),
        ("from .runtime import room", "from . import rewrite_runtime_room as room"),
        ("from . import mine", "from . import mine"),
        ("from .mine import a; b = a", "from .mine import a; b = a"),
        (
            "def f():\n    from .runtime.room import second, first\n    return first",
            "def f():\n    from . import rewrite_runtime_room_second as second\n"
            "    from .rewrite_runtime_room import first\n    return first",
        ),
    ],
)
def test_an_import_of_a_folder_becomes_one_of_a_file(tmp_path: Path, statement: str, flat: str) -> None:
    (tmp_path / "runtime" / "room").mkdir(parents=True)
    files = {
        "runtime/__init__.py": "",
        "runtime/room/__init__.py": "from .first import first, third\n",
        "mine.py": "a = 1\n",
    }
    files |= {"runtime/room/first.py": "first = third = 1\n", "runtime/room/second.py": "from ..room import first\n"}
    for name, text in {**files, "modeling_x.py": f'"""Doc."""\n{statement}\n'}.items():
        (tmp_path / name).write_text(text)
    assert flat_files(tmp_path, "modeling_x.py")["modeling_x.py"].endswith(f"\n{flat}\n")


@pytest.mark.parametrize("statement", ["from .gone import a", "from . import gone", "from .runtime import gone"])
def test_an_import_of_nothing_has_no_flat_form(tmp_path: Path, statement: str) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("")
    (tmp_path / "modeling_x.py").write_text(statement)
    with pytest.raises(NotFlat, match=r"modeling_x\.py imports"):
        flat_files(tmp_path, "modeling_x.py")


def test_two_files_of_one_flat_name_are_refused(tmp_path: Path) -> None:
    for name in ("a/b_c.py", "a_b/c.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "modeling_x.py").write_text("from .a.b_c import x\nfrom .a_b.c import x as y\n")
    with pytest.raises(NotFlat, match="one name"):
        flat_files(tmp_path, "modeling_x.py")


def test_an_export_replaces_its_own_files_and_no_others(
    package: Path, checkpoint: Path, here: Path, rewrite: CommandLine
) -> None:
    arguments = ("export", package, "--hub", "hub", "--checkpoint", checkpoint)
    assert rewrite(*arguments).code == 0
    stale = here / "hub" / "rewrite_runtime_old.py"
    stale.write_text((here / "hub" / "rewrite_runtime_products.py").read_text())
    mine = here / "hub" / "rewrite_notes.py"
    mine.write_text("mine = 1\n")
    again = rewrite(*arguments)
    assert (again.code, "taken out, of an earlier export: rewrite_runtime_old.py" in again.out) == (0, True)
    assert mine.is_file()
    assert not stale.exists()
    for name in ("modeling_tiny.py", "rewrite_runtime_products.py", "config.json"):
        before = (here / "hub" / name).read_text()
        (here / "hub" / name).write_text("{}")
        refused = rewrite(*arguments)
        assert (refused.code, f"has a {name} that no export wrote: choose another --hub" in refused.err) == (2, True)
        assert (here / "hub" / name).read_text() == "{}"
        (here / "hub" / name).write_text(before)
    refused = rewrite("export", package, "--hub", package)
    assert (refused.code, "is a rewritten package itself" in refused.err) == (2, True)


def test_a_checkpoints_own_folder_may_take_the_files(package: Path, checkpoint: Path, rewrite: CommandLine) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    assert rewrite("export", package, "--hub", checkpoint, "--checkpoint", checkpoint).code == 0
    assert (checkpoint / "model.safetensors").read_bytes() == b"weights"
    assert "AutoModelForCausalLM" in json.loads((checkpoint / "config.json").read_text())["auto_map"]


def test_what_cannot_be_exported_is_said(package: Path, checkpoint: Path, here: Path, rewrite: CommandLine) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "x", "architectures": ["OtherForCausalLM"]}')
    refused = rewrite("export", package, "--hub", "hub", "--checkpoint", checkpoint)
    assert (refused.code, "does not define OtherForCausalLM" in refused.err) == (2, True)
    path = package / "modeling_tiny.py"
    path.write_text("from .gone import x\n" + path.read_text())
    refused = rewrite("export", package, "--hub", "hub")
    assert (refused.code, "cannot be exported: modeling_tiny.py imports x" in refused.err) == (2, True)
    assert rewrite("export", "nowhere", "--hub", "hub").code == 2
    assert not (here / "hub").exists()


def test_auto_classes_are_those_of_the_installed_transformers() -> None:
    installed = find_transformers()
    assert installed is not None
    found = auto_classes(installed, "llama", ["LlamaModel", "LlamaForCausalLM", "Other"])
    assert found == {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"}
    unknown = auto_classes(installed, "unknown", ["XModel", "XPreTrainedModel", "XForMaskedLM", "XBlock"])
    assert unknown == {"AutoModel": "XModel", "AutoModelForMaskedLM": "XForMaskedLM"}
