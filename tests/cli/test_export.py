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
from command_line import rewrite

from rewrite.offers import VENDORED
from rewrite.package import vendored_files
from rewrite.package.flat import NotFlat, flat_files, flat_name
from rewrite.source.auto_classes import auto_classes
from rewrite.source.installed import find_transformers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOADS = """
import json, sys, transformers
sys.modules["rewrite"] = None
config, name, auto = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(config, trust_remote_code=True).eval()
original = getattr(transformers, name).from_pretrained(config).eval()
import torch
ids = torch.arange(3, 12)[None]
with torch.no_grad():
    equal = torch.allclose(model(ids).logits, original(ids).logits, atol=1e-5)
runtimes = {name.split(".")[0] for name in sys.modules if name.startswith("hf_rewrite_runtime")}
print(json.dumps({"module": type(model).__module__, "equal": equal, "runtimes": sorted(runtimes)}))
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


@pytest.mark.parametrize("vendored", [False, True])
def test_what_is_exported_loads_elsewhere_and_computes_the_same(here: Path, vendored: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    assert rewrite("llama", "--out", "llama_out", "--no-verify", "--diff", "none").code == 0
    options = ("--vendor",) if vendored else ()
    done = rewrite("export", "llama_out", "--hub", "hub", "--checkpoint", "llama", *options)
    assert done.code == 0, done.err
    shutil.copy(here / "llama" / "model.safetensors", here / "hub")
    if not vendored:
        assert [path.name for path in (here / "hub").glob("*.py")] == ["modeling_llama.py"]
    places = [str(ROOT / ".links"), str(ROOT)] if not vendored else []
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in others if path and Path(path) not in (ROOT, ROOT / ".links")]
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([*places, *others]), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(here / "hf"), "HF_MODULES_CACHE": str(here / "modules"),
    }  # fmt: skip
    command = [sys.executable, "-c", LOADS, "hub", "LlamaForCausalLM", "AutoModelForCausalLM"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["module"].startswith("transformers_modules.")
    assert found["equal"]
    assert found["runtimes"] == ([] if vendored else ["hf_rewrite_runtime"])


def test_the_files_say_what_they_are(package: Path, checkpoint: Path, here: Path) -> None:
    text = (package / "modeling_tiny.py").read_text()
    (package / "modeling_tiny.py").write_text("# Copyright 2020 Somebody. Licensed to all.\n" + text)
    done = rewrite("export", package, "--hub", "a/hub", "--checkpoint", checkpoint, "--vendor")
    assert done.code == 0, done.err
    assert "AutoModelForCausalLM → TinyLlamaForCausalLM" in done.out
    hub = here / "a" / "hub"
    modeling = (hub / "modeling_tiny.py").read_text()
    assert "# Copyright 2020 Somebody. Licensed to all." in modeling
    assert "rewrite.lock" not in modeling
    marks = {path.read_text().splitlines()[0] for path in hub.glob("rewrite_*.py")}
    assert "# Flat copy by hf-rewrite (Apache-2.0) of _runtime/linear/packing.py" in marks
    config = json.loads((hub / "config.json").read_text())
    assert config["note"] == "mine"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_tiny.TinyLlamaForCausalLM"
    assert config["auto_map"]["AutoConfig"] == "modeling_tiny.TinyLlamaConfig"
    assert "auto_map" not in json.loads((checkpoint / "config.json").read_text())


def test_transformers_finds_every_file_in_the_modeling_file(package: Path, here: Path) -> None:
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    assert rewrite("export", package, "--hub", "hub", "--vendor").code == 0
    others = {path.stem for path in (here / "hub").glob("*.py")} - {"modeling_tiny"}
    assert set(dynamic.get_relative_imports(here / "hub" / "modeling_tiny.py")) == others
    for path in (here / "hub").glob("*.py"):
        assert set(dynamic.get_relative_imports(path)) <= others


def test_the_whole_runtime_has_a_flat_form() -> None:
    names = [name for name in vendored_files.names() if "__init__" not in name]
    modeling = "\n".join(f"from .{VENDORED}.{name.replace('/', '.')} import __doc__" for name in names)
    files = {path: data.decode("utf-8") for path, data in vendored_files.files([modeling]).items()}
    flat = flat_files({"modeling_all.py": modeling, **files}, "modeling_all.py")
    assert {flat_name(f"{VENDORED}/{name}.py") for name in names} <= set(flat)
    for text in flat.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                wanted = [node.module] if node.module else [alias.name for alias in node.names]
                assert (node.level, {f"{name}.py" for name in wanted} <= set(flat)) == (1, True)


@pytest.mark.parametrize(
    ("statement", "flat"),
    [
        (
            "from ._runtime.room.first import first, third as x",
            "from .rewrite_runtime_room_first import first, third as x",
        ),
        (
            "from ._runtime.room.first import (\n    first,  # why\n)  # noqa",
            "from .rewrite_runtime_room_first import first  # noqa",
        ),
        ("from ._runtime.room.second import *", "from .rewrite_runtime_room_second import *"),
        ("from ._runtime.room import second as s", "from . import rewrite_runtime_room_second as s"),
        ("from . import mine", "from . import mine"),
        ("from .mine import a; b = a", "from .mine import a; b = a"),
        (
            "def f():\n    from ._runtime.room.first import first\n    return first",
            "def f():\n    from .rewrite_runtime_room_first import first\n    return first",
        ),
    ],
)
def test_an_import_of_a_folder_becomes_one_of_a_file(statement: str, flat: str) -> None:
    files = {
        "_runtime/__init__.py": "",
        "_runtime/room/__init__.py": "",
        "_runtime/room/first.py": "first = third = 1\n",
        "_runtime/room/second.py": "from ..room.first import first\n",
        "mine.py": "a = 1\n",
        "modeling_x.py": f'"""Doc."""\n{statement}\n',
    }
    assert flat_files(files, "modeling_x.py")["modeling_x.py"].endswith(f"\n{flat}\n")


@pytest.mark.parametrize("statement", ["from .gone import a", "from . import gone", "from ._runtime import gone"])
def test_an_import_of_nothing_has_no_flat_form(statement: str) -> None:
    with pytest.raises(NotFlat, match=r"modeling_x\.py imports"):
        flat_files({"_runtime/__init__.py": "", "modeling_x.py": statement}, "modeling_x.py")


def test_two_files_of_one_flat_name_are_refused() -> None:
    files = dict.fromkeys(("a/b_c.py", "a_b/c.py"), "x = 1\n")
    files["modeling_x.py"] = "from .a.b_c import x\nfrom .a_b.c import x as y\n"
    with pytest.raises(NotFlat, match="one name"):
        flat_files(files, "modeling_x.py")


def test_an_export_replaces_its_own_files_and_no_others(package: Path, checkpoint: Path, here: Path) -> None:
    arguments = ("export", package, "--hub", "hub", "--checkpoint", checkpoint, "--vendor")
    assert rewrite(*arguments).code == 0
    stale = here / "hub" / "rewrite_runtime_old.py"
    stale.write_text((here / "hub" / "rewrite_runtime_linear_packing.py").read_text())
    mine = here / "hub" / "rewrite_notes.py"
    mine.write_text("mine = 1\n")
    again = rewrite(*arguments)
    assert (again.code, "taken out, of an earlier export: rewrite_runtime_old.py" in again.out) == (0, True)
    assert mine.is_file()
    assert not stale.exists()
    for name in ("modeling_tiny.py", "rewrite_runtime_linear_packing.py", "config.json"):
        before = (here / "hub" / name).read_text()
        (here / "hub" / name).write_text("{}")
        refused = rewrite(*arguments)
        assert (refused.code, f"has a {name} that no export wrote: choose another --hub" in refused.err) == (2, True)
        assert (here / "hub" / name).read_text() == "{}"
        (here / "hub" / name).write_text(before)
    refused = rewrite("export", package, "--hub", package)
    assert (refused.code, "is a rewritten package itself" in refused.err) == (2, True)


def test_a_checkpoints_own_folder_may_take_the_files(package: Path, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    assert rewrite("export", package, "--hub", checkpoint, "--checkpoint", checkpoint).code == 0
    assert (checkpoint / "model.safetensors").read_bytes() == b"weights"
    assert "AutoModelForCausalLM" in json.loads((checkpoint / "config.json").read_text())["auto_map"]


def test_what_cannot_be_exported_is_said(package: Path, checkpoint: Path, here: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "x", "architectures": ["OtherForCausalLM"]}')
    refused = rewrite("export", package, "--hub", "hub", "--checkpoint", checkpoint)
    assert (refused.code, "does not define OtherForCausalLM" in refused.err) == (2, True)
    path = package / "modeling_tiny.py"
    path.write_text("from .gone import x\n" + path.read_text())
    refused = rewrite("export", package, "--hub", "hub", "--vendor")
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
