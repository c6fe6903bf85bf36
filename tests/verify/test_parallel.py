"""Parts of a gate in several processes: the same verdict as in one, and whatever becomes of a process is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewrite.verify import Options, Verdict, verify
from rewrite.verify.judging.checks import CheckRun, Done, run_gate
from rewrite.verify.judging.compare import Mismatch, NotRun
from rewrite.verify.judging.verdict import ConfigField, Figure
from rewrite.verify.line_coverage import Reach
from rewrite.verify.models.configs import Variant, small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import Subject
from rewrite.verify.parallel import Part, Pool

from .copies import planted, source_of, upstream, write_package

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def bench() -> Workbench:
    from transformers import LlamaForCausalLM

    subject = Subject(LlamaForCausalLM, LlamaForCausalLM, True)
    return Workbench(subject, small_variants(LlamaForCausalLM, True, {})[:1], Options())


def check(name: str, run: Callable[[], Mapping[str, Figure]], essential: bool = False) -> CheckRun:
    return CheckRun(name, run, essential)


def ran(at: int, seconds: float = 0.0) -> CheckRun:
    def run() -> Mapping[str, Figure]:
        time.sleep(seconds)
        return {"at": at, "process": os.getpid()}

    return check(f"check {at}", run)


def pooled(parts: list[Part], on: Workbench, said: Callable[[str], None] = lambda message: None) -> Iterator[Done]:
    return Pool(on, 2, said, lambda: Reach(()), Reach(())).run(parts)


def test_checks_stand_in_order_whichever_part_ends_first() -> None:
    parts = [
        Part(lambda: iter([ran(0, 0.3), ran(1)])),
        Part(lambda: iter([ran(at) for at in range(2, 9)]), shares=3, early=True),
        Part(lambda: iter([])),
        Part(lambda: iter([ran(9)])),
    ]
    said: list[str] = []
    found = [done.check for done in pooled(parts, bench(), said.append)]
    assert [one.figures["at"] for one in found] == list(range(10))
    processes = [one.figures["process"] for one in found]
    assert processes[2] == processes[5] != processes[3]
    assert os.getpid() not in processes
    assert sorted(said) == [f"check {at}" for at in range(10)]


def test_what_a_part_leaves_on_the_workbench_is_there_for_the_next_gate() -> None:
    on = bench()

    def first() -> Iterator[CheckRun]:
        on.record.expect("A", ("labels", "use_cache"))
        on.fields.append(ConfigField("theta"))
        on.varied = Variant("varied", on.base.config)
        yield ran(0)

    def second() -> Iterator[CheckRun]:
        on.record.expect("A", ("labels",))
        on.record.gave("A", ("labels",), {"logits": True})
        yield ran(1)

    found = list(pooled([Part(first), Part(second)], on))
    assert len(found) == 2
    assert on.record.arguments == {"A": {"labels": True, "use_cache": False}}
    assert on.record.outputs == {"A": {"logits": True}}
    assert on.fields == [ConfigField("theta")]
    assert on.varied is not None
    assert on.varied.config.hidden_size == on.base.config.hidden_size


def test_a_failure_ends_a_gate_where_it_would_in_one_process() -> None:
    def fails() -> Mapping[str, Figure]:
        raise Mismatch("off")

    def not_here() -> Mapping[str, Figure]:
        raise NotRun("not here")

    parts = [
        Part(lambda: iter([check("essential", not_here, essential=True), ran(1, 0.2)])),
        Part(lambda: iter([check("fails", fails), ran(3)])),
        Part(lambda: iter([ran(4, 60)])),
    ]
    started = time.perf_counter()
    results = pooled(parts, bench())
    gate, complete = run_gate(2, "parity", results, fail_fast=True)
    results.close()  # type: ignore[attr-defined]
    assert [one.name for one in gate.checks] == ["essential", "check 1", "fails"]
    assert not complete
    assert time.perf_counter() - started < 30


def test_a_process_that_is_brought_down_is_a_failed_check() -> None:
    def killed() -> Mapping[str, Figure]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    parts = [Part(lambda: iter([ran(0), check("kills", killed), ran(2)])), Part(lambda: iter([ran(3)]))]
    found = [done.check for done in pooled(parts, bench())]
    assert [(one.name, one.status) for one in found] == [
        ("check 0", "passed"), ("kills", "failed"), ("check 3", "passed"),
    ]  # fmt: skip
    assert "-9" in found[1].detail


def test_a_fault_of_ours_is_raised_here() -> None:
    def broken() -> Iterator[CheckRun]:
        yield ran(0)
        raise KeyError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        list(pooled([Part(broken)], bench()))


def plain(verdict: Verdict) -> list[tuple[str, str, str, Mapping[str, Figure]]]:
    return [(one.name, one.status, one.detail, one.figures) for gate in verdict.gates for one in gate.checks]


def both(folder: Path, text: str, options: Options) -> tuple[Verdict, Verdict]:
    packages = [write_package(folder / side / "llama_copy", "llama", text) for side in "ab"]  # each is imported once
    one, several = (
        verify(upstream("llama"), package, replace(options, workers=workers))
        for package, workers in zip(packages, (1, 3), strict=True)
    )
    assert plain(several) == plain(one)
    assert (several.passed, several.reason, several.asked) == (one.passed, one.reason, one.asked)
    assert (several.divergence, several.reached) == (one.divergence, one.reached)
    return one, several


def test_a_bug_is_found_as_by_one_process(tmp_path: Path) -> None:
    text = planted(source_of("llama"), "attention_mask=causal_mask", "attention_mask=None")
    options = Options(quick=True, others=False, fail_fast=True, gates=("structure", "parity"))
    one, _ = both(tmp_path, text, options)
    assert one.divergence is not None
    assert not one.passed


def test_lines_are_counted_as_by_one_process(tmp_path: Path) -> None:
    _, several = both(tmp_path, source_of("llama"), Options(clean_process=False, gates=("structure", "generation")))
    assert several.passed, several.reason
    assert 0 < several.reached[0].missed < several.reached[0].lines / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a process that began to use a GPU: needs one")
def test_processes_are_forked_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    package = write_package(tmp_path / "llama_copy", "llama", source_of("llama"))
    code = (
        "from pathlib import Path\n"
        "from rewrite.verify import Options, verify\n"
        f"v = verify({upstream('llama')!r}, Path({str(package)!r}), Options(quick=True, device='cpu'))\n"
        "assert v.passed, v.reason"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
