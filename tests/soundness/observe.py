"""Runs a text and writes down everything that a caller could see of it: results, inputs, state, gradients, errors."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import linecache
import random
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soundness.case import Case
from soundness.decoding import decode, talk

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "soundness_package"
_TURNS = 64
"""How far a generator is read."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_numbers = itertools.count()
Calls = tuple[tuple[tuple[str, int, bool], ...], ...]
CALLS: Calls = (
    (("eval 1, batch 2", 2, False), ("eval 2, batch 2", 2, False), ("eval 3, batch 3", 3, False)),
    (("training, batch 3", 3, True),),
)
"""What is called on one model after the other, with which batch and whether in training: the first call packs."""
FEW_CALLS: Calls = ((("eval 1, batch 2", 2, False), ("eval 2, batch 3", 3, False)), (("training, batch 2", 2, True),))


@dataclass(frozen=True)
class Leaf:
    """A tensor or a plain value, at a path through tuples, mappings and attributes."""

    path: str
    value: Any
    stride: tuple[int, ...] = ()
    requires_grad: bool = False

    @property
    def layout(self) -> list[int]:
        """The strides of the dimensions that have more than one element; those of others mean nothing."""
        return [stride for size, stride in zip(self.value.shape, self.stride, strict=True) if size > 1]


@dataclass
class Observation:
    """What one call left behind."""

    what: str
    """Which call: `eval 1`."""
    raised: str = ""
    result: list[Leaf] = field(default_factory=list)
    inputs: list[Leaf] = field(default_factory=list)
    state: list[Leaf] = field(default_factory=list)
    gradients: list[Leaf] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    """Which results are inputs, or share memory with them."""

    def parts(self) -> Iterator[tuple[str, list[Leaf]]]:
        """Yield every list of leaves with its name."""
        for name in ("result", "inputs", "state", "gradients"):
            yield name, getattr(self, name)


def package() -> None:
    """Make relative imports work in executed texts."""
    if PACKAGE not in sys.modules:
        made = types.ModuleType(PACKAGE)
        sys.modules[PACKAGE] = made


def load(text: str) -> types.ModuleType:
    """Return the module that a text is, with its source at hand for those who inspect it."""
    package()
    name = f"{PACKAGE}.text_{next(_numbers)}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


def unload(module: types.ModuleType) -> None:
    """Forget a loaded text."""
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(str(module.__file__), None)


def observations(case: Case, text: str, rewritten: bool = False, calls: Calls = CALLS) -> list[Observation]:
    """Return what happens in `calls`, each group of them on a model of its own.

    `rewritten` is what the case's `run` is told.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    loaded = []
    try:
        seen: list[Observation] = []
        for group in calls:
            loaded.append(load(text))
            model = _build(loaded[-1])
            seen += [_observe(case, loaded[-1], model, *how, rewritten) for how in group]
        return seen
    except Exception as error:
        return [Observation(f"building ({error})", raised=type(error).__name__)]
    finally:
        torch.set_default_dtype(before)
        for module in loaded:
            unload(module)


def _build(module: types.ModuleType) -> Any:
    _seed(0)
    model = module.Subject()
    if isinstance(model, nn.Module):
        with torch.no_grad():
            for parameter in model.parameters():
                # Weights of ones and biases of zeros would hide what is done with them.
                if not parameter.is_meta and parameter.numel() and bool((parameter == parameter.reshape(-1)[0]).all()):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # torch.manual_seed seeds all devices: 2 ms
    random.seed(number)


def _observe(
    case: Case, module: types.ModuleType, model: Any, what: str, batch: int, training: bool, rewritten: bool
) -> Observation:
    seen = Observation(what)
    if isinstance(model, nn.Module):
        model.train(training)
    leaves, arguments = _arguments(case, batch, training)
    _seed(batch)
    names = {"model": model, "inputs": arguments, "module": module, "rewritten": rewritten}
    names |= {"torch": torch, "decode": decode, "talk": talk}
    with torch.set_grad_enabled(training):
        try:
            result = _read(eval(case.run, names))
            seen.result = list(_leaves("", result))
            if training:
                seen.gradients = _gradients(seen.result, leaves, model)
        except Exception as error:
            seen.raised = type(error).__name__
    seen.inputs = list(_leaves("", arguments))
    seen.sharing = _sharing(seen.result, seen.inputs)
    seen.state = [*_state(model), *_globals(module), Leaf("next random numbers", _next_random())]
    for name, leaves in seen.parts():
        setattr(seen, name, [_frozen(leaf) for leaf in leaves])
    return seen


def _frozen(leaf: Leaf) -> Leaf:
    """Return a leaf that later calls do not change."""
    if not isinstance(leaf.value, torch.Tensor):
        return leaf
    plain = leaf.value.detach().as_subclass(torch.Tensor).clone()
    return Leaf(leaf.path, plain, tuple(leaf.value.stride()), leaf.value.requires_grad)


def _arguments(case: Case, batch: int, training: bool) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the tensors that gradients are taken of, and the arguments, which may be written in place."""
    given = case.arguments(batch)
    if not training:
        return [], given
    leaves = [x.requires_grad_() for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
    by_id = {id(leaf): leaf.clone() for leaf in leaves}
    return leaves, tuple(by_id.get(id(x), x) for x in given)


def _read(result: Any) -> Any:
    """Return what a generator yields, up to where it raises or a number of turns."""
    if isinstance(result, Iterator):
        return list(itertools.islice(result, _TURNS))
    return result


def _gradients(result: list[Leaf], leaves: list[torch.Tensor], model: Any) -> list[Leaf]:
    """Return the gradients of a weighted sum of all results."""
    total = torch.zeros(())
    for number, leaf in enumerate(result):
        if isinstance(leaf.value, torch.Tensor) and leaf.value.requires_grad:
            weights = torch.arange(leaf.value.numel(), dtype=torch.float64).add(number + 1).cos()
            total = total + (leaf.value.double().reshape(-1) * weights).sum()
    if not total.requires_grad:
        return []
    total.backward()
    named = [(f"input {number}", leaf) for number, leaf in enumerate(leaves)]
    named += list(model.named_parameters()) if isinstance(model, nn.Module) else []
    return [Leaf(name, tensor.grad) for name, tensor in named]


def _leaves(path: str, value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Leaf]:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield Leaf(path, value)
    elif id(value) in seen:
        yield Leaf(path, "itself")
    elif isinstance(value, Mapping):
        yield Leaf(path, f"{type(value).__name__} of {list(map(str, value))}")
        for key, item in value.items():
            yield from _leaves(f"{path}[{key}]", item, seen | {id(value)})
    elif isinstance(value, (list, tuple, collections.deque)):
        yield Leaf(path, f"{type(value).__name__} of {len(value)}")
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item, seen | {id(value)})
    elif isinstance(value, (set, frozenset)):
        yield Leaf(path, f"set of {sorted(map(str, value))}")
    else:
        yield Leaf(path, f"a {type(value).__name__}")


def _sharing(result: list[Leaf], inputs: list[Leaf]) -> list[str]:
    """Say which results are one object, and which lie in the memory of an input."""
    tensors = [leaf for leaf in result if isinstance(leaf.value, torch.Tensor) and leaf.value.numel()]
    given = [leaf for leaf in inputs if isinstance(leaf.value, torch.Tensor) and leaf.value.numel()]
    own = [
        f"{one.path} in {other.path}"
        for one in tensors
        for other in given
        if one.value.untyped_storage().data_ptr() == other.value.untyped_storage().data_ptr()
    ]
    starts = [
        f"{one.path} at {other.path}"
        for one, other in itertools.combinations(tensors, 2)
        if one.value.data_ptr() == other.value.data_ptr()
    ]
    return own + starts


def _state(model: Any) -> Iterator[Leaf]:
    """Yield parameters, buffers and plain attributes of every module, and the keys of the state dict."""
    if not isinstance(model, nn.Module):
        return
    yield Leaf("state dict", list(model.state_dict()).__repr__())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        yield Leaf(name, tensor)
    own = set(vars(nn.Module()))
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            if key not in own:
                yield from _leaves(f"{name}.{key}", value)
        for kind in type(part).__mro__:
            if kind.__module__.startswith(f"{PACKAGE}.text_"):
                yield from _plain_items(f"{name} class {kind.__name__}", vars(kind))


def _globals(module: types.ModuleType) -> Iterator[Leaf]:
    yield from _plain_items("global", {k: v for k, v in vars(module).items() if not k.startswith("__")})


def _plain_items(path: str, items: Mapping[str, Any]) -> Iterator[Leaf]:
    data = (bool, int, float, list, dict, set, torch.Tensor, collections.deque)
    for key, value in list(items.items()):
        if isinstance(value, data) and not key.startswith("__"):
            yield from _leaves(f"{path} {key}", value)


def _next_random() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()
