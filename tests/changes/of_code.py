"""Changes of code: classes, functions and registries that a modeling file has or uses, and torch's functions."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

from .change import Absent, Change, altered, bare, entry, method_patched, patched, wrapped
from .families import Side

_REGISTRIES = (
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.activations",
    "transformers.modeling_rope_utils",
    "transformers.integrations.moe",
    "transformers.pytorch_utils",
    "transformers.loss.loss_utils",
)
_KEYS_LIKE = ("sdpa", "eager", "silu", "gelu_new", "gelu", "gelu_pytorch_tanh", "default", "grouped_mm", "batched_mm")
"""Entries of registries that these families use."""


def changes(side: Side) -> Iterator[Change]:
    """Yield changes of the code behind a model."""
    yield from _classes(side)
    yield from _functions(side)
    yield from _registries(side)
    yield from _torch(side)


def _classes(side: Side) -> Iterator[Change]:
    """Yield every method of every class of the file that the model has an object of, and those of bases."""
    kinds = {type(module) for module in side.model.modules()}
    seen = set[str]()
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for owner in kind.__mro__:
            if owner.__module__ != side.file.__name__ or owner.__name__ in seen:
                continue
            seen.add(owner.__name__)
            for name, value in vars(owner).items():
                if isinstance(value, (FunctionType, staticmethod, classmethod)) and name != "__init__":
                    make = _of_class(owner.__name__, name, wrapped)
                    yield Change("class, method", f"{owner.__name__}.{name}", make)
                    if not name.startswith("_"):
                        make = _of_class(owner.__name__, name, bare)
                        yield Change("class, method bare", f"{owner.__name__}.{name}", make)
                        yield Change("instance, method", f"{owner.__name__}.{name}", _on_instances(owner, name))
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        bases = [base for base in kind.__mro__ if base.__module__ != side.file.__name__ and "forward" in vars(base)]
        for base in bases[:1] if kind.__module__ != side.file.__name__ and "forward" in vars(kind) else ():
            make = lambda _, base=base: method_patched(base, "forward")
            yield Change("library class, forward", base.__name__, make)
    yield Change("library class, forward", "DynamicLayer.update", lambda _: method_patched(DynamicLayer, "update"))
    for name in ("__call__", "_call_impl", "__getattr__"):
        yield Change("library class, forward", f"Module.{name}", lambda _, name=name: _counting(name))


@contextlib.contextmanager
def _counting(name: str) -> Iterator[None]:
    """Alter what every product of torch's class gives, by way of `nn.Module`."""
    real = getattr(nn.Module, name)

    def mine(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        found = real(self, *arguments, **keywords)
        return altered(found) if isinstance(self, nn.Linear) and isinstance(found, Tensor) else found

    with patched(nn.Module, name, mine):
        yield


def _of_class(name: str, method: str, how: Callable[..., Any]) -> Callable[[Side], AbstractContextManager[object]]:
    def make(side: Side) -> AbstractContextManager[object]:
        owner = getattr(side.file, name, None)
        if owner is None or method not in vars(owner):
            raise Absent(f"{name}.{method}")
        return method_patched(owner, method, how)

    return make


def _on_instances(owner: type, method: str) -> Callable[[Side], AbstractContextManager[object]]:
    @contextlib.contextmanager
    def make(side: Side) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in side.model.modules():
                if any(kind.__name__ == owner.__name__ for kind in type(module).__mro__):
                    if not hasattr(module, method):
                        raise Absent(f"{owner.__name__}.{method}")
                    stack.enter_context(patched(module, method, bare(getattr(module, method))))
            yield

    return make


def _functions(side: Side) -> Iterator[Change]:
    """Yield every function that the file's namespace has, its own and imported ones."""
    for name, value in sorted(vars(side.file).items()):
        if isinstance(value, FunctionType) and not name.startswith("__"):
            kind = "function of the file" if value.__module__ == side.file.__name__ else "function imported"
            for how in (wrapped, bare):
                make = lambda side, name=name, how=how: patched(side.file, name, how(_present(side.file, name)))
                yield Change(f"{kind}, {how.__name__}", name, make)


def _present(owner: Any, name: str) -> Any:
    if name not in vars(owner):
        raise Absent(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def _registries(side: Side) -> Iterator[Change]:
    """Yield entries of every registry replaced: those of the file's namespace and transformers' own."""
    files: list[ModuleType] = [importlib.import_module(name) for name in _REGISTRIES]
    seen = set[int]()
    for file in [*files, side.file]:
        for name, registry in sorted(vars(file).items()):
            if not isinstance(registry, MutableMapping) or not name.isupper() or id(registry) in seen:
                continue
            seen.add(id(registry))
            for key in list(registry):
                if key in _KEYS_LIKE:
                    yield Change("registry, entry", f"{name}[{key!r}]", _entry_of(file, name, key, side))
    yield Change("registry, new entry", "attention", _new_attention)


def _entry_of(file: ModuleType, name: str, key: Any, side: Side) -> Callable[[Side], AbstractContextManager[object]]:
    own = file is side.file

    def make(side: Side) -> AbstractContextManager[object]:
        registry = _present(side.file if own else file, name)
        value = registry[key]
        if isinstance(value, tuple):  # a class and its arguments
            return entry(registry, key, nn.Tanh)
        return entry(registry, key, nn.Tanh if inspect.isclass(value) else bare(value))

    return make


@contextlib.contextmanager
def _new_attention(side: Side) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with (
        entry(ALL_ATTENTION_FUNCTIONS, "mine", bare(ALL_ATTENTION_FUNCTIONS["sdpa"])),
        entry(ALL_MASK_ATTENTION_FUNCTIONS, "mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]),
    ):
        before = side.model.config._attn_implementation
        side.model.set_attn_implementation("mine")
        try:
            yield
        finally:
            side.model.set_attn_implementation(before)


def _torch(side: Side) -> Iterator[Change]:
    """Yield every function of torch that the file mentions, replaced there or seen by a mode."""
    for path in sorted(_mentioned(inspect.getsource(side.file))):
        owner, name = _found(path)
        value = vars(owner).get(name) if owner is not None else None
        if callable(value) and not inspect.isclass(value):
            make = lambda _, owner=owner, name=name: patched(owner, name, wrapped(vars(owner)[name]))
            yield Change("torch function", path, make, in_text=True)
            yield Change("torch function mode", path, lambda _, value=value: _Functions(value))
    for name in sorted(_tensor_methods(inspect.getsource(side.file))):
        make = lambda _, name=name: method_patched(Tensor, name)
        yield Change("tensor method", name, make, in_text=True)
    for path in ("matmul", "addmm", "mm", "bmm", "softmax", "sigmoid", "rsqrt", "embedding", "silu"):
        if hasattr(torch, path):
            make = lambda _, path=path: patched(torch, path, wrapped(getattr(torch, path)))
            yield Change("torch function elsewhere", f"torch.{path}", make)
    for path in ("scaled_dot_product_attention", "linear", "embedding", "silu", "softmax", "layer_norm"):
        make = lambda _, path=path: patched(nn.functional, path, wrapped(getattr(nn.functional, path)))
        yield Change("torch function elsewhere", f"nn.functional.{path}", make)
        make = lambda _, path=path: _Functions(getattr(nn.functional, path))
        yield Change("torch function mode", f"{path} elsewhere", make)
    for name in ("addmm", "mm", "embedding", "mul", "bmm"):
        yield Change("torch dispatch mode", name, lambda _, name=name: _Operators(name), in_text=True)


class _Functions(TorchFunctionMode):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return altered(found) if func is self.function else found


class _Operators(TorchDispatchMode):
    def __init__(self, name: str):
        super().__init__()
        self.name = f"aten::{name}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return altered(found) if func._schema.name == self.name else found


def _mentioned(source: str) -> set[str]:
    found = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return {path.replace("F.", "torch.nn.functional.", 1) if path.startswith("F.") else path for path in found}


def _found(path: str) -> tuple[Any, str]:
    first, *middle, last = path.split(".") if path.startswith(("torch.", "nn.")) else ("", "")
    owner: Any = {"torch": torch, "nn": nn}.get(first)
    for name in middle:
        owner = getattr(owner, name, None)
    return (owner if isinstance(owner, ModuleType) else None), last


def _tensor_methods(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    return {name for name in names if callable(getattr(Tensor, name, None)) and not hasattr(nn.Module, name)}
