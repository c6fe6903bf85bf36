"""Everything that MODEL may be, against the installed transformers and against a small copy of its layout."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rewrite.errors import CheckpointNotUsable, MissingLibrary, SourceNotReadable, UnknownModel, UsageError
from rewrite.source.installed import copy_at, find_transformers
from rewrite.source.resolve import resolve, weights_fit

NEW_AUTO = {
    "auto_mappings.py": """
CONFIG_MAPPING_NAMES = {"llama": "LlamaConfig", "odd-name": "OddConfig", "two_text": "TwoTextConfig"}
SPECIAL_MODEL_TYPE_TO_MODULE_NAME = OrderedDict([("two_text", "two")])
""",
    "configuration_auto.py": """
from .auto_mappings import CONFIG_MAPPING_NAMES, SPECIAL_MODEL_TYPE_TO_MODULE_NAME
CONFIG_MAPPING_NAMES.update({"two_audio": "TwoAudioConfig", "hollow": "HollowConfig"})
CONFIG_MAPPING_NAMES = OrderedDict(**{"cousin": "LlamaConfig"}, **CONFIG_MAPPING_NAMES)
SPECIAL_MODEL_TYPE_TO_MODULE_NAME.update({"two_audio": "two"})
""",
}
OLD_AUTO = {
    "configuration_auto.py": """
CONFIG_MAPPING_NAMES = OrderedDict[str, str](
    [("llama", "LlamaConfig"), ("odd-name", "OddConfig"), ("two_text", "TwoTextConfig"),
     ("two_audio", "TwoAudioConfig"), ("hollow", "HollowConfig"), ("cousin", "LlamaConfig")]
)
SPECIAL_MODEL_TYPE_TO_MODULE_NAME = OrderedDict[str, str]([("two_text", "two"), ("two_audio", "two")])
""",
}
MODELS = {
    "llama/modeling_llama.py": "class LlamaModel: ...",
    "odd_name/modeling_odd_name.py": "class OddModel: ...",
    "two/modeling_first.py": "class TwoText(X):\n    config: TwoTextConfig",
    "two/modeling_second.py": "class TwoAudio(X):\n    config: TwoAudioConfig",
    "hollow/__init__.py": "",
}


@pytest.fixture(params=[OLD_AUTO, NEW_AUTO], ids=["5.0", "5.23"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A transformers package with the layout of two releases."""
    root = tmp_path / "transformers"
    for name, text in {"__init__.py": '__version__ = "5.1.2"\n'}.items():
        root.mkdir()
        (root / name).write_text(text)
    for folder, files in (("models/auto", request.param), ("models", MODELS)):
        for name, text in files.items():
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def test_model_types_are_read_from_the_mappings(copy: Path) -> None:
    found = copy_at(copy)
    assert found is not None
    assert found.version == "5.1.2"
    files = {name: model.path.name if model.path else None for name, model in found.model_types.items()}
    assert files == {
        "cousin": "modeling_llama.py",  # shares the configuration class
        "hollow": None,
        "llama": "modeling_llama.py",
        "odd-name": "modeling_odd_name.py",
        "two_audio": "modeling_second.py",
        "two_text": "modeling_first.py",
    }


def test_a_path_inside_a_copy_gets_its_module_name(copy: Path) -> None:
    source = resolve(str(copy / "models" / "two" / "modeling_first.py"))
    assert source.module == "transformers.models.two.modeling_first"
    assert source.transformers_version == "5.1.2"
    assert source.model_type == "two_text"


def test_every_way_to_name_llama_gives_the_same_source() -> None:
    by_type = resolve("llama")
    assert by_type.module == "transformers.models.llama.modeling_llama"
    for target in (by_type.module, str(by_type.path)):
        source = resolve(target)
        assert (source.sha256, source.module, source.model_type) == (by_type.sha256, by_type.module, "llama")


def test_nearly_every_installed_model_type_has_a_file() -> None:
    installed = find_transformers()
    assert installed is not None
    without = [name for name, model in installed.model_types.items() if model.path is None]
    assert len(installed.model_types) > 400
    assert len(without) < 12


def test_a_bare_word_is_a_model_type_before_it_is_a_folder(here: Path) -> None:
    (here / "llama").mkdir()
    assert resolve("llama").module is not None
    with pytest.raises(CheckpointNotUsable, match=r"no config\.json"):
        resolve("./llama")


def test_a_dotted_module_is_found_without_importing_it(here: Path) -> None:
    (here / "parent").mkdir()
    (here / "parent" / "__init__.py").write_text("raise RuntimeError('imported')")
    (here / "parent" / "modeling_x.py").write_text("raise RuntimeError('imported')")
    assert resolve("parent.modeling_x").path == here / "parent" / "modeling_x.py"


def test_other_files_are_named_as_what_they_are(here: Path) -> None:
    (here / "work.ipynb").write_text('{"cells": []}')  # which is Python, too
    (here / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"is a notebook: put the classes of the model into a Python file"):
        resolve("work.ipynb")
    with pytest.raises(UsageError, match="is no Python file"):
        resolve("notes.txt")
    with pytest.raises(SourceNotReadable, match="there is no such file"):
        resolve("nowhere.ipynb")
    with pytest.raises(UnknownModel, match="is named ORG/NAME, without the address"):
        resolve("https://huggingface.co/org/name")


def test_unknown_names_get_the_nearest(here: Path) -> None:
    with pytest.raises(UnknownModel, match="did you mean llama"):
        resolve("lama")
    for word, meant in (("Lama", "llama"), ("modeling_lama", "mllama"), ("LlamaForCausalML", "LlamaForCausalLM")):
        with pytest.raises(UnknownModel, match=meant):
            resolve(word)
    for word in ("no.such.module", "./nowhere", "a/b/c"):
        with pytest.raises(UnknownModel):
            resolve(word)


@pytest.mark.parametrize(
    ("word", "file"),
    [
        ("XLM-RoBERTa", "xlm_roberta/modeling_xlm_roberta.py"),
        ("xlm_roberta", "xlm_roberta/modeling_xlm_roberta.py"),
        ("data2vec_text", "data2vec/modeling_data2vec_text.py"),
        ("modernbert_decoder", "modernbert_decoder/modeling_modernbert_decoder.py"),
        ("Qwen3MoE", "qwen3_moe/modeling_qwen3_moe.py"),
        ("LLAMA", "llama/modeling_llama.py"),
        ("LlamaConfig", "llama/modeling_llama.py"),
        ("LlamaForCausalLM", "llama/modeling_llama.py"),
        ("modeling_llama", "llama/modeling_llama.py"),
        ("transformers.models.llama", "llama/modeling_llama.py"),
        ("transformers.LlamaForCausalLM", "llama/modeling_llama.py"),
    ],
)
def test_other_names_of_a_model(here: Path, word: str, file: str) -> None:
    source = resolve(word)
    assert source.path.as_posix().endswith(f"/models/{file}")
    assert source.model_type is not None
    assert source.target == word
    assert source.module == "transformers.models." + file.removesuffix(".py").replace("/", ".")


def test_a_model_type_without_a_file_says_so() -> None:
    with pytest.raises(UsageError, match="layoutxlm"):
        resolve("layoutxlm")


def test_a_model_type_that_is_another_model_s_class_names_it(tmp_path: Path) -> None:
    files = {
        "__init__.py": '__version__ = "6.0.0"\n',
        "models/auto/auto_mappings.py": 'CONFIG_MAPPING_NAMES = {"reed": "ReedConfig", "sedge": "SedgeConfig"}\n',
        "models/auto/modeling_auto.py": (
            'BARE_MAPPING_NAMES = {"reed": "ReedModel", "sedge": "ReedModel"}\n'
            'CAUSAL_MAPPING_NAMES = {"reed": "ReedForCausalLM", "sedge": "ReedForCausalLM"}\n'
            "BARE = _LazyAutoMapping(CONFIG_MAPPING_NAMES, BARE_MAPPING_NAMES)\n"
            "CAUSAL = _LazyAutoMapping(CONFIG_MAPPING_NAMES, CAUSAL_MAPPING_NAMES)\n"
            "class AutoModel:\n    _model_mapping = BARE\n"
            "class AutoModelForCausalLM:\n    _model_mapping = CAUSAL\n"
        ),
        "models/reed/modeling_reed.py": "class ReedModel: ...\nclass ReedForCausalLM: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    library = copy_at(tmp_path / "transformers")
    with pytest.raises(UsageError, match=r"'sedge' \(SedgeConfig\): its model is ReedForCausalLM"):
        resolve("sedge", library=library)
    folder = checkpoint(tmp_path / "c", model_type="sedge", architectures=["ReedForCausalLM"])
    with pytest.raises(UsageError, match=r"rewrite ReedForCausalLM"):
        resolve(str(folder), library=library)
    assert resolve("ReedForCausalLM", library=library).model_type == "reed"


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_names_its_model_type_and_architecture(here: Path) -> None:
    folder = checkpoint(here / "c", model_type="data2vec-text", architectures=["Data2VecTextForMaskedLM"])
    source = resolve(str(folder))
    assert source.path.name == "modeling_data2vec_text.py"
    assert source.checkpoint == folder
    other = checkpoint(here / "d", model_type="llama", architectures=["QwenForCausalLM"])
    with pytest.raises(CheckpointNotUsable, match="QwenForCausalLM, which is not in modeling_llama"):
        resolve(str(other))


def test_a_configuration_names_its_folder(here: Path) -> None:
    folder = checkpoint(here / "c", model_type="llama")
    assert resolve(str(folder / "config.json")).checkpoint == folder


def gguf(architecture: bytes) -> bytes:
    key = b"general.architecture"
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(architecture)) + architecture
    return b"GGUF" + struct.pack("<IQQ", 3, 10, 20) + text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gguf(b"qwen3"), "its architecture is 'qwen3': try `rewrite qwen3`"),
        (gguf(b"\xff"), "give its model type"),
        (b"", "give its model type"),
        (b"GGUF", "give its model type"),
    ],
)
def test_a_gguf_file_says_what_to_give(here: Path, data: bytes, said: str) -> None:
    (here / "g").mkdir()
    (here / "g" / "model.gguf").write_bytes(data)
    for target in ("g", "g/model.gguf"):
        with pytest.raises(UsageError, match=said):
            resolve(target)
    checkpoint(here / "c", model_type="llama")
    (here / "c" / "model.gguf").write_bytes(data)
    assert resolve("./c").model_type == "llama"


def test_weights_are_no_model(here: Path) -> None:
    (here / "model.safetensors").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="give the folder that it lies in"):
        resolve("model.safetensors")


def test_a_checkpoint_with_its_own_code_is_read_not_run(here: Path) -> None:
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    folder = checkpoint(here / "c", model_type="own", auto_map=auto_map)
    with pytest.raises(CheckpointNotUsable, match=r"modeling_own\.py, which is not there"):
        resolve(str(folder))
    (folder / "modeling_own.py").write_text("raise RuntimeError('run')")
    source = resolve(str(folder))
    assert source.path.name == "modeling_own.py"
    assert source.remote_code


def test_a_known_model_type_wins_over_own_code_unless_trusted(here: Path) -> None:
    folder = checkpoint(here / "c", model_type="llama", auto_map={"AutoModel": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("x = 1")
    assert resolve(str(folder)).path.name == "modeling_llama.py"
    assert resolve(str(folder), trust_remote_code=True).path.name == "modeling_own.py"


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": "nosuchmodel"}'])
def test_a_broken_configuration_is_one_message(here: Path, config: str) -> None:
    (here / "c").mkdir()
    (here / "c" / "config.json").write_text(config)
    with pytest.raises(CheckpointNotUsable, match=r"config\.json"):
        resolve("./c")


def test_weights_of_another_architecture_are_refused(here: Path) -> None:
    other = checkpoint(here / "c", model_type="qwen3")
    with pytest.raises(CheckpointNotUsable, match="holds a 'qwen3' model and llama is 'llama'"):
        weights_fit(resolve("llama"), other)
    weights_fit(resolve("llama"), checkpoint(here / "d", model_type="llama", architectures=["LlamaForCausalLM"]))


def test_newlines_and_tabs_are_kept_and_a_byte_order_mark_is_not(here: Path) -> None:
    path = here / "modeling_x.py"
    path.write_bytes(b"\xef\xbb\xbfif x:\r\n\ty = 1\r\n")
    assert resolve(str(path)).text == "if x:\r\n\ty = 1\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = 1\ny = '\xff'\n", "line 2 is not UTF-8"),
        (b"# -*- coding: latin-1 -*-\nx = 1\n", "declares the encoding iso-8859-1"),
        (b"# -*- coding: nonsense -*-\nx = 1\n", "unknown encoding"),
    ],
)
def test_other_encodings_are_refused(here: Path, data: bytes, message: str) -> None:
    path = here / "modeling_x.py"
    path.write_bytes(data)
    with pytest.raises(SourceNotReadable, match=message):
        resolve(str(path))


def test_without_transformers_a_file_still_resolves(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewrite.source.resolve.find_transformers", lambda: None)
    assert resolve("modeling_tiny.py").transformers_version is None
    with pytest.raises(MissingLibrary, match="--transformers VERSION"):
        resolve("llama")
