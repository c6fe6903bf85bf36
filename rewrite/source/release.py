"""A transformers that is not installed: a wheel or an unpacked tree, read and never imported."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rewrite.errors import ReleaseNotFound
from rewrite.source.installed import Installed, copy_at, find_transformers

PROJECT = "project"
"""Asks for the transformers of the project's own environment; a hook runs in an environment of its own."""
_VERSION = re.compile(r"\d+(\.\w+)+")
_ENVIRONMENTS = (".venv", "venv", "env")


@contextlib.contextmanager
def library(asked: str | None) -> Iterator[Installed | None]:
    """Yield the transformers that is asked for; a wheel is unpacked for the time of the block.

    Args:
        asked: a version, a wheel, a folder that transformers lies in or is, `project`; None is what is installed.

    Raises:
        ReleaseNotFound: if there is none.
    """
    if asked is None:
        yield find_transformers()
        return
    if asked == PROJECT:
        yield of_project(Path.cwd()) or find_transformers()
        return
    path = Path(asked).expanduser()
    if path.is_dir():
        yield _of_folder(path)
        return
    if _VERSION.fullmatch(asked) and not path.exists():
        found = find_transformers()
        if found is not None and found.version == asked:
            yield found
            return
        path = _wheel(asked)
    with tempfile.TemporaryDirectory(prefix="rewrite-") as folder:
        yield _unpacked(path, Path(folder))


def of_project(folder: Path) -> Installed | None:
    """Return the transformers of the project around `folder`: of its virtual environment, else of a Python on PATH.

    The environment that this tool runs in is passed over; None if there is no other.
    """
    own = Path(sys.prefix).resolve()
    places = [above / name for above in (folder, *folder.parents) for name in _ENVIRONMENTS]
    for place in (*places, *(Path(entry).parent for entry in os.get_exec_path())):
        if place.resolve() != own and (found := _of_environment(place)) is not None:
            return found
    return None


def _of_environment(prefix: Path) -> Installed | None:
    for site in sorted(prefix.glob("lib/python3*/site-packages")):
        for package in (site / "transformers", *_editable(site)):
            if (found := copy_at(package)) is not None:
                return found
    return copy_at(prefix / "Lib" / "site-packages" / "transformers")


def _editable(site: Path) -> Iterator[Path]:
    """Yield where an environment may have a transformers that was installed with `pip install -e`."""
    for listed in sorted(site.glob("*.pth")):
        lines = (line.strip() for line in listed.read_text("utf-8", "replace").splitlines())
        yield from (Path(line) / "transformers" for line in lines if line and not line.startswith("import"))


def _of_folder(path: Path) -> Installed:
    for place in (path, path / "transformers", path / "src" / "transformers"):
        if (place / "models" / "auto").is_dir() and (found := copy_at(place)) is not None:
            return found
    raise ReleaseNotFound(str(path), "there is no transformers in that folder")


def _wheel(version: str) -> Path:
    """Return the wheel of a version: one that was downloaded before, else pip is asked for it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-rewrite"
    wheel = cache / f"transformers-{version}-py3-none-any.whl"
    if wheel.is_file():
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        with tempfile.TemporaryDirectory(prefix="rewrite-") as folder:
            done = subprocess.run(
                [*command, f"transformers=={version}", "-d", folder],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            found = list(Path(folder).glob("transformers-*.whl"))
            if done.returncode != 0 or not found:
                if "No module named pip" in done.stderr:
                    raise ReleaseNotFound(
                        version, "this environment has no pip to download it: name a wheel or a folder"
                    )
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [""]
                raise ReleaseNotFound(version, f"pip could not download it. {lines[-1]}".strip())
            cache.mkdir(parents=True, exist_ok=True)
            beside = wheel.with_name(f".{wheel.name}.{os.getpid()}")
            beside.write_bytes(found[0].read_bytes())
            beside.replace(wheel)
    except OSError as error:
        raise ReleaseNotFound(version, f"its wheel could not be kept: {error.strerror or error}") from error
    return wheel


def _unpacked(wheel: Path, folder: Path) -> Installed:
    """Unpack the Python files of a wheel into `folder`."""
    if not wheel.is_file():
        raise ReleaseNotFound(str(wheel), "it is no version, no wheel and no folder that transformers lies in")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("transformers/") and n.endswith(".py")]
            archive.extractall(folder, names)
    except (zipfile.BadZipFile, OSError) as error:
        raise ReleaseNotFound(str(wheel), f"it cannot be read as a wheel: {error}") from error
    found = copy_at(folder / "transformers")
    if found is None:
        raise ReleaseNotFound(str(wheel), "it holds no transformers")
    return found
