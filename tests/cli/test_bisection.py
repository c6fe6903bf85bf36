"""Failures grouped by kind, and the transform at fault found by making packages with fewer of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rewrite.delivery import bisection, verification
from rewrite.delivery.bisection import MOST_FOUND, MOST_SECONDS, Bisection, bisect
from rewrite.delivery.verification import Request
from rewrite.source.resolve import resolve
from rewrite.transforms import select
from rewrite.verify import failure_groups, render
from rewrite.verify.judging.verdict import Check, Gate, Identity, Options, Verdict

TINY = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"
CHECK = "fp64 sdpa, base: prefill, one token"
WRONG = '''
import libcst as cst

from rewrite.analysis.tree.module import walk
from rewrite.analysis.tree.nodes import expression
from rewrite.transform import Candidate, Edit, Found, Numerics, Transform


class Wrong_{name}(Transform):
    """Multiplies what {call} is given by 1.01."""

    name = "wrong_{name}"
    summary = "Wrong on purpose."
    numerics = Numerics.EXACT
    reasons = {{}}

    def candidates(self, module):
        for owner, name, method in module.methods():
            for node in walk(method.body) if name == "forward" else ():
                if isinstance(node, cst.Call) and module.code(node.func) == "{call}":
                    if "1.01" not in module.code(node):
                        yield Candidate(node.args[0].value, f"{{owner.name}}.{{name}}")

    def match(self, candidate, module):
        return Found((Edit(candidate.node, (expression(f"1.01 * ({{module.code(candidate.node)}})"),)),))
'''


def failed(*checks: Check, gate: str = "parity") -> Verdict:
    side = Identity("m", "m", "0" * 64)
    gates = (Gate(2, gate, checks or (Check(CHECK, "failed", "relative error 0.1 > 2e-06 at logits"),), 1.0),)
    return Verdict(False, side, side, "Model", gates, None, "planted", {}, Options(), 1.0)


class Packages:
    """Replaces making and verifying packages: those fail that have all of one of `wrong` in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: str, *wrong: str):
        self.names = tuple(names)
        self.wrong = [set(several) for several in wrong]
        self.asked: list[str] = []
        monkeypatch.setattr(bisection, "_at_work", lambda source, transforms: iter(self.names))
        monkeypatch.setattr(bisection._Search, "_fails", lambda search, *given: self.fails(search, *given))

    def fails(self, search: Any, names: Iterable[str], checks: tuple[str, ...]) -> tuple[str, ...]:
        if search.clock() - search.started > MOST_SECONDS:
            raise bisection._Spent
        search.runs += 1
        self.asked.append("".join(names))
        return (CHECK,) if any(several <= set(names) for several in self.wrong) else ()

    def search(self, **given: Any) -> Bisection:
        return bisect(resolve(str(TINY)), (), failed(), Request(), verification.judge, **given)


@pytest.mark.parametrize("wrong", list("abcdefgh"))
def test_one_is_found_by_halves(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    packages = Packages(monkeypatch, "abcdefgh", wrong)
    found = packages.search()
    assert (found.at_fault, found.passes, found.runs) == ((wrong,), True, 5)
    assert packages.asked[:2] == ["abcdefgh", "abcd"]
    assert packages.asked[-1] == "abcdefgh".replace(wrong, "")
    assert found.skips == f"--skip {wrong}"
    assert str(found).startswith(f"{wrong}: without it the check that failed passes (5 runs, ")


def test_two_are_found_and_it_is_said_that_neither_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Packages(monkeypatch, "abcdefgh", "b", "g").search()
    assert (set(found.at_fault), found.passes) == ({"b", "g"}, True)
    assert str(found).startswith("no single transform: without b and g together ")


def test_of_two_that_fail_together_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Packages(monkeypatch, "abcdefgh", "cf").search()
    assert (found.at_fault, found.passes) == (("f",), True)


def test_more_than_a_few_are_no_transforms_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Packages(monkeypatch, "abcdefgh", *"abcde").search()
    assert (len(found.at_fault), found.passes) == (MOST_FOUND, False)
    assert "no single transform: it fails without a, b, c too" in str(found)


def test_what_does_not_fail_again_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Packages(monkeypatch, "abc").search()
    assert (found.at_fault, found.passes) == ((), False)
    assert "what they generate passes" in str(found)


def test_the_only_one_is_not_said_to_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Packages(monkeypatch, "a", "a").search()
    assert (found.at_fault, found.passes) == (("a",), False)
    assert "no other transform rewrites anything" in str(found)


def test_it_stops_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 10_000, 250))
    found = Packages(monkeypatch, "abcdefgh", "c").search(clock=lambda: float(next(times)))
    assert (found.at_fault, found.passes, found.runs) == ((), False, 2)
    assert str(found).startswith("not found in 10:00 (2 runs, ")


@pytest.mark.slow
def test_planted_transforms_are_found_by_the_real_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("down", "o")
    (tmp_path / "rules").mkdir()
    for name in wrong:
        (tmp_path / "rules" / f"wrong_{name}.py").write_text(WRONG.format(name=name, call=f"self.{name}_proj"))
    (tmp_path / "pyproject.toml").write_text('[tool.rewrite]\ntransforms = ["rules"]\n')
    monkeypatch.chdir(tmp_path)
    planted = tuple(f"wrong_{name}" for name in wrong)
    transforms = select(only=("fuse_rms_norm", "native_gqa", *planted))
    found = bisect(resolve(str(TINY)), transforms, failed(), Request(quick=True), verification.judge)
    assert (set(found.at_fault), found.passes) == (set(planted), True), found
    for name in [name for name in sys.modules if name.startswith("rewrite_outside_wrong")]:
        del sys.modules[name]


def test_failures_of_one_kind_are_one_of_them_and_a_count() -> None:
    checks = [
        Check(f"fp64 sdpa, base: case {n}", "failed", f"relative error {n / 10} > 2e-06 at x", {"max": n / 10}, 1.0)
        for n in range(1, 9)
    ]
    odd = Check("fp64 eager, base: odd", "failed", "TypeError: forward() got 3 (model.py:7 in forward)")
    verdict = failed(*checks, odd)
    found = failure_groups.of_verdict(verdict)
    assert [(cause.kind, len(cause.checks)) for cause in found] == [
        ("relative error", 8),
        ("TypeError: forward() got", 1),
    ]
    assert found[0].worst is checks[-1]
    text = render(verdict)
    assert text.count("FAILED  fp64") == 2
    assert "and 7 more (relative error): fp64 sdpa, base × 7" in text
    assert render(verdict, verbose=True).count("FAILED  fp64") == 9
    assert all(len(line) <= 80 for line in text.splitlines())
