"""The runtime as packages have it, all of its files: for texts that a test rewrites and runs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from rewrite import operators
from rewrite.package import runtime_files


@cache
def whole_runtime() -> Path:
    """Return a folder, made once a process, whose `runtime` has every file."""
    folder = Path(tempfile.mkdtemp(prefix="whole_runtime_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = [name for name in operators.files() if not name.endswith("/__init__")]
    for path, content in runtime_files.files(names).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content + _by_reference(path))
    return folder


def _by_reference(path: str) -> bytes:
    """Return what makes a mixer's operator compute its reference, where it would leave a CPU's tensors to the file."""
    room, _, name = path.removeprefix("runtime/").removesuffix(".py").partition("/")
    return f"\n\n{name} = reference\n".encode() if room == "mixers" and not name.startswith("_") else b""
