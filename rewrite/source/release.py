"""A transformers that is not installed: a wheel or an unpacked tree, read and never imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
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
    version = asked if _VERSION.fullmatch(asked) and not path.exists() else None
    if version is not None and (found := find_transformers()) is not None and found.version == version:
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="rewrite-") as folder:
        yield _unpacked(path if version is None else _wheel(version, Path(folder)), Path(folder))


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


def _wheel(version: str, folder: Path) -> Path:
    """Return the wheel of a version: one that was kept, else a new one, in `folder` where it cannot be kept."""
    cache = _cache()
    name = f"transformers-{version}-py3-none-any.whl"
    if cache is not None and os.path.isfile(cache / name):  # False, too, where it may not be read
        return cache / name
    found = _downloaded(version, folder)
    if cache is None:
        return found
    beside = cache / f".{name}.{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(found.read_bytes())
        beside.replace(cache / name)
    except OSError:  # a cache that is read-only, or full: the next call downloads it again
        with contextlib.suppress(OSError):
            beside.unlink()
        return found
    return cache / name


def _cache() -> Path | None:
    """Return the folder that wheels are kept in; None for a user who has no home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "hf-rewrite"
    try:
        return Path.home() / ".cache" / "hf-rewrite"
    except RuntimeError:  # no HOME, and no entry in the list of users
        return None


def _downloaded(version: str, folder: Path) -> Path:
    """Download a wheel.

    Raises:
        ReleaseNotFound: if there is no pip, or it finds none.
    """
    pip = _pip()
    if pip is None:
        raise ReleaseNotFound(version, "there is no pip and no uv to download it: name a wheel or a folder")
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", f"transformers=={version}"]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = list(folder.glob("transformers-*.whl"))
    if done.returncode != 0 or not found:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [""]
        raise ReleaseNotFound(version, f"pip could not download it. {lines[-1]}".strip())
    return found[0]


def _pip() -> list[str] | None:
    """Return how pip is called: this environment's own, else, as in one that uv made, uv's or one on PATH."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "tool", "run", "--quiet", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    return None if other is None else [other]


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
