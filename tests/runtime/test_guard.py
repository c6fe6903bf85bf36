"""What a package takes from transformers is compared at its import: a change is said once, what cannot work raises."""

import ast
import importlib
import json
import sys
import types
import warnings
from pathlib import Path

import pytest
import transformers

from hf_rewrite_runtime import __version__ as runtime_version
from hf_rewrite_runtime.compat import fingerprints, guard
from hf_rewrite_runtime.launching import card_tables
from rewrite.package import definitions

ROOT = Path(transformers.__file__).parent
MASK = "masking_utils:create_causal_mask"
PACKAGE = "optimized_llama"
MODULE = """
@wrapped(
    "x",
)
def attend(query, *, scale=1.0, **kwargs):
    # why
    return query * scale


class Layers:
    kept: int = 0

    def __init__(self, config):
        self.config = config

    def update(
        self,
        key,
        value=None,  # (
    ):
        return key

    def other(self):
        return 1


def last(x):
    return x
"""
SAME = {
    "comment": ("# why", "# because"),
    "annotation": ("def attend(query,", "def attend(query: int,"),
    "layout": ("    return query * scale", "    return (\n        query * scale\n    )"),
    "another definition": ("def last(x)", "def new():\n    pass\n\n\ndef last(x)"),
}
OTHER = {
    "default": ("attend", ("scale=1.0", "scale"), guard.fingerprints.OTHER_PARAMETERS),
    "parameter": ("attend", ("def attend(query", "def attend(q"), guard.fingerprints.OTHER_PARAMETERS),
    "code": ("attend", ("query * scale", "query / scale"), guard.fingerprints.OTHER_CODE),
    "decorator": ("attend", ('"x"', '"y"'), guard.fingerprints.OTHER_CODE),
    "method": ("Layers", ("value=None", "value"), guard.fingerprints.OTHER_PARAMETERS),
    "no method": ("Layers", ("def update", "def renew"), guard.fingerprints.OTHER_PARAMETERS),
    "field": ("Layers", ("kept: int", "held: int"), guard.fingerprints.OTHER_PARAMETERS),
    "unused method": ("Layers", ("return 1", "return 2"), guard.fingerprints.OTHER_CODE),
    "name": ("last", ("def last", "def first"), guard.fingerprints.GONE),
}


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """Write what the lock of a package says of the libraries that it was made with."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    module = types.ModuleType(PACKAGE)
    module.__file__ = str(folder / "__init__.py")
    monkeypatch.setitem(sys.modules, PACKAGE, module)

    def write(version="4.99.0", runtime=runtime_version, **guarded):
        lock = {"source": {"transformers": version}, "guard": guarded, "runtime": {"version": runtime}}
        (folder / "rewrite.lock").write_text(json.dumps(lock))

    write()
    return write


@pytest.fixture
def imported(locked):
    """Import a package whose lock says this."""

    def run(**said):
        locked(**said)
        with guard.made_from(PACKAGE):
            return True

    return run


def mask(**changes):
    """The fingerprint of a function as it is, or as it was before a change."""
    file, name, whole, parameters, code = definitions.of_names(ROOT, [MASK], ())[MASK].split()
    parts = {"file": file, "name": name, "whole": whole, "parameters": parameters, "code": code} | changes
    return {MASK: " ".join(parts.values())}


def of_module(folder, text):
    (folder / "attention.py").write_text(text)
    return definitions.of_names(folder, ["attention:attend", "attention:Layers", "attention:last"], ["update"])


@pytest.mark.parametrize("change", SAME)
def test_what_only_looks_different_is_no_change(change, tmp_path):
    taken = of_module(tmp_path, MODULE)
    assert len(taken) == 3
    assert MODULE.replace(*SAME[change]) != MODULE
    (tmp_path / "attention.py").write_text(MODULE.replace(*SAME[change]))
    assert changes(tmp_path, taken) == {}


@pytest.mark.parametrize("change", OTHER)
def test_what_changes(change, tmp_path):
    name, replaced, kind = OTHER[change]
    taken = of_module(tmp_path, MODULE)
    assert MODULE.replace(*replaced) != MODULE
    (tmp_path / "attention.py").write_text(MODULE.replace(*replaced))
    assert changes(tmp_path, taken) == {f"attention:{name}": kind}


def test_of_a_long_class_the_methods_that_are_used_count(tmp_path):
    long = "\n".join(f"    def m{number}(self):\n        return {number}" for number in range(fingerprints.SHORT))
    text = MODULE.replace("    def other", f"{long}\n\n    def other")
    taken = of_module(tmp_path, text)
    (tmp_path / "attention.py").write_text(text.replace("return 77", "return 78"))
    assert changes(tmp_path, taken) == {}
    (tmp_path / "attention.py").write_text(text.replace("value=None", "values=None"))
    assert changes(tmp_path, taken) == {"attention:Layers": fingerprints.OTHER_PARAMETERS}


def changes(folder, taken):
    """Return what became of it in files that are not imported."""
    return fingerprints.changes(fingerprints.Files(folder), taken, definitions.elsewhere)


def test_a_definition_that_moved_is_followed(tmp_path):
    taken = of_module(tmp_path, MODULE)
    (tmp_path / "elsewhere.py").write_text(MODULE)
    (tmp_path / "attention.py").write_text("from .elsewhere import Layers, attend, last\n")
    assert changes(tmp_path, taken) == {}


def test_a_definition_that_moved_is_found_by_what_was_imported():
    files = fingerprints.Files(ROOT)
    text = files.definition("masking_utils.py", "create_causal_mask")
    assert text is not None
    assert guard._moved(files, MASK) == text
    assert guard._moved(files, "modeling_utils:create_causal_mask") is None  # which has it not
    assert guard._moved(files, ":PreTrainedModel") == files.definition("modeling_utils.py", "PreTrainedModel")
    assert guard._moved(files, "nowhere:create_causal_mask") is None
    assert guard._moved(files, "utils:is_torch_available") == files.definition(
        "utils/import_utils.py", "is_torch_available"
    )


def test_what_has_not_changed_imports_without_a_word(imported):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported(imported=mask())
        assert imported(imported=mask(whole="0" * 8))
        assert imported(version=transformers.__version__, imported=mask(whole="0" * 8, code="0" * 8))


def test_a_change_warns_once_and_says_what_to_run(imported):
    with pytest.warns(guard.TransformersChanged, match="other code in create_causal_mask") as said:
        assert imported(imported=mask(whole="0" * 8, code="0" * 8))
    assert len(said) == 1
    text = str(said[0].message)
    for piece in ("4.99.0", transformers.__version__, "rewrite sync optimized_llama", "optimized_llama.selftest()"):
        assert piece in text
    assert said[0].filename == __file__ or "pytest" in said[0].filename


def test_strict_raises_and_off_says_nothing(imported, monkeypatch):
    changed = mask(whole="0" * 8, parameters="0" * 8)
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "strict")
    with pytest.raises(guard.TransformersMoved, match="other parameters of create_causal_mask"):
        imported(imported=changed)
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported(imported=changed)
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "loud")
    with pytest.raises(ValueError, match="REWRITE_GUARD is 'loud': it may be warn, strict or off"):
        imported()


def test_a_function_that_no_longer_takes_what_it_is_given_raises_with_the_way_out():
    called = {MASK: ["config", "attention_mask"]}
    fits = fingerprints.misfits(fingerprints.Files(ROOT), mask(), called)
    assert fits == []
    called = {"attention:last": ["x", "gone_keyword"]}
    taken = {"attention:last": "attention.py last 0 0 0"}
    assert fingerprints.misfits(fingerprints.Files(ROOT), taken, called) == []  # the import says that it is gone


@pytest.mark.parametrize("version", ["0.0.7", "1.0.0"])
def test_a_runtime_of_another_minor_version_is_said_once_and_raises_where_it_is_asked_to(
    imported, monkeypatch, version
):
    with pytest.warns(guard.RuntimeMoved) as said:
        assert imported(runtime=version, version=transformers.__version__)
    (text,) = {str(one.message) for one in said}
    for piece in (version, runtime_version, f"rewrite sync {PACKAGE}", f"hf-rewrite-runtime~={version}"):
        assert piece in text
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "strict")
    with pytest.raises(ImportError, match="is installed: rewrite sync"):
        imported(runtime=version)


def test_a_runtime_of_another_patch_and_a_package_without_a_lock_are_not_spoken_of(imported, tmp_path, monkeypatch):
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "strict")
    assert imported(runtime=f"{runtime_version}.7", version=transformers.__version__)
    (tmp_path / PACKAGE / "rewrite.lock").unlink()
    with guard.made_from(PACKAGE):
        pass


def test_a_package_that_ships_tables_has_its_say(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(card_tables, "_shipped", [])
    assert imported(version=transformers.__version__)
    assert card_tables.folders() == [card_tables.folder()]
    for folder, entry in ((tmp_path / PACKAGE, [1]), (tmp_path / "own", [2])):
        folder.mkdir(exist_ok=True)
        (folder / card_tables.TUNED).write_text(json.dumps({"chip": {"linear": entry, str(entry): None}}))
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path / "own"))
    assert imported(version=transformers.__version__)
    assert card_tables.read(card_tables.TUNED) == {
        "chip": {"linear": [2], "[1]": None, "[2]": None}
    }  # the user's goes before
    card_tables.forget()


def test_a_keyword_that_is_gone(imported, tmp_path, monkeypatch):
    taken = of_module(tmp_path, MODULE)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(transformers, "__file__", str(tmp_path / "__init__.py"))
    assert imported(imported=taken, called={"attention:last": ["x"]})
    with pytest.raises(guard.TransformersMoved, match=r"attention\.last takes no gone") as error:
        imported(imported=taken, called={"attention:last": ["gone", "x"]})
    assert "Make it anew: rewrite sync optimized_llama, or pip install transformers==4.99.0" in str(error.value)


def test_a_name_that_is_gone_is_the_same_error(locked):
    with pytest.raises(guard.TransformersMoved, match="cannot import name 'gone_helper'"), guard.made_from(PACKAGE):
        from transformers.utils import gone_helper  # noqa: F401


def test_an_error_that_is_not_about_transformers_passes_through(locked):
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), guard.made_from(PACKAGE):
        importlib.import_module("no_such_library")
    assert "no_such_library" not in sys.modules


def test_definitions_are_parsed_alone(monkeypatch):
    """Parsing the files whole takes seconds at every import."""
    parse, parsed = ast.parse, []
    monkeypatch.setattr(fingerprints.ast, "parse", lambda text, *rest: parsed.append(len(text)) or parse(text, *rest))
    names = ["cache_utils:Cache", "generation:GenerationMixin", "modeling_utils:PreTrainedModel", MASK]
    taken = definitions.of_names(ROOT, names, ["update", "generate", "post_init"])
    parsed.clear()  # what making a package reads, files whole
    changed = {name: " ".join([*text.split()[:2], "0" * 8, *text.split()[3:]]) for name, text in taken.items()}
    assert (len(changed), changes(ROOT, changed)) == (4, {})
    assert 0 < max(parsed) < max((ROOT / text.split()[0]).stat().st_size for text in taken.values()) / 2


@pytest.mark.parametrize("folder", ["models", "nets"])
def test_a_package_in_a_folder_of_models_is_imported_without_a_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """transformers takes `models/NAME` for one of its own, and prints that it knows no configuration of it."""
    package = tmp_path / folder / "fast_one"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from hf_rewrite_runtime.compat.guard import made_from\n"
        "with made_from(__name__):\n    from . import modeling_fast\n"
    )
    (package / "modeling_fast.py").write_text(
        "from transformers.utils import auto_docstring\n"
        "print('said', end=' ')\nprint('before')\n\n\nclass FastModel:\n    @auto_docstring\n"
        "    def forward(self, input_ids=None):\n        pass\n\n\nprint('after')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    importlib.import_module("fast_one")
    for name in ("fast_one.modeling_fast", "fast_one"):
        del sys.modules[name]
    assert capsys.readouterr().out == "said before\nafter\n"
