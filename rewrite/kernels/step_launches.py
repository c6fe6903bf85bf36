"""The launches of a decode step of real models: which operators run, how often, and what they move.

The operators choose kernels, tiles and splits themselves, as they would on the card that `launch.pretend` named.
Import this after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_rewrite_runtime.attention import decode_attention
from hf_rewrite_runtime.linear import linear
from hf_rewrite_runtime.moe import batched_experts, experts, router
from hf_rewrite_runtime.rope import qkv_batch, qkv_step, rope_cache

from .kernel_cases import int64, tensor
from .model_sizes import Step
from .stand_ins import Experts, Gate, Norm, cache, prologue

CONTEXT = 512
"""Tokens before the one of the step."""
CAPACITY = 1024
WORD = 2
"""Bytes of a number."""


@dataclass(frozen=True)
class Part:
    """One operator of a step."""

    name: str
    count: int
    """How often it runs in a step."""
    moved: int
    """Bytes of weights and cache that its first launch moves; what is between launches stays in the L2 cache."""
    call: Callable[[], object]


def parts(step: Step, rows: int) -> Iterator[Part]:
    """Yield the operators of a step of `rows` sequences, layer by layer and then the head."""
    model = step.model
    size, width = model.hidden_size, model.heads * model.head_dim
    packed = width + 2 * model.kv_heads * model.head_dim

    def product(name: str, out: int, cols: int, normed: bool) -> Part:
        return Part(name, step.layers, out * cols * WORD, lambda: _product(rows, out, cols, normed))

    if rows > 1:
        yield Part("qkv", step.layers, packed * size * WORD, lambda: _qkv_rows(step, rows, packed))
    elif not step.head_norms:
        yield Part("qkv", step.layers, packed * size * WORD, lambda: _qkv(step, packed))
    else:
        yield product("qkv", packed, size, True)
        yield Part("rotary and cache", step.layers, 0, lambda: _rope(step, rows, packed, width))
    kept = 2 * rows * CONTEXT * model.kv_heads * model.head_dim * WORD
    yield Part("attention", step.layers, kept, lambda: _attend(step, rows))
    yield product("o", size, width, False)
    if step.mixture is not None:
        yield from _experts(step, rows)
    else:
        weight = 2 * model.intermediate_size * size * WORD
        yield Part("gate-up", step.layers, weight, lambda: _gated(step, rows))
        yield product("down", size, model.intermediate_size, False)
    head = model.vocabulary * size * WORD
    yield Part("head", 1, head, lambda: _product(rows, model.vocabulary, size, True))


def _product(rows: int, out: int, cols: int, normed: bool) -> object:
    before, after = (prologue(cols), None) if normed else (None, tensor(rows, 1, out))
    return linear.few_rows(tensor(rows, 1, cols), tensor(out, cols), None, before, after)


def _rotation(step: Step, rows: int) -> Any:
    table = tensor(rows, 1, step.model.head_dim)
    return rope_cache.Rotation(table, table)


def _qkv(step: Step, packed: int) -> object:
    model = step.model
    weight, x = tensor(packed, model.hidden_size), tensor(1, 1, model.hidden_size)
    tile = linear.tile_for("qkv", model.head_dim // 2, model.hidden_size, weight)
    if tile is None:
        _product(1, packed, model.hidden_size, True)
        return _rope(step, 1, packed, model.heads * model.head_dim)
    kept, at = cache(model, 1, CAPACITY), int64(1)
    return qkv_step.launch_qkv(x, weight, None, prologue(model.hidden_size), *kept, at, _rotation(step, 1), tile)


def _qkv_rows(step: Step, rows: int, packed: int) -> object:
    model = step.model
    weight, x = tensor(packed, model.hidden_size), tensor(rows, 1, model.hidden_size)
    form = qkv_batch.form_for_rows(x, weight, model.head_dim, step.head_norms)
    if form is None:
        _product(rows, packed, model.hidden_size, True)
        return _rope(step, rows, packed, model.heads * model.head_dim)
    kept, at = cache(model, rows, CAPACITY), int64(1)
    of_head = prologue(model.head_dim) if step.head_norms else None
    norms = (prologue(model.hidden_size), of_head, of_head)
    return qkv_batch.launch_qkv_rows(x, weight, None, norms, *kept, at, _rotation(step, rows), form)


def _rope(step: Step, rows: int, packed: int, width: int) -> object:
    model = step.model
    rest = (packed - width) // 2
    q, k, v = torch.split(tensor(rows, 1, packed), [width, rest, rest], -1)
    norm = prologue(model.head_dim) if step.head_norms else None
    kept, at = cache(model, rows, CAPACITY), int64(1)
    return rope_cache.rope_cache(q, k, v, *kept, at, _rotation(step, rows), norm, norm)


def _attend(step: Step, rows: int) -> object:
    model = step.model
    query, counted = tensor(rows, model.heads, 1, model.head_dim), tensor(rows * model.heads)
    split = decode_attention.choose(rows, model.heads, model.kv_heads, CAPACITY, model.head_dim)
    rule = decode_attention.ScoreRule(model.head_dim**-0.5)
    kept = cache(model, rows, CAPACITY)
    return decode_attention.launch(query, *kept, int64(1), int64(rows), counted.int(), rule, split)


def _gated(step: Step, rows: int) -> object:
    size, inner = step.model.hidden_size, step.model.intermediate_size
    product = linear._gated if rows == 1 else linear._gated_rows
    return product(tensor(rows, 1, size), tensor(2 * inner, size), None, "silu", prologue(size))


def _experts(step: Step, rows: int) -> Iterator[Part]:
    sizes = step.mixture
    assert sizes is not None
    x, weights = tensor(rows, 1, sizes.hidden_size), Experts(sizes)
    gate, norm = Gate(sizes, False), Norm(sizes.hidden_size)
    yield Part(
        "router", step.layers, sizes.experts * sizes.hidden_size * WORD, lambda: router.router(x, gate, norm=norm)
    )
    chosen, scores = int64(rows, sizes.top_k), tensor(rows, sizes.top_k)
    one = 3 * sizes.hidden_size * sizes.intermediate_size * WORD
    pairs = rows * sizes.top_k
    if batched_experts.are_joined(rows, sizes.top_k, sizes.experts, x.dtype):  # else one that two take is read twice
        pairs = round(sizes.experts * (1.0 - (1.0 - sizes.top_k / sizes.experts) ** rows))
    yield Part(
        "experts", step.layers, pairs * one, lambda: experts.fused_experts(x, weights, chosen, scores, residual=x)
    )
