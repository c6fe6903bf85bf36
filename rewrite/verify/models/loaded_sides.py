"""Loads a modeling file as a module, without touching transformers and without one copy shadowing another."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rewrite.errors import SideNotFound
from rewrite.source import importable

from ..judging.verdict import Identity

Side = str | Path
BEGINS = "starts_plainly"
"""Of a class with a decode loop: whether its first tokens are chosen without kernels (`generate/eager_warmup.py`)."""


@dataclass(frozen=True)
class Source:
    """Where a side's text is: the modeling file, and the outermost package folder around it if there is one."""

    side: Side
    path: Path
    package: Path | None

    @property
    def identity(self) -> Identity:
        """The file by name and content."""
        return Identity(str(self.side), str(self.path), hashlib.sha256(self.path.read_bytes()).hexdigest())


def locate(side: Side) -> Source:
    """Find the modeling file of a side.

    Raises:
        SideNotFound: there is none, or there are several.
    """
    path = Path(side)
    if path.is_dir():
        return _in_folder(side, path.resolve())
    if path.is_file():
        return Source(side, path.resolve(), _outermost_package(path.resolve()))
    if isinstance(side, str) and all(part.isidentifier() for part in side.split(".")):
        return _by_name(side)
    raise SideNotFound(side, "there is no such file, folder or module")


def _in_folder(side: Side, folder: Path) -> Source:
    files = sorted(folder.glob("modeling_*.py"))
    init = folder / "__init__.py"
    if len(files) > 1 and init.is_file():  # the others are neighbours of the one that the package is
        named = {alias.name for node in ast.walk(ast.parse(init.read_bytes())) for alias in _beside(node)}
        files = [file for file in files if file.stem in named]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise SideNotFound(side, f"the folder should hold one modeling_*.py and holds {names}")
    return Source(side, files[0], _outermost_package(files[0]))


def _beside(node: ast.AST) -> list[ast.alias]:
    """Return the modules that `from . import …` names."""
    return node.names if isinstance(node, ast.ImportFrom) and node.level and node.module is None else []


def _by_name(name: str) -> Source:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise SideNotFound(name, str(error)) from error
    if spec is None or spec.origin is None:
        raise SideNotFound(name, "there is no such module")
    path = Path(spec.origin)
    if path.name == "__init__.py":
        return _in_folder(name, path.parent.resolve())
    return Source(name, path.resolve(), _outermost_package(path.resolve()))


def _outermost_package(path: Path) -> Path | None:
    package = None
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        package = folder
    return package


def load(source: Source) -> ModuleType:
    """Import a side.

    A file inside an importable package (transformers' own files) is imported under its real name. Any other package
    is imported under its folder's name, or, where that name is taken, under that name with a part of its hash: so
    relative imports, `inspect.getsource` and `sys.modules` work, and two folders of one name live side by side. A file
    that lies in no package and imports its neighbours is imported as if its folder were one.

    What is compared and timed of a package is its graph: `generate()` does not begin in torch's own operators there.
    Keys and values are in the model's dtype, whatever this shell asks for.
    """
    os.environ.pop("REWRITE_CACHE", None)
    module = _imported(source)
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, BEGINS):
            setattr(kind, BEGINS, False)
    return module


def _imported(source: Source) -> ModuleType:
    package = source.package
    if package is None and _imports_neighbours(source.path):
        inside = importable.name_of(source.path)
        return _import_from_folder(source.path) if inside is None else importlib.import_module(inside)
    if package is None:
        return _import_file(_free_name(source.path.stem, source.path), source.path, None)
    tail = ".".join(source.path.relative_to(package).with_suffix("").parts)
    name = package.name if _is_installed(package) else _free_name(package.name, package)
    if name not in sys.modules:
        _import_file(name, package / "__init__.py", package)
    return importlib.import_module(f"{name}.{tail}")


def _imports_neighbours(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)


def _import_from_folder(path: Path) -> ModuleType:
    files = sorted(path.parent.glob("*.py"))
    name = f"beside_{path.stem}_{_token(path.parent, files)}"
    if name not in sys.modules:
        folder = ModuleType(name)
        folder.__path__ = [str(path.parent)]
        sys.modules[name] = folder
    return importlib.import_module(f"{name}.{path.stem}")


def _is_installed(package: Path) -> bool:
    loaded = sys.modules.get(package.name)
    if loaded is not None:
        return _folder_of(loaded) == package and not hasattr(loaded, "__verified__")
    spec = importlib.util.find_spec(package.name) if package.name.isidentifier() else None
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == package


def _folder_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve().parent if file else None


def _free_name(stem: str, where: Path) -> str:
    """`stem` if nothing else claims it; the suffix depends on place and content, so an edited file loads anew."""
    token = _token(where)
    loaded = sys.modules.get(stem)
    if loaded is not None and getattr(loaded, "__verified__", None) == token:
        return stem
    if not stem.isidentifier():
        return f"{re.sub(r'[^0-9a-zA-Z_]', '_', stem)}_{token}"
    return f"{stem}_{token}" if loaded is not None or importlib.util.find_spec(stem) is not None else stem


def _import_file(name: str, path: Path, package: Path | None) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    search = [str(package)] if package is not None else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise SideNotFound(path, "Python cannot import this file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    module.__dict__["__verified__"] = _token(package or path)
    return module


def _token(where: Path, files: Sequence[Path] = ()) -> str:
    digest = hashlib.sha256(str(where).encode())
    for file in files or (sorted(where.rglob("*.py")) if where.is_dir() else [where]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:10]
