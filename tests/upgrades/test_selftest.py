"""`selftest()` of a package: passes on what computes the same, and notices what does not."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import rewrite

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rewrite.verify import selftest_run  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of llama in a folder of its own."""
    from rewrite.cli import run

    folder = tmp_path_factory.mktemp("selftest")
    arguments = ["llama", "--out", str(folder / "tested_llama"), "--no-verify", "--diff", "none"]
    assert run([*arguments, "--only", "fuse_qkv", "--only", "fuse_rms_norm"]) == 0
    return folder / "tested_llama"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of bert in a folder of its own."""
    from rewrite.cli import run

    folder = tmp_path_factory.mktemp("selftest") / "tested_bert"
    assert run(["bert", "--out", str(folder), "--no-verify", "--diff", "none", "--only", "fuse_qkv"]) == 0
    return folder


@pytest.fixture
def package(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A copy under a name of its own, importable."""
    name = f"tested_{abs(hash(request.node.name))}"
    shutil.copytree(made, tmp_path / name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def imported(package: Path) -> types.ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(package.name)


def plant(package: Path, old: str, new: str, file: str = "modeling_llama.py") -> None:
    path = package / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_it_passes_and_says_what_it_compared(package: Path) -> None:
    random_state = torch.get_rng_state()
    result = imported(package).selftest()
    assert (result.model, result.tensors, result.tokens) == ("LlamaForCausalLM", 21, 8)
    assert result.difference <= 1e-5
    assert set(result.libraries) == {"torch", "transformers"}
    assert "21 tensors arrived whole" in str(result)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("q, k, v = packed_linear(", "q, v, k = packed_linear(", "differs by"),
        ("self.scaling = self.head_dim**-0.5", "self.scaling = self.head_dim**-0.4", "differs by"),
        ("self.variance_epsilon = eps", "self.variance_epsilon = 1e-9", "differs by"),
        ("self.o_proj = nn.Linear", "self.out_proj = self.o_proj = nn.Linear", "did not load the checkpoint whole"),
    ],
    ids=["keys and values", "scaling", "eps", "names"],
)
def test_a_planted_bug_is_noticed(package: Path, old: str, new: str, said: str) -> None:
    plant(package, old, new)
    module = imported(package)
    with pytest.raises(selftest_run.SelfTestFailed, match=said):
        module.selftest()


def test_a_tensor_that_arrives_changed_is_noticed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        package,
        "        self.post_init()",
        "        self.post_init()\n        self.register_load_state_dict_post_hook(lambda *a: None)",
    )
    module = imported(package)
    loaded = selftest_run._loaded

    def changes(model_class, checkpoint):  # type: ignore[no-untyped-def]
        model = loaded(model_class, checkpoint)
        if model_class.__module__.startswith(package.name):
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        return model

    monkeypatch.setattr(selftest_run, "_loaded", changes)
    with pytest.raises(selftest_run.SelfTestFailed, match=r"up_proj\.weight is not what the original loads"):
        module.selftest()


def test_a_checkpoint_of_the_users(package: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    result = imported(package).selftest(str(tmp_path / "checkpoint"))
    assert (result.tensors, result.model) == (12, "LlamaForCausalLM")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertModel", "BertForSequenceClassification"])
def test_a_checkpoint_of_an_encoder_is_loaded_into_its_own_class(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    getattr(transformers, name)(config).save_pretrained(tmp_path / "checkpoint")
    monkeypatch.syspath_prepend(encoder.parent)
    result = imported(encoder).selftest(str(tmp_path / "checkpoint"))
    assert result.model == name


def test_a_checkpoint_of_another_model_is_named(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["OtherModel"]}')
    monkeypatch.syspath_prepend(encoder.parent)
    with pytest.raises(AssertionError, match="the checkpoint is one of OtherModel, which this package does not have"):
        imported(encoder).selftest(str(tmp_path))


def test_a_file_from_elsewhere_has_no_installed_original(tmp_path: Path) -> None:
    from .conftest import FIXTURE

    (tmp_path / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    arguments = (tmp_path / "modeling_tiny.py", "--out", tmp_path / "plain", "--no-verify", "--diff", "none")
    assert rewrite(*arguments, "--only", "fuse_qkv").code == 0
    done = subprocess.run(
        [sys.executable, "-c", "import plain; plain.selftest()"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "made from a file outside transformers" in done.stderr


def test_without_the_tool_it_says_what_to_install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(package)
    monkeypatch.setitem(sys.modules, "rewrite.verify.selftest_run", None)
    with pytest.raises(ModuleNotFoundError, match="pip install hf-rewrite"):
        module.selftest()


def test_a_model_that_reads_no_text_wants_a_checkpoint() -> None:
    from transformers import ViTModel

    with pytest.raises(selftest_run.NoSmallModel, match=r"it reads pixel_values.*selftest\('FOLDER'\)"):
        selftest_run._random(ViTModel)
