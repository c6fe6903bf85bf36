"""Gate 2, the operators of a package: what a compiler is told of them is so, and nothing stands before them unwatched.

Neither shows in eager numbers: a compiled model makes room by what an operator's fake says, and an operator that goes
through torch's dispatcher where nobody watches costs the host more than its product costs a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

from rewrite.measure.runtime_part import runtime_part

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.verdict import Figure
from ..models.model_pair import Workbench, on_original
from .runtime import backend_of, called, each_call, package_of

DTYPES = ("float32", "float64", "bfloat16")
NONE = "no operator of the package runs in a plain call"


def operator_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The checks of a package that has a runtime."""
    yield CheckRun("operators give what their fakes say", partial(_as_promised, bench))
    yield CheckRun("operators are called directly", partial(_direct, bench))


def _as_promised(bench: Workbench) -> Mapping[str, Figure]:
    """Plain calls in three dtypes: shape, dtype and strides of every output of an operator are those of its fake.

    Raises:
        Mismatch: one is not.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    namespace = _namespace(bench)
    compared = 0

    class Compared(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            promised = None
            if func.namespace == namespace:
                with FakeTensorMode() as mode:
                    faked = tree_map(
                        lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, (args, kwargs)
                    )
                    promised = func(*faked[0], **faked[1])
            out = func(*args, **kwargs)
            if promised is not None:
                nonlocal compared
                compared += 1
                for one, other in zip(tree_leaves(promised), tree_leaves(out), strict=True):
                    if isinstance(other, torch.Tensor) and _form(one) != _form(other):
                        raise Mismatch(f"{func}: {_form(other)} comes out, and {_form(one)} is said to")
            return out

    for variant in (*bench.variants, *([bench.varied] if bench.varied else [])):
        for implementation in bench.implementations():
            for dtype in DTYPES:
                pair = bench.fresh(variant, implementation, dtype)
                try:
                    on_original(called, bench, pair.original)
                except NotRun:
                    continue
                with Compared():
                    called(bench, pair.rewritten)
    if not compared:
        raise NotRun(NONE)
    return {"calls": compared}


def _form(tensor: Any) -> tuple[Any, ...]:
    """What a compiler has to know of a tensor; the strides of dimensions of one element say nothing."""
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return tuple(tensor.shape), str(tensor.dtype), strides


def _direct(bench: Workbench) -> Mapping[str, Figure]:
    """A plain call of a model that nobody watches runs no operator through torch's dispatcher.

    Raises:
        Mismatch: one does.
        NotRun: the rewritten side has no runtime, or none of its operators runs.
    """
    namespace = _namespace(bench)
    pair = bench.fresh(bench.base, bench.implementations()[0], "float32")
    on_original(called, bench, pair.original)
    with _dispatched(namespace) as through:
        count = called(bench, pair.rewritten)
    if through:
        raise Mismatch(f"{sorted(through)[0]} goes through the dispatcher, and {len(through) - 1} others")
    if not _run(bench, pair.rewritten, namespace):
        raise NotRun(NONE)
    return {"calls": count}


def _run(bench: Workbench, model: Any, namespace: str) -> bool:
    """Call a model, and return whether an operator of a namespace runs where somebody watches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watched(TorchDispatchMode):
        found = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found = self.found or func.namespace == namespace
            return func(*args, **(kwargs or {}))

    with Watched() as watched:
        called(bench, model)
    return watched.found


@contextlib.contextmanager
def _dispatched(namespace: str) -> Iterator[set[str]]:
    """Collect the operators of a namespace that are called by torch's own way to them, which is a method in Python."""
    import torch

    through: set[str] = set()
    method = torch._ops.OpOverload.__call__.__code__

    def seen(frame: FrameType) -> None:
        operator = frame.f_locals.get("self") if frame.f_code is method else None
        if getattr(operator, "namespace", None) == namespace:
            through.add(str(operator))

    with each_call(seen):
        yield through


def _namespace(bench: Workbench) -> str:
    """The namespace of the operators of the package's runtime.

    Raises:
        NotRun: the rewritten side has no runtime.
    """
    backend_of(bench)
    return str(runtime_part(package_of(bench), "guards/place").NAMESPACE)
