"""Digests of source: equal where only the looks differ, different where the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewrite.package import definitions

CODE = '''
"""A module."""
import torch

def scaled(x, factor=2.0):
    """Return x, scaled."""
    logger.warning("slow")
    if factor == 0:
        raise ValueError("no factor")
    return x * factor

class Norm:
    eps: float = 1e-6
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.eps
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another text."""'),
        ('"""Return x, scaled."""\n', "\n"),
        ("x * factor", "(x *\n            factor)  # a comment"),
        ("(self, x: torch.Tensor) -> torch.Tensor", "(self, x)"),
        ('"no factor"', '"the factor is 0"'),
        ('logger.warning("slow")', "pass"),
    ],
)
def test_looks_do_not_count(old: str, new: str) -> None:
    assert old in CODE
    changed = CODE.replace(old, new)
    if new == "pass":
        changed = CODE.replace(f"    {old}\n", "")
    assert definitions.of_module(changed) == definitions.of_module(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * factor", "x / factor"),
        ("factor=2.0", "factor=2"),
        ("1e-6", "1e-5"),
        ("ValueError", "TypeError"),
        ("def forward", "def decode"),
        ("factor == 0", "factor is 0"),
    ],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in CODE
    assert definitions.of_module(CODE.replace(old, new)) != definitions.of_module(CODE)


def test_a_digest_is_the_same_in_every_version_of_python() -> None:
    """Digests are compared between the machine that made a package and the one that imports it."""
    assert definitions.of_module("def f(a, *, b=1):\n    return [x for x in a if x > b]\n") == "dce8bac1702b49ba"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "masks.py": "from .deep import inner as make\n\ndef plain(config, *, mask=None):\n    return mask\n",
        "deep/__init__.py": "from .core import inner\n",
        "deep/core.py": "try:\n    import fast\nexcept ImportError:\n    fast = None\n\ndef inner(x):\n    return x\n",
        "open.py": "def anything(**kwargs):\n    return kwargs\n\n@decorated\ndef wrapped(a):\n    return a\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    definitions.forget()
    return tmp_path


def test_a_name_that_is_passed_on_is_found_where_it_is_written(library: Path) -> None:
    found = definitions.of_functions(library, ["masks:make", "deep.core:inner", "masks:gone", "nowhere:x"])
    assert set(found) == {"masks:make", "deep.core:inner"}
    assert found["masks:make"] == found["deep.core:inner"]


def test_keywords_that_a_function_does_not_take(library: Path) -> None:
    assert definitions.misfits(library, {"masks:plain": ["config", "mask"]}) == []
    assert definitions.misfits(library, {"masks:plain": ["position_ids"]}) == ["masks.plain takes no position_ids"]
    assert definitions.misfits(library, {"open:anything": ["x"], "open:wrapped": ["x"], "gone:f": ["x"]}) == []


def test_calls_and_imports_of_a_file(library: Path) -> None:
    text = (
        "from transformers.masks import plain as p, make\nfrom torch import nn\np(1, mask=2)\nnn.f(x=1)\nmake(**{})\n"
    )
    assert definitions.calls(text) == {"masks:make": [], "masks:plain": ["mask"]}
    assert definitions.missing(library, text) == []
    assert definitions.missing(library, text + "from transformers.masks import gone\np(other=1)\n") == [
        "masks.gone",
        "masks.plain takes no other",
    ]
