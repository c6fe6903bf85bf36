"""Every family of `bench/family_sizes.py`: the original beside its rewritten package, and the table of them all.

    python bench/families.py prepare PACKAGES                   # needs libcst; writes PACKAGES/<file>
    python bench/families.py measure PACKAGES --rows ROWS [--devices cuda:0,cuda:1] [--limit-seconds 550]
    python bench/families.py measure PACKAGES --rows ROWS --tiny --devices cpu [--families llama,whisper]
    python bench/families.py render [--check]

`measure` writes the packages that are missing, runs each family in a process of its own, one at a time on a device
(the next one imports meanwhile), and keeps a row of JSON for each: a later call goes on with the families that have
none of the package as it is. `render` needs rows only, and writes docs/families.md, README's figures and both charts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from family_sizes import BY_KEY

ROOT = Path(__file__).resolve().parents[1]

LONGEST = 150
"""Seconds after which a family is stopped."""
PROCESSES = 2
"""Processes for each device, of which one measures."""
USUAL = 45
"""Seconds that a family takes, its wait for the device too: none is started with less left."""


def prepare(folder: Path, families: Iterable[str], jobs: int) -> None:
    """Write the packages that are missing, with the transformers of this environment."""
    files = sorted({BY_KEY[name].file for name in families})
    with ThreadPoolExecutor(jobs) as pool:
        for file, error in zip(files, pool.map(lambda file: package(folder, file), files), strict=True):
            print(f"{file:20} {error or 'written'}", flush=True)


def package(folder: Path, file: str) -> str:
    """Write one package if it is missing; return the error, empty if there is none."""
    out = folder / file
    if (out / "rewrite.lock").is_file():
        return ""
    command = [
        sys.executable,
        "-m",
        "rewrite.cli",
        file,
        "--out",
        str(out),
        "--no-verify",
        "--diff",
        "none",
        "--force",
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment())
    return "" if run.returncode == 0 else _last_line(run.stderr or run.stdout)


def environment(device: str = "cpu") -> dict[str, str]:
    """The environment of a family's process, which sees one card."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if ":" in device:
        found["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    return found


class Run:
    """Families that are still to be measured, taken by one thread for each device.

    Args:
        folder: of packages.
        rows: where the rows go.
        waiting: names of families.
        seconds: after which none is started.
        tiny: whether sizes are tiny.
    """

    def __init__(self, folder: Path, rows: Path, waiting: list[str], seconds: float, tiny: bool):
        self.folder, self.rows, self.waiting, self.tiny = folder, rows, waiting, tiny
        self.deadline = time.monotonic() + seconds
        self.lock = threading.Lock()

    def on(self, device: str) -> None:
        """Measure one family after the other on a device, while there is time."""
        while True:
            with self.lock:
                if not self.waiting or time.monotonic() + USUAL > self.deadline:
                    return
                name = self.waiting.pop(0)
            row = self.measured(name, device)
            with self.lock:
                print(line(name, row), flush=True)

    def measured(self, name: str, device: str) -> dict[str, Any]:
        """Return the row of a family; one with an error, if it could not be measured."""
        path, started = row_path(self.rows, name), time.monotonic()
        error = package(self.folder, BY_KEY[name].file)
        if not error:
            error = self.child(name, path, device)
        row = json.loads(path.read_text("utf-8")) if path.is_file() else {"published": BY_KEY[name].published}
        row["process_seconds"] = round(time.monotonic() - started, 1)
        if error:
            row["error"] = error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
        return row

    def child(self, name: str, path: Path, device: str) -> str:
        """Run a family in a process of its own and return its error; what it prints goes beside the row."""
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "bench" / "family_run.py"), name, str(self.folder / BY_KEY[name].file)]
        command += [str(path), "--device", device.partition(":")[0], *(["--tiny"] if self.tiny else [])]
        command += ["--turn", str(self.rows / f"{device.replace(':', '-')}.turn")]
        log = path.with_suffix(".log")
        seconds = min(LONGEST, max(1.0, self.deadline - time.monotonic()))
        with log.open("w", encoding="utf-8") as stream:
            try:
                code = subprocess.run(
                    command, stdout=stream, stderr=stream, env=environment(device), timeout=seconds
                ).returncode
            except subprocess.TimeoutExpired:
                return f"stopped after {seconds:.0f} s"
        return "" if code == 0 else _last_line(log.read_text("utf-8")) or f"ended with {code}"


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no message")


def row_path(rows: Path, name: str) -> Path:
    """Where a family's row is kept."""
    return rows / f"{name}.json"


def read_rows(rows: Path) -> dict[str, dict[str, Any]]:
    """Every row there is, by family, in the order of the table of sizes."""
    paths = {name: row_path(rows, name) for name in BY_KEY}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.is_file()}


def line(name: str, row: dict[str, Any]) -> str:
    """What is printed when a family is done."""
    if "ours_ms" not in row:
        return f"{name:18} ERROR {row['error']}"
    share = f"{row['share']:4.0%}" if row["share"] is not None else "   –"
    parity = row.get("parity")
    ratio = f"{parity['ratio']:.2f}, gap {parity['gap']:.2g}/{parity['own_gap']:.2g}" if parity else "not measured"
    parts = [f"{name:18} eager {row['eager_ms']:6.2f}", f"ours {row['ours_ms']:6.3f}", f"{row['speed_up']:5.2f}×"]
    parts += [share, "graph" if row["graph"] else f"no graph: {row['reason']}", f"parity {ratio}"]
    return "  ".join([*parts, f"{row['process_seconds']:.0f} s", f"ERROR {row['error']}" if "error" in row else ""])


def is_done(row: dict[str, Any], package: Path, tiny: bool) -> bool:
    """Whether a row is of the package as it is now, complete, and of the sizes asked for."""
    lock = package / "rewrite.lock"
    digest = json.loads(lock.read_text("utf-8"))["digest"] if lock.is_file() else None
    return "error" not in row and row["package"] == digest and row["tiny"] == tiny


def measure(given: argparse.Namespace, families: list[str]) -> int:
    """Measure every family that has no row; 1 if one of those asked for has none, or one with an error."""
    rows = read_rows(given.rows)
    done = {name for name in rows if is_done(rows[name], given.packages / BY_KEY[name].file, given.tiny)}
    run = Run(
        given.packages, given.rows, [name for name in families if name not in done], given.limit_seconds, given.tiny
    )
    places = given.devices.split(",") * PROCESSES
    threads = [threading.Thread(target=run.on, args=(device,)) for device in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = read_rows(given.rows)
    failed = [name for name in families if name not in rows or "error" in rows[name]]
    print(f"{len(families) - len(failed)} of {len(families)} measured; not: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


def render(given: argparse.Namespace) -> int:
    """Write the page, the block of README and the charts; with `--check`, only say whether a text is another."""
    import family_page

    rows, decode = read_rows(given.rows), json.loads(given.decode.read_text("utf-8"))
    head, begin, rest = given.readme.read_text("utf-8").partition(family_page.README_BEGIN)
    tail = rest.partition(family_page.README_END)[2]
    texts = {
        given.markdown: family_page.page(rows, given.chart.name),
        given.readme: f"{head}{begin}\n{family_page.readme(rows, decode)}\n{family_page.README_END}{tail}",
        given.chart: family_page.chart(rows),
        ROOT / family_page.README_CHART: family_page.readme_chart(decode),
    }
    if given.check:
        return int(any(path.read_text("utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing, measuring, rendering = (commands.add_parser(name) for name in ("prepare", "measure", "render"))
    for command in (preparing, measuring):
        command.add_argument("packages", type=Path)
        command.add_argument("--families", default=",".join(BY_KEY), help="some of them, by name")
    preparing.add_argument("--jobs", type=int, default=4)
    measuring.add_argument("--devices", default="cuda:0", help="one family at a time on each: cuda:0,cuda:1")
    measuring.add_argument("--limit-seconds", type=float, default=1e9, help="start no family that would end later")
    measuring.add_argument("--tiny", action="store_true", help="tiny sizes: tries the command, on any device")
    measuring.add_argument("--rows", type=Path, required=True)
    rendering.add_argument("--rows", type=Path, default=ROOT / "bench" / "results" / "families-h100")
    rendering.add_argument("--decode", type=Path, default=ROOT / "bench" / "results" / "decode-1b-h100.json")
    rendering.add_argument("--markdown", type=Path, default=ROOT / "docs" / "families.md")
    rendering.add_argument("--readme", type=Path, default=ROOT / "README.md")
    rendering.add_argument("--chart", type=Path, default=ROOT / "docs" / "families.svg")
    rendering.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a text is another")
    given = parser.parse_args()
    if given.command == "render":
        return render(given)
    families = given.families.split(",")
    if unknown := sorted(set(families) - set(BY_KEY)):
        parser.error(f"no such families: {', '.join(unknown)}")
    if given.command == "measure":
        return measure(given, families)
    prepare(given.packages, families, given.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
