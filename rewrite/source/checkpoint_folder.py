"""What a checkpoint folder says of its model: its config.json, and the code of its own that this names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.errors import CheckpointNotUsable

CONFIG_NAME = "config.json"
_MODELING_CLASSES = ("AutoModelForCausalLM", "AutoModel")


@dataclass(frozen=True)
class OwnCode:
    """The modeling file that a configuration names."""

    file: str
    """Path beside config.json, `modeling_own.py`."""
    repository: str
    """Where else on the Hub that file is, `org/name`; empty where it is beside config.json."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint folder.

    Raises:
        CheckpointNotUsable: if there is none, or what is read of it is not of the kind that it must be.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        file = next(iter(sorted(folder.glob("modeling_*.py"))), None)
        named = f"; for a modeling file, name it: {file}" if file is not None else ""
        raise CheckpointNotUsable(folder, f"it has no {CONFIG_NAME}, so it is no checkpoint folder{named}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointNotUsable(folder, f"its {CONFIG_NAME} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointNotUsable(folder, f"its {CONFIG_NAME} cannot be read: it is nested without end") from error
    if not isinstance(config, dict) or not ("model_type" in config or "auto_map" in config):
        raise CheckpointNotUsable(folder, f"its {CONFIG_NAME} has neither model_type nor auto_map")
    for name, (right, kind) in _FIELDS.items():
        if name in config and not right(config[name]):
            raise CheckpointNotUsable(folder, f"{name} in its {CONFIG_NAME} should be {kind}")
    return config


def _is_list_of_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_auto_map(value: object) -> bool:
    """Return whether a value is as `auto_map`: `{"AutoModel": "modeling_x.Model"}`; two names for two tokenizers."""
    return value is None or (isinstance(value, dict) and all(_is_reference(entry) for entry in value.values()))


def _is_reference(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], (str, type(None)))
    )


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model_type": (lambda value: isinstance(value, str), "a string"),
    "architectures": (_is_list_of_names, "a list of class names"),
    "auto_map": (_is_auto_map, "an object of class names"),
}
"""What is read of a configuration, and of which kind it must be."""


def own_code(config: Mapping[str, Any]) -> OwnCode | None:
    """Return the modeling file that the `auto_map` of a configuration names, None if it names none."""
    auto_map = config.get("auto_map") or {}
    classes = [name for name in (*_MODELING_CLASSES, *sorted(auto_map)) if name in auto_map and "Model" in name]
    if not classes:
        return None
    reference = auto_map[classes[0]]
    reference = reference[0] if isinstance(reference, list) else reference
    repository, _, where = str(reference).rpartition("--")
    return OwnCode("/".join(where.split(".")[:-1]) + ".py", repository)


def own_file(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the modeling file beside the configuration of a checkpoint folder, None if that names none.

    Raises:
        CheckpointNotUsable: if it is not there.
    """
    code = own_code(config)
    if code is None:
        return None
    path = folder / code.file
    if code.repository or not path.is_file():
        place = f"the repository {code.repository}" if code.repository else f"{path.name}, which is not there"
        raise CheckpointNotUsable(
            folder,
            f"its auto_map names code in {place}: download that file, and those that it imports, beside config.json",
        )
    return path
