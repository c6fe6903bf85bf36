"""A package refuses a transformers that it was not made from."""

import hashlib
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import transformers

from rewrite.runtime.origin import definitions, guard

MODULE = "transformers.models.llama.modeling_llama"
FILE = Path(transformers.__file__).parent / "models" / "llama" / "modeling_llama.py"
MADE = {
    "package": "optimized_llama",
    "module": MODULE,
    "sha256": hashlib.sha256(FILE.read_bytes()).hexdigest(),
    "version": transformers.__version__,
    "command": "rewrite llama --out optimized_llama --force",
}


def imported(**changes):
    with guard.made_from(**{**MADE, **changes}):
        return True


def test_the_same_file_imports_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sha256": "0" * 64}, "is not the one of"),
        ({"module": "transformers.models.llama.modeling_gone"}, "it has no transformers.models.llama.modeling_gone"),
    ],
)
def test_another_file_is_one_error_that_names_the_command(changes, what):
    with pytest.raises(guard.TransformersMoved, match="rewrite llama --out optimized_llama --force") as error:
        imported(**changes)
    assert what in str(error.value)
    assert guard.ENVIRONMENT_VARIABLE in str(error.value)


def test_the_environment_variable_overrides(monkeypatch):
    monkeypatch.setenv(guard.ENVIRONMENT_VARIABLE, "1")
    assert imported(sha256="0" * 64)


def test_a_file_that_only_looks_different_is_the_same():
    code = definitions.of_module(FILE.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported(sha256="0" * 64, code=code)
        assert imported(version="4.99.0")
    with pytest.raises(guard.TransformersMoved, match="is not the one of"):
        imported(sha256="0" * 64, code=definitions.of_module(FILE.read_text().replace("1e-6", "1e-5")))


def test_a_function_that_the_package_stands_in_for_warns_once_where_it_has_changed():
    name = "integrations.sdpa_attention:sdpa_attention_forward"
    now = definitions.of_functions(FILE.parents[2], [name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported(version="4.99.0", replaced=now)
        assert imported(replaced={name: "0"})  # the same version has the same functions
    with pytest.warns(
        UserWarning, match=r"does the work of integrations\.sdpa_attention\.sdpa_attention_forward"
    ) as said:
        assert imported(version="4.99.0", replaced={name: "0"})
    assert len(said) == 1


def test_a_function_that_no_longer_takes_what_it_is_given():
    called = {"masking_utils:create_causal_mask": ["config", "attention_mask"]}
    assert imported(version="4.99.0", called=called)
    called["masking_utils:create_causal_mask"].append("gone_keyword")
    with pytest.raises(guard.TransformersMoved, match="create_causal_mask takes no gone_keyword"):
        imported(version="4.99.0", called=called)


def test_a_name_that_is_gone_is_the_same_error():
    with pytest.raises(guard.TransformersMoved, match="cannot import name 'gone_helper'"), guard.made_from(**MADE):
        from transformers.utils import gone_helper  # noqa: F401


def test_an_error_that_is_not_about_transformers_passes_through():
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), guard.made_from(**MADE):
        importlib.import_module("no_such_library")
    assert "no_such_library" not in sys.modules


def test_a_file_from_elsewhere_is_not_compared():
    assert imported(module=None, sha256="0" * 64)
