"""Gate 1: the classes, the state dict and the class attributes that transformers reads."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import DoesNotRun, Mismatch, NotRun
from ..judging.verdict import Figure
from ..models.loaded_sides import Source
from ..models.model_inputs import make
from ..models.model_pair import Workbench
from ..models.subjects import Subjects

ATTRIBUTES = (
    "_no_split_modules", "_tp_plan", "_pp_plan", "_skip_keys_device_placement", "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn",
    "_supports_attention_backend", "_can_compile_fullgraph", "supports_gradient_checkpointing", "base_model_prefix",
    "main_input_name", "config_class",
)  # fmt: skip


def text_checks(source: Source) -> Iterator[CheckRun]:
    """What can be said before anything is imported."""
    yield CheckRun("the output parses", lambda: _parses(source), stops=True)
    yield CheckRun("sites equal the lock", lambda: _sites(source))


def _parses(source: Source) -> Mapping[str, Figure]:
    folder = source.package or source.path.parent
    files = sorted(folder.rglob("*.py")) if source.package else [source.path]
    for file in files:
        try:
            ast.parse(file.read_text("utf-8"), str(file))
        except SyntaxError as error:
            raise DoesNotRun(f"{file.name}:{error.lineno} does not parse: {error.msg}") from error
    return {"files": len(files)}


def _sites(source: Source) -> Mapping[str, Figure]:
    """Every site that the lock calls rewritten exists."""
    lock = source.path.parent / "rewrite.lock"
    if not lock.is_file():
        raise NotRun(f"there is no rewrite.lock beside {source.path.name}")
    sites = json.loads(lock.read_text("utf-8")).get("transforms")
    if not isinstance(sites, dict):
        raise Mismatch("rewrite.lock does not say what each transform rewrote")
    rewritten = {name: list(found.get("rewritten", ())) for name, found in sites.items()}
    defined = _defined(source.path)
    for transform, names in rewritten.items():
        lost = [name for name in names if name.partition(":")[0] not in defined]
        if lost:
            raise Mismatch(f"{transform} is said to have rewritten {lost[0]}, which the file does not define")
    return {name: len(names) for name, names in rewritten.items()}


def _defined(path: Path) -> set[str]:
    names: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(f"{prefix}{child.name}")
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text("utf-8")), "")
    return names


def class_checks(subjects: Subjects, rewritten: ModuleType) -> Iterator[CheckRun]:
    """Names and class attributes that transformers looks up."""
    yield CheckRun("every model class is there", lambda: _classes(subjects, rewritten))
    yield CheckRun("class attributes are equal", lambda: _attributes(subjects))


def _classes(subjects: Subjects, rewritten: ModuleType) -> Mapping[str, Figure]:
    if subjects.missing:
        raise Mismatch(f"the rewritten file lacks {', '.join(subjects.missing)}")
    if subjects.renamed:
        said = ", ".join(f"{name} is called {new}" for name, new in subjects.renamed.items())
        raise Mismatch(f"in the rewritten file {said}")
    for subject in (subjects.main, *subjects.others):
        if subject.rewritten.__module__ != rewritten.__name__:
            raise Mismatch(f"{subject.name} is defined in {subject.rewritten.__module__}, not in the rewritten file")
    return {"classes": 1 + len(subjects.others)}


def _attributes(subjects: Subjects) -> Mapping[str, Figure]:
    for subject in (subjects.main, *subjects.others):
        for name in ATTRIBUTES:
            expected, found = getattr(subject.original, name, None), getattr(subject.rewritten, name, None)
            if _comparable(expected) != _comparable(found):
                raise Mismatch(f"{subject.name}.{name} is {found!r}, expected {expected!r}")
    return {"attributes": len(ATTRIBUTES)}


def _comparable(value: Any) -> Any:
    if isinstance(value, type) and not value.__module__.startswith("transformers."):
        return value.__qualname__  # a configuration class that the modeling file itself defines is one a side
    return sorted(map(str, value)) if isinstance(value, set) else value


def state_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The state dict: keys, shapes, dtypes, tying, before and after a forward."""
    for variant in bench.variants:
        yield CheckRun(f"state dict, {variant.name}", partial(_state, bench, variant), essential=True)


def _state(bench: Workbench, variant: Any) -> Mapping[str, Figure]:
    import torch

    pair = bench.fresh(variant, bench.implementations()[0], "float32")
    same_state(pair.original.state_dict(), pair.rewritten.state_dict())
    same_tying(pair.original, pair.rewritten)
    for name in ("loss_type", "_no_split_modules", "_tp_plan", "all_tied_weights_keys", "main_input_name"):
        expected, found = getattr(pair.original, name, None), getattr(pair.rewritten, name, None)
        if _comparable(expected) != _comparable(found):
            raise Mismatch(f"{name} of the model is {found!r}, expected {expected!r}")
    with torch.no_grad():
        arguments = make(variant.inputs, pair.rewritten.config, 1, 0, torch.float32)
        pair.rewritten(**{name: value.to(bench.options.device) for name, value in arguments.items()})
    same_state(pair.original.state_dict(), pair.rewritten.state_dict(), "after a forward: ")
    same_tying(pair.original, pair.rewritten)
    return {"tensors": len(pair.original.state_dict())}


def same_state(expected: Mapping[str, Any], found: Mapping[str, Any], when: str = "") -> None:
    """Raise `Mismatch` unless two state dicts have the same keys, in order, and byte-equal tensors."""
    import torch

    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or extra:
        raise Mismatch(f"{when}missing keys {sorted(missing)[:5]}, unexpected keys {sorted(extra)[:5]}")
    if list(expected) != list(found):
        raise Mismatch(f"{when}the keys come in another order")
    for name, tensor in expected.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise Mismatch(f"{when}{name} is {other.dtype}{list(other.shape)}, not {tensor.dtype}{list(tensor.shape)}")
        if not torch.equal(tensor, other):
            changed = int((tensor != other).sum())
            raise Mismatch(f"{when}{name}: {changed} of {tensor.numel()} values differ")


def same_tying(original: Any, rewritten: Any) -> None:
    """Raise `Mismatch` unless the same parameters are one object in both models."""
    if _tied(original) != _tied(rewritten):
        raise Mismatch(f"tied parameters are {_tied(rewritten)}, expected {_tied(original)}")


def _tied(model: Any) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)
