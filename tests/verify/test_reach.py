"""What no check ran is listed as not verified."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rewrite.verify import Options, Verdict, render, summary, verify
from rewrite.verify.judging.compare import NotRun
from rewrite.verify.line_coverage import Reach
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.counting import counted, uncounted
from rewrite.verify.models.model_pair import on_original

from .copies import planted, source_of, upstream, write_package

STRUCTURE = Options(gates=("structure",), clean_process=False, compile=False)
NEVER = """\
        if self.config.hidden_size < 0:
            hidden_states = hidden_states + 1
            print(hidden_states)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = source_of("llama")
    place = "        hidden_states = self.norm(hidden_states)\n"
    text = planted(text, place, place + NEVER)
    folder = write_package(tmp_path_factory.mktemp("packages") / "llama_never", "llama", text)
    (folder / "unused.py").write_text("def unused():\n    return 1\n")
    (folder / ".kept").mkdir()
    (folder / ".kept" / "original.py").write_text("KEPT = 1\n")
    return folder


@pytest.fixture(scope="module")
def verdict(package: Path) -> Verdict:
    return verify(upstream("llama"), package, STRUCTURE)


def test_lines_that_no_check_ran_are_listed(verdict: Verdict, package: Path) -> None:
    assert verdict.passed, verdict.reason
    own = verdict.reached[0]
    assert own.file == "modeling_llama.py"
    lines = (package / own.file).read_text().splitlines()
    never = lines.index("            print(hidden_states)") + 1
    assert f"{never - 1}-{never}" in own.where.split(", ")
    assert 2 <= own.missed < own.lines
    assert 1 <= own.missed_branches < own.branches
    assert [file.file for file in verdict.reached[1:]] == ["__init__.py", "unused.py"]
    assert verdict.reached[2].missed == verdict.reached[2].lines == 2


def test_the_headline_and_the_report_say_so(verdict: Verdict) -> None:
    own = verdict.reached[0]
    assert f"not verified: {own.missed} of {own.lines} lines and " in summary(verdict)
    assert f"not verified  modeling_llama.py: {own.missed} of {own.lines} lines" in render(verdict)
    assert "unused.py: 2 of 2: 1-2" in render(verdict, verbose=True)
    assert all(len(line) <= 80 for line in render(verdict, verbose=True).splitlines())
    assert verdict.to_json()["reached"][0]["where"] == own.where


def test_a_quick_verdict_counts_nothing(package: Path) -> None:
    quick = verify(upstream("llama"), package, replace(STRUCTURE, quick=True))
    assert quick.reached == ()
    assert "not verified" not in summary(quick)


def test_a_file_that_is_no_python_is_a_failed_verdict(tmp_path: Path) -> None:
    broken = write_package(tmp_path / "odd [1]" / "llama_broken", "llama", "def broken(:\n")
    verdict = verify(upstream("llama"), broken, STRUCTURE)
    assert not verdict.passed
    assert verdict.failed_gate is not None
    assert "modeling_llama.py" not in [file.file for file in verdict.reached]


def test_a_folder_may_have_the_letters_of_a_pattern(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "odd [1] *" / "llama_odd", "llama", source_of("llama"))
    verdict = verify(upstream("llama"), folder, STRUCTURE)
    assert verdict.passed, verdict.reason
    assert 0 < verdict.reached[0].missed < verdict.reached[0].lines


@pytest.fixture
def traced() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    yield
    sys.settrace(before)


def test_another_tracer_is_left_alone(package: Path, traced: None) -> None:
    tracer = sys.gettrace()
    verdict = verify(upstream("llama"), package, STRUCTURE)
    assert sys.gettrace() is tracer
    assert verdict.reached == ()
    assert "not counted" in render(verdict)


def test_what_is_not_of_the_rewritten_side_is_not_counted(tmp_path: Path) -> None:
    """Nor is it when one such block is in another; what follows is."""
    coverage = pytest.importorskip("coverage")
    file = tmp_path / "counted_lines.py"
    file.write_text("def first():\n    return 1\n\n\ndef second():\n    return 2\n\n\ndef third():\n    return 3\n")
    names: dict[str, Callable[[], int]] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    counter = coverage.Coverage(data_file=None, branch=True, include=[str(file)], config_file=False, messages=False)
    with counted(counter):
        names["first"]()
        with contextlib.suppress(ValueError), uncounted():
            with uncounted():
                names["second"]()
            names["second"]()
            raise ValueError
        names["third"]()
    names["second"]()
    lines = set(counter.get_data().lines(str(file)) or ())
    assert {2, 10} <= lines
    assert 6 not in lines or sys.version_info >= (3, 14)
    with uncounted():  # where nothing is counted
        pass


def test_what_counts_does_not_run_while_the_original_does(package: Path) -> None:
    """Seen by what Python traces: the original's forward runs without a tracer, the rewritten one's with it."""
    traced: dict[str, bool] = {}

    def note(side: str) -> None:
        traced[side] = sys.gettrace() is not None

    counter = Reach.of(loaded_sides.locate(package), wanted=True)
    with counter.counted():
        on_original(note, "original")
        with contextlib.suppress(NotRun):
            on_original(_fails)
        note("rewritten")
    assert traced == {"original": False, "rewritten": sys.version_info < (3, 14)}


def _fails() -> None:
    raise ValueError
