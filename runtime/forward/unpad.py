"""Batches whose mask hides much run their layers on the tokens that it shows, on request.

    with Packing(model, attention_mask, tokens):
        outputs = model(input_ids, attention_mask)

B texts in S places, of which T <= `tokens` are shown. Between the first and the last layer hidden states are
[1, tokens, D]: the shown ones in their order, and hidden ones that fill it up. Products, norms and activations of the
layers do so much less; attention gets its queries, keys and values back as [B, H, S, D], with the mask, windows and
biases that the model made for them. Nothing of this reads the mask on the host, so that it can be part of a graph.
Behind the last layer hidden positions are zeros.

What a layer does with a token besides attention must not depend on its neighbours. That, and all else, is proved as
for texts that are padded (`bucket_check`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .forward_graph import Run, Unsuitable
from .length_buckets import MASK, Text

EIGHTHS = 8
"""Graphs are for multiples of this part of the places of a batch."""
MOST_EIGHTHS = 6
"""Shown tokens above which a batch is padded: packing and unpacking read and write the states once more each."""


def packed_text(text: Text) -> Text | None:
    """Return a batch as one whose layers are packed; None where its mask hides too little, or is no plain one.

    The mask is read, which waits for the device.
    """
    mask = text.given.get(MASK)
    if text.reason or mask is None or mask.dim() != 2 or mask.shape[0] < 2:
        return None
    text = text.with_its_rows()
    places = mask.shape[0] * text.bucket
    eighths = -(-int((mask != 0).sum().item()) * EIGHTHS // places)
    if not 0 < eighths <= MOST_EIGHTHS:
        return None
    tokens = -(-eighths * places // EIGHTHS)
    tokens += tokens == text.bucket  # so that the packed batch is not mistaken for one text
    return replace(text, tokens=tokens, family=("packed", text.family), kind=("packed", tokens, text.kind))


def packed_run(model: nn.Module, run: Run, tokens: int) -> Run:
    """Return `run` with layers packed; it keeps the layers alive and not the model.

    Raises:
        Unsuitable: if the model has no layers one behind the other.
    """
    layers = layers_of(model)

    def packed(call: Any) -> Any:
        with Packing(layers, call[1][MASK], tokens) as packing:
            outputs = run(call)
        if not packing.is_used:
            raise Unsuitable("packed_layers", "no layer was called with hidden states of the batch")
        return outputs

    return packed


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of one class in a list that have the most parameters, not looking inside of such lists.

    Raises:
        Unsuitable: if there are none.
    """
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        for child in waiting.pop().children():
            if isinstance(child, nn.ModuleList) and len({type(layer) for layer in child}) == 1:
                found.append(child)
            else:
                waiting.append(child)
    if not found:
        raise Unsuitable("packed_layers")
    return list(max(found, key=_size).children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Packing(TorchFunctionMode):
    """Packs what the first layer is given, unpacks what the last one returns, and what attention is given between.

    Args:
        layers: in their order.
        mask: `[B, S]`, zero where a token is hidden.
        tokens: of the packed batch; the mask shows no more.
    """

    def __init__(self, layers: Sequence[nn.Module], mask: Tensor, tokens: int):
        super().__init__()
        self.is_used = False
        self._layers = layers
        self._rows, self._length = mask.shape
        self._tokens = tokens
        self._thread = threading.get_ident()
        self._shown = (mask != 0)[..., None]
        flat = mask.flatten() == 0
        self._places = torch.argsort(flat.to(torch.uint8), stable=True)[:tokens]
        """Where each packed token stands in the batch, [tokens]."""
        numbers = torch.arange(tokens, device=mask.device)
        self._numbers = torch.zeros_like(flat, dtype=torch.int64).scatter_(0, self._places, numbers)
        """Where each place of the batch is packed, [B S]; of those that are not, another token, which is hidden."""
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Packing:
        """Watch the layers."""
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(self._layers[-1].register_forward_hook(self._behind))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Leave the layers as they were."""
        super().__exit__(*raised)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; attention of packed queries, keys and values on the whole batch."""
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        packed = (1, self._tokens)
        if any((tensor.shape[0], tensor.shape[-2]) != packed for tensor in (query, key, value)):
            return F.scaled_dot_product_attention(query, key, value, *args, **named)
        q, k, v = (self._unpacked(tensor[0].transpose(0, 1)).transpose(1, 2) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, *args, **named)
        return self._packed(out.transpose(1, 2)).transpose(1, 2)

    def _packed(self, tensor: Tensor) -> Tensor:
        """Return `[B, S, …]` as `[1, tokens, …]`."""
        return tensor.reshape(-1, *tensor.shape[2:]).index_select(0, self._places)[None]

    def _unpacked(self, rows: Tensor) -> Tensor:
        """Return `[tokens, …]` as `[B, S, …]`."""
        return rows.index_select(0, self._numbers).unflatten(0, (self._rows, self._length))

    def _before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return None
        return _each(args, self._pack), {name: _each(value, self._pack) for name, value in kwargs.items()}

    def _pack(self, tensor: Tensor) -> Tensor:
        """Pack what has the places of the batch, hidden states or tables of rotations: [B, S, D] or [1, S, D]."""
        rows = tensor.shape[0]
        if tensor.dim() != 3 or tensor.shape[1] != self._length or rows not in (1, self._rows):
            return tensor
        self.is_used = self.is_used or rows == self._rows
        return self._packed(tensor.expand(self._rows, -1, -1))

    def _behind(self, layer: nn.Module, args: Any, output: Any) -> Any:
        return _each(output, self._unpack) if threading.get_ident() == self._thread else None

    def _unpack(self, tensor: Tensor) -> Tensor:
        if tensor.dim() != 3 or tensor.shape[:2] != (1, self._tokens):
            return tensor
        return torch.where(self._shown, self._unpacked(tensor[0]), 0)


def _each(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with other tensors, which may be in tuples and lists."""
    if isinstance(value, Tensor):
        return of(value)
    if type(value) in (tuple, list):
        return type(value)(_each(part, of) for part in value)
    return value
