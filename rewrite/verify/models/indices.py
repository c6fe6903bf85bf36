"""Asks a CPU first whether an operator's indices are in range: on a GPU one that is not ends the process's context.

The original answers some calls with an `IndexError`: a label beyond the classes, a position beyond the table. On a GPU
the same call trips an assertion in a kernel, after which nothing else runs in that process. So where the original runs
on a GPU, each operator that takes integers beside other tensors runs on a CPU before, with the same integers, and with
memory of the same shapes in place of the other values, which no range depends on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

BY_VALUE = ("aten::multinomial", "aten::binary_cross_entropy", "aten::_assert_async")
"""Operators whose kernels assert something of their floating-point values: they are asked with the values."""


@contextlib.contextmanager
def asked_first(kind: str = "cuda") -> Iterator[None]:
    """Within the block, what a CPU answers to an operator on a device of this kind with an error is raised at once."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    class AttentionAsItIs(TorchFunctionMode):
        """torch's attention, which no index reaches, unwatched: where it is watched it adds masks out of place, and
        takes one of six dimensions that it refuses otherwise."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            unwatched = func is scaled_dot_product_attention
            with _disable_current_modes() if unwatched else contextlib.nullcontext():
                return func(*args, **(kwargs or {}))

    class AskedFirst(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if reads_indices(func, args, kwargs, kind):
                ask(func, args, kwargs)
            return func(*args, **kwargs)

    if kind == "cuda" and not torch.cuda.is_initialized():
        yield
        return
    with AskedFirst(), AttentionAsItIs():
        yield


def reads_indices(func: Any, args: Any, kwargs: Any, kind: str) -> bool:
    """Whether an operator may find something in its tensors, which are on a device of that kind, that it asserts."""
    import torch
    from torch.utils._pytree import tree_leaves

    needed = _tensors_needed(func)
    if not needed:
        return False
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if len(tensors) < needed or not any(tensor.device.type == kind for tensor in tensors):
        return False
    return needed == 1 or any(map(_counts, tensors))


@functools.cache
def _tensors_needed(func: Any) -> int:
    """How many tensors an operator has to be given to be asked first: 0 where nothing it is given is an index."""
    import torch

    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.pointwise in func.tags:
        return 0
    if func._schema.name in BY_VALUE:
        return 1
    return 2 if sum("Tensor" in str(argument.type) for argument in func._schema.arguments) > 1 else 0


def ask(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run an operator on a CPU, on copies of its arguments.

    Raises:
        IndexError: as the operator does on a CPU.
        RuntimeError: the same; but not where the integers make no difference, as for what no CPU has a kernel of.
    """
    import torch

    by_value = _tensors_needed(func) == 1
    try:
        with torch.random.fork_rng(devices=(), enabled=by_value):
            _on_a_cpu(func, args, kwargs, _copied if by_value else _indices_alone)
    except NotImplementedError:
        return
    except (IndexError, RuntimeError):
        if by_value or _runs(func, args, kwargs, _zeros):
            raise


def _runs(func: Callable[..., Any], args: Any, kwargs: Any, stand_in: Callable[[Any], Any]) -> bool:
    try:
        _on_a_cpu(func, args, kwargs, stand_in)
    except (IndexError, RuntimeError):
        return False
    return True


def _on_a_cpu(func: Callable[..., Any], args: Any, kwargs: Any, stand_in: Callable[[Any], Any]) -> None:
    from torch.utils._pytree import tree_map

    func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))


def _counts(tensor: Any) -> bool:
    """Whether a tensor holds integers."""
    import torch

    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _copied(value: Any) -> Any:
    import torch

    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _indices_alone(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.empty(value.shape, dtype=torch.float32)  # not every operator on a CPU knows 16 bits
    return _copied(value)


def _zeros(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and _counts(value):
        return torch.zeros(value.shape, dtype=value.dtype)
    return _indices_alone(value)
