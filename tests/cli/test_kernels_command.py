"""`python -m rewrite.kernels`: what it prints and returns; tests/runtime/test_ahead_of_time.py compiles."""

from __future__ import annotations

import importlib.util
import json

import pytest
from command_line import tool

from rewrite.kernels import kernel_run
from rewrite.kernels.assembly import Figures, Row

FINE = Figures(40, 0, 30, 0, 0, 900, {128: 4, 64: 1}, {}, False, False)


def row(**changes: object) -> Row:
    return Row(**{"arch": "gfx942", "kernel": "linear", "shape": "8B", "threads": 256, "figures": FINE, **changes})  # type: ignore[arg-type]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """What the compilers are made to say."""
    rows = [row(occupancy=8, compiler="triton 3.6.0")]
    monkeypatch.setattr(kernel_run, "compile_all", lambda archs, names, **options: rows)
    return rows


def test_a_table_and_nothing_to_find(compiled: list[Row]) -> None:
    shown = tool("kernels", "--target", "gfx942")
    assert shown.code == 0
    assert "gfx942 · AMD MI300, MI325" in shown.out
    line = next(line for line in shown.out.splitlines() if line.startswith(" 8B"))
    assert line.split() == ["8B", "256", "40", "30", "0", "0", "8", "128", "89%", "–", "900"]
    assert "1 launch for gfx942 by triton 3.6.0: no findings" in shown.out


def test_findings_are_lines_and_the_exit_code(compiled: list[Row]) -> None:
    compiled.append(row(shape="70B", error="LLVM ERROR: no", figures=None))
    compiled.append(row(shape="1B", shared=70000))
    shown = tool("kernels", "--json", "-")
    assert shown.code == 1
    record = json.loads(shown.out)["chips"]["gfx942"]
    assert [found["kind"] for found in record["findings"]] == ["does not compile", "shared memory"]
    assert Row.from_json(record["rows"][0]) == compiled[0]
    assert "gfx942 · linear · 70B: does not compile: LLVM ERROR: no" in shown.err
    assert "gfx942 · linear · 1B: 70000 bytes of LDS, gfx942 has 65536" in shown.err


def test_a_kernel_that_there_is_not() -> None:
    shown = tool("kernels", "rms")
    assert shown.code == 2
    assert "no kernel 'rms': there are beside, best_of_block, block_down," in shown.err


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else there(name))
    shown = tool("kernels")
    assert shown.code == 2
    said = "error: triton is not installed and compiling kernels needs it: pip install 'hf-rewrite[verify]'"
    assert shown.err.strip() == said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_one_kernel_is_compiled() -> None:
    shown = tool("kernels", "rotary_rows", "--target", "gfx942", "--jobs", "1")
    assert shown.code == 0, shown.out + shown.err
    assert "1 launch for gfx942" in shown.out
