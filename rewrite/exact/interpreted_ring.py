"""Triton's interpreter with fp32 numbers in the ring: the bits of a number are its residue.

Numbers of other types are what they are: a conversion to fp32, and bits that are taken for an fp32, become elements.
Constants and scalars of the host do when the kernel makes fp32 of them. Conversions back have no meaning; the bits of
an element can be read as an integer, which says something only of equality.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from hf_rewrite_runtime.device import elementary
from rewrite.finite import ring

_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder


def install() -> None:
    """Compute in the ring for the rest of the process."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    for name, operation in _BINARY.items():
        setattr(_Builder, f"create_{name}", _two(operation, getattr(_Builder, f"create_{name}")))
    for name, function in _UNARY.items():
        setattr(_Builder, f"create_{name}", _one(function))
    for name, compare in _COMPARISONS.items():
        for kind in "OU":
            setattr(_Builder, f"create_fcmp{kind}{name}", _compared(compare))
    for name in ("clampf", "frem"):
        setattr(_Builder, f"create_{name}", _refused(name))
    _Builder.create_fma = lambda self, x, y, z: self.create_fadd(self.create_fmul(x, y), z)
    _Builder.create_dot = _dot
    _Builder.get_fp32 = lambda self, value: _handle(torch.tensor([ring.element(float(np.float32(value)))]))
    for name in ("si_to_fp", "ui_to_fp", "fp_ext", "fp_trunc", "fp_to_si", "fp_to_ui"):
        setattr(_Builder, f"create_{name}", _cast(getattr(_Builder, f"create_{name}")))
    _Builder.create_fp_to_fp = _cast(_Builder.create_fp_to_fp)
    _Builder.create_bitcast = _bitcast(_Builder.create_bitcast)
    interpreter.ReduceOps.sum = _sum(interpreter.ReduceOps.sum)
    interpreter.ReduceOps.min_max = _min_max(interpreter.ReduceOps.min_max)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(tl.extra.cuda, name, lambda: None)
    elementary.tanh.rewritten_fn[elementary.tanh.fn] = _tanh


def _patched_once(before: Callable[..., Any]) -> Callable[..., Any]:
    """Let Triton's language stay the interpreter's: changing it at each call takes a third of the time."""
    done: set[int] = set()

    def run(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            before(function)
        scope = getattr(interpreter, "_LangPatchScope", None)  # what Triton 3.4 changes stays so by itself
        return None if scope is None else scope()

    return run


def payload(numbers: Any) -> Tensor:
    """Return the elements whose residues are the bits of numbers."""
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32).view(np.int32)).to(torch.int64)


def _numbers(found: Tensor) -> Any:
    return found.to(torch.int32).numpy().view(np.float32)


def _handle(found: Tensor) -> Any:
    return _Handle(_numbers(found), tl.float32)


def _is_fp32(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.float32)


def _two(operation: Callable[[Tensor, Tensor], Tensor], before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, a: Any, b: Any) -> Any:
        if not _is_fp32(a):
            return before(self, a, b)
        x, y = torch.broadcast_tensors(payload(a.data).reshape(a.data.shape), payload(b.data).reshape(b.data.shape))
        return _handle(operation(x, y))

    return run


def _tanh(x: Any) -> Any:
    """Return what the kernels' own polynomial near zero rounds to."""
    return tl.core.tensor(_handle(ring.tanh(payload(x.handle.data))), x.type)


def _one(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def run(self: Any, a: Any) -> Any:
        if not _is_fp32(a):
            raise ring.Meaningless(f"a function of {a.dtype}")
        return _handle(function(payload(a.data)))

    return run


def _compared(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def run(self: Any, a: Any, b: Any) -> Any:
        if not _is_fp32(a):
            raise ring.Meaningless(f"an order of {a.dtype}")
        return _Handle(compare(ring.key(payload(a.data)), ring.key(payload(b.data))).numpy(), tl.float32)

    return run


def _refused(name: str) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any) -> Any:
        raise ring.Meaningless(name)

    return run


def _dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    return _handle(ring.add(ring.matmul(payload(a.data), payload(b.data)), payload(d.data)))


def _cast(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, source: Any, target: Any, *how: Any) -> Any:
        if _is_fp32(source) and bool(payload(source.data).any()):
            raise ring.Meaningless(f"an element as {target.scalar}")
        if target.scalar != tl.float32 or _is_fp32(source):
            return before(self, source, target, *how)
        if source.dtype.scalar in (tl.float8e4nv, tl.float8e4b8):
            source = interpreter.TensorHandle(source.data.view(np.uint8), source.dtype)
            kind = torch.float8_e4m3fn if source.dtype.scalar == tl.float8e4nv else torch.float8_e4m3fnuz
            return _handle(ring.elements(torch.from_numpy(np.ascontiguousarray(source.data)).view(kind).float()))
        return _handle(ring.elements(torch.from_numpy(np.ascontiguousarray(source.data))))

    return run


def _bitcast(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, source: Any, target: Any) -> Any:
        found = before(self, source, target)
        if target.scalar == tl.float32 and not _is_fp32(source):
            return _handle(ring.elements(torch.from_numpy(np.ascontiguousarray(found.data))))
        return found

    return run


def _sum(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, given: Any) -> Any:
        if given.dtype != tl.float32:
            return before(self, given)
        axis = list(range(given.handle.data.ndim)) if self.axis is None else self.axis
        found = ring.total(payload(given.handle.data), axis, self.keep_dims)
        return self.to_tensor(_numbers(found) if found.dim() else _numbers(found)[()], given.dtype)

    return run


def _min_max(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        given = given[0] if isinstance(given, tuple) else given
        if given.dtype != tl.float32:
            return before(self, given, val_reduce_op, idx_reduce_op)
        keys = ring.key(payload(given.handle.data)).numpy()
        highest = val_reduce_op in (np.nanmax, np.max)
        best = (np.max if highest else np.min)(keys, axis=self.axis, keepdims=self.keep_dims)
        found = _numbers(ring.of_key(torch.from_numpy(np.asarray(best))))
        value = self.to_tensor(found if found.ndim else found[()], given.dtype)
        if idx_reduce_op is None:
            return value
        place = (np.argmax if highest else np.argmin)(keys, axis=self.axis, keepdims=self.keep_dims)
        return value, self.to_tensor(place, tl.int32)

    return run


def _named(name: str) -> Callable[[Tensor], Tensor]:
    return lambda a: ring.oracle(name, a)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fadd": ring.add,
    "fsub": ring.sub,
    "fmul": ring.mul,
    "fdiv": ring.div,
    "precise_divf": ring.div,
    "maximumf": ring.maximum,
    "maxnumf": ring.maximum,
    "minimumf": ring.minimum,
    "minnumf": ring.minimum,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "fneg": ring.neg,
    "exp": ring.exp,
    "exp2": ring.exp2,
    "fabs": lambda a: torch.where(ring.key(a) < 0, ring.neg(a), a),
    **{name: _named(name) for name in ("rsqrt", "sqrt", "log", "log2", "erf", "sin", "cos", "floor", "ceil")},
    "precise_sqrt": _named("sqrt"),
}
_COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "LT": torch.lt,
    "GT": torch.gt,
    "LE": torch.le,
    "GE": torch.ge,
    "EQ": torch.eq,
    "NE": torch.ne,
}
