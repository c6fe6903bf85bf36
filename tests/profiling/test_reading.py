"""Traces of other tools: what is read of them, and what is said of those that cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rewrite import cli
from rewrite.profile.external_trace import record_of
from rewrite.profile.read import TraceNotReadable, read

GEMM, NORM = "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN", "_rms_norm_kernel.kd"


def event(name: str, start: float, length: float, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "tid": 1, "pid": 0, "args": arguments}


CHROME = {
    "deviceProperties": [{"name": "AMD Instinct MI300X"}],
    "baseTimeNanoseconds": 0,
    "traceEvents": [
        event("hipLaunchKernel", 0, 4, "cuda_runtime", correlation=1),
        event(GEMM, 10, 20, "kernel", correlation=1, stream=0),
        event("hipLaunchKernel", 40, 5, "cuda_runtime", correlation=2),
        event("Memcpy DtoD (Device -> Device)", 50, 10, "gpu_memcpy", correlation=2, stream=0),
        event("aten::mm", 0, 5, "cpu_op", **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}),
    ],
}
V3_ROWS = (
    "Kind,Agent_Id,Queue_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp\n"
    f'KERNEL_DISPATCH,1,1,1,"{GEMM}",1,1000,21000\nKERNEL_DISPATCH,1,1,2,"{NORM}",2,31000,36000\n'
)
V1_ROWS = (
    '"Index","KernelName","gpu-id","queue-id","BeginNs","EndNs","DurationNs"\n'
    f'0,"{GEMM} [clone .kd]",0,0,1000,21000,20000\n1,"{NORM} [clone .kd]",0,0,31000,36000,5000\n'
)
SUMS = f'"Name","Calls","TotalDurationNs","AverageNs"\n"{GEMM}",4,20000,5000\n"{NORM}",5,5000,1000\n'
V3 = {
    "rocprofiler-sdk-tool": [
        {
            "agents": [{"name": "gfx950", "product_name": "AMD Instinct MI350X"}],
            "kernel_symbols": [
                {"kernel_id": 1, "kernel_name": f"{GEMM}.kd", "formatted_kernel_name": GEMM},
                {"kernel_id": 2, "kernel_name": NORM},
            ],
            "buffer_records": {
                "kernel_dispatch": [
                    {
                        "start_timestamp": start,
                        "end_timestamp": end,
                        "correlation_id": {"internal": number},
                        "dispatch_info": {"kernel_id": number, "queue_id": {"handle": 1}},
                    }
                    for number, start, end in ((1, 1000, 21000), (2, 31000, 36000))
                ],
                "memory_copy": [],
            },
        }
    ]
}
V1_CHROME = {
    "traceEvents": [
        {"ph": "X", "name": GEMM, "ts": "1", "dur": "20", "pid": "6", "tid": "0", "args": {"BeginNs": "1000"}},
        {"ph": "X", "name": NORM, "ts": "31", "dur": "5", "pid": "6", "tid": "0", "args": {"BeginNs": "31000"}},
        {"ph": "X", "name": "hipMalloc", "ts": "0", "dur": "9", "pid": "2", "tid": "0", "args": {}},
    ]
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("kernel_trace.csv", V3_ROWS),
        ("results.csv", V1_ROWS),
        ("results.json", json.dumps(V3)),
        ("chrome.json", json.dumps(V1_CHROME)),
        ("kernel_stats.csv", SUMS),
    ],
)
def test_forms_of_rocprof_say_the_same(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    side = record_of(path)["sides"]["original"]
    times = {kind: values["us"] for kind, values in side["categories"].items()}
    assert times == pytest.approx({"gemm": 20.0, "elementwise": 5.0})
    assert side["waits"] == ({} if "stats" in name else pytest.approx({"idle": 10.0}))


@pytest.mark.parametrize("zipped", [False, True])
def test_torch_trace(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("trace.json.gz" if zipped else "trace.json")
    data = json.dumps(CHROME).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    record = record_of(path)
    side = record["sides"]["original"]
    assert record["device"] == "AMD Instinct MI300X"
    assert side["sum_us"] == pytest.approx(50.0)
    assert {k: v["us"] for k, v in side["categories"].items()} == pytest.approx({"gemm": 20.0, "copies": 10.0})
    assert side["waits"] == pytest.approx({"host": 15.0, "between": 5.0})


def test_steps_that_the_profiler_marked_are_averaged(tmp_path: Path) -> None:
    steps = [event(f"ProfilerStep#{n}", 100.0 * n, 100.0, "user_annotation") for n in range(2)]
    kernels = [event(GEMM, 100.0 * n + 10, 20.0 * (n + 1), "kernel", correlation=9) for n in range(2)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*steps, *kernels]}), encoding="utf-8")
    side = record_of(path)["sides"]["original"]
    assert side["steps"] == 2
    assert side["sum_us"] == pytest.approx(100.0)
    assert side["categories"]["gemm"] == pytest.approx({"us": 30.0, "count": 1.0})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "empty"),
        ("a.json", b"{", "no valid JSON"),
        ("a.json", b'{"a": 1}', "neither traceEvents"),
        ("a.json", b"3", "none of the columns"),
        ("a.json", b'{"traceEvents": []}', "no kernel"),
        ("a.json", b'{"traceEvents": 3}', "damaged"),
        ("a.json", b'{"traceEvents": [{"ph": "X", "ts": "x", "name": "k", "cat": "kernel"}]}', "damaged"),
        ("a.json", b'{"rocprofiler-sdk-tool": [{}]}', "damaged"),
        ("a.json.gz", b"\x1f\x8b\x08\x00broken", "cannot read"),
        ("a.json.gz", gzip.compress(json.dumps(CHROME).encode(), mtime=0)[:60], "cannot read"),
        ("a.csv", b"a,b\n1,2\n", "none of the columns"),
        ("a.csv", b"Kernel_Name,Start_Timestamp,End_Timestamp\nk,1,\n", "line 2 has no times"),
        ("a.csv", b"Name,Calls,TotalDurationNs\nk,x,1\n", "line 2 has no numbers"),
        ("a.pftrace", b"\x0a\xff\xfe\x00", "not text"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceNotReadable) as raised:
        read(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "a folder"), (tmp_path / "none.json", "no such file")):
        with pytest.raises(TraceNotReadable, match=said):
            read(path)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(CHROME), encoding="utf-8")
    assert cli.run(["profile", "--trace", str(path), "--json", "-", "--markdown", str(tmp_path / "a.md")]) == 0
    assert json.loads(capfd.readouterr().out)["kind"] == "trace"
    text = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert "| products | 20 | 40.0% | 1 |" in text
    assert cli.run(["profile", "--trace", str(tmp_path / "none.json")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert cli.run(["profile"]) == 2
    assert cli.run(["profile", "llama", "--trace", str(path)]) == 2
