"""What stands in the slots of a cache that no step may read, so that one that reads them shows."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of
from hf_rewrite_runtime.guards.code_names import attends

from ..calls.caches import new_cache
from ..models.inputs import Batch
from ..models.model_pair import Workbench

if TYPE_CHECKING:
    from torch import Tensor

FINITE_POISON = 1e3
"""Where ordinary attention reads whole buffers it multiplies what it masks by zero, and NaN would show there too."""


def poison_for(model: Any) -> float:
    """What may stand in slots that no step may read: NaN where every attention has, and takes, a step of its own."""
    attentions = [
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    own = bool(attentions) and all(has_own_step(type(module)) for module in attentions)
    layers = {type(module) for module in model.modules() if hasattr(module, "decode")}
    file = {type(module) for module in model.modules() if type(module).__module__ == type(model).__module__}
    masked = any(map(makes_masks, file))
    return float("nan") if own and not masked and all(map(always_steps, layers)) else FINITE_POISON


def has_own_step(attention: type[Any]) -> bool:
    """Whether an attention reads the valid slots of a preallocated cache alone: by a method, or in its `forward`."""
    return hasattr(attention, "decode_residual") or attends(attention)


def always_steps(layer: type[Any]) -> bool:
    """Whether a layer takes its step whenever one runs, whatever its configuration asks for."""
    forward = ast.parse(textwrap.dedent(inspect.getsource(layer.forward)))
    joined = [value for node in ast.walk(forward) if isinstance(node, ast.BoolOp) for value in node.values]
    called = [value.func for value in joined if isinstance(value, ast.Call)]
    return not any(isinstance(function, ast.Name) and function.id == "is_decode_step" for function in called)


def makes_masks(kind: type[Any]) -> bool:
    """Whether a class makes causal masks in a step too, with which attention reads whole buffers."""
    forward = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    called = {ast.unparse(node.func) for node in ast.walk(forward) if isinstance(node, ast.Call)}
    causal = any("causal_mask" in name for name in called)
    return causal and not called & {"skips_mask", "is_decode_step"}


def reads_padding(bench: Workbench, model: Any, batch: Batch) -> bool:
    """Whether a step of the original looks at what the padding of its prompt left in its cache (GIT's does)."""
    import torch

    if batch.mask is None or not bench.subject.takes_cache:
        return False
    found = []
    for poisoned in (False, True):
        cache = new_cache(model, "dynamic")
        arguments: dict[str, Any] = {argument_of(model): cache, "use_cache": True}
        with torch.no_grad():
            model(input_ids=batch.input_ids, attention_mask=batch.mask, **arguments)
            for layer in cache.layers if poisoned else ():
                _fill_padding(layer, batch.mask, FINITE_POISON)
            mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
            found.append(model(input_ids=batch.input_ids[:, -1:], attention_mask=mask, **arguments).logits)
    return not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-3)


def _fill_padding(layer: Any, mask: Tensor, value: float) -> None:
    """Fill a growing layer's slots `[B, n]` of which `mask` says that they are padding."""
    import torch

    for buffer in vars(layer).values():
        if isinstance(buffer, torch.Tensor) and buffer.dim() == 4:
            padding = mask[:, mask.shape[1] - buffer.shape[2] :] == 0
            buffer.masked_fill_(padding[:, None, :, None], value)


def poison(graph: Any, value: float, padding: bool = True) -> None:
    """Fill the slots that no ordered step has written, and those of the padding, of every layer that has been written.

    A configuration can count more layers than a decoder has: those of an encoder, of another number.
    """
    cache = graph.cache
    starts = cache.starts.tolist() if padding else [0] * graph.cache.starts.numel()
    for layer in cache.attention_layers:
        for buffer in (layer.keys, layer.values) if layer.is_initialized else ():
            buffer[:, :, cache.length :] = value
            for row, start in enumerate(starts):
                buffer[row, :, :start] = value
        indexer = getattr(layer, "indexer_keys", None)
        if indexer is not None:
            indexer[:, cache.length :] = value
            for row, start in enumerate(starts):
                indexer[row, :start] = value
        for method, grown in getattr(layer, "beside", {}).items():
            slots = grown.movedim(layer.grown[method][1], 1)
            slots[:, cache.length :] = value
            for row, start in enumerate(starts):
                slots[row, :start] = value
