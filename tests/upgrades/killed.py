"""`python killed.py COUNT SEED [--no-exchange]`: kills a sync at random steps and looks at what is there.

A child process is forked for each kill, so that nothing is imported twice. The kill comes from an audit hook, at the
Nth time that Python opens, renames, makes or removes a file: every moment in which the disk could change.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "fixtures" / "models" / "modeling_tiny_llama.py"
STEPS = ("open", "os.", "shutil.", "tempfile.", "ctypes.", "fcntl.", "subprocess.")


def kill_at_random(count: int, choose: random.Random) -> dict[str, int]:
    """Run this file as a script of its own, and return how often which state was found."""
    command = [sys.executable, __file__, str(count), str(choose.randrange(10**6))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def started(place: Path) -> None:
    """A package with an edit, whose original has moved."""
    from rewrite.cli import run

    place.mkdir()
    os.chdir(place)
    original = place / "modeling_tiny.py"
    original.write_bytes(FIXTURE.read_bytes())
    assert run([original.name, "--out", "out", "--no-verify", "--diff", "none", "--only", "fuse_qkv"]) == 0
    original.write_text(original.read_text().replace("attention_dropout = 0.0", "attention_dropout = 0.1"))
    edited = place / "out" / "modeling_tiny.py"
    edited.write_text(edited.read_text().replace("class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP"))
    (place / "out" / "notes.txt").write_text("mine")


def synced(place: Path, kill_at: int | None) -> tuple[int, int]:
    """Sync in a forked child, which kills itself at step `kill_at`; returns its status and its number of steps."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(place)
        steps = 0

        def step(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal steps
            if event.startswith(STEPS):
                steps += 1
                if steps == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        from rewrite.cli import run

        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        sys.addaudithook(step)
        code = run(["sync", "out", "--diff", "none"])
        os.write(writer, str(steps).encode())
        os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return status, int(file.read() or 0)


def main(count: int, seed: int, exchange: bool) -> dict[str, int]:
    choose = random.Random(seed)
    if not exchange:
        import rewrite.package.swap

        rewrite.package.swap.exchange = lambda one, other: False
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        top = Path(name)
        started(top / "start")
        old = contents(top / "start" / "out")
        shutil.copytree(top / "start", top / "whole")
        status, steps = synced(top / "whole", None)
        assert status == 0, status
        new = contents(top / "whole" / "out")
        assert old != new
        for number in range(count):
            place = top / str(number)
            shutil.copytree(top / "start", place)
            kill_at = choose.randint(1, steps)
            status, _ = synced(place, kill_at)
            assert os.WIFSIGNALED(status), (kill_at, status)
            found = contents(place / "out") if (place / "out").is_dir() else None
            state = "missing" if found is None else "old" if found == old else "new" if found == new else "between"
            assert state in ("old", "new") or (state == "missing" and not exchange), (kill_at, state)
            counts[state] += 1
            assert synced(place, None)[0] == 0
            assert contents(place / "out") == new, kill_at
            assert not [path for path in place.iterdir() if path.name.startswith(".")], kill_at
            shutil.rmtree(place)
        os.chdir("/")
    return {**counts, "kills": count, "steps": steps}


if __name__ == "__main__":
    result = main(int(sys.argv[1]), int(sys.argv[2]), "--no-exchange" not in sys.argv)
    print(json.dumps(result))
