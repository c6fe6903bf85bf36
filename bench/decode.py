"""The measurements behind the decoding tables of docs/performance.md: three shapes, each in a process of its own.

    python bench/decode.py prepare PACKAGES                 # needs libcst; writes PACKAGES/{llama,qwen3_moe,ladder}
    python bench/decode.py measure PACKAGES [--only 1b,8b] [--for 480] [--results bench/results] [OPTION …]
    rewrite bench PACKAGES/ladder --ladder --shape 1b --json bench/results/ladder-1b-h100.json
    python bench/generation.py PACKAGES/llama --json bench/results/generation-1b-h100.json
    python bench/decode.py render [--check]                 # writes docs/performance.md from the JSON

`measure` needs torch and transformers only; options that it does not know go to `decode_run.py`. A
shape's results are in `decode-<shape>-<card>.json` from its first figure on and grow as it runs, so a run that is
killed has lost nothing that it printed. For every shape first comes what runs at once, then what has to be compiled;
the seconds are shared out between the shapes, and what does not fit is recorded as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
RUN = Path(__file__).with_name("decode_run.py")
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench/decode.py render: begin -->", "<!-- bench/decode.py render: end -->"


@dataclass(frozen=True)
class Job:
    """A shape: its package, batch shapes, those for which the original is compiled, and its share of the time.

    What transformers compiles by itself is measured at one batch shape: the compiled step is the faster of the two.
    """

    package: str
    cells: str
    compiled: str
    prefill: str
    share: float
    more: tuple[str, ...] = ()


JOBS = {
    "1b": Job("llama", "1x512,8x512,32x512,1x8192,1x32768", "1x512,8x512,32x512,1x8192,1x32768", "128,512,2048", 0.3),
    "8b": Job("llama", "1x512,8x512,32x512,1x8192,1x32768", "1x512,8x512,1x32768,32x512,1x8192", "128,512,2048", 0.4),
    "30b-a3b": Job("qwen3_moe", "1x512,8x512,1x8192", "1x512", "128,512,2048", 0.3, ("--parity-rows", "2")),
}


def prepare(folder: Path) -> None:
    """Write the packages, with the transformers of this environment."""
    for package in sorted({job.package for job in JOBS.values()}):
        command = [sys.executable, "-m", "rewrite.cli", package, "--out", str(folder / package), "--no-verify"]
        subprocess.run([*command, "--diff", "none", "--force"], check=True, env=environment())
    ladder = [sys.executable, "-m", "rewrite.cli", "bench", "llama", "--ladder-prepare", str(folder / "ladder")]
    subprocess.run(ladder, check=True, env=environment())


def measure(folder: Path, results: Path, only: list[str], seconds: float, more: list[str]) -> int:
    """Measure shape after shape; a shape that fails does not stop the next. Returns how many failed."""
    started, failed = time.perf_counter(), 0
    shares = sum(JOBS[name].share for name in only)
    for name in only:
        job = JOBS[name]
        left = seconds - (time.perf_counter() - started)
        budget = left * job.share / shares
        shares -= job.share
        out = results / f"decode-{name}-{card()}.json"
        command = [sys.executable, str(RUN), str(folder / job.package), "--shape", name]
        command += ["--cells", job.cells, "--compiled-cells", job.compiled, "--static-cells", "1x512"]
        command += ["--prefill", job.prefill]
        command += ["--budget", f"{budget:.0f}", "--json", str(out), "--seconds", "4", "--rounds", "4,20"]
        command += [*job.more, *more]
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        try:
            code = subprocess.run(command, env=environment(), timeout=left + 60).returncode
        except subprocess.TimeoutExpired:
            code = -1
            print(f"{name}: stopped, what there is so far is in {out}", flush=True)
        failed += code != 0
    return failed


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def card() -> str:
    """A short name of the GPU: `h100`."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().lower().split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])


def render(check: bool) -> int:
    """Put the tables of all recorded results between the markers of docs/performance.md."""
    sys.path.insert(0, str(ROOT))
    import decode_page

    found = {
        kind: [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]
        for kind in ("decode", "ladder", "generation")
    }
    order = list(JOBS)
    for records in found.values():
        records.sort(key=lambda record: order.index(record["shape"]))
    tables = decode_page.decoding(found["decode"], found["ladder"], found["generation"])
    return int(between(PAGE, BEGIN, END, tables, check))


def between(page: Path, begin: str, end: str, text: str, check: bool) -> bool:
    """Put text between two markers; with `check` only say whether it is another."""
    before = page.read_text("utf-8")
    head, _, rest = before.partition(begin)
    _, _, tail = rest.partition(end)
    after = f"{head}{begin}\n{text}\n{end}{tail}"
    if not check:
        page.write_text(after, "utf-8")
    return check and before != after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("packages", type=Path)
    measuring = commands.add_parser("measure")
    measuring.add_argument("packages", type=Path)
    measuring.add_argument("--only", default=",".join(JOBS))
    measuring.add_argument("--for", dest="duration", type=float, default=480, help="seconds for all shapes together")
    measuring.add_argument("--results", type=Path, default=RESULTS)
    rendering = commands.add_parser("render")
    rendering.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not up to date")
    given, more = parser.parse_known_args()  # what measure does not know goes to decode_run.py
    if more and given.command != "measure":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if given.command == "prepare":
        prepare(given.packages)
        return 0
    if given.command == "render":
        return render(given.check)
    return measure(given.packages, given.results, given.only.split(","), given.duration, more)


if __name__ == "__main__":
    sys.exit(main())
