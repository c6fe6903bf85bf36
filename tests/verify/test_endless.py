"""A rewritten side that never comes back is a failed check, and a slow one is none."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rewrite.verify import Options, verify
from rewrite.verify import parallel as pools
from rewrite.verify.judging import watchdog
from rewrite.verify.judging.checks import CheckRun, Done, one_by_one
from rewrite.verify.judging.verdict import Figure
from rewrite.verify.judging.watchdog import Hung, of_original, watched
from rewrite.verify.models.model_pair import on_original
from rewrite.verify.parallel import Part

from .copies import generated, plant, upstream
from .loop_bugs import ENDLESS
from .test_parallel import bench, pooled, ran

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer of processor time")
FORWARD = "        if (input_ids is None) ^ (inputs_embeds is not None):\n"
LOOKED_UP = "decode loop, tokens looked up in the text"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SLICE_S", 0.05)
    monkeypatch.setattr(watchdog, "LEAST", 60)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def changed(package: Path, copy: Path, name: str, old: str, new: str) -> Path:
    shutil.copytree(package, copy)
    plant(copy, name, old, new)
    return copy


def spin(seconds: float = 60.0) -> Mapping[str, Figure]:
    """Use the processor for so many seconds of it."""
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass
    return {}


def ended(*checks: CheckRun) -> list[Done]:
    return list(one_by_one(checks, lambda message: None))


@pytest.mark.usefixtures("impatient")
def test_a_decode_loop_without_progress_is_a_failed_check(package: Path, tmp_path: Path) -> None:
    assert ENDLESS.file is not None
    copy = changed(package, tmp_path / "llama", ENDLESS.file, ENDLESS.old, ENDLESS.new)
    options = Options(gates=("generation",), checks=(LOOKED_UP,), clean_process=False, reach=False, keep_going=True)
    verdict = verify(upstream("llama"), copy, options)
    assert verdict.exit_code == 1
    assert f"gate 4 (generation): {LOOKED_UP}: it does not end" in verdict.reason
    assert "run (speculative/" in verdict.reason
    assert verdict.divergence is None, "what does not end was run again"


@pytest.mark.usefixtures("impatient")
def test_a_forward_that_does_not_return_is_a_failed_check(package: Path, tmp_path: Path) -> None:
    endless = "        while True:\n            pass\n" + FORWARD
    copy = changed(package, tmp_path / "llama", "modeling_llama.py", FORWARD, endless)
    verdict = verify(upstream("llama"), copy, Options(quick=True, keep_going=True, workers=3))
    assert verdict.exit_code == 1
    assert len(verdict.gates) == 1, "another gate was asked"
    assert "state dict, base: it does not end" in verdict.reason
    assert "forward (llama/modeling_llama.py:" in verdict.reason


@pytest.mark.usefixtures("impatient")
def test_an_import_that_does_not_end_is_a_failed_check(package: Path, tmp_path: Path) -> None:
    copy = changed(package, tmp_path / "llama", "modeling_llama.py", "logger = ", "while True:\n    pass\nlogger = ")
    verdict = verify(upstream("llama"), copy, Options(quick=True))
    assert "both sides import: it does not end" in verdict.reason
    assert "(llama/modeling_llama.py:" in verdict.reason


@pytest.mark.usefixtures("impatient")
def test_nothing_of_the_code_under_test_can_take_it_for_its_own_error() -> None:
    def swallows() -> Mapping[str, Figure]:
        while True:
            with contextlib.suppress(Exception):
                spin(0.2)

    first, *others = ended(CheckRun("swallows", swallows), ran(1))
    assert first.endless
    assert first.check.status == "failed"
    assert "swallows (verify/test_endless.py:" in first.check.detail, "the call that lasted was another"
    assert not others


@pytest.mark.usefixtures("impatient")
def test_what_the_original_takes_is_allowed_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> Mapping[str, Figure]:
        on_original(spin, 0.6)
        return spin(5)

    assert [done.check.status for done in ended(CheckRun("slow on both sides", slow))] == ["passed"]
    monkeypatch.setattr(watchdog, "TIMES", 0)
    assert [done.endless for done in ended(CheckRun("slow on both sides", slow))] == [True]


def test_a_machine_that_stalls_or_is_used_by_others_takes_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SLICE_S", 0.05)
    monkeypatch.setattr(watchdog, "LEAST", 2)

    def waits() -> Mapping[str, Figure]:
        time.sleep(1)
        return {}

    assert [done.check.status for done in ended(CheckRun("waits", waits))] == ["passed"]
    watch = watchdog._Watch()
    for _ in range(2):  # however long each was: what is counted is how often there was something to see
        time.sleep(0.06)
        for _ in range(64):  # threads that use up a slice in no time
            watch.look(sys._getframe())
    assert watch.own == 2
    time.sleep(0.06)
    with pytest.raises(Hung):
        watch.look(sys._getframe())


@pytest.mark.usefixtures("impatient")
def test_the_timer_is_off_behind_a_check_and_left_alone_where_it_is_in_use() -> None:
    with watched():
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
    with of_original():
        pass
    before = signal.signal(signal.SIGPROF, lambda *at: None)
    try:
        with watched():
            assert signal.getitimer(signal.ITIMER_PROF)[0] == 0, "a profiler's handler was replaced"
    finally:
        signal.signal(signal.SIGPROF, before)
    found: list[float] = []

    def elsewhere() -> None:
        with watched():
            found.append(signal.getitimer(signal.ITIMER_PROF)[0])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.usefixtures("impatient")
def test_one_process_whose_check_does_not_end_ends_them_all() -> None:
    parts = [Part(lambda: iter([ran(0)])), Part(lambda: iter([CheckRun("endless", spin), ran(2)]))]
    parts += [Part(lambda at=at: iter([ran(at, 300)])) for at in (3, 4)]  # type: ignore[misc]
    started = time.monotonic()
    found = list(pooled(parts, bench()))
    assert [(done.check.name, done.check.status) for done in found] == [("check 0", "passed"), ("endless", "failed")]
    assert found[-1].endless
    assert found[-1].ends
    assert time.monotonic() - started < 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_that_cannot_be_asked_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 2)
    parts = [Part(lambda: iter([ran(0)])), Part(lambda: iter([ran(1), ran(2, 300)]))]
    found = list(pooled(parts, bench()))
    assert [(done.check.name, done.check.status) for done in found] == [
        ("check 0", "passed"), ("check 1", "passed"), ("check 2", "failed"),
    ]  # fmt: skip
    assert "said nothing for 2 s" in found[-1].check.detail
    assert found[-1].endless


def test_ctrl_c_ends_a_verification_that_does_not_end(package: Path, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    endless = f"        open({str(reached)!r}, 'w').close()\n        while True:\n            pass\n" + FORWARD
    copy = changed(package, tmp_path / "llama", "modeling_llama.py", FORWARD, endless)
    code = "from rewrite.cli import main; main()"
    command = [sys.executable, "-c", code, "verify", upstream("llama"), str(copy), "--quick"]
    with started(command) as process:
        until = time.monotonic() + 300
        while not reached.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until, "the forward was not reached"
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "interrupted" in errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is the first of a group of its own, as from a terminal."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
