"""Which implementation of an operator runs, and the record of every time it was not the fast one.

Every operator has a plain torch reference and, where it pays, a Triton kernel. The choice between them is made when
the operator runs, from the device of its first tensor and from `set_backend` or the environment variable
`REWRITE_BACKEND` (`auto`, `reference`, `triton` or `aiter`), so that a wrong result can be bisected without editing a
file. `aiter` is AMD's library, for the operators that `aiter_calls` lists; the others run as under `auto`.

Reading on: `runtime/norms/rms_norm.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level as _functorch_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.nn.modules.module import _has_any_global_hook

from ..guards.observers import has_own_forward, takes_part
from ..guards.place import NAMESPACE
from ..guards.provenance import runs_as_written
from ..launching import launch
from . import aiter_probe

BACKENDS = ("auto", "reference", "triton", "aiter")
ENVIRONMENT_VARIABLE = "REWRITE_BACKEND"

_fallbacks: Counter[tuple[str, str]] = Counter()
_fallbacks_of: weakref.WeakKeyDictionary[nn.Module, Counter[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""Those of each module or model that they happened at, as long as it lives."""
_fallbacks_outside: Counter[tuple[str, str]] = Counter()
"""Those at no module and outside of any model's call."""
_last_reasons: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_chosen: str | None = None
ATTENTION_VARIABLE = "REWRITE_ATTENTION"
CACHE_VARIABLE = "REWRITE_CACHE"
named_besides: dict[str, str | None] = {
    "attention": os.environ.get(ATTENTION_VARIABLE) or None,
    "cache": os.environ.get(CACHE_VARIABLE) or None,
}
"""What else was chosen by name in this process, as kernels of graphs were chosen by it."""
OWN_ATTENTION = "own"
"""The ordinary way of attention: torch's choice, the forms of `native_gqa`, aiter where it is installed."""
_NAMED = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
"""For code that is being compiled, which may not look into the environment."""

library = torch.library.Library(NAMESPACE, "FRAGMENT")
_NO_GUARD = contextlib.nullcontext()


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run here."""

    def __init__(self, backend: str, why: str):
        super().__init__(
            f"backend '{backend}' was asked for and cannot run: {why}. "
            f"Choose another with set_backend() or {ENVIRONMENT_VARIABLE} ({', '.join(BACKENDS)})."
        )


def set_backend(name: str) -> None:
    """Choose the implementation of every operator of this package: one of `BACKENDS`.

    Raises:
        ValueError: if `name` is not one of `BACKENDS`.
        BackendUnavailable: if `name` is `"triton"` and Triton is not installed, or `"aiter"` and AMD's aiter cannot be
            imported on an AMD GPU.
    """
    global _chosen
    _chosen = _checked(name)


def get_backend() -> str:
    """Return the backend in force: the last `set_backend`, else `REWRITE_BACKEND`, else `"auto"`."""
    return _chosen if _chosen is not None else _checked(os.environ.get(ENVIRONMENT_VARIABLE, "auto"))


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose a backend for the length of a `with` block."""
    global _chosen
    previous, _chosen = _chosen, _checked(name)
    try:
        yield
    finally:
        _chosen = previous


class _Plain(threading.local):
    active: bool = False


_PLAIN = _Plain()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Run operators by their torch reference in this thread: for a few calls that are not worth compiling for."""
    before, _PLAIN.active = _PLAIN.active, True
    try:
        yield
    finally:
        _PLAIN.active = before


def runs_plainly() -> bool:
    """Return whether this thread is inside `plainly`."""
    return _PLAIN.active


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether an operator on `tensor` runs its Triton kernel.

    `auto` takes Triton on CUDA and HIP devices, and `aiter` does so where aiter has nothing. A named `triton` is
    honoured or raises `BackendUnavailable`; on a CPU tensor it needs Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    backend = get_backend()
    if backend == "reference" or _PLAIN.active:
        return False
    if tensor.is_cuda or launch.pretends():
        if triton_installed():
            return True
        warn_once("triton is not installed: operators run their torch reference on the GPU, which is slower")
        count_fallback("every operator", "triton_not_installed")
        return False
    if backend == "triton":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return True
        raise BackendUnavailable("triton", f"the tensor is on '{tensor.device}' and TRITON_INTERPRET is not 1")
    return False


def wants_gradient(*tensors: torch.Tensor | Proxy | None) -> bool:
    """Return whether torch differentiates an operator on these tensors: then the form in its own operators has to run.

    So it does inside a transform (`transformed`), whichever tensors that is about, and for `torch.fx.symbolic_trace`,
    whose proxies record torch's own functions and can be asked nothing.
    """
    if type(tensors[0]) is Proxy:  # the first is what a module was called with
        return True
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    return transformed()


def composes() -> bool:
    """Return whether an operator that does little per element runs as torch's own operators, without a question.

    So it does inside torch.compile, which fuses torch's with what is around them: an operator of ours is a wall, and
    asks its questions anew at each call. SigLIP base took 8.1 ms compiled with them, 3.3 ms without (one image, H200,
    torch 2.11). A backend that was named is honoured.
    """
    return is_compiling() and named_none()


def named_none() -> bool:
    """Return whether nobody asked for kernels by name."""
    return (_chosen or _NAMED) not in ("triton", "aiter")


def learns(*tensors: torch.Tensor | None) -> bool:
    """Return whether an operator that torch is to differentiate may do it itself, by kernels for both ways.

    Not where a compiler looks, which fuses torch's own operators better than it could these, and not under a
    transform, a dispatch mode, or for a tensor class. A second differentiation takes the form in torch's operators
    (`again`). The first tensor decides on the backend, as in a forward.
    """
    first = tensors[0]
    plain = all(tensor is None or type(tensor) in _PLAIN_TENSORS for tensor in tensors)
    return plain and first is not None and nothing_watches(first.detach()) and not transformed() and uses_triton(first)


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_admitted: set[type[torch.Tensor]] = set()


def admit(kind: type[torch.Tensor]) -> None:
    """Take a class of tensors for plain ones: that by which `rewrite verify` computes in a finite ring."""
    _admitted.add(kind)


def is_plain(tensor: object) -> bool:
    """Return whether a tensor or a parameter is of torch's own class, or of one that was admitted."""
    return type(tensor) in _PLAIN_TENSORS or type(tensor) in _admitted


def again(
    reference: Callable[..., Any],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the gradients of `reference` by its inputs, so that they can be differentiated themselves.

    Args:
        reference: an operator in torch's own, of these inputs.
        inputs: what its kernels were called with, as autograd saved it.
        needed: of which of them a gradient is wanted.
        gradients: of each of its outputs.
    """
    places = [place for place, (x, need) in enumerate(zip(inputs, needed, strict=True)) if need and x is not None]

    def of_wanted(*wanted: torch.Tensor | None) -> Any:
        given = dict(zip(places, wanted, strict=True))
        return reference(*[given.get(place, x) for place, x in enumerate(inputs)])

    # not `autograd.grad`, which would also follow the paths on which one input was made of another
    pull = torch.func.vjp(of_wanted, *[inputs[place] for place in places])[1]
    found = dict(zip(places, pull(gradients[0] if len(gradients) == 1 else tuple(gradients)), strict=True))
    return [found.get(place) for place in range(len(inputs))]


def transformed() -> bool:
    """Return whether `torch.func` or forward-mode differentiation is under way: an operator would drop the tangents.

    A compiler sees forward mode, and not the other transforms, which go through an operator as through any other.
    """
    return forward_ad._current_level >= 0 or (not is_compiling() and _functorch_level() is not None)


def interposed() -> bool:
    """Return whether tensors may not be what they seem: inside a transform, or under a dispatch mode (fake, proxy)."""
    if forward_ad._current_level >= 0:
        return True
    return not is_compiling() and (_functorch_level() is not None or _len_torch_dispatch_stack() > 0)


def autocasts(kind: str) -> bool:
    """Return whether autocast chooses dtypes on a kind of device; torch raises where it has none, as on `meta`."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def observed(module: nn.Module) -> bool:
    """Return whether something outside the module takes part in its call, so that the call itself has to be made.

    That is a hook of any kind that does something (its own or torch's global ones), a `forward` set on the instance
    (accelerate's offloading and hub kernels do this), one that is not written in its class (`provenance`) or a
    parametrised weight.
    """
    return bool(
        (module._forward_hooks and any(map(takes_part, module._forward_hooks.values())))
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or not has_own_forward(module)
        or not runs_as_written(type(module))
        or "parametrizations" in module._modules
        or _has_any_global_hook()
    )


def are_watched(modules: Iterable[object]) -> bool:
    """Return whether the calls of some modules may be seen from outside, so that their order matters.

    It asks for hooks and for a `forward` on the instance alone, which takes less than a launch; what is no module is
    passed over.
    """
    if is_compiling():
        return False
    return _has_any_global_hook() or any(map(_is_watched, modules))


def _is_watched(module: object) -> bool:
    if not isinstance(module, nn.Module):
        return False
    own = vars(module)
    hooks = own.get("_forward_hooks")
    return bool(
        (hooks and any(map(takes_part, hooks.values())))
        or own.get("_forward_pre_hooks")
        or ("forward" in own and not has_own_forward(module))
    )


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the device of `tensor` the current one: Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(tensor.device)


def register(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register a torch operator that works on every device and passes through `torch.compile(fullgraph=True)`.

    The first argument is a tensor. `schema` is the part after the name (`"(Tensor x, float eps) -> Tensor"`). The
    low-level library is used because one call costs 3 µs against 10 µs for `torch.library.custom_op` (torch 2.13,
    CPU), and a decode step makes hundreds.
    """
    library.define(f"{name}{schema}")
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(tensor: torch.Tensor, *rest: Any) -> Any:
        return implementation(tensor, *rest) if nothing_watches(tensor) else operator(tensor, *rest)

    return call


def nothing_watches(tensor: torch.Tensor) -> bool:
    """Return whether nobody would see the operator: no compiler, no dispatch mode, no tensor subclass, no tracer.

    Then its implementation is called directly, which saves 12 µs of dispatch a call (H100 host, torch 2.11).
    """
    return (
        (type(tensor) is torch.Tensor or type(tensor) in _admitted)
        and not is_compiling()
        and not _len_torch_dispatch_stack()
        and _functorch_level() is None
        and torch._C._get_tracing_state() is None
    )


class _Called(threading.local):
    model: nn.Module | None = None


_CALLED = _Called()


class Inside:
    """Have what this thread counts in a `with` block be of a model, the last one where several are in each other."""

    __slots__ = ("before", "model")

    def __init__(self, model: Any):
        self.model = model

    def __enter__(self) -> None:
        self.before = _CALLED.model
        _CALLED.model = self.model

    def __exit__(self, *_: object) -> None:
        _CALLED.model = self.before


def count_fallback(operator: str, reason: str, module: nn.Module | None = None) -> None:
    """Count one run of `operator` that did not take its fast form, for `explain`. Free while compiling.

    It is of `module`, which is remembered with the last reason, or of the model that this thread is `Inside`. What
    does not run is not counted.
    """
    if not is_compiling() and not launch.collects():
        _fallbacks[(operator, reason)] += 1
        owner = _CALLED.model if module is None else module
        counts = _fallbacks_outside if owner is None else _fallbacks_of.setdefault(owner, Counter())
        counts[(operator, reason)] += 1
        if module is not None:
            _last_reasons[module] = f"{operator}: {reason}"


def forget_reason(operator: str, module: nn.Module) -> None:
    """Forget why `operator` last ran in its slower form at a module: it has just taken its fast one."""
    if _last_reasons.get(module, "").startswith(f"{operator}: "):
        del _last_reasons[module]


def fallbacks() -> dict[tuple[str, str], int]:
    """Return how often each operator ran in its slower form, by (operator, reason), since `reset_fallbacks`."""
    return dict(_fallbacks)


def fallbacks_of(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return the same of a model and its modules alone."""
    found: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        found.update(_fallbacks_of.get(module, {}))
    return dict(found)


def fallbacks_outside() -> dict[tuple[str, str], int]:
    """Return the same of what ran at no module and outside of any model's call.

    Such are operators that are called by themselves, a backward, and what a compiled model runs: none of these goes
    through a model's `__call__`.
    """
    return dict(_fallbacks_outside)


def last_reasons(model: nn.Module) -> dict[str, str]:
    """Return the last fallback at each module of `model` that had one, by the module's name."""
    return {name: _last_reasons[module] for name, module in model.named_modules() if module in _last_reasons}


def reset_fallbacks() -> None:
    """Set every fallback count to zero and forget the modules they happened at."""
    for counts in (_fallbacks, _fallbacks_outside, _fallbacks_of, _last_reasons):
        counts.clear()


@functools.cache
def triton_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"unknown backend '{name}': choose one of {', '.join(BACKENDS)}")
    if name == "triton" and not triton_installed():
        raise BackendUnavailable(name, "triton is not installed")
    if name == "aiter" and (failure := aiter_probe.failure()) is not None:
        raise BackendUnavailable(name, failure)
    return name


@functools.cache
def warn_once(message: str) -> None:
    """Warn of the same thing once a process."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
