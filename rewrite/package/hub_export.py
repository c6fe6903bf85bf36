"""A package as a checkpoint's repository on the Hub has it: one file, and a config.json that names its classes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite import operators
from rewrite.codemod.relocate import is_rewritten
from rewrite.errors import MissingTransformers, NotExportable, OutputNotOurs, OutputNotWritable
from rewrite.package import output, vendored_files
from rewrite.package.assemble import INIT
from rewrite.package.flat import MARK, NotFlat, flat_files
from rewrite.package.lock import Lock
from rewrite.source.auto_classes import auto_classes
from rewrite.source.checkpoint_folder import CONFIG_NAME, read_config
from rewrite.source.installed import Installed
from rewrite.source.resolve import LOCK_NAME

_LOCK = " rewrite.lock lists what was changed and what was skipped."


@dataclass(frozen=True)
class Export:
    """What is written beside a checkpoint's weights."""

    files: Mapping[str, str]
    """By name; `config.json` among them where a checkpoint was given."""
    auto_map: Mapping[str, str]
    """The class that each Auto class builds, `modeling_llama.LlamaForCausalLM`."""


def export(
    folder: Path, lock: Lock, checkpoint: Path | None, library: Installed | None, vendored: bool = False
) -> Export:
    """Return the form of the package in `folder` that loads with `trust_remote_code`.

    Args:
        folder: the package.
        lock: its lock.
        checkpoint: whose configuration is to name the classes, if there is one.
        library: whose Auto classes build them.
        vendored: whether the runtime goes along, in flat files; else whoever loads it has to have it installed, which
            transformers checks.

    Raises:
        NotExportable: if the package has no flat form, or none of its classes is one that an Auto class builds.
        CheckpointNotUsable: if the checkpoint's configuration cannot be read.
        MissingTransformers: if there is no `library`.
    """
    try:
        files = _files(folder, lock, vendored or lock.options.vendored)
    except NotFlat as error:
        raise NotExportable(folder, str(error)) from error
    config = read_config(checkpoint) if checkpoint is not None else {}
    auto_map = _auto_map(folder, lock, files[lock.modeling], config, library)
    if checkpoint is not None:
        config = {**config, "auto_map": {**(config.get("auto_map") or {}), **auto_map}}
        files = {**files, CONFIG_NAME: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    return Export(files, auto_map)


def _files(folder: Path, lock: Lock, vendored: bool) -> dict[str, str]:
    """Return the files of an export but for the configuration, by name.

    Raises:
        NotFlat: if the package has no such form.
    """
    own = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.name != INIT}
    own[lock.modeling] = own[lock.modeling].replace(_LOCK, "", 1)
    if not vendored:
        needed = {lock.modeling, *(name for name in lock.upstream if name in own)}
        return {name: text for name, text in own.items() if name in needed}
    own = {name: vendored_files.relative(text) for name, text in own.items()}
    # transformers takes what a literal has at the beginning of a line for an import too
    runtime = {
        path: operators.without_cases(data.decode()) for path, data in vendored_files.files(own.values()).items()
    }
    return flat_files({**own, **runtime}, lock.modeling)


def write(out: Path, made: Export, checkpoint: Path | None) -> list[str]:
    """Write the files of an export to the folder `out`, and return the names of what was taken out of it: files of an
    earlier export that this one does not have.

    Raises:
        OutputNotOurs: if `out` has a file of such a name that no export wrote.
        OutputNotWritable: if the disk refuses.
    """
    if out.exists() and not out.is_dir():
        raise OutputNotOurs(out, "is a file", forcible=False, option="--hub")
    if (out / LOCK_NAME).exists():
        raise OutputNotOurs(out, "is a rewritten package itself", forcible=False, option="--hub")
    own_config = checkpoint is not None and out.exists() and out.samefile(checkpoint)
    for name, text in made.files.items():
        if (out / name).exists() and not _replaceable(out / name, text, own_config):
            raise OutputNotOurs(out, f"has a {name} that no export wrote", forcible=False, option="--hub")
    try:
        out.mkdir(parents=True, exist_ok=True)
        left = [path for path in sorted(out.glob("rewrite_*.py")) if path.name not in made.files and _is_ours(path)]
        for path in left:
            path.unlink()
    except OSError as error:
        raise OutputNotWritable(out, error.strerror or str(error)) from error
    for name, text in made.files.items():
        output.write_beside(out / name, text.encode("utf-8"))
    return [path.name for path in left]


def _replaceable(path: Path, text: str, own_config: bool) -> bool:
    """Return whether an export may write to `path`: over its own files, and a configuration that is to be changed."""
    if not path.is_file():
        return False
    if path.name == CONFIG_NAME:
        return own_config or path.read_text("utf-8", "replace") == text or "modeling_" in _names_code(path)
    return _is_ours(path) or path.read_text("utf-8", "replace") == text


def _names_code(config: Path) -> str:
    try:
        data = json.loads(config.read_text("utf-8", "replace"))
    except (ValueError, RecursionError):
        return ""
    return str(data.get("auto_map", "")) if isinstance(data, dict) else ""


def _is_ours(path: Path) -> bool:
    text = path.read_text("utf-8", "replace")
    return text.startswith(MARK) or is_rewritten(text)


def _auto_map(
    folder: Path, lock: Lock, text: str, config: Mapping[str, Any], library: Installed | None
) -> dict[str, str]:
    if library is None:
        raise MissingTransformers("what the Auto classes build")
    module = lock.modeling.removesuffix(".py")
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    model_type = config.get("model_type") or lock.source.model_type or ""
    found = auto_classes(library, model_type, classes)
    if lacking := [name for name in config.get("architectures") or [] if name not in classes]:
        raise NotExportable(folder, f"its {lock.modeling} does not define {lacking[0]}, which the checkpoint asks for")
    if not found:
        raise NotExportable(folder, f"no Auto class builds a class of its {lock.modeling} for a '{model_type}'")
    own = [name for name, node in classes.items() if model_type and _model_type(node) == model_type]
    return {auto: f"{module}.{name}" for auto, name in [*(("AutoConfig", name) for name in own[:1]), *found.items()]}


def _model_type(node: ast.ClassDef) -> str | None:
    """Return the model type that a class of configurations declares."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            if isinstance(statement.targets[0], ast.Name) and statement.targets[0].id == "model_type":
                return str(statement.value.value)
    return None
