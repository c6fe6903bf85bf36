"""Imports a rewritten package in a clean process and reports what that changed in transformers and torch.

Run as a script, without the rest of the tool: `python clean_import.py FILE UPSTREAM`. Writes one JSON line.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

SIDE = "side_under_test"
WATCHED = ("transformers", "torch", "torch.nn", "torch.cuda", "torch.autograd", "torch.utils.checkpoint")
CODE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property, types.MethodType)
REGISTRIES = (dict, set, list)
BOOKKEEPING = {
    "_CAN_RECORD_REGISTRY", "_import_structure", "_objects", "_registered_model_output_types", "sys_modules",
}  # fmt: skip
"""What transformers fills when it imports modules of its own: a loose file may be the first to need one."""


def main(path: str, upstream: str) -> None:
    """Import `upstream` and what it needs, then the side at `path`; print the changes."""
    import torch

    importlib.import_module("torch.nn")
    importlib.import_module(upstream)
    before, held = snapshot()
    modules = set(sys.modules)
    import_side(SIDE, Path(path))
    after, _ = snapshot()
    changed = sorted(key for key, value in before.items() if key in after and after[key] != value)
    lost = sorted(key for key in before if key not in after)
    del held
    report = {
        "changed": changed,
        "lost": lost,
        "tool": sorted(m for m in set(sys.modules) - modules if m.split(".")[0] in ("libcst", "click", "rich")),
        "watched": len(before),
        "torch": torch.__version__,
    }
    print(json.dumps(report))


def import_side(name: str, path: Path) -> None:
    """Import a package or a lone file by its path, under a name of its own, and the package's modeling file."""
    package = path.parent if path.name == "__init__.py" else None
    search = [str(package)] if package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for file in sorted(package.glob("modeling_*.py")) if package else ():
        importlib.import_module(f"{name}.{file.stem}")


def snapshot() -> tuple[dict[str, Any], list[Any]]:
    """The identity of every function, class, class member and registry entry, and the objects, to keep ids unique."""
    found: dict[str, Any] = {}
    held: list[Any] = []
    for module_name, module in sorted(sys.modules.items()):
        if not _is_watched(module_name) or module is None:
            continue
        for name, value in list(vars(module).items()):
            key = f"{module_name}.{name}"
            if isinstance(value, CODE):
                found[key] = id(value)
                held.append(value)
                if isinstance(value, type) and value.__module__ == module_name:
                    _members(key, value, found, held)
            elif isinstance(value, REGISTRIES) and name not in BOOKKEEPING and not name.startswith("__"):
                found[key] = _contents(value)
                held.append(value)
    return found, held


def _is_watched(name: str) -> bool:
    return name.split(".")[0] == "transformers" or name in WATCHED or name.startswith("torch.nn.")


def _members(key: str, cls: type, found: dict[str, Any], held: list[Any]) -> None:
    for name, value in list(vars(cls).items()):
        if isinstance(value, CODE):
            found[f"{key}.{name}"] = id(value)
            held.append(value)
        elif isinstance(value, REGISTRIES) and not name.startswith(("__", "_abc")):
            found[f"{key}.{name}"] = _contents(value)


def _contents(value: Any) -> str:
    """A registry's keys, and the identity of what they map to where that is code.

    Classes of the side itself are left out: transformers registers each output class that a file defines.
    The built-in methods are called directly, because a lazy mapping would import everything it names.
    """
    if isinstance(value, dict):
        items = [(str(key), _identity(key, item)) for key, item in list(dict.items(value))]
        return repr([item for item in items if SIDE not in item[0]])
    if isinstance(value, set):
        return repr(sorted(name for name in map(str, set.__iter__(value)) if SIDE not in name))
    return str(list.__len__(value))


def _identity(key: object, item: object) -> object:
    """Return what tells an entry from another: by its code, if it is a class that stands there of itself.

    A layer of a cache that says for which kind of attention it is (`_layer_type`) replaces the one that did so before,
    where its file is imported: the original's, and the package's, which is the same.
    """
    if isinstance(item, type) and getattr(item, "_layer_type", None) == key:
        methods = (member for member in vars(item).values() if isinstance(member, types.FunctionType))
        return item.__name__, [(one.__name__, one.__code__.co_code, one.__code__.co_names) for one in methods]
    return id(item) if isinstance(item, CODE) else None


if __name__ == "__main__":
    gc.disable()  # of what is imported nothing goes: a fifth of the time was looking
    main(*sys.argv[1:3])
