"""Which Auto class of transformers builds which class of a model type, read from its mappings."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from rewrite.source.installed import Installed, entries

_FILE = "models/auto/modeling_auto.py"


def auto_classes(installed: Installed, model_type: str, classes: Iterable[str]) -> dict[str, str]:
    """Return, by Auto class, which of `classes` it builds for a model type.

    For a model type that transformers does not know, the end of a class's name decides: `XForCausalLM` is what
    `AutoModelForCausalLM` builds, and the class that has no such end is `AutoModel`'s.
    """
    path = installed.root / _FILE
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mappings = _mappings(tree)
    known = set(classes)
    if model_type in installed.model_types:
        found = {auto: mappings.get(mapping, {}).get(model_type, "") for auto, mapping in _autos(tree).items()}
        return {auto: name for auto, name in sorted(found.items()) if name in known}
    ends = {auto.removeprefix("AutoModel"): auto for auto in sorted(_autos(tree))}
    found = {ends[end]: name for name in sorted(known) if (end := _end(name)) in ends}
    return dict(sorted(found.items()))


def built_for(installed: Installed, model_type: str) -> str | None:
    """Return the class that transformers builds for a model type, one for generation first; None if there is none."""
    path = installed.root / _FILE
    if not path.is_file():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mappings, autos = _mappings(tree), _autos(tree)
    for auto in ("AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM", *sorted(autos)):
        if (name := mappings.get(autos.get(auto, ""), {}).get(model_type)) is not None:
            return name
    return None


def _end(name: str) -> str:
    """Return `ForCausalLM` of `XForCausalLM`, nothing of `XModel`, and what is no end of an Auto class otherwise."""
    if name.endswith("Model") and not name.endswith("PreTrainedModel"):
        return ""
    return f"For{name.partition('For')[2]}" if "For" in name else "-"


def _autos(tree: ast.Module) -> dict[str, str]:
    """Return the mapping of each Auto class, by the names of both."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("AutoModel"):
            for statement in node.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                    if isinstance(statement.targets[0], ast.Name) and statement.targets[0].id == "_model_mapping":
                        found[node.name] = statement.value.id
    return found


def _mappings(tree: ast.Module) -> dict[str, dict[str, str]]:
    """Return the class of each model type, by the name of the mapping that an Auto class has."""
    names: dict[str, dict[str, str]] = {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        target, value = node.targets[0].id, node.value
        if target.endswith("_MAPPING_NAMES"):
            names[target] = dict(entries(value))
        elif isinstance(value, ast.Call) and len(value.args) == 2 and isinstance(value.args[1], ast.Name):
            found[target] = names.get(value.args[1].id, {})
    return found
