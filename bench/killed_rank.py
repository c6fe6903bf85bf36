"""What the other ranks do when one is killed in the middle of `generate()`: nobody but themselves ends them here.

    python bench/killed_rank.py PACKAGE [--device cuda] [--ranks 2]

Prints, for each survivor, the seconds from the kill to its end, its exit code and the last line it said. The exit code
is 1 if one takes more than 30 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 30.0


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("package", type=Path)
    made.add_argument("--device", default="cuda")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--shape", default="1b")
    made.add_argument("--worker", metavar="FOLDER", type=Path)
    given = made.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.worker is not None:
        return work(given)
    with tempfile.TemporaryDirectory() as folder:
        return watch(given, Path(folder))


def watch(given: argparse.Namespace, folder: Path) -> int:
    """Start the ranks, kill the last one while it generates, and wait for the others."""
    save(given, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, str(given.package), "--device", given.device, "--worker", str(folder)]
    ranks = []
    for rank in range(given.ranks):
        more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": given.ranks, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in more.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    while not all((folder / f"generates-{rank}").exists() for rank in range(given.ranks)):
        if any(process.poll() is not None for process in ranks):
            print("a rank ended before it generated:", *(process.communicate()[1][-600:] for process in ranks))
            return 1
        time.sleep(0.2)
    time.sleep(2.0)
    ranks[-1].send_signal(signal.SIGKILL)
    ranks[-1].wait()
    killed, late = time.perf_counter(), False
    for rank, process in enumerate(ranks[:-1]):
        try:
            _, said = process.communicate(timeout=2 * LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
        seconds = time.perf_counter() - killed
        late = late or seconds > LIMIT_S
        line = next(
            (line for line in reversed(said.splitlines()) if "Error" in line or "has ended" in line), "nothing"
        )
        print(f"rank {rank} ended {seconds:.1f} s after the kill with code {process.returncode}: {line}", flush=True)
    return int(late)


def save(given: argparse.Namespace, folder: Path) -> None:
    from rewrite.benchmark.benchmark_models import build, load
    from rewrite.measure.presets import config_for

    subject = load(given.package)
    shape, dtype = (given.shape, "bfloat16") if given.device == "cuda" else ("tiny", "float32")
    model = build(subject.original, config_for(subject.original.config_class, shape), dtype, given.device)
    model.save_pretrained(folder)


def work(given: argparse.Namespace) -> int:
    """Generate until killed."""
    import torch

    from rewrite.benchmark.benchmark_models import load, settled

    subject = load(given.package)
    model = settled(subject.rewritten.from_pretrained(given.worker / "model", dtype="auto", tp_plan="auto"))
    type(model)._step_without_graph = given.device == "cpu"
    prompt = torch.ones(1, 16, dtype=torch.long, device=model.device)
    model.generate(prompt, max_new_tokens=16)
    (given.worker / f"generates-{os.environ['RANK']}").touch()
    model.generate(prompt, max_new_tokens=min(100_000, model.config.max_position_embeddings - 32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
