"""The runtime as packages have it, all of its files: for texts that a test rewrites and runs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from rewrite.package.closure import closure
from rewrite.package.parts import Own

from rewrite.package import parts, runtime_files


@cache
def whole_runtime() -> Path:
    """Return a folder, made once a process, whose `runtime` has every file."""
    folder = Path(tempfile.mkdtemp(prefix="whole_runtime_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path, content in runtime_files.files(closure(parts.final_names())).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content + _BY_REFERENCE.get(path, bytes)())
    return folder


def _mixers() -> bytes:
    """Return what makes mixers' operators compute references, where they would leave a CPU's tensors to the file."""
    files = sorted(name for name in parts.modules() if name.startswith("mixers/"))
    names = parts.final_names()
    lines = [f"{names[Own(file, file.split('/')[1])]} = {names[Own(file, 'reference')]}\n" for file in files]
    return "".join(["\n\n", *lines]).encode()


def _expert_lists() -> bytes:
    """Return what makes lists of experts take the operator, whose reference a CPU runs, where they would run loops."""
    return f"\n\n{parts.final_names()[Own('moe/expert_list', '_has_kernels')]} = torch.is_tensor\n".encode()


_BY_REFERENCE = {"runtime/mixers.py": _mixers, "runtime/moe.py": _expert_lists}
"""What files of the runtime end with, so that what is rewritten is computed on a CPU as on a GPU."""
