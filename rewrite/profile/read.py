"""Reads traces: of torch's profiler (Chrome JSON) and of AMD's rocprof 1 and 3, as CSV or JSON, gzipped or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewrite.errors import UsageError

from .trace import Activity, Launch, Mark, Operator, Trace

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "privateuse1_runtime"}
_ROCPROF_API = {"HIP", "HSA", "HIP_API", "HSA_API", "ROCTX", "MARKER"}


class TraceNotReadable(UsageError):
    """A file given with --trace is no trace that can be read."""

    def __init__(self, path: object, why: str):
        super().__init__(
            f"cannot read {path} as a trace: {why}. What is read: torch.profiler's export_chrome_trace (.json, "
            ".json.gz), rocprof's results.csv, results.stats.csv and results.json, rocprofv3's kernel_trace.csv, "
            "kernel_stats.csv and results.json."
        )


def read(path: Path) -> Trace:
    """Read a trace, whichever of the known profilers wrote it.

    Raises:
        TraceNotReadable: it is none, or holds no activity of a device and no operator.
    """
    text = _text(path)
    start = text.lstrip()[:1]
    if not start:
        raise TraceNotReadable(path, "it is empty")
    trace = _json(path, text) if start in "{[" else _table(path, text)
    if not trace.activities and not trace.operators:
        raise TraceNotReadable(path, "it holds no kernel and no operator")
    return trace.sort()


def _text(path: Path) -> str:
    if path.is_dir():
        raise TraceNotReadable(path, "it is a folder")
    if not path.is_file():
        raise TraceNotReadable(path, "there is no such file")
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TraceNotReadable(path, "it is not text (a .pftrace or a database has to be exported as JSON)") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceNotReadable(path, str(error) or "it is cut off") from error


def _json(path: Path, text: str) -> Trace:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TraceNotReadable(path, f"it is no valid JSON ({error})") from error
    if isinstance(content, list):
        content = {"traceEvents": content}
    if not isinstance(content, dict):
        raise TraceNotReadable(path, "its JSON is neither an object nor a list")
    try:
        if "rocprofiler-sdk-tool" in content:
            return _rocprofv3(content)
        if "traceEvents" in content:
            return chrome(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceNotReadable(path, f"it is damaged ({type(error).__name__}: {error})") from error
    raise TraceNotReadable(path, "its JSON has neither traceEvents nor rocprofiler-sdk-tool")


def chrome(content: Mapping[str, Any]) -> Trace:
    """Take over a Chrome trace of torch's profiler, or of rocprof 1, which writes kernels without categories."""
    trace = Trace(source="torch.profiler", base_ns=content.get("baseTimeNanoseconds"))
    devices = content.get("deviceProperties") or []
    trace.device = str(devices[0].get("name") or "") if devices else ""
    spans = [e for e in content["traceEvents"] if isinstance(e, dict) and e.get("ph", "X") == "X" and "ts" in e]
    launches: dict[int, Launch] = {}
    for event in spans:
        if event.get("cat") in CALLS:
            launch = Launch(*_span(event), event.get("tid"), _arguments(event).get("correlation"))
            trace.launches.append(launch)
            if launch.correlation is not None:
                launches[launch.correlation] = launch
    for event in spans:
        kind, arguments = event.get("cat"), _arguments(event)
        name, start, end = _span(event)
        if kind in DEVICE:
            number = arguments.get("correlation")
            found = launches.get(number) if number is not None else None
            trace.activities.append(Activity(name, start, end, arguments.get("stream"), number, found))
        elif kind == "cpu_op":
            dims, types = arguments.get("Input Dims", ()), arguments.get("Input type", ())
            strides, values = arguments.get("Input Strides", ()), arguments.get("Concrete Inputs", ())
            number = arguments.get("Sequence number")
            trace.operators.append(Operator(name, start, end, event.get("tid"), dims, types, strides, values, number))
        elif kind == "user_annotation":
            trace.marks.append(Mark(name, start, end, event.get("tid")))
        elif kind == "python_function":
            trace.functions.append(Mark(name, start, end, event.get("tid")))
    if not trace.activities and not trace.operators:
        _rocprof_chrome(trace, spans)
    return trace.sort()


def _span(event: Mapping[str, Any]) -> tuple[str, float, float]:
    start = float(event["ts"])
    return str(event["name"]), start, start + float(event.get("dur") or 0.0)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, Mapping) else {}


def _rocprof_chrome(trace: Trace, spans: Sequence[Mapping[str, Any]]) -> None:
    """rocprof 1: a kernel's `args` have `BeginNs`; calls have a process that is not a device's."""
    trace.source = "rocprof"
    for event in spans:
        arguments = _arguments(event)
        if "BeginNs" in arguments or "dev-id" in arguments:
            name, start, end = _span(event)
            if end > start:
                trace.activities.append(Activity(_bare(name), start, end, arguments.get("queue-id")))


def _rocprofv3(content: Mapping[str, Any]) -> Trace:
    trace = Trace(source="rocprofv3")
    for process in content["rocprofiler-sdk-tool"]:
        names = {
            symbol["kernel_id"]: symbol.get("formatted_kernel_name") or symbol["kernel_name"]
            for symbol in process["kernel_symbols"]
        }
        found = [agent.get("product_name") or agent.get("name") for agent in process.get("agents", [])]
        trace.device = trace.device or next((str(name) for name in found if name and "Instinct" in str(name)), "")
        records = process["buffer_records"]
        for record in records.get("kernel_dispatch", []):
            info = record["dispatch_info"]
            trace.activities.append(
                Activity(
                    _bare(names[info["kernel_id"]]),
                    record["start_timestamp"] / 1e3,
                    record["end_timestamp"] / 1e3,
                    info["queue_id"]["handle"],
                    record["correlation_id"]["internal"],
                )
            )
        for record in records.get("memory_copy", []):
            trace.activities.append(
                Activity("Memcpy (rocprofv3)", record["start_timestamp"] / 1e3, record["end_timestamp"] / 1e3)
            )
    return trace


def _table(path: Path, text: str) -> Trace:
    """A CSV of rocprof or rocprofv3: a row a kernel's run, or a row a kernel with its sum."""
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise TraceNotReadable(path, f"it is no valid CSV ({error})") from error
    columns = set(rows[0]) if rows else set()
    for name, start, end, source in (
        ("Kernel_Name", "Start_Timestamp", "End_Timestamp", "rocprofv3"),
        ("KernelName", "BeginNs", "EndNs", "rocprof"),
    ):
        if {name, start, end} <= columns:
            return _runs(path, rows, (name, start, end), source)
    if {"Name", "Calls", "TotalDurationNs"} <= columns:
        return _sums(path, rows)
    known = "Kernel_Name, Start_Timestamp, End_Timestamp; KernelName, BeginNs, EndNs; or Name, Calls, TotalDurationNs"
    raise TraceNotReadable(path, f"it has none of the columns {known}")


def _runs(path: Path, rows: Sequence[Mapping[str, str]], columns: tuple[str, str, str], source: str) -> Trace:
    trace, (name, start, end) = Trace(source=source), columns
    for number, row in enumerate(rows, 2):
        if not row[name] or row.get("Kind", "KERNEL_DISPATCH") in _ROCPROF_API:
            continue
        try:
            begun, ended = float(row[start]) / 1e3, float(row[end]) / 1e3
        except (TypeError, ValueError):
            raise TraceNotReadable(path, f"line {number} has no times in {start} and {end}") from None
        stream = row.get("Stream_Id") or row.get("Queue_Id") or row.get("queue-id")
        trace.activities.append(Activity(_bare(row[name]), begun, ended, stream))
    return trace


def _sums(path: Path, rows: Sequence[Mapping[str, str]]) -> Trace:
    trace, cursor = Trace(source="rocprof statistics", totals=True), 0.0
    for number, row in enumerate(rows, 2):
        try:
            total, calls = float(row["TotalDurationNs"]) / 1e3, int(row["Calls"])
        except (TypeError, ValueError):
            raise TraceNotReadable(path, f"line {number} has no numbers in Calls and TotalDurationNs") from None
        name = _bare(row["Name"])
        trace.activities.append(Activity(name, cursor, cursor + total))
        trace.counts[name] = calls
        cursor += total
    return trace


def _bare(name: str) -> str:
    return name.strip().removesuffix(" [clone .kd]").removesuffix(".kd")
