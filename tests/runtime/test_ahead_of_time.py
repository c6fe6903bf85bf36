"""Every kernel compiles for NVIDIA's and AMD's data-centre GPUs, without one: Triton ships both compilers."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED

from hf_rewrite_runtime.launching import launch
from rewrite import runtime
from rewrite.kernels import drift, findings, kernel_run, kernel_tables
from rewrite.kernels.assembly import Row
from rewrite.kernels.chips import CHIPS, occupancy

TRITON = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter stands in for the compiler"),
]
WHOLE = ("gfx942", "sm_90")
"""Of the others, whose compilers and registers are the same, one launch of each kernel: each costs 0.2 s."""
RUNTIME = Path(next(iter(runtime.__path__)))
RECORDS = Path(__file__).parents[2] / "fixtures/kernels"
"""Made with each version of Triton as docs/kernels.md says, for `WHOLE`."""


def compiles(function: Any) -> Any:
    """Mark a test that compiles kernels."""
    for mark in TRITON:
        function = mark(function)
    return function


@functools.cache
def compiled(arch: str, one_of_each: bool) -> list[Row]:
    return kernel_run.compile_all([arch], one_of_each=one_of_each)


def drifts(rows: list[Row]) -> list[str]:
    """What takes more of its chip than was recorded of this compiler, or of the newest one before it."""
    path = drift.nearest(RECORDS, rows[0].compiler)
    if path is None or rows[0].arch not in WHOLE:
        return []
    before = drift.Record.read(path)
    compared = drift.compare(drift.Record.of(rows), before)
    assert compared.compared > compared.new, "most launches are not recorded: python -m rewrite.kernels --record FILE"
    return [f"{change}, by {before.compiler} before" for change in compared.drifts]


GIVEN = {"num_warps", "enable_fp_fusion"}
AMD = {"waves_per_eu", "allow_flush_denorm"}
AMD_MATRIX = {"matrix_instr_nonkdim", "kpack"}
"""Options of every launch, of those on AMD's chips, and of those with products."""

MATRIX_FOR_MORE_ROWS = {"latent_query"}
"""Kernels that multiply one row without the matrix units."""


@compiles
@pytest.mark.parametrize("arch", CHIPS)
def test_kernels_are_fit_for_the_chip(arch: str, brief: bool) -> None:
    whole = arch in WHOLE and not brief
    rows = compiled(arch, not whole)
    assert [str(finding) for finding in findings.judge(rows)] == []
    # signals between cards, and the matrix units that sum up for each thread: NVIDIA's alone
    nvidia = {"shared_sum", "mxfp4_gate_up", "mxfp4_down", "integer_skinny"}
    elsewhere = nvidia if CHIPS[arch].backend == "hip" else set()
    known = set(kernel_run.known_kernels()) - elsewhere
    assert {row.kernel for row in rows} == known, "the catalogue has no case of these kernels"
    if whole:
        assert findings.unused_exemptions(rows) == []
    assert drifts(rows) == []
    counting = {row.kernel for row in rows if row.figures is not None and row.figures.arrivals}
    shared = {
        "decode_attention", "joined_down", "masked_attention", "qkv_rows", "skinny_linear", "transposed_down",
        "transposed_linear",
    }  # fmt: skip
    of_amd = CHIPS[arch].backend == "hip"
    apart = {"block_rows", "integer_rows"}  # whose first launch needs no parts everywhere
    assert counting - apart == (shared if of_amd else set())
    assert not whole or ("block_rows" in counting) == of_amd
    for row in rows:
        assert row.figures is not None
        assert row.figures.overlaps == ("launch_pdl" in row.options), row.name
        matrix = row.figures.matrix or row.kernel in MATRIX_FOR_MORE_ROWS
        amd = AMD | (AMD_MATRIX if matrix else set())
        assert row.options.keys() - {"launch_pdl"} == GIVEN | (amd if arch.startswith("gfx") else set())
        assert row.occupancy > 0
    for table in kernel_tables.tables(rows):
        widths = [max(len(row[i]) for row in (table.headings, *table.rows)) for i in range(len(table.headings))]
        assert sum(widths) + len(widths) - 1 <= 80
        assert all(len(note) <= 78 for note in table.notes)


@compiles
def test_a_byte_of_several_rows_takes_two_vector_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop of a product of 8 rows with weights in 8 bits: half a conversion, half a move, and the rest.

    The matrix units multiply. With the compiler's own rounding to bf16 there were 6.3, and 10.6 with a
    norm inside, which is a launch of its own here. Triton 3.4 takes four.
    """
    import triton

    monkeypatch.setenv("TRITON_KERNEL_DUMP", "1")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path))
    kernel_run.compile_all(["gfx942"], ["fp8_skinny"])
    counted = []
    for path in tmp_path.glob("*/*.amdgcn"):
        loop = longest_loop(path.read_text("utf-8"))
        operations = sum(name.startswith("v_") and not name.startswith("v_mfma") for name in loop)
        weights = 2 * sum(name.startswith("v_cvt_pk_f32_fp8") for name in loop)
        counted.append(operations / weights)
    assert len(counted) == 2
    assert max(counted) <= (4 if triton.__version__.startswith("3.4.") else 2)


@compiles
@pytest.mark.parametrize(
    ("arch", "name"), [("gfx942", "v_cvt_pk_fp8_f32"), ("gfx950", "v_cvt_scalef32_pk_fp8_f32"), ("gfx90a", None)]
)
def test_rows_are_converted_two_numbers_at_a_time(
    arch: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the chip, where it can; else by operations on integers."""
    monkeypatch.setenv("TRITON_KERNEL_DUMP", "1")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path))
    kernel_run.compile_all([arch], ["fp8_rows"])
    (path,) = tmp_path.glob("*/*.amdgcn")
    converted = {found.group() for found in re.finditer(r"v_cvt_\w*fp8_f32", path.read_text("utf-8"))}
    assert converted == (set() if name is None else {name})


def longest_loop(text: str) -> list[str]:
    """Return the names of the instructions of the longest loop of AMD's assembly."""
    names: list[str] = []
    begins: dict[str, int] = {}
    longest: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            begins[label[1]] = len(names)
        elif found := re.match(r"\s+([a-z]\w+)(?:\s+(\S+))?", line):
            names.append(found[1])
            if found[1].startswith("s_cbranch") and len(names) - begins.get(found[2], len(names)) > len(longest):
                longest = names[begins[found[2]] :]
    return longest


@compiles
@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_what_is_wrong_with_a_kernel_is_found(arch: str) -> None:
    judged = findings.judge(kernel_run.compile_all([arch], module="planted"))
    assert not [str(finding) for finding in judged if "nothing" in finding.row.shape]
    found = {(finding.row.kernel, finding.kind) for finding in judged}
    ring = ("ring", "ring slots")
    assert ring in found or arch == "sm_90" or not importlib.metadata.version("triton").startswith(("3.8", "3.9"))
    of_amd = found & {ring} | {
        ("fatal", "does not compile"),
        ("fine", "threads"),  # 32 warps of 32 are 1,024
        ("last_arrival", "last arrivals"),
        ("relaxed", "last arrivals"),
    }
    assert found == (of_amd if arch == "gfx942" else set()) | {
        ("spills", "spills"),
        ("scalar_loads", "scalar loads"),
        ("shared_memory", "shared memory"),
    }


def test_every_product_says_how_precise_it_is() -> None:
    """On gfx942 the default for fp32 is less than fp32."""
    for path in RUNTIME.rglob("*.py"):
        for call in re.findall(r"tl\.dot\(.*", path.read_text(encoding="utf-8")):
            assert "input_precision=" in call, f"{path.name}: {call}"


def test_who_counts_itself_publishes_first() -> None:
    """Whichever variant of a kernel the catalogue has: what is stored before a count is stored for everybody."""
    for path in RUNTIME.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.stem == "shared_sum":  # signals between cards
            signals = [line for line in lines if "tl.atomic_" in line]
            assert all('scope="sys"' in line and ("release" in line or "acquire" in line) for line in signals)
            continue
        for number, line in enumerate(lines):
            if "tl.atomic_" in line:
                assert any("publish(WAIT)" in before for before in lines[number - 2 : number]), f"{path.name}: {line}"
                assert 'sem="acq_rel", scope="gpu"' in line
        within = ("split_k_semaphores", "conv_step", "left_pad_rows")  # numbers that move within a program
        assert not any("debug_barrier" in line for line in lines) or path.stem in within, path.name


class Recorder:
    """A jit function that keeps what it is called with."""

    def __init__(self) -> None:
        self.given: list[dict[str, object]] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: self.given.append(options)

    def warmup(self, *arguments: object, grid: object, **options: object) -> None:
        self.given.append(options)


@pytest.mark.parametrize("arch", CHIPS)
def test_a_kernel_may_round_every_product(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of torch's functions do: a product and a sum are rounded twice."""
    monkeypatch.setattr(launch, "HIP", CHIPS[arch].backend == "hip")
    monkeypatch.setattr(launch, "_pretended", launch.Target(CHIPS[arch].backend, arch))
    recorder = Recorder()
    launch.Kernel(recorder, contracts=False).launch((1, 1, 1), 4, (torch.empty(16),), (), (), (), ())
    assert recorder.given[0]["enable_fp_fusion"] is False


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arch", [None, *CHIPS])
def test_what_is_compiled_is_what_is_launched(
    arch: str | None, overlap: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch and `collect` hand the compiler the same options, and NVIDIA's none that it does not know."""
    if arch is not None:
        monkeypatch.setattr(launch, "HIP", CHIPS[arch].backend == "hip")
        monkeypatch.setattr(launch, "_pretended", launch.Target(CHIPS[arch].backend, arch))
    recorder = Recorder()
    kernel = launch.Kernel(recorder, dot=dot)
    planned: list[launch.Launch] = []
    arguments = ((1, 1, 1), 4, (torch.empty(16),), (), (), (), ())
    kernel.launch(*arguments, overlap=overlap)
    launch.collect(lambda key, one: planned.append(one))
    kernel.launch(*arguments, overlap=overlap)
    launch.collect(None)
    planned[0]()
    launched, ahead = recorder.given
    assert launched == ahead == planned[0].options
    expected = {"num_warps"} | ({"launch_pdl"} if overlap else set())
    if arch is not None:
        expected |= GIVEN
        assert launched["enable_fp_fusion"] is True, "Triton 3.9 would compile a product and a sum as two instructions"
    if arch is not None and arch.startswith("gfx"):
        expected |= AMD | (AMD_MATRIX if dot else set())
        assert launched["allow_flush_denorm"] is False, "weights in 4 bits are read as subnormals"
    assert set(launched) == expected


def test_pretending_comes_before_the_operators() -> None:
    from hf_rewrite_runtime.device import row_tiles

    assert row_tiles.WAVE
    with pytest.raises(RuntimeError, match=r"already imported for this machine: .*rows"):
        launch.pretend(launch.Target("hip", "gfx942"))


@pytest.mark.parametrize(("arch", "dtype"), [
    ("gfx90a", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn),
    ("sm_90", torch.float8_e4m3fn),
])  # fmt: skip
def test_8_bit_floats_of_chips(arch: str, dtype: torch.dtype) -> None:
    assert launch.fp8_dtype(arch) == dtype


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "scalars", "shared", "waves"),
    [
        ("gfx942", 256, 64, 30, 0, 8),
        ("gfx942", 256, 65, 30, 0, 7),  # the table of "MI300X workload optimization"
        ("gfx942", 256, 96, 30, 0, 5),
        ("gfx942", 256, 128, 30, 0, 4),
        ("gfx942", 256, 168, 30, 0, 3),
        ("gfx942", 256, 256, 30, 0, 2),
        ("gfx942", 256, 512, 30, 0, 1),
        ("gfx942", 256, 64, 104, 0, 7),  # scalar registers
        ("gfx942", 512, 80, 30, 0, 6),  # 24 waves of a compute unit in groups of 8
        ("gfx942", 1024, 80, 30, 0, 4),  # in groups of 16: one fits
        ("gfx942", 256, 64, 30, 32768, 2),  # LDS: two groups of 4 waves
        ("gfx950", 256, 64, 30, 32768, 5),
        ("gfx942", 64, 64, 30, 65536, 0.25),
        ("gfx942", 256, 64, 30, 65537, 0),
        ("gfx942", 1024, 256, 30, 0, 0),
        ("sm_90", 128, 32, None, 0, 16),
        ("sm_90", 128, 128, None, 0, 4),
        ("sm_90", 256, 255, None, 0, 2),
        ("sm_90", 32, 16, None, 0, 8),  # 32 groups of one warp
        ("sm_80", 128, 32, None, 40 * 1024, 4),
        ("sm_90", 128, 32, None, 40 * 1024, 5),
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, scalars: int | None, shared: int, waves: float) -> None:
    assert occupancy(CHIPS[arch], threads, registers, scalars, shared) == waves


@compiles
def test_constants_of_decode_attention_are_the_kernels() -> None:
    from hf_rewrite_runtime.attention import decode_attention

    kernel = decode_attention.decode_attention_kernel.jit_function
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    assert list(decode_attention._Constants._fields) == constants
