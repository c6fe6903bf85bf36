"""The process that verifies beside the rewriting: its verdict, its progress, and what happens where it has none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rewrite.delivery import worker
from rewrite.delivery.verification import Request
from rewrite.errors import VerificationError

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2, reason="there is no process beside"
)
REQUEST = Request(quick=True, seed=3)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the verifier in both processes: it answers with what it was asked and where it ran."""
    fails: dict[str, Any] = {"there": None}
    here = os.getpid()

    def judge(original: Any, rewritten: Any, request: Request, progress: Any) -> Any:
        if os.getpid() != here and fails["there"] is not None:
            fails["there"]()
        progress("half way")
        return original, rewritten, request, os.getpid()

    monkeypatch.setattr("rewrite.delivery.verification.judge", judge)
    monkeypatch.setattr("rewrite.verify.preload.MODULES", ("json",))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return fails


def ask(said: list[str]) -> tuple[Any, ...]:
    with worker.judge(True) as judge:
        assert judge is not None
        first: Any = judge(Path("a"), "b", REQUEST, said.append)
        second: Any = judge(Path("a"), "b", REQUEST, said.append)
    assert first == second
    return tuple(first)


def test_the_verdict_comes_from_there_and_the_progress_too(judged: dict[str, Any]) -> None:
    said: list[str] = []
    original, rewritten, request, process = ask(said)
    assert (original, rewritten, request) == (Path("a"), "b", REQUEST)
    assert process != os.getpid()
    assert said == ["half way", "half way"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def raises() -> None:
    raise VerificationError("no model class")


@pytest.mark.parametrize("fails", [raises, lambda: os._exit(1), lambda: sys.stdout.fileno() and print(1 / 0)])
def test_where_it_has_none_this_process_judges(judged: dict[str, Any], fails: Any) -> None:
    judged["there"] = fails
    assert ask([])[-1] == os.getpid()


def test_there_is_none_where_nothing_is_gained(judged: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with worker.judge(False) as judge:
        assert judge is None
    monkeypatch.setitem(sys.modules, "torch", object())
    with worker.judge(True) as judge:
        assert judge is None


def test_it_ends_with_a_command_that_fails(judged: dict[str, Any]) -> None:
    found: list[Any] = []

    def failing() -> None:
        with worker.judge(True) as judge:
            assert judge is not None
            found.append(judge("a", "b", REQUEST, lambda message: None))
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    with pytest.raises(ProcessLookupError):
        os.kill(found[0][-1], 0)
