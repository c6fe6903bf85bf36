"""`rewrite compile`: kernels compiled ahead of time are those that a launch on the card asks Triton's cache for."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import rewrite
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.launching import card_tables, launch, precompiled
from rewrite.errors import RewriteError
from rewrite.kernels import ahead, package_work
from rewrite.kernels.package_work import shortened

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

JIT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch, triton
from rewrite.benchmark import benchmark_models as models
from rewrite.kernels import package_work
from rewrite.kernels.cards import CARDS
from rewrite.kernels.chips import CHIPS
from rewrite.kernels.compile_work import Driver
from rewrite.measure.presets import config_for
from rewrite.measure.runtime_part import runtime_part

folder, cache, rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
triton.runtime.driver.set_active(Driver(CHIPS["sm_90"]))
subject = models.load(folder)
name = sys.modules[subject.rewritten.__module__].__package__
launch, shipped = runtime_part(name, "launching/launch"), runtime_part(name, "launching/precompiled")
launch._pretended = launch.Target("cuda", "sm_90", 132, CHIPS["sm_90"].shared_of_group)
package_work._take_tables(name, CARDS["H100"].device)
shipped.copy(folder / "kernels" / shipped.name_for("sm_90", triton.__version__), cache)
config = config_for(subject.original.config_class, "tiny", num_hidden_layers=3)
model = models.build(subject.rewritten, config, "bfloat16", "cpu")
found = {"hits": [], "misses": []}
def listen(*, src, metadata, cache_hit, **rest):
    found["hits" if cache_hit else "misses"].append(src.name)
triton.knobs.compilation.listener = listen
with torch.no_grad():
    for job in package_work._launches(name, model, rows, 512).values():
        job()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rewrite.cli import run

    folder = tmp_path_factory.mktemp("packages") / "llama"
    assert run(["llama", "--out", str(folder), "--no-verify", "--quiet"]) == 0
    return folder


def jit(package: Path, cache: Path, rows: int) -> dict[str, list[str]]:
    """Let Triton compile what a whole model with weights launches; return what it found in its cache, and did not."""
    cache.mkdir()
    command = [sys.executable, "-c", JIT, str(package), str(cache), str(rows)]
    environment = ahead.kernel_run.environment(str(cache))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_triton
def test_a_launch_finds_what_was_compiled_ahead(package: Path, tmp_path: Path) -> None:
    asked = (
        "compile",
        str(package),
        "--target",
        "H100",
        "--shape",
        "tiny",
        "--context",
        "512",
        "--ship",
        "--json",
        "-",
    )
    shown = rewrite(*asked)
    assert shown.code == 0, shown.err
    ((folder, names),) = json.loads(shown.out)["folders"].items()
    assert Path(folder).parent == package / "kernels"
    assert {"rms_norm", "gated", "decode_attention", "best_of_block"} <= set(names)
    assert str(tmp_path) not in "".join(path.read_text("utf-8") for path in Path(folder).glob("*/__grp__*"))
    found = jit(package, tmp_path / "cache", 1)
    assert found["misses"] == []
    assert len(found["hits"]) >= len(set(names))
    assert jit(package, tmp_path / "other", 2)["misses"]  # which were not asked for


@needs_triton
def test_into_a_cache_of_triton(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "checkpoint").mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    LlamaConfig(**sizes, vocab_size=128, eos_token_id=[3, 4]).save_pretrained(tmp_path / "checkpoint")
    asked = ("compile", str(package), "--target", "H200", "--weights", str(tmp_path / "checkpoint"))
    before = sorted(package.rglob("*"))
    shown = rewrite(*asked, "--context", "256", "--cache", str(cache), "--json", "-")
    assert shown.code == 0, shown.err
    assert sorted(package.rglob("*")) == before
    ((_, names),) = json.loads(shown.out)["folders"].items()
    assert sorted(package_work.names_in(cache)) == sorted(names)  # as they are read where a GPU has compiled them
    groups = list(cache.glob("*/__grp__*.json"))
    assert groups
    for group in groups:
        assert all(Path(path).is_file() for path in json.loads(group.read_text())["child_paths"].values())
    assert sum("take_best" in group.name for group in groups) == 2  # without ends, and with two


def test_what_it_wants_to_be_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = rewrite("compile", str(package), "--target", "H100")
    assert shown.code == 2
    assert "--weights DIR or --shape" in shown.err

    def fails(*given: object) -> object:
        raise RewriteError("the kernels of the package could not be compiled for H100: no word")

    monkeypatch.setattr(ahead, "compile_for", fails)
    shown = rewrite("compile", str(package), "--target", "H100", "--shape", "tiny")
    assert shown.code == 1
    assert "could not be compiled for H100: no word" in shown.err


@needs_triton
def test_a_folder_is_named_for_the_chip_that_was_found(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REWRITE_TABLES", str(tmp_path))
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(ahead, "_compiled", lambda *given: iter(found))
    shown = rewrite("compile", str(package), "--shape", "tiny")
    assert shown.code == 1
    assert "could not be compiled for this GPU: its prompts and steps launch none" in shown.err
    assert not list(tmp_path.iterdir())
    found += [("rms_norm", "sm_103")]
    assert rewrite("compile", str(package), "--shape", "tiny").code == 0
    assert [path.name.split("-")[0] for path in (tmp_path / "kernels").iterdir()] == ["sm_103"]


@needs_triton
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_what_is_linked_with_a_driver_that_is_not_here_asks_for_it(tmp_path: Path) -> None:
    environment = ahead._building(tmp_path)
    assert environment["TRITON_LIBCUDA_PATH"] == str(tmp_path)
    (tmp_path / "uses.c").write_text("int cuInit(unsigned); int uses(void) { return cuInit(0); }")
    for library in ("-l:libcuda.so.1", "-lcuda"):  # as Triton 3.6 and 3.4 ask for it
        command = ["gcc", "uses.c", "-shared", "-fPIC", "-o", "uses.so", "-L.", library]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert b"libcuda.so.1\0" in (tmp_path / "uses.so").read_bytes()


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_for_the_gpu_that_is_here(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "llama"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("kernels"))
    shown = rewrite("compile", str(copy), "--shape", "tiny", "--context", "512", "--ship", "--json", "-")
    assert shown.code == 0, shown.err
    ((folder, names),) = json.loads(shown.out)["folders"].items()
    assert Path(folder).name.startswith(launch.target(torch.cuda.current_device()).arch)
    assert {"rms_norm", "gated", "decode_attention", "best_of_block"} <= set(names)


def test_a_chip_stands_for_its_cards() -> None:
    assert [card.name for card in ahead.cards_of("sm_90")] == ["H100", "H200"]
    assert [card.name for card in ahead.cards_of("B200")] == ["B200"]
    assert [card.processors for card in ahead.cards_of("sm_80")] == [108]


def test_layers_of_every_kind_are_kept() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    with torch.device("meta"):
        config = LlamaConfig(**sizes, num_hidden_layers=9, vocab_size=16)
        assert shortened(config, LlamaForCausalLM(config)).num_hidden_layers == 2
        mixed = Gemma3TextConfig(**sizes, head_dim=16, num_hidden_layers=14, vocab_size=16)
        short = shortened(mixed, Gemma3ForCausalLM(mixed))
    assert short.num_hidden_layers == 6
    assert short.layer_types == mixed.layer_types[:6]
    assert mixed.num_hidden_layers == 14


def kernels_in(folder: Path, version: str = "9.9.9") -> Path:
    """Write a kernel as Triton would, in the folder of a package."""
    kernel = folder / precompiled.name_for("sm_90", version) / "KEY"
    kernel.mkdir(parents=True)
    (kernel / "k.cubin").write_bytes(b"code")
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": "k.cubin"}}))
    return kernel.parent


def test_kernels_go_to_the_cache_once(tmp_path: Path) -> None:
    source, cache = kernels_in(tmp_path / "kernels"), tmp_path / "cache"
    (cache / "KEY").mkdir(parents=True)  # as Triton leaves it behind where it has looked in vain
    assert precompiled.copy(source, cache) == 1
    group = json.loads((cache / "KEY" / "__grp__k.json").read_text())
    assert Path(group["child_paths"]["k.cubin"]).read_bytes() == b"code"
    assert Path(group["child_paths"]["k.cubin"]).parent == cache / "KEY"
    assert sorted(path.name for path in (cache / "KEY").iterdir()) == ["__grp__k.json", "k.cubin"]
    assert precompiled.copy(source, cache) == 0


@needs_triton
def test_what_became_of_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setenv("REWRITE_TABLES", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def told(arch: str) -> str:
        card_tables.forget()
        return precompiled.use(arch)

    assert told("sm_90") == ""
    old = kernels_in(tmp_path / "kernels", "3.0.0")
    assert f"{old.name}; not used, since this is sm_90-triton-{triton.__version__}" in told("sm_90")
    kernels_in(tmp_path / "kernels", triton.__version__)
    assert told("sm_90").endswith("1 of them new to Triton's cache")
    assert told("sm_90").endswith("0 of them new to Triton's cache")
    assert "not used, since this is sm_100" in told("sm_100")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert "not used: [Errno" in told("sm_90")
    card_tables.forget()


def test_a_launch_without_a_gpu_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompiled, "use", lambda arch: pytest.fail("there is no chip"))
    launch._use_shipped(torch.ones(1))
    assert launch.describe(torch.nn.Linear(1, 1)) == []
