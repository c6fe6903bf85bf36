"""From what the user typed to the bytes of one modeling file. Nothing is imported, nothing of a checkpoint is run."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewrite.errors import (
    AlreadyRewritten,
    CheckpointNotUsable,
    MissingTransformers,
    SourceNotReadable,
    UnknownModel,
    UsageError,
    shortened,
)
from rewrite.source import auto_classes, hub_model, importable, weight_files
from rewrite.source.checkpoint_folder import CONFIG_NAME, own_code, own_file, read_config
from rewrite.source.installed import Installed, ModelType, copy_around, find_transformers
from rewrite.typed import typed

LOCK_NAME = "rewrite.lock"
_PACKAGE = "transformers."


@dataclass(frozen=True)
class Source:
    """One modeling file, as read."""

    target: str
    """What the user typed."""
    path: Path
    text: str
    """As written, newlines included, less a byte order mark."""
    sha256: str
    """Of the bytes of the file."""
    module: str | None
    """Dotted name inside transformers, `transformers.models.llama.modeling_llama`; None for a file outside it."""
    model_type: str | None
    transformers_version: str | None
    """Version of the transformers that the file is from, else of the installed one; None where there is neither."""
    transformers_root: Path | None = None
    """Package folder of that transformers."""
    checkpoint: Path | None = None
    """The checkpoint folder that was given, if one was."""
    remote_code: bool = False
    """Whether the file came with a checkpoint (a config.json beside it names code): run only where that is trusted."""
    origin: str | None = None
    """Where on the Hub it is from, `hf://org/name@commit/modeling_x.py`."""
    inside: str | None = None
    """Dotted name inside another installed package, `diffusers.models.attention`: it is imported, nothing copied."""

    @property
    def imported_as(self) -> str | None:
        """Dotted name of a file whose neighbours are imported from where they are, None where they come along."""
        return self.module or self.inside


def resolve(
    target: str, trust_remote_code: bool = False, revision: str | None = None, library: Installed | None = None
) -> Source:
    """Find and read the modeling file that `target` names.

    A bare word is a model type first, then a path, then a module, then a model type in another spelling
    (`XLM-RoBERTa`), a modeling file by its name and a class of one; `./word` is always a path. What has one slash and
    is no path is a name on the Hub.

    Args:
        target: model type, class, path of a modeling file, checkpoint folder or its config.json, dotted module, name
            on the Hub.
        trust_remote_code: take a checkpoint's own modeling file even where transformers has its model type, and
            download one from the Hub.
        revision: branch, tag or commit of a model on the Hub.
        library: the transformers to look in; None is the installed one.

    Raises:
        UnknownModel: if it is none of these.
        UsageError: if transformers has no modeling file for the model type, or if it is weights only, a file of
            another kind, not on the Hub while a revision is given, or a model on the Hub with code of its own, which
            is not trusted.
        CheckpointNotUsable: if a checkpoint folder does not say which model it holds.
        NotOnTheHub: if a model cannot be taken from the Hub.
        SourceNotReadable: if the file cannot be read as UTF-8 text.
        AlreadyRewritten: if a folder is given that this tool wrote.
        MissingTransformers: if a model type is given and there is no transformers.
    """
    installed = library or find_transformers()
    path = Path(os.path.expanduser(target))
    if revision is not None and (path.exists() or not hub_model.is_name(target)):
        raise UsageError(f"--revision is for a model on the Hub, ORG/NAME, which '{shortened(target)}' is not")
    if _is_word(target) and installed is not None and target in installed.model_types:
        return _of_model_type(target, target, installed)
    if path.exists() and (other := weight_files.instead(path)) is not None:
        raise UsageError(f"cannot rewrite {shortened(target)}: {other}.")
    if path.is_dir():
        return _of_folder(target, path, installed, trust_remote_code)
    if path.name == CONFIG_NAME and path.is_file():
        return _of_folder(target, path.parent, installed, trust_remote_code)
    if path.is_file() and path.suffix != ".py":
        raise _no_python(path)
    if path.is_file() or target.endswith((".py", ".ipynb")):
        return _read(target, path, installed)
    if (found := _module_file(target, installed)) is not None:
        return _read(target, found, installed)
    if _is_word(target):
        return _of_word(target, installed)
    if hub_model.is_name(target):
        return _of_hub(target, revision, installed, trust_remote_code)
    raise UnknownModel(target, list(installed.model_types) if installed else [])


def of_library(origin: str, library: Installed) -> Source | None:
    """Return the file at `origin` (`models/llama/modeling_llama.py`) of a copy of transformers, None if it has none.

    Raises:
        SourceNotReadable: if it cannot be read as UTF-8 text.
    """
    path = library.root / origin
    return _read(origin, path, library) if path.is_file() else None


def weights_fit(source: Source, weights: Path) -> None:
    """Check that a checkpoint folder holds the architecture of `source`.

    Raises:
        CheckpointNotUsable: if it does not, or does not say what it holds.
    """
    config = read_config(weights)
    theirs = config.get("model_type")
    if source.model_type is not None and theirs is not None and theirs != source.model_type:
        raise CheckpointNotUsable(weights, f"it holds a '{theirs}' model and {source.target} is '{source.model_type}'")
    architectures = config.get("architectures") or []
    if architectures and not any(f"class {name}(" in source.text for name in architectures):
        raise CheckpointNotUsable(weights, f"{source.path.name} defines none of its {', '.join(architectures)}")


def _is_word(target: str) -> bool:
    return not any(separator in target for separator in (os.sep, "/")) and not target.endswith(".py")


def _of_model_type(target: str, name: str, installed: Installed) -> Source:
    model_type = installed.model_types[name]
    if model_type.path is None:
        raise _no_file(model_type, installed)
    return _read(target, model_type.path, installed, model_type=name)


def _no_python(path: Path) -> UsageError:
    """Return what to say of another file: a notebook is JSON, which parses as Python and holds no classes."""
    if path.suffix != ".ipynb":
        return UsageError(f"{path} is no Python file: what is rewritten is a Python file, modeling_*.py.")
    meant = "put the classes of the model into a Python file, modeling_*.py, and import it in the notebook"
    return UsageError(f"{path} is a notebook: {meant}.")


def _no_file(model_type: ModelType, installed: Installed) -> UsageError:
    """Return the error that names what else can be rewritten: a file of its own, or the class of another model."""
    others = [path.name for path in model_type.others]
    built = auto_classes.built_for(installed, model_type.name)
    choice = "it is made of other models' code."
    if others:
        choice = f"choose one of {', '.join(others)} and give its path."
    elif built is not None and installed.defining(built) is not None:
        choice = (
            f"its model is {built}. Rewrite that ({typed(built)} --out DIR), and load with "
            f"{built}.from_pretrained(CHECKPOINT, config=AutoConfig.from_pretrained(CHECKPOINT))."
        )
    return UsageError(
        f"transformers {installed.version} has no modeling file of its own for '{model_type.name}' "
        f"({model_type.config}): {choice}"
    )


def _of_word(target: str, installed: Installed | None) -> Source:
    if installed is None:
        raise MissingTransformers(f"the model type '{target}'")
    word = target.removeprefix(_PACKAGE).removeprefix("models.")
    if (name := installed.spelled(word)) is not None:
        return _of_model_type(target, name, installed)
    if (defining := installed.defining(word)) is not None:
        return _read(target, defining, installed)
    raise UnknownModel(target, [*installed.model_types, *(installed.class_names if target != target.lower() else ())])


def _of_hub(name: str, revision: str | None, installed: Installed | None, trust_remote_code: bool) -> Source:
    """Return the modeling file of a model on the Hub: transformers' own where it has one, else the model's."""
    config_path = hub_model.file(name, CONFIG_NAME, revision)
    config = read_config(config_path.parent)
    code = own_code(config)
    known = installed is not None and config.get("model_type") in installed.model_types
    if code is None or (known and not trust_remote_code):
        return _of_config(name, config_path.parent, config, installed)
    if not trust_remote_code:
        raise UsageError(
            f"'{name}' is made by code of its own, {code.file}: --trust-remote-code downloads it and lets the "
            "verification run it (--no-verify only reads it)."
        )
    repository = code.repository or name
    path = hub_model.code(repository, code.file, None if code.repository else hub_model.commit_of(config_path))
    source = _read(name, path, installed, checkpoint=config_path.parent)
    return replace(source, remote_code=True, origin=hub_model.origin(repository, path))


def _of_folder(target: str, folder: Path, installed: Installed | None, trust_remote_code: bool) -> Source:
    if (folder / LOCK_NAME).is_file():
        raise AlreadyRewritten(folder)
    config = read_config(folder)
    known = installed is not None and config.get("model_type") in installed.model_types
    if (trust_remote_code or not known) and (remote := own_file(folder, config)) is not None:
        return _read(target, remote, installed, checkpoint=folder)
    return _of_config(target, folder, config, installed)


def _of_config(target: str, folder: Path, config: Mapping[str, Any], installed: Installed | None) -> Source:
    """Return the file of transformers for a configuration."""
    name = config.get("model_type")
    if installed is None:
        raise MissingTransformers(f"the model type '{name}' of {folder}")
    if name not in installed.model_types:
        near = UnknownModel(str(name), list(installed.model_types))
        raise CheckpointNotUsable(folder, f"its config.json asks for {near}")
    path = _defining(config.get("architectures") or [], installed.model_types[str(name)], installed, folder)
    return _read(target, path, installed, model_type=str(name), checkpoint=folder)


def _defining(architectures: Sequence[str], model_type: ModelType, installed: Installed, folder: Path) -> Path:
    """Return the modeling file of `model_type` that defines the first architecture a checkpoint asks for."""
    files = installed.modeling_files(model_type)
    if not files:
        raise _no_file(model_type, installed)
    if not architectures:
        return files[0]
    for path in files:
        if f"class {architectures[0]}(" in path.read_text(encoding="utf-8"):
            return path
    names = ", ".join(path.name for path in files)
    raise CheckpointNotUsable(folder, f"it asks for {architectures[0]}, which is not in {names}")


def _module_file(name: str, installed: Installed | None) -> Path | None:
    """Return the file of a dotted module without importing it or its parents; one of transformers from `installed`."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    if name.startswith(_PACKAGE) and installed is not None:
        inside = installed.root.joinpath(*parts[1:]).with_suffix(".py")
        return inside if inside.is_file() else None
    return importable.file_of(name, [os.getcwd(), *sys.path])


def _read(
    target: str,
    path: Path,
    installed: Installed | None,
    *,
    model_type: str | None = None,
    checkpoint: Path | None = None,
) -> Source:
    data = _bytes(path)
    own = copy_around(path)
    if own is not None and model_type is None:
        model_type = own.model_type_of(path)
    version = own or installed
    remote = own is None and _names_code(path.parent / CONFIG_NAME)
    return Source(
        target=target,
        path=path,
        text=_text(path, data),
        sha256=hashlib.sha256(data).hexdigest(),
        module=own.module_name(path) if own is not None else None,
        model_type=model_type,
        transformers_version=version.version if version is not None else None,
        transformers_root=version.root if version is not None else None,
        checkpoint=checkpoint,
        remote_code=remote,
        inside=importable.name_of(path) if own is None and not remote else None,
    )


def _names_code(config: Path) -> bool:
    return config.is_file() and b'"auto_map"' in config.read_bytes()


def _bytes(path: Path) -> bytes:
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
        raise SourceNotReadable(path, "its name is not UTF-8, and goes into the package; rename it")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe could wait for ever
            raise SourceNotReadable(path, "it is no regular file")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SourceNotReadable(path, "there is no such file") from error
    except OSError as error:
        raise SourceNotReadable(path, error.strerror or str(error)) from error


def _text(path: Path, data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if encoding not in ("utf-8", "utf-8-sig"):
            raise SourceNotReadable(path, f"it declares the encoding {encoding}; save it as UTF-8")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceNotReadable(path, f"line {line} is not UTF-8; save it as UTF-8") from error
    except SyntaxError as error:  # detect_encoding: an unknown or contradictory coding line
        raise SourceNotReadable(path, f"{error.msg}; save it as UTF-8") from error
