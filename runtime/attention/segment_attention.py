"""Attention inside each segment of one packed sequence: images, windows of an image, clips of sound.

N segments of lengths L_1 … L_N, one behind the other in S = L_1 + … + L_N tokens; H query heads, Hk key/value heads,
D head_dim, Dv that of the values. With s_i = L_1 + … + L_(i-1):

    out[:, s_i : s_i + L_i] = attend(q[:, :, s_i : s_i + L_i], k[:, :, s_i : s_i + L_i], v[:, :, s_i : s_i + L_i])

transformers calls its attention function once a segment. Segments of one length L are the rows of a batch, of which
none sees another: the `[1, H, n L, D]` of n of them that lie side by side is `[n, H, L, D]` as a view. So there is one
call for each length. Where lengths differ, what lies apart is copied together, and the results back into their order;
that is a copy of queries, keys and values, and no pass over the result that the concatenation did not make before.
Where gradients are wanted nothing is copied, and neighbours of one length share a call: what is kept for them is then
the memory that was kept before, no more, and a write to it in between means what it did.

The attention function has to treat the rows of a batch alike. transformers' own for `sdpa` does, and ours in its
place; any other, one of the file or one that was registered, is called once a segment as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..core import backend
from .grouped_query import native_gqa

MOST_ROWS = 65_535
"""Segments of one call: a grid of a CUDA kernel has no more in its second and third dimension."""


def segment_attention(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: int | list[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend inside each segment, in one call for each length of a segment where `attend` allows it.

    Args:
        attend: an attention function of transformers.
        module: its first argument.
        query: `[1, H, S, D]`, of any strides; so are `key` and `value`.
        key: `[1, Hk, S, D]`.
        value: `[1, Hk, S, Dv]`.
        sizes: the lengths of the segments, or that of each but the last, as `torch.split` takes them.
        args: what else each call is given by position.
        kwargs: and by keyword.

    Returns:
        `[1, S, H, Dv]`: the results of the calls, concatenated along the sequence.
    """
    lengths = _lengths(attend, module, (query, key, value), sizes, args, kwargs)
    if lengths is None:
        return torch.cat([r[0] for r in _in_turn(attend, module, (query, key, value), sizes, args, kwargs)], dim=1)
    return _by_length(lambda *rows: attend(module, *rows, *args, **kwargs)[0], (query, key, value), lengths)


def segment_attention_weights(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: int | list[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return what `segment_attention` does, and the attention weights of each segment, None where there are none."""
    lengths = _lengths(attend, module, (query, key, value), sizes, args, kwargs)
    if lengths is None:
        outputs, weights = [], []
        for output, weight in _in_turn(attend, module, (query, key, value), sizes, args, kwargs):
            outputs.append(output)
            weights.append(weight)
        return torch.cat(outputs, dim=1), weights
    out = _by_length(lambda *rows: attend(module, *rows, *args, **kwargs)[0], (query, key, value), lengths)
    return out, [None] * len(lengths)


def _in_turn(
    attend: Callable[..., Any],
    module: nn.Module,
    tensors: Sequence[Tensor],
    sizes: int | list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[Any]:
    """Yield what `attend` returns for each segment: the reference."""
    for rows in zip(*[torch.split(tensor, sizes, dim=2) for tensor in tensors], strict=False):
        yield attend(module, *rows, *args, **kwargs)


def _lengths(
    attend: Callable[..., Any],
    module: nn.Module,
    tensors: Sequence[Tensor],
    sizes: int | list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[int] | None:
    """Return the length of each segment, or None where each needs a call of its own; that is counted."""
    if torch.compiler.is_compiling():  # lengths may be unknown there, and equal ones are not looked for
        return None
    lengths = _as_list(sizes, tensors[0])
    reason = _refusal(attend, tensors, lengths, args, kwargs)
    if reason is None:
        return lengths
    backend.count_fallback("segment_attention", reason, module)
    return None


def _as_list(sizes: int | list[int], tensor: Tensor) -> list[int]:
    """Return the lengths that `torch.split` would give the parts, an empty list where it may raise."""
    if isinstance(sizes, int):
        whole, rest = divmod(tensor.shape[2], sizes) if sizes > 0 and tensor.dim() == 4 else (0, 0)
        return [sizes] * whole + [rest] * (rest > 0)
    return list(sizes) if isinstance(sizes, (list, tuple)) and all(type(size) is int for size in sizes) else []


def _refusal(
    attend: Callable[..., Any],
    tensors: Sequence[Tensor],
    lengths: list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    if attend is not sdpa_attention_forward and attend is not native_gqa(sdpa_attention_forward):
        return "other_function"
    if kwargs.get("dropout"):
        return "dropout"  # each call draws its own numbers
    if any(arg is not None for arg in args) or any(isinstance(value, Tensor) for value in kwargs.values()):
        return "argument"  # a mask or a bias has no row for each segment
    if any(tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != sum(lengths) for tensor in tensors):
        return "shape"
    return None if lengths and min(lengths) > 0 else "lengths"  # what fails does so as it did


def _by_length(attend: Callable[..., Tensor], tensors: Sequence[Tensor], lengths: list[int]) -> Tensor:
    """Attend to all segments of one length at once, `attend` to `[n, H, L, D]`; the result is `[1, S, H, Dv]`."""
    apart = not backend.wants_gradient(*tensors)
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    start = 0
    for length, neighbours in itertools.groupby(lengths):
        rows = length * len(list(neighbours))
        groups.setdefault((length, 0 if apart else start), []).append((start, rows))
        start += rows
    parts: dict[int, Tensor] = {}
    for (length, _), places in groups.items():
        together = [_taken(tensor, places).unflatten(1, (-1, length)).transpose(0, 1) for tensor in tensors]
        batches = zip(*(tensor.split(MOST_ROWS) for tensor in together), strict=True)
        out = _joined([attend(*batch).flatten(0, 1) for batch in batches])
        parts.update(zip((first for first, _ in places), out.split([rows for _, rows in places]), strict=True))
    return _joined([parts[first] for first in sorted(parts)]).unsqueeze(0)


def _taken(tensor: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Return some tokens of `[1, H, S, D]` as `[H, n, D]`, a view where they lie in one piece."""
    parts = [tensor[0].narrow(1, first, rows) for first, rows in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
