"""Logits that nobody has read yet.

A loss that is computed from hidden states leaves no logits behind, and a training loop rarely reads them. What stands
in their place remembers how they are made. It answers for their shape, dtype and device, writes down what the file
does to every one of them (a scale, a cap, another dtype), and computes them when anything else is asked: any other
method, operator or function of torch finds the tensor that the original would have returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..guards.tensor_version import version_of
from .cross_entropy import Shape

Operation = tuple[str, Any]
"""`mul` and `div` by a number, `tanh`, `to` a dtype."""


class WeightsChanged(RuntimeError):
    """Logits are read after an update of the weights that would have made them."""

    def __init__(self) -> None:
        super().__init__(
            "the logits of this output were not computed, since the loss did not need them, and what they are made of "
            "was written to. Read `logits` before the optimizer's step, or have them computed each time: "
            "REWRITE_CHUNKED_LOSS=0, or use_chunked_loss(False)."
        )


class DeferredLogits:
    """The product of hidden states and a head, to be computed when it is read.

    Args:
        hidden_states: `[..., H]`.
        head: a plain `nn.Linear(H, V)`.
        dtype: of the product.
        operations: what was done to it since.
    """

    def __init__(
        self, hidden_states: Tensor, head: nn.Linear, dtype: torch.dtype, operations: tuple[Operation, ...] = ()
    ):
        self.hidden_states = hidden_states
        self.head = head
        self.product_dtype = dtype
        self.operations = operations
        self._versions = self._written()
        self._computed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[..., V]`."""
        return torch.Size((*self.hidden_states.shape[:-1], self.head.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return next((given for name, given in reversed(self.operations) if name == "to"), self.product_dtype)

    @property
    def device(self) -> torch.device:
        """That of the tensor."""
        return self.hidden_states.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden_states.ndim

    @property
    def is_computed(self) -> bool:
        """Whether somebody has read them, and may have written to them."""
        return self._computed is not None

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.hidden_states.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def form(self) -> Shape | None:
        """Return what is done to the logits as the loss computes it, None where it computes no such thing."""
        inner, outer, capped = 1.0, 1.0, False
        for name, given in self.operations:
            if name == "tanh":
                if capped:
                    return None
                capped = True
            elif name in ("mul", "div"):
                factor = given if name == "mul" else 1.0 / given
                inner, outer = (inner, outer * factor) if capped else (inner * factor, outer)
        return Shape(inner, outer, capped) if math.isfinite(inner) and math.isfinite(outer) else None

    def computed(self) -> Tensor:
        """Return the tensor, differentiable where gradients are on.

        Raises:
            WeightsChanged: if the head has other weights by now, or the hidden states were written to.
        """
        if self._computed is not None:
            return self._computed
        self.check()
        device = self.device.type
        lower = self.product_dtype if self.product_dtype in (torch.float16, torch.bfloat16) else None
        mixed = self.product_dtype != self.head.weight.dtype
        with torch.autocast(device, dtype=lower, enabled=mixed):
            logits: Tensor = self.head(self.hidden_states)
        for name, given in self.operations:
            logits = _APPLY[name](logits, given)
        if torch.is_grad_enabled():  # without gradients they would be others for who reads them next
            self._computed = logits
        return logits

    def check(self) -> None:
        """Raise if they would be other logits than when they were made.

        Raises:
            WeightsChanged: if the head has other weights by now, or the hidden states were written to.
        """
        now = self._written()
        if self._versions and now and self._versions != now:
            raise WeightsChanged

    def _written(self) -> list[int | None]:
        """Return how often each tensor was written to that the logits are made of."""
        tensors = (self.hidden_states, self.head.weight, self.head.bias)
        return [] if torch.compiler.is_compiling() else [version_of(t) for t in tensors if t is not None]

    def then(self, name: str, given: Any = None) -> DeferredLogits:
        """Return these logits with one operation more."""
        made = DeferredLogits(self.hidden_states, self.head, self.product_dtype, (*self.operations, (name, given)))
        made._versions = self._versions
        return made

    def float(self) -> DeferredLogits | Tensor:
        """Return them in fp32."""
        return self.to(torch.float32)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Return them in another dtype; on another device they are computed."""
        wanted = arguments[0] if len(arguments) == 1 and not keywords else None
        if self._computed is None and wanted == self.dtype:
            return self
        if self._computed is None and isinstance(wanted, torch.dtype) and wanted.is_floating_point:
            return self.then("to", wanted)
        if self._computed is None and isinstance(wanted, torch.device) and wanted == self.device:
            return self
        return self.computed().to(*arguments, **keywords)

    def contiguous(self) -> DeferredLogits:
        """Return them: a product is."""
        return self

    def tanh(self) -> DeferredLogits | Tensor:
        """Return the hyperbolic tangent."""
        return self.then("tanh") if self._computed is None else self._computed.tanh()

    def detach(self) -> Tensor:
        """Return the tensor, computed without a graph."""
        with torch.no_grad():
            return self.computed().detach()

    def __mul__(self, other: Any) -> Any:
        return self.then("mul", other) if self._takes(other) else self.computed() * plain(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.then("div", other) if self._takes(other) and other else self.computed() / plain(other)

    def _takes(self, other: Any) -> bool:
        return self._computed is None and type(other) in (int, float)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its libraries ask of any object
            raise AttributeError(name)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on the tensors."""
        if function in (torch.tanh, Tensor.tanh) and not kwargs and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        return function(*plain(args), **plain(kwargs or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return plain, (self.computed(),)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self.is_computed})"


def plain(value: Any) -> Any:
    """Return a value with the tensors in the place of deferred logits, inside tuples, lists and dictionaries too."""
    if isinstance(value, DeferredLogits):
        return value.computed()
    if isinstance(value, (tuple, list)):
        parts = [plain(part) for part in value]
        return type(value)(parts) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    return value


_APPLY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda logits, given: logits * given,
    "div": lambda logits, given: logits / given,
    "tanh": lambda logits, given: torch.tanh(logits),
    "to": lambda logits, given: logits.to(given),
}


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *arguments: Any) -> Any:
        return getattr(self.computed(), name)(*plain(arguments))

    method.__name__ = name
    return method


for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__matmul__", "__rmatmul__", "__neg__", "__pow__",
    "__abs__", "__floordiv__", "__mod__", "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__array__",
    "__float__", "__int__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__",
    "__imul__", "__itruediv__", "__contains__", "__deepcopy__",
):  # fmt: skip
    setattr(DeferredLogits, _name, _delegate(_name))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
