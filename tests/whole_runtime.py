"""The runtime as packages have it, all of its files: for texts that a test rewrites and runs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from rewrite.package import parts, runtime_files
from rewrite.package.closure import closure
from rewrite.package.parts import Own


@cache
def whole_runtime() -> Path:
    """Return a folder, made once a process, whose `runtime` has every file."""
    folder = Path(tempfile.mkdtemp(prefix="whole_runtime_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path, content in runtime_files.files(closure(parts.final_names())).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content + (_by_reference() if path == "runtime/mixers.py" else b""))
    return folder


def _by_reference() -> bytes:
    """Return what makes mixers' operators compute references, where they would leave a CPU's tensors to the file."""
    files = sorted(name for name in parts.modules() if name.startswith("mixers/"))
    names = parts.final_names()
    lines = [f"{names[Own(file, file.split('/')[1])]} = {names[Own(file, 'reference')]}\n" for file in files]
    return "".join(["\n\n", *lines]).encode()
