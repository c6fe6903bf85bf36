"""Which mutants `bench/mutants.py` leaves out: those that rules and reviews call the same program, and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from equivalent import REVIEWED, Package, review
from mutation import Mutant, mutants

CODE = '''"""Rows."""
import torch
from . import other

TABLE = {"card": (8, 128)}
SIZES = {"any": 4}


def made(x, kind):
    out = torch.zeros(3, dtype=torch.int64, device=x.device)
    where = x.to(kind, device=x.device)
    return out if x.is_cuda else where


def fits(x, y):
    return x.dim() == 4 and y.dim() == 3 and backend_uses_triton(x)


def either(x, y):
    return x.dim() == 4 or backend_uses_triton(x)


def typed(x):
    return torch.float32 if x.device.type in ("cpu", "mps") else torch.float64


def tile(card):
    return TABLE[card]


def size(name):
    return SIZES[name]


def scaled(x, *, by=2, more=5):
    return x * by + more


def use(x):
    return scaled(x, by=3) + scaled(x, by=4, more=6)


def handed(x, by=2):
    return x * by


def hands(call):
    return call(handed) + handed(1, 3)
'''
MISSED = {"runtime/core.py": [[CODE[: CODE.index("return TABLE")].count("\n") + 1], []]}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/core.py").write_text(CODE)
    return Package(tmp_path, MISSED)


def one(package: Package, **about: Any) -> Mutant:
    found = [m for m in mutants(package.folder) if all(getattr(m, name) == value for name, value in about.items())]
    assert len(found) == 1, found
    return found[0]


SAME = (
    {"where": "made", "change": "device dropped", "line": 10},
    {"where": "made", "change": "always False"},
    {"where": "fits", "change": "4 → 5"},
    {"where": "fits", "change": "3 → 4"},
    {"where": "typed", "change": "always True"},
    {"where": "typed", "change": "float64 → float32"},
)
OTHER = (
    {"where": "made", "change": "device dropped", "line": 11},  # of a function that is none of torch's makers
    {"where": "made", "change": "int64 → int32"},
    {"where": "made", "change": "always True"},
    {"where": "either", "change": "4 → 5"},
    {"where": "either", "change": "== → !="},
    {"where": "typed", "change": "float32 → bfloat16"},
    {"where": "typed", "change": "in → not in"},
)


@pytest.mark.parametrize("about", SAME, ids=str)
def test_the_same_program_on_a_cpu(package: Package, about: dict[str, Any]) -> None:
    assert package.same_on_a_cpu(one(package, **about))


@pytest.mark.parametrize("about", OTHER, ids=str)
def test_another_program_on_a_cpu(package: Package, about: dict[str, Any]) -> None:
    assert not package.same_on_a_cpu(one(package, **about))


def test_a_default_that_every_call_gives(package: Package) -> None:
    given = {
        (m.where, m.change): package.default_always_given(m) for m in mutants(package.folder) if m.rule == "default"
    }
    assert given == {("scaled", "2 → 3"): True, ("scaled", "5 → 6"): False, ("handed", "2 → 3"): False}


def test_data_that_no_line_that_runs_reads(package: Package) -> None:
    unread = {m.change for m in mutants(package.folder) if package.read_by_nothing(m)}
    assert unread == {"8 → 9", "128 → 129"}


def test_reviews_say_why() -> None:
    code = "class PreallocatedCache:\n    def __init__(self):\n        self.starts = 1\n        self.position = 1\n"
    about = {"where": "PreallocatedCache.__init__", "line": 3, "rule": "dtype", "change": "int64 → int32", "text": ""}
    starts, position = (code.index(name) for name in ("self.starts", "self.position"))
    known = review("llama", Mutant(file="runtime/cache.py", start=starts, end=starts, **about), code)
    assert known is not None
    assert known.equivalent
    assert known.why
    assert review("llama", Mutant(file="runtime/cache.py", start=position, end=position, **about), code) is None
    assert '"why": ""' not in REVIEWED.read_text("utf-8")
