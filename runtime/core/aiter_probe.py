"""Finds AMD's aiter and says how its functions are called in the release that is installed.

aiter is found, never required. Its import needs a ROCm GPU, raises anything and may compile for a while, so it happens
once, at the first use, and only on ROCm. The distribution `aiter` of the public index is an asyncio helper: files that
only AMD's has tell them apart. Signatures change about every second release, so names are read, never versions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

MARKERS = ("jit/core.py", "ops/mha.py", "ops/rmsnorm.py")
"""Files of AMD's package that the asyncio helper of the same name does not have."""


class Signature(NamedTuple):
    """The parameters of a function: all names in order, and those without a default."""

    names: tuple[str, ...]
    required: frozenset[str]


def chip(device: torch.device | None = None) -> str | None:
    """Return the AMD chip that `device` is, as `gfx942`; None for anything else. Without a device, the current one.

    Everything about aiter asks here first: tests put another function in its place.
    """
    if torch.version.hip is None or (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return None
    index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
    return _chip_of(index)


@functools.cache
def _chip_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]


@functools.cache
def absence() -> str | None:
    """Return why there is no aiter to import; None if there is one. Looks at files only."""
    if chip() is None:
        return "the current device is no AMD GPU"
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError) as error:
        return f"it cannot be looked for ({error})"
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        return "it is not installed"
    missing = [marker for marker in MARKERS if not (Path(folders[0]) / marker).is_file()]
    if missing:
        return f"'{folders[0]}' is another package of that name (it has no {missing[0]})"
    return None


@functools.cache
def failure() -> str | None:
    """Import aiter, which may compile for a while; return why it cannot be used, or None if it can."""
    return absence() or _imported("aiter")


def tried() -> bool:
    """Return whether `failure` has been asked: then asking again costs nothing."""
    return failure.cache_info().currsize > 0


@functools.cache
def version() -> str:
    """Return the version that the installed distribution states; a build from source has one of its own."""
    for name in ("amd-aiter", "aiter"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


@functools.cache
def _imported(module: str) -> str | None:
    """Import a module of aiter; return what went wrong, or None."""
    os.environ.setdefault("AITER_LOG_LEVEL", "WARNING")  # else it logs a line for every unseen shape
    try:
        importlib.import_module(module)
    except Exception as error:  # RuntimeError, KeyError, AttributeError, a failed compilation: there is no limit
        return f"its import raised {type(error).__name__}: {error}"
    return None


def function(
    path: str, tensors: tuple[str, ...], keywords: Collection[str], module: str = "aiter"
) -> Callable[..., Any] | str:
    """Return a function of aiter that can be called as wanted, or why not: a key of `aiter_calls.REASONS`.

    Args:
        path: dotted name in the module, `rms_norm` or `tgemm.mm`.
        tensors: names of the first parameters, which are passed by position.
        keywords: names of everything else that is passed.
        module: where it is; imported if need be.
    """
    return _function(path, tensors, frozenset(keywords), module)


@functools.cache
def _function(path: str, tensors: tuple[str, ...], keywords: frozenset[str], module: str) -> Callable[..., Any] | str:
    if failure() is not None or _imported(module) is not None:
        return "import_failed"
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        return "missing"
    signature = signature_of(path, found)
    if signature is None:
        return "signature_unknown"
    passed = {*tensors, *keywords}
    fits = signature.names[: len(tensors)] == tensors and passed <= {*signature.names}
    return found if fits and signature.required <= passed else "signature"


def signature_of(name: str, found: Callable[..., Any]) -> Signature | None:
    """Return the parameters of a function of aiter; None if nothing says them.

    The compiled operators are wrapped in functions of `*args`: theirs are in the schema of `torch.ops.aiter`.
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if named and len(named) == len(parameters):
        required = frozenset(p.name for p in named if p.default is p.empty)
        return Signature(tuple(p.name for p in named), required)
    operator = getattr(torch.ops.aiter, name, None) if "." not in name else None
    if operator is None or "default" not in operator.overloads():
        return None
    arguments = operator.default._schema.arguments
    required = frozenset(argument.name for argument in arguments if not argument.has_default_value())
    return Signature(tuple(argument.name for argument in arguments), required)


def forget() -> None:
    """Look for aiter anew at the next use."""
    for known in (absence, failure, version, _imported, _function):
        known.cache_clear()
