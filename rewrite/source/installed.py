"""The installed transformers, found and read as files: importing it takes seconds and needs torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_MODEL = re.compile(r"^class (\w+(?:Model|For\w+))\b", re.MULTILINE)
_MAPPINGS = ("CONFIG_MAPPING_NAMES", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


@dataclass(frozen=True)
class ModelType:
    """One model type and where its model is written."""

    name: str
    config: str
    """Class name of its configuration."""
    path: Path | None
    """Its modeling file; None where transformers has none (a tokenizer only) or several without a clear choice."""
    others: tuple[Path, ...] = ()
    """Other modeling files in the same folder."""


@dataclass(frozen=True)
class Installed:
    """One copy of the transformers package on disk."""

    root: Path
    version: str

    @cached_property
    def model_types(self) -> dict[str, ModelType]:
        """Every model type, sorted by name."""
        configs, folders = self._mappings()
        own = {name: self._model_type(name, configs[name], folders.get(name)) for name in sorted(configs)}
        by_config = {model.config: model for model in own.values() if model.path is not None}
        # gpt-sw3 is GPT-2 with another tokenizer: the same configuration class means the same model
        return {name: replace(model, path=_path_of(model, by_config)) for name, model in own.items()}

    def spelled(self, word: str) -> str | None:
        """Return the model type that a word is but for case, hyphens and underscores, or whose configuration it is."""
        plain = _plain(word)
        found = [name for name, model in self.model_types.items() if _plain(name) == plain or model.config == word]
        return found[0] if found else None

    def defining(self, word: str) -> Path | None:
        """Return the one modeling file that a word names (`modeling_llama`), or that defines a class of that name.

        Where no class has the name as it is spelled, one in another case has.
        """
        files = sorted((self.root / "models").glob("*/modeling_*.py"))
        stem = _plain(word.removeprefix("modeling_"))
        named = [path for path in files if _plain(path.stem.removeprefix("modeling_")) == stem]
        if not named and word.isidentifier():
            texts = {path: path.read_text(encoding="utf-8") for path in files}
            for case in (0, re.IGNORECASE):
                line = re.compile(rf"^class {word}\b", re.MULTILINE | case)
                named = named or [path for path, text in texts.items() if line.search(text)]
        return named[0] if len(named) == 1 else None

    @property
    def class_names(self) -> list[str]:
        """Every class that a modeling file defines and that is no part of another, by the ends of their names."""
        files = sorted((self.root / "models").glob("*/modeling_*.py"))
        names = (name for path in files for name in _MODEL.findall(path.read_text(encoding="utf-8")))
        return sorted(set(names))

    def module_name(self, path: Path) -> str | None:
        """Return the dotted name of a file of this package, None for a file outside it."""
        resolved, root = path.resolve(), self.root.resolve()
        if not resolved.is_relative_to(root):
            return None
        return ".".join(("transformers", *resolved.relative_to(root).with_suffix("").parts))

    def model_type_of(self, path: Path) -> str | None:
        """Return the model type that `path` is the modeling file of; the folder's own name where there are several."""
        resolved = path.resolve()
        candidates = [t.name for t in self.model_types.values() if t.path is not None and t.path.resolve() == resolved]
        return min(candidates, key=lambda name: (name != path.parent.name, name), default=None)

    def modeling_files(self, model_type: ModelType) -> tuple[Path, ...]:
        """Return every modeling file in the folder of a model type."""
        return (*((model_type.path,) if model_type.path else ()), *model_type.others)

    def _model_type(self, name: str, config: str, folder: str | None) -> ModelType:
        where = self.root / "models" / (folder or name.replace("-", "_"))
        files = sorted(where.glob("modeling_*.py"))
        named = {path.stem.removeprefix("modeling_"): path for path in files}
        chosen = named.get(name.replace("-", "_"))
        if chosen is None:
            chosen = files[0] if len(files) == 1 else _only_reader(files, config) or named.get(where.name)
        return ModelType(name, config, chosen, tuple(path for path in files if path != chosen))

    def _mappings(self) -> tuple[dict[str, str], dict[str, str]]:
        found: dict[str, dict[str, str]] = {name: {} for name in _MAPPINGS}
        for file in ("auto_mappings.py", "configuration_auto.py"):
            path = self.root / "models" / "auto" / file
            if path.is_file():
                for name, entries in _string_mappings(ast.parse(path.read_text(encoding="utf-8"))):
                    found[name].update(entries)
        return found[_MAPPINGS[0]], found[_MAPPINGS[1]]


def find_transformers() -> Installed | None:
    """Return the transformers that `import transformers` would import, without importing it; None if there is none."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    return copy_at(Path(spec.origin).parent)


def copy_around(path: Path) -> Installed | None:
    """Return the copy of transformers, installed or only unpacked, that `path` lies in."""
    for folder in path.resolve().parents:
        if folder.name == "transformers" and (folder / "models" / "auto").is_dir():
            return copy_at(folder)
    return None


def copy_at(root: Path) -> Installed | None:
    """Return the copy of transformers in the package folder `root`, None if there is none."""
    init = root / "__init__.py"
    if not init.is_file():
        return None
    version = _VERSION.search(init.read_text(encoding="utf-8"))
    return Installed(root, version.group(1)) if version else None


def _plain(word: str) -> str:
    return re.sub(r"[-_ ]", "", word.lower())


def _path_of(model: ModelType, by_config: dict[str, ModelType]) -> Path | None:
    return model.path or (by_config[model.config].path if model.config in by_config else None)


def _only_reader(files: list[Path], config: str) -> Path | None:
    """Return the one file whose classes are annotated `config: <config>`, None if that is not exactly one."""
    annotation = re.compile(rf"\bconfig:\s*[\"']?{re.escape(config)}\b")
    readers = [path for path in files if annotation.search(path.read_text(encoding="utf-8"))]
    return readers[0] if len(readers) == 1 else None


def _string_mappings(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (name, entries) of every assignment to and `.update(...)` of one of `_MAPPINGS`, in order."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            name, value = statement.target.id, statement.value
        elif isinstance(statement, ast.Expr) and _is_update(statement.value):
            call = statement.value
            name, value = call.func.value.id, call  # type: ignore[attr-defined]
        else:
            continue
        if name in _MAPPINGS:
            yield name, dict(entries(value))


def _is_update(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and isinstance(node.func.value, ast.Name)
    )


def entries(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the pairs of string literals in a dict, a list of tuples, or a call of `OrderedDict` on either."""
    if isinstance(node, ast.Call):
        for inner in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from entries(inner)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            if isinstance(element, ast.Tuple) and len(element.elts) == 2:
                yield from _pair(element.elts[0], element.elts[1])
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield from _pair(key, value)


def _pair(key: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
        yield str(key.value), str(value.value)
