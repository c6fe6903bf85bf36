"""Compiler drift: what is written is what is read, and what a compiler does worse is found, beyond the slack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewrite.errors import NoKernelRecord
from rewrite.kernels import drift
from rewrite.kernels.assembly import Figures, Row
from rewrite.kernels.drift import Record

RECORDS = Path(__file__).parents[1] / "fixtures/kernels"


def row(shape: str, registers: int = 64, spills: int = 0, shared: int = 0, occupancy: float = 8.0) -> Row:
    figures = Figures(registers, 0, None, spills, 0, None, {}, {}, False, False)
    return Row("sm_90", "linear", shape, 256, {}, figures, shared, occupancy, "triton 3.6.0")


def changed(before: Row, after: Row) -> list[str]:
    return [found.column for found in drift.compare(Record.of([after]), Record.of([before])).drifts]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record.of([row("8B"), row("8B", 40), row("70B"), Row("sm_90", "linear", "no figures", 256)])
    path = tmp_path / "triton.json"
    record.write(path)
    assert Record.read(path).launches == record.launches
    assert json.loads(path.read_text("utf-8"))["chips"]["sm_90"]["linear · 8B"] == [[64, 0, 0, 8.0], [40, 0, 0, 8.0]]


@pytest.mark.parametrize(
    ("after", "columns"),
    [
        (row("8B"), []),
        (row("8B", 80), []),  # a quarter, or 16
        (row("8B", 81), ["registers"]),
        (row("8B", spills=1), ["spills"]),
        (row("8B", shared=1024), []),
        (row("8B", shared=1025), ["shared"]),
        (row("8B", occupancy=6), []),
        (row("8B", occupancy=5), ["occupancy"]),
        (row("8B", 20, occupancy=16), []),  # better
        (row("70B", 255, 99), []),  # new
    ],
)
def test_what_a_compiler_does_worse(after: Row, columns: list[str]) -> None:
    assert changed(row("8B"), after) == columns


def test_the_second_variant_of_a_launch_drifts() -> None:
    compared = drift.compare(Record.of([row("8B"), row("8B", 255)]), Record.of([row("8B"), row("8B")]))
    assert [str(found) for found in compared.drifts] == ["sm_90 · linear · 8B: registers 64 → 255"]
    assert (compared.compared, compared.new) == (2, 0)


def test_the_record_of_a_version(tmp_path: Path) -> None:
    for name in ("triton-3.4.json", "triton-3.9.json", "triton-3.10.json"):
        (tmp_path / name).touch()
    asked = ("triton 3.9.1", "triton 3.8.0", "triton 3.12.0", "triton 3.3.0")
    found = [drift.nearest(tmp_path, compiler) for compiler in asked]
    assert [path and path.name for path in found] == ["triton-3.9.json", "triton-3.4.json", "triton-3.10.json", None]


def test_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "triton.json"
    path.write_text('{"columns": ["registers"]}', encoding="utf-8")
    with pytest.raises(NoKernelRecord, match="its columns are not registers, spills"):
        Record.read(path)


@pytest.mark.parametrize("path", sorted(RECORDS.glob("triton-*.json")), ids=lambda path: path.stem)
def test_records_of_the_repository(path: Path) -> None:
    record = Record.read(path)
    assert record.compiler.startswith(path.stem.replace("-", " "))
    assert sum(len(found) for found in record.launches.values()) > 250
    assert all(len(one) == 4 for chip in record.launches.values() for found in chip.values() for one in found)
