"""Changes of modules, parameters and buffers: every kind of module a model has, and every way to alter one."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .change import SCALE, Change, altered, bare, called, others, patched, several, wrapped
from .families import Side

_OWN = set(vars(nn.Module())) | {"training"}


class Scaled(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.train(inner.training)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return altered(self.inner(*arguments, **keywords))


class ScaledLikeIt(Scaled):
    """One that has the attributes of what it is around, as wrappers of adapters and quantisers do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


class Smaller(nn.Module):
    """A parametrization."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * SCALE


def changes(side: Side) -> Iterator[Change]:
    """Yield changes of every kind of module, of one module and of all that have its place in their layer."""
    groups: dict[str, list[str]] = {}
    for path, _ in side.model.named_modules(remove_duplicate=False):
        groups.setdefault(re.sub(r"\d+", "*", path), []).append(path)
    for number, (pattern, paths) in enumerate(groups.items()):
        module = side.model.get_submodule(paths[-1])
        for turn, (name, make) in enumerate(_operations(module).items()):
            taken = paths if (number + turn) % 2 else paths[-1:]
            label = f"{pattern or 'the whole model'} ({len(taken)})"
            kind, _, what = name.partition(" of ")
            made = lambda side, make=make, taken=taken: _each(side, taken, make)
            yield Change(kind, f"{label} {what}".strip(), made)


Make = Callable[[Any, nn.Module, str], AbstractContextManager[object]]
"""Of a module, the one that it belongs to, and its name there."""


def _each(side: Side, paths: list[str], make: Make) -> AbstractContextManager[object]:
    made = []
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        made.append(make(side.model.get_submodule(path), side.model.get_submodule(parent), leaf))
    return several(*made)


def _operations(module: nn.Module) -> dict[str, Make]:
    found: dict[str, Make] = {
        "module, class": lambda m, *_: _class(m),
        "module, forward on the instance": lambda m, *_: patched(m, "forward", wrapped(m.forward)),
        "module, forward on the instance, bare": lambda m, *_: patched(m, "forward", bare(m.forward)),
        "module, hook": lambda m, *_: _handle(lambda: m.register_forward_hook(lambda _, __, out: altered(out))),
        "module, pre-hook": lambda m, *_: _handle(lambda: m.register_forward_pre_hook(_before, with_kwargs=True)),
        "module, dtype": lambda m, *_: called(lambda: m.to(torch.float64), lambda: m.to(torch.float32)),
        "module, half the tensors": lambda m, *_: _written([*m.parameters(), *m.buffers()][::2], _in_place),
        "module, parameters in place": lambda m, *_: _written([*m.parameters()], _in_place),
        "module, requires_grad": lambda m, *_: _graded([*m.parameters()]),
    }
    if not _is_model(module):
        found |= {
            "module, replaced": lambda m, parent, leaf: _submodule(parent, leaf, Scaled(m)),
            "module, replaced by its like": lambda m, parent, leaf: _submodule(parent, leaf, ScaledLikeIt(m)),
            "module, replaced by a copy": lambda m, parent, leaf: _submodule(parent, leaf, _other_copy(m)),
            "module, replaced by nothing": lambda m, parent, leaf: _submodule(parent, leaf, nn.Identity()),
        }
    for name, value in vars(module).items():
        if name not in _OWN and not name.startswith("_"):
            for other in [wrapped(value)] if isinstance(value, FunctionType) else others(value, name)[:1]:
                found[f"module, attribute of {name}"] = lambda m, *_, name=name, other=other: patched(m, name, other)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            for how, write in _WRITES.items():
                found[f"parameter, {how} of {name}"] = lambda m, *_, name=name, write=write: _written(
                    [m._parameters[name]], write
                )
            found[f"parameter, replaced of {name}"] = lambda m, *_, name=name: _entry(m, name, _new_parameter)
            found[f"parameter, deleted of {name}"] = lambda m, *_, name=name: _deleted(m, name)
            found[f"parameter, parametrized of {name}"] = lambda m, *_, name=name: called(
                lambda: parametrize.register_parametrization(m, name, Smaller()),
                lambda: parametrize.remove_parametrizations(m, name, leave_parametrized=False),
            )
        else:
            found[f"parameter, that was None of {name}"] = lambda m, *_, name=name: _entry(m, name, lambda _: _bias(m))
    for name in module._buffers:
        found[f"buffer, in place of {name}"] = lambda m, *_, name=name: _written([m._buffers[name]], _in_place)
        found[f"buffer, replaced of {name}"] = lambda m, *_, name=name: _entry(m, name, lambda old: old * SCALE)
    return found


def _is_model(module: nn.Module) -> bool:
    return hasattr(module, "generation_config")


@contextlib.contextmanager
def _class(module: Any) -> Iterator[None]:
    kind = type(module)

    class Mine(kind):  # type: ignore[misc, valid-type]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return altered(super().forward(*arguments, **keywords))

    module.__class__ = Mine
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def _handle(register: Callable[[], Any]) -> Iterator[None]:
    handle = register()
    try:
        yield
    finally:
        handle.remove()


def _before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if arguments:
        return altered(arguments), keywords
    name = next((name for name, value in keywords.items() if isinstance(value, Tensor)), None)
    return arguments, keywords if name is None else {**keywords, name: altered(keywords[name])}


@contextlib.contextmanager
def _submodule(parent: nn.Module, leaf: str, other: nn.Module) -> Iterator[None]:
    before = parent._modules[leaf]
    setattr(parent, leaf, other)
    try:
        yield
    finally:
        setattr(parent, leaf, before)


@torch.no_grad()
def _other_copy(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    for tensor in other.parameters():
        tensor.mul_(SCALE)
    return other


@contextlib.contextmanager
def _written(tensors: list[Any], write: Callable[[Any], None]) -> Iterator[None]:
    """Write to tensors; afterwards they hold what they held, written in place."""
    held = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        write(tensor)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, held, strict=True):
                tensor.copy_(before)


@torch.no_grad()
def _in_place(tensor: Tensor) -> None:
    tensor.mul_(SCALE) if tensor.is_floating_point() else None


def _data_in_place(tensor: Tensor) -> None:
    tensor.data.mul_(SCALE)


def _data_swapped(tensor: Tensor) -> None:
    tensor.data = tensor.data * SCALE


@torch.inference_mode()
def _in_inference(tensor: Tensor) -> None:
    tensor.mul_(SCALE)


@torch.no_grad()
def _one_half(tensor: Tensor) -> None:
    tensor[: -(-len(tensor) // 2)] *= SCALE


def _through_numpy(tensor: Tensor) -> None:
    values = tensor.detach().cpu().numpy()
    values *= SCALE
    if tensor.device.type != "cpu":
        tensor.data.copy_(torch.from_numpy(values))


_WRITES: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    ".data in place": _data_in_place,
    ".data swapped": _data_swapped,
    "in place, inference mode": _in_inference,
    "one half in place": _one_half,
    "through numpy": _through_numpy,
}


@contextlib.contextmanager
def _entry(module: nn.Module, name: str, new: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, new(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def _new_parameter(old: Tensor) -> nn.Parameter:
    return nn.Parameter(old.detach() * SCALE)


def _bias(module: Any) -> nn.Parameter:
    weight = next(iter(module.parameters()))
    return nn.Parameter(torch.full((len(weight),), 0.3, device=weight.device))


@contextlib.contextmanager
def _deleted(module: nn.Module, name: str) -> Iterator[None]:
    before = getattr(module, name)
    delattr(module, name)
    try:
        yield
    finally:
        module.register_parameter(name, before)


@contextlib.contextmanager
def _graded(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Freeze what learns."""
    held = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter, wanted in zip(parameters, held, strict=True):
            parameter.requires_grad_(wanted)
