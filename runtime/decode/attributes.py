"""What Python decided a step by: plain values and functions that modules and configurations have as attributes.

A replay runs no Python. Addresses, hooks and adapters are in the signature of `graph_store`; here is what changes
neither: another activation, number of experts or epsilon, a window or cap of the configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..core.snapshot import REGISTRIES
from ..core.target import CHANGES

_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Attributes:
    """The attributes of a model's modules and of their configurations, as they are now.

    In a package whose code may leave something on a module (`CHANGES`), plain values of modules are not among them:
    `changes.Kept` asks whether a step reads one that is another now, whoever left it.
    """

    def __init__(self, model: nn.Module):
        self._read: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = []
        self._values: list[Any] = []
        configurations: dict[int, Any] = {}
        for module in model.modules():
            self._add(vars(module), _FUNCTIONS if CHANGES else (*_PLAIN, *_FUNCTIONS))
            _collect(vars(module).get("config"), configurations)
        for configuration in configurations.values():
            self._add(vars(configuration), _PLAIN)

    def are_current(self) -> bool:
        """Return whether all have the values that they had."""
        try:
            return [get(state) for get, state in self._read] == self._values
        except KeyError:
            return False

    def _add(self, state: dict[str, Any], kinds: tuple[type, ...]) -> None:
        names = [name for name, value in state.items() if name not in REGISTRIES and _is_of(value, kinds)]
        if names:
            get = itemgetter(*names)
            self._read.append((get, state))
            self._values.append(copy.deepcopy(get(state)))


def _collect(configuration: Any, into: dict[int, Any]) -> None:
    """Add a configuration, and those of its parts."""
    if isinstance(configuration, PretrainedConfig) and id(configuration) not in into:
        into[id(configuration)] = configuration
        for part in vars(configuration).values():
            _collect(part, into)


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is of certain classes, or a container of such."""
    if isinstance(value, dict):
        return all(_is_of(part, kinds) for part in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_of(part, kinds) for part in value)
    return isinstance(value, kinds)
