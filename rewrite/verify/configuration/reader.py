"""Which fields of its configuration a model reads: from the text of its file and of what that file imports."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODELS = "transformers.models."
"""Files of models are read with all that they import of each other; of other modules, what a model's file names."""

GENERATION = "transformers.generation"
"""What chooses tokens reads its own configuration, and the gate of generation judges it."""


@dataclass
class FieldsRead:
    """The names that are read from a configuration, and the strings that each is compared with."""

    names: set[str] = field(default_factory=set)
    strings: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    constants: set[str] = field(default_factory=set)
    """Every string of the model's own file: the kinds of layers are keys there."""

    def update(self, other: FieldsRead) -> None:
        """Add what was read elsewhere."""
        self.names |= other.names
        for name, strings in other.strings.items():
            self.strings[name] |= strings


def fields_read(model_class: Any, model: Any = None) -> FieldsRead:
    """Return what a model class reads, itself and through what it uses; of a `model` of it, what its modules read."""
    module = sys.modules[model_class.__module__]
    found = FieldsRead()
    tree = _tree(module)
    found.constants = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for definition in _reached(module, model_class, model):
        found.update(read_in(definition))
    found.names |= set(inspect.signature(model_class.forward).parameters)  # their defaults stand in the configuration
    for config_class in _config_classes(model_class.config_class):
        found.update(_behind_properties(config_class, found.names))
    return found


@functools.cache
def read_in(tree: ast.AST) -> FieldsRead:
    """Return what is read from anything called a configuration in one piece of code; every class asks for the same."""
    found = FieldsRead()
    aliases = {target for target, value in _assigned(tree) if _is_config(value, set())}
    for node in _nodes(tree):
        if (name := _field(node, aliases)) is not None and not name.startswith("_"):
            found.names.add(name)
        if isinstance(node, ast.Compare):
            _note_strings(node, aliases, found)
    return found


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in _nodes(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _field(node: ast.AST, aliases: set[str]) -> str | None:
    """The field that an expression reads: `config.X`, `getattr(config, "X")`, `config.rope_parameters["X"]`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value, aliases):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        if len(node.args) > 1 and _is_config(node.args[0], aliases):
            return _string(node.args[1])
    if isinstance(node, ast.Subscript) and _is_rope(node.value):
        return _rope_key(node.slice)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return _rope_key(node.args[0]) if _is_rope(node.func.value) else None
    return None


def _rope_key(node: ast.expr) -> str | None:
    key = _string(node)
    return f"rope_parameters.{key}" if key is not None else None


def _string(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_rope(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):  # one dict per kind of layer
        return _is_rope(node.value)
    return "rope_param" in _last_name(node)


def _is_config(node: ast.expr, aliases: set[str]) -> bool:
    if isinstance(node, ast.Call):
        last = _last_name(node.func)
        return last == "get_text_config" or (
            last in ("deepcopy", "copy") and any(_is_config(argument, aliases) for argument in node.args)
        )
    last = _last_name(node)
    return last in aliases or last in ("config", "cfg") or last.endswith("_config")


def _note_strings(node: ast.Compare, aliases: set[str], found: FieldsRead) -> None:
    sides = [node.left, *node.comparators]
    names = [name for side in sides if (name := _field(side, aliases)) is not None]
    strings = {text for side in sides for part in ast.walk(side) if (text := _text(part)) is not None}
    for name in names:
        found.strings[name] |= strings - {name}


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _reached(module: ModuleType, model_class: Any, model: Any) -> Iterator[ast.AST]:
    """Yield the definitions that a class uses, also those that it imports by name; of a model, no class it lacks."""
    parts = {type(part) for part in model.modules()} if model is not None else {model_class}
    built = {cls for part in parts for cls in part.__mro__}
    waiting = [(sys.modules[cls.__module__], cls.__name__) for cls in built if cls.__module__.startswith(MODELS)]
    waiting.append((module, model_class.__name__))
    done: set[tuple[str, str]] = set()
    while waiting:
        where, name = waiting.pop()
        if (where.__name__, name) in done or (model is not None and _is_absent(getattr(where, name, None), built)):
            continue
        done.add((where.__name__, name))
        definition = _definitions(where).get(name)
        if definition is not None:
            yield definition
            waiting += [(where, used) for used in _names(definition)]
        elif where is module or where.__name__.startswith(MODELS):
            source = _imports(where).get(name)
            if source is not None and not source[0].startswith(GENERATION) and source[0] in sys.modules:
                waiting.append((sys.modules[source[0]], source[1]))


def _is_absent(value: Any, built: set[type]) -> bool:
    """Whether this is a part that a model could have and has not."""
    return hasattr(value, "register_forward_hook") and isinstance(value, type) and value not in built


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in _nodes(tree) if isinstance(node, ast.Name)}


@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a definition, which are asked for several times."""
    return tuple(ast.walk(tree))


@functools.cache
def _tree(module: ModuleType) -> ast.Module:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # an extension module, or one without a file
        return ast.Module([], [])


@functools.cache
def _definitions(module: ModuleType) -> dict[str, ast.AST]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.AST] = {}
    for node in _tree(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node
    return found


@functools.cache
def _imports(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Module and name of what a module imports from transformers, by the name that it has there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), _package(module))
            if source.partition(".")[0] in ("transformers", module.__name__.partition(".")[0]):
                found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


def _package(module: ModuleType) -> str:
    """The package that a relative import of a module starts from; lazy modules do not say it."""
    own = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    return module.__package__ or own


def _config_classes(config_class: Any) -> Iterator[Any]:
    yield config_class
    for part in getattr(config_class, "sub_configs", {}).values():
        if isinstance(part, type):
            yield part


def _behind_properties(config_class: Any, names: Iterable[str]) -> FieldsRead:
    """What the properties that a configuration class defines read of the configuration itself."""
    found = FieldsRead()
    for name in names:
        value = inspect.getattr_static(config_class, name, None)
        if isinstance(value, property) and value.fget is not None:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value.fget)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and _last_name(node.value) == "self":
                    found.names.add(node.attr)
    return found
