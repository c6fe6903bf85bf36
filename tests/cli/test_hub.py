"""Models of the Hub by their names, from a cache as huggingface_hub lays it out; there is no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.errors import MissingLibrary, NeighbourMissing, NotOnTheHub, UsageError
from rewrite.package.lock import read_lock
from rewrite.source import hub_model
from rewrite.source.resolve import resolve

constants = pytest.importorskip("huggingface_hub.constants")
REMOTE = Path(__file__).parents[2] / "fixtures" / "remote"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OWN = {"model_type": "cedar", "auto_map": {"AutoModel": "modeling_cedar.CedarModel"}}


class Cache:
    """A cache that holds what was downloaded before."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, name: str, config: dict[str, object], *files: str, revision: str = "main") -> Path:
        """Put `config.json` and copies of fixtures there, as one commit of `revision`."""
        repository = self.folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(COMMIT)
        (snapshot / "config.json").write_text(json.dumps(config))
        for file in files:
            shutil.copy(REMOTE / file, snapshot)
        return snapshot


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Cache:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return Cache(folder)


def test_a_model_of_transformers_is_found_by_its_configuration(here: Path, cache: Cache) -> None:
    cache("some-org/Llama-7b.v1", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    source = resolve("some-org/Llama-7b.v1")
    assert source.module == "transformers.models.llama.modeling_llama"
    assert (source.remote_code, source.origin) == (False, None)


def test_another_revision(here: Path, cache: Cache) -> None:
    cache("org/name", {"model_type": "llama"}, revision="v2")
    assert resolve("org/name", revision="v2").model_type == "llama"
    with pytest.raises(NotOnTheHub, match="the Hub cannot be reached"):
        resolve("org/name")


def test_its_own_code_is_downloaded_where_it_is_trusted(here: Path, cache: Cache) -> None:
    snapshot = cache("org/cedar", OWN, *(path.name for path in REMOTE.glob("*cedar*.py")))
    with pytest.raises(UsageError, match=r"modeling_cedar\.py: --trust-remote-code"):
        resolve("org/cedar")
    source = resolve("org/cedar", trust_remote_code=True)
    assert source.path == snapshot / "modeling_cedar.py"
    assert (source.remote_code, source.origin) == (True, f"hf://org/cedar@{COMMIT}/modeling_cedar.py")
    cache("org/other", {**OWN, "auto_map": {"AutoModel": "org/cedar--modeling_cedar.CedarModel"}})
    other = resolve("org/other", trust_remote_code=True)
    assert (other.path, other.remote_code, other.origin) == (source.path, True, source.origin)


def test_a_package_of_it_needs_neither_cache_nor_network(here: Path, cache: Cache) -> None:
    cache("org/cedar", OWN, *(path.name for path in REMOTE.glob("*cedar*.py")))
    done = rewrite("org/cedar", "--out", "out", "--no-verify", "--trust-remote-code")
    assert done.code == 0, done.err
    shutil.rmtree(cache.folder)
    assert read_lock(here / "out").source.target == f"hf://org/cedar@{COMMIT}/modeling_cedar.py"
    assert rewrite("check", "out").code == 0
    assert rewrite("diff", "out", "--diff", "stat").code == 0
    path = here / "out" / "modeling_cedar.py"
    path.write_text(path.read_text() + "\nMINE = 1\n")
    (here / "out" / "configuration_cedar.py").unlink()
    assert rewrite("sync", "out").code == 0
    assert "MINE = 1" in path.read_text()
    assert rewrite("check", "out", "--full").code == 0
    refused = rewrite("verify", "out")
    assert (refused.code, "--trust-remote-code" in refused.err) == (2, True)


def test_what_cannot_be_had_is_said_in_one_line(here: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    done = rewrite("org/name", "--out", "o", "--no-verify")
    assert done.code == 2
    (said,) = done.said
    assert "hf download org/name --include config.json '*.py' --local-dir name" in said
    cache("org/cedar", OWN, "modeling_cedar.py")
    with pytest.raises(NotOnTheHub, match=r"configuration_cedar\.py is not in its cache"):
        resolve("org/cedar", trust_remote_code=True)
    there = hub_model.file

    def lacking(name: str, path: str, revision: str | None) -> Path:
        if path.startswith("configuration"):
            raise NotOnTheHub(name, f"it has no {path}", missing=path)
        return there(name, path, revision)

    monkeypatch.setattr(hub_model, "file", lacking)
    with pytest.raises(NeighbourMissing, match=r"org/cedar/modeling_cedar\.py says .* no configuration_cedar\.py"):
        resolve("org/cedar", trust_remote_code=True)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingLibrary, match=r"hf-rewrite\[hub\]"):
        resolve("org/name")


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        ("org/name", True),
        ("org/Name-1.5_b", True),
        ("./a/b", False),
        ("a/b/c", False),
        ("a/m.py", False),
        ("a/", False),
    ],
)
def test_names_of_the_hub(word: str, is_one: bool) -> None:
    assert hub_model.is_name(word) == is_one
