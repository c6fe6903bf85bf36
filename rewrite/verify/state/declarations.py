"""Gate 1: what classes and built models declare, read from the original: plans, names, defaults, buffers, methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.verdict import Figure
from ..models.model_pair import Workbench
from ..models.subjects import Subjects
from .class_structure import same_state

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def declared_checks(
    subjects: Subjects, modules: tuple[ModuleType, ModuleType], bench: Workbench
) -> Iterator[CheckRun]:
    """What classes declare, and what a built model has."""
    yield CheckRun("what model classes declare", lambda: _classes(subjects))
    yield CheckRun("signatures of every module's forward", lambda: signatures_alike(*modules))
    yield CheckRun("defaults of every function", lambda: defaults_alike(*modules))
    yield CheckRun("what a built model declares", partial(built_alike, bench))


def comparable(value: Any) -> Any:
    """A value in a form that is equal for both sides: classes and functions by their name, sets in order."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, Mapping):
        return {str(name): comparable(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(comparable(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if type(value).__module__ != "torch":
        return type(value).__qualname__, ""
    return type(value).__qualname__, comparable(vars(value)) if hasattr(value, "__dict__") else repr(value)


def _classes(subjects: Subjects) -> Mapping[str, Figure]:
    count = 0
    for subject in (subjects.main, *subjects.others):
        for name in sorted(set(dir(subject.original)) - set(dir(object))):
            if name.startswith("__") or name.endswith("_cached_value"):  # what transformers remembers as it runs
                continue
            expected = inspect.getattr_static(subject.original, name)
            if not hasattr(subject.rewritten, name):
                raise Mismatch(f"{subject.name} has no {name}")
            if inspect.isroutine(expected) or hasattr(expected, "__get__"):
                continue
            found = inspect.getattr_static(subject.rewritten, name)
            if comparable(expected) != comparable(found):
                raise Mismatch(f"{subject.name}.{name} is {found!r}, expected {expected!r}")
            count += 1
    return {"attributes": count}


def signatures_alike(original: ModuleType, rewritten: ModuleType) -> Mapping[str, Figure]:
    """Every class's `forward` takes what the original's takes, with the same defaults, in the same order.

    It may take more, behind that, which every call of the original's can leave out: an edit's own argument.
    """
    from torch import nn

    count = 0
    for name, owner in vars(original).items():
        if not (inspect.isclass(owner) and issubclass(owner, nn.Module) and owner.__module__ == original.__name__):
            continue
        other = getattr(rewritten, name, None)
        if other is None:
            continue  # a part that is no longer needed; model classes are looked for elsewhere
        for method in ("__init__", "forward"):
            expected, found = (_parameters(getattr(side, method)) for side in (owner, other))
            if _without_own(found, expected) != expected:
                raise Mismatch(f"{name}.{method} takes {_spelled(found)}, expected {_spelled(expected)}")
            count += 1
    return {"signatures": count}


def defaults_alike(original: ModuleType, rewritten: ModuleType) -> Mapping[str, Figure]:
    """Every function and method of the file that both sides have: what a call may leave out is the same."""
    count = 0
    others = dict(_functions(rewritten))
    for name, function in _functions(original):
        if name not in others:
            continue  # a part that is no longer needed
        expected, found = (_left_out(side) for side in (function, others[name]))
        for parameter in expected.keys() & found.keys():
            if expected[parameter] != found[parameter]:
                raise Mismatch(f"{name} takes {parameter}={found[parameter]}, expected {expected[parameter]}")
        count += 1
    return {"functions": count}


def _functions(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and methods that a module defines, by their names; decorated ones as they were written."""
    for name, value in vars(module).items():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        for inner, member in vars(value).items() if own else [("", value)]:
            function = getattr(member, "__func__", member)  # of class methods and static ones
            plain = inspect.unwrap(function) if callable(function) else None
            if inspect.isfunction(plain) and plain.__module__ == module.__name__:
                yield f"{name}.{inner}".rstrip("."), plain


def _left_out(function: Any) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: repr(comparable(one.default)) for one in parameters if one.default is not one.empty}


_Parameter = tuple[str, int, str]
_ROW = int(inspect.Parameter.VAR_POSITIONAL)
"""The last kind that a positional argument can reach; what follows is given by name."""


def _parameters(function: Any) -> list[_Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, int(one.kind), repr(comparable(one.default))) for one in parameters]


def _without_own(found: list[_Parameter], expected: list[_Parameter]) -> list[_Parameter]:
    """Leave out of `found` what has a default, is not expected, and no positional argument of the original reaches."""
    known = {name for name, _, _ in expected}
    last = max((at for at, (name, kind, _) in enumerate(found) if name in known and kind <= _ROW), default=-1)

    def own(at: int, parameter: _Parameter) -> bool:
        name, kind, default = parameter
        return name not in known and "_empty" not in default and (at > last or kind > _ROW)

    return [one for at, one in enumerate(found) if not own(at, one)]


def _spelled(parameters: list[_Parameter]) -> str:
    return ", ".join(f"{name}={default}" if "_empty" not in default else name for name, _, default in parameters)


def built_alike(bench: Workbench) -> Mapping[str, Figure]:
    """Numbers, names and plans of every module, and the buffers, also those that no checkpoint holds."""
    import torch

    kind = bench.base, bench.implementations()[0], "float32"
    original, rewritten = bench.plain_original(*kind), bench.pair(*kind).rewritten
    common = set(vars(torch.nn.Module()))
    new = dict(rewritten.named_modules())
    count = 0
    for path, module in original.named_modules():
        other = new.get(path)
        if other is None:
            raise Mismatch(f"the model has no module {path}")
        for name in sorted(set(vars(module)) - common):
            expected, found = vars(module)[name], getattr(other, name, None)
            if comparable(expected) != comparable(found):
                raise Mismatch(f"{path}.{name} is {found!r}, expected {expected!r}".lstrip("."))
            count += 1
        if module._non_persistent_buffers_set != other._non_persistent_buffers_set:
            raise Mismatch(f"{path}: other buffers are left out of checkpoints than in the original")
    same_state(dict(original.named_buffers()), dict(rewritten.named_buffers()), "buffers: ")
    return {"attributes": count}
