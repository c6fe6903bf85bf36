"""Kernels that `rewrite compile` has compiled ahead of time, in `kernels/` of the user's cache or of a package.

There is a folder for each chip, version of Triton and of Python (`sm_90-triton-3.6.0-cpython-312`), in the form of
Triton's own cache on disk. Before a process compiles its first kernel they are copied to that cache, where they are
found by Triton's own key: of the kernel's text, its arguments, options and the compiler. What another compiler would
make differently is not found, and is compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import card_tables

GROUP = "__grp__"
"""Begins the name of the file by which Triton knows the others, by their whole paths."""


def name_for(arch: str, version: str) -> str:
    """Return the name of the folder for a chip (`sm_90`) and a version of Triton, with this Python."""
    return f"{arch}-triton-{version}-{sys.implementation.cache_tag}"


def copy(source: Path, cache: Path) -> int:
    """Copy kernels to a cache on disk of Triton's, where it has none of that key; return how many are new there.

    Raises:
        OSError: if it cannot be written.
    """
    new = 0
    for kernel in sorted(path for path in source.iterdir() if path.is_dir()):
        files = sorted(kernel.iterdir(), key=lambda file: file.name.startswith(GROUP))  # what names the others, last
        if files and not (cache / kernel.name / files[-1].name).exists():
            for file in files:
                _copy_file(file, cache / kernel.name / file.name)
            new += 1
    return new


def _copy_file(source: Path, to: Path) -> None:
    """Copy a file at once, as another process may read it; a group gets the paths of where it goes."""
    to.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=to.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            if source.name.startswith(GROUP):
                names = json.loads(source.read_bytes())["child_paths"]
                out.write(json.dumps({"child_paths": {name: str(to.parent / name) for name in names}}).encode())
            else:
                out.write(source.read_bytes())
        shutil.copymode(source, temporary)
        os.replace(temporary, to)
    except BaseException:
        os.unlink(temporary)
        raise


@card_tables.cached
def use(arch: str) -> str:
    """Let Triton find the kernels for a chip (`sm_90`), once a process; return what became of them, "" for none."""
    kept = [place for folder in card_tables.folders() if os.path.isdir(place := folder / card_tables.KERNELS)]
    if not kept:
        return ""
    knobs, version = _triton()
    name = name_for(arch, version)
    found = [place / name for place in kept if (place / name).is_dir()]
    if not found:
        there = ", ".join(sorted({path.name for place in kept for path in place.iterdir()})) or "none"
        return f"kernels compiled ahead: {there}; not used, since this is {name}"
    if knobs.cache.manager_class is not None:
        return f"kernels compiled ahead: {name}, not used: Triton's cache is not on this disk"
    try:
        new = sum(copy(folder, Path(knobs.cache.dir)) for folder in found)
    except OSError as error:
        return f"kernels compiled ahead: {name}, not used: {error}"
    return f"kernels compiled ahead: {name}, {new} of them new to Triton's cache"


def _triton() -> tuple[Any, str]:
    import triton

    return triton.knobs, triton.__version__
