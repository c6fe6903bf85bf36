"""Compiles a package's kernels for cards that need not be here, and puts them where its runtime finds them.

Imports neither torch nor triton: each card has a process of its own, with an empty cache of Triton's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching import card_tables
from hf_rewrite_runtime.launching.precompiled import GROUP, copy, name_for
from rewrite.console.progress_steps import Step
from rewrite.errors import RewriteError

from . import kernel_run
from .cards import CARDS, Card
from .chips import CHIPS, MODELLED
from .package_work import BUILDS, MARK

TARGETS = (*CARDS, *CHIPS)
"""What may be asked for: a card, or a chip with all cards of it."""
HERE = "this GPU"
_START = (
    "import json, sys; asked = json.load(sys.stdin); sys.path[:] = asked.pop('path'); "
    "from rewrite.kernels.package_work import work; work(**asked)"
)


@dataclass(frozen=True)
class Ahead:
    """What to compile."""

    package: Path
    original: str | None
    shape: str | None
    path: str | None
    """A checkpoint whose configuration counts, instead of a shape."""
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Tokens that caches hold."""
    ship: bool = False
    """Whether the package gets the kernels, not the user's folder of tables."""


def cards_of(target: str) -> list[Card]:
    """Return the cards that a target stands for; one without a name where its chip has none in `CARDS`."""
    if target in CARDS:
        return [CARDS[target]]
    if target == HERE:
        return [Card(HERE, HERE, 0, 0, 0, 0, 0, 0)]
    known = [card for card in CARDS.values() if card.arch == target]
    return known or [Card(target, target, CHIPS[target].processors, 0, 0, 0, 0, 0)]


def compile_for(
    plan: Ahead, targets: Sequence[str], to: Path | None, progress: Callable[[str], None] = lambda message: None
) -> dict[str, list[str]]:
    """Compile for each target; return the names of the kernels, by the folder that they are in.

    Args:
        plan: what.
        targets: of `TARGETS`; none for the GPU that is here.
        to: a cache of Triton's to put them into, instead of a folder of tables.
        progress: told of every kernel.

    Raises:
        RewriteError: the process of a card failed, or compiled nothing.
    """
    made: dict[str, list[str]] = {}
    kernels = (plan.package if plan.ship else card_tables.folder()) / card_tables.KERNELS
    for target in targets or (HERE,):
        for card in cards_of(target):
            with tempfile.TemporaryDirectory() as cache:
                found = [*_compiled(plan, card, Path(cache), progress)]
                if not found:
                    raise _failed(plan, card, "its prompts and steps launch none")
                arch = found[0][1] if target == HERE else card.arch
                names = [name for name, _ in found]
                folder = to or kernels / name_for(arch, importlib.metadata.version("triton"))
                folder.mkdir(parents=True, exist_ok=True)
                copy(Path(cache), folder)
                made.setdefault(str(folder), []).extend(names)
    for kept in {Path(name) for name in made} if to is None else ():
        _shorten(kept)
    return made


def _compiled(plan: Ahead, card: Card, cache: Path, progress: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Run the process of a card; yield its kernels, which are in `cache` then, by name, and their chip."""
    asked: dict[str, Any] = {
        "package": str(plan.package), "original": plan.original,
        "chip": None if card.arch == HERE else asdict(MODELLED[card.arch]),
        "card": asdict(card), "config": {"shape": plan.shape, "path": plan.path}, "dtype": plan.dtype,
        "batches": plan.batches, "contexts": plan.contexts, "path": sys.path,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as libraries, tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        environment = kernel_run.environment(str(cache)) | {"TRITON_STORE_BINARY_ONLY": "1"}
        environment |= {} if card.arch == HERE else _building(Path(libraries))
        command = [sys.executable, "-c", _START]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            json.dump(asked, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                if line.startswith(MARK):
                    name, arch, number, count = json.loads(line.removeprefix(MARK))
                    progress(Step(f"{name} for {card.name}", number, count))
                    yield name, arch
        if process.returncode:
            said.seek(0)
            why = (said.read().strip().splitlines() or ["no word"])[-1]
            raise _failed(plan, card, why)


def _failed(plan: Ahead, card: Card, why: str) -> RewriteError:
    return RewriteError(f"the kernels of {plan.package} could not be compiled for {card.name}: {why}")


def _building(folder: Path) -> dict[str, str]:
    """Return what a process needs to build C functions that are linked with a driver, which need not be here.

    Nothing where there is no compiler, or no header of Python: then they are built where kernels are launched.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return {}
    text = folder / "driver.c"
    # a linker leaves out a library of which nothing is used, and what it made could not be loaded there
    functions = "".join(f"void {name}(void) {{}}\n" for name in _functions_of_the_driver())
    text.write_text(f"#include <Python.h>\n{functions}", encoding="utf-8")
    library, header = folder / "libcuda.so.1", sysconfig.get_path("include")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-I",
        header,
        "-o",
        str(library),
        f"-Wl,-soname,{library.name}",
        str(text),
    ]
    done = subprocess.run(command, capture_output=True, check=False)
    (folder / "libcuda.so").symlink_to(library)  # by which Triton 3.4 asks for it
    return {} if done.returncode else {BUILDS: "1", "TRITON_LIBCUDA_PATH": str(folder)}


def _functions_of_the_driver() -> list[str]:
    """Return the names of CUDA's driver that Triton's C functions may call."""
    spec = importlib.util.find_spec("triton")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder, "backends", "nvidia").glob("driver.*")]
    return sorted({name for file in files for name in re.findall(r"\bcu[A-Z]\w+(?=\()", file.read_text("utf-8"))})


def _shorten(folder: Path) -> None:
    """Leave whole paths out of kernels: they get those of the cache that they are copied to."""
    for group in folder.glob(f"*/{GROUP}*"):
        names = json.loads(group.read_bytes())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: name for name in sorted(names)}}), encoding="utf-8")
