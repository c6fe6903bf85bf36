"""Attention of one new token a row to the valid slots of a preallocated cache (split-KV, as in Flash-Decoding, 2023).

B rows, H query heads, Hk key/value heads, G = H / Hk, S capacity, D and Dv head_dim of keys and values, p the position
of the token, W the window:

    row b reads slots s with starts[b] <= s <= p and, with a window, p - W < s
    scores = q kᵀ * scaling, then softcap * tanh(scores / softcap)
    weights = softmax over the slots, and over the sink logit of the head where there is one

A program takes some query heads of one key/value head and one part of the row's valid slots, so that time follows the
tokens there are and not the capacity; the last program of a head to finish adds up the parts. Slots that hold nothing
valid are never read.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..aiter import unified as aiter_unified
from ..cache.fp8_layer import Fp8Layer
from ..cache.preallocated import PreallocatedCache
from ..cache.token import Write
from ..core import backend, lazy_hooks, prefill_context
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import HIP, overlaps, processors, shared_memory, wait_for_stores
from ..launching.tiles import attention_key, entry, in_one_turn, next_power
from .prompt_attention import prompt_attention

CASES = """
def attend(model, rows, capacity, *rule):
    query, starts = tensor(rows, model.heads, 1, model.head_dim), int64(rows)
    arrived = tensor(rows * model.heads, dtype=torch.int32)
    split = choose(rows, model.heads, model.kv_heads, capacity, model.head_dim)
    kept = cache(model, rows, capacity)
    return launch(query, *kept, int64(1), starts, arrived, ScoreRule(model.head_dim**-0.5, *rule), split)

def attend_and_write(model, rows, capacity):
    query, starts = tensor(rows, model.heads, 1, model.head_dim), int64(rows)
    arrived = tensor(rows * model.heads, dtype=torch.int32)
    split = choose(rows, model.heads, model.kv_heads, capacity, model.head_dim)
    kept = cache(model, rows, capacity)
    write = Write(*kept, *(tensor(rows, model.kv_heads, 1, model.head_dim) for _ in range(2)), int64(1))
    return launch(query, *kept, int64(1), starts, arrived, ScoreRule(model.head_dim**-0.5), split, None, write)

for model in (*LLAMAS, GEMMA_9B):
    case(model.name, attend, model, 1, CONTEXT)
case("Llama 8B, its token", attend_and_write, LLAMA_8B, 1, CONTEXT)
case("Llama 8B, 8 rows", attend, LLAMA_8B, 8, CONTEXT)
for model in (LLAMA_8B, GEMMA_9B):
    case(f"{model.name}, 32k", attend, model, 1, LONG_CONTEXT)
def attend_in_8_bits(model, rows, capacity, *rule):
    slots = fp8_cache(model, rows, capacity)
    query, starts = tensor(rows, model.heads, 1, model.head_dim), int64(rows)
    arrived = tensor(rows * model.heads, dtype=torch.int32)
    split = choose(rows, model.heads, model.kv_heads, capacity, model.head_dim)
    split = for_8_bits(split, rows, model.kv_heads, capacity, model.head_dim)
    rule = ScoreRule(model.head_dim**-0.5, *rule)
    return launch(query, slots.keys, slots.values, int64(1), starts, arrived, rule, split, slots)

for model in (LLAMA_8B, GEMMA_9B):
    case(f"{model.name}, 8 bits", attend_in_8_bits, model, 1, CONTEXT)
    case(f"{model.name}, 8 bits, 32k", attend_in_8_bits, model, 8, LONG_CONTEXT)
case("Gemma 9B, all, 8 bits", attend_in_8_bits, GEMMA_9B, 1, LONG_CONTEXT, 4096, 50.0, tensor(GEMMA_9B.heads))
case("Gemma 9B, all forms", attend, GEMMA_9B, 1, LONG_CONTEXT, 4096, 50.0, tensor(GEMMA_9B.heads))
"""

if backend.triton_installed():
    from .decode_attention_kernel import decode_attention_kernel


class ScoreRule(NamedTuple):
    """What becomes of the products of a query with keys, and what takes part in their softmax."""

    scaling: float
    sliding_window: int | None = None
    """Number of slots a token sees, itself included; None for all."""
    softcap: float | None = None
    """Bound of the scores; None for none."""
    sinks: Tensor | None = None
    """`[H]` logits that take part in the softmax and have no value; None for none."""


def score(product: Tensor, distance: Tensor, rule: ScoreRule) -> Tensor:
    """Return the scores of products q kᵀ `[B, Hk, G, S]` as the kernel's `_score` does, slots at a distance `[S]`."""
    scores = product * rule.scaling
    return scores if rule.softcap is None else torch.tanh(scores / rule.softcap) * rule.softcap


class _Constants(NamedTuple):
    """The constants of a variant of the kernel, by the names and in the order of its parameters."""

    H: int
    HK: int
    D: int
    DV: int
    WINDOW: bool
    SOFTCAP: bool
    SINKS: bool
    OVERLAP: bool
    WAIT: str
    HEADS: int
    HEADS_HELD: int
    BLOCK_HEADS: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_SLOTS: int
    SPLITS: int
    PARTS: int
    DOT: bool
    WRITES: bool
    FP8_CACHE: bool
    DECODE: bool
    FNUZ: bool


class Split(NamedTuple):
    """How the work is divided."""

    heads: int
    """Query heads of a program, of one key/value head."""
    splits: int
    """Most parts of a row."""
    slots: int
    """Slots of a tile."""
    dot: bool
    """Whether the tensor cores multiply; they want 16 rows, of which `heads` are used."""
    num_warps: int


def decode_attention(
    query: Tensor,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the cache of one layer, which already holds the token's own key and value.

    Args:
        query: `[B, H, 1, D]`.
        past_key_values: a stepping cache.
        layer_idx: of its layer.
        scaling: of the scores.
        sliding_window: number of slots a token sees, itself included; None for all.
        softcap: bound of the scores; None for none.
        sinks: `[H]` logits that take part in the softmax and have no value; None for none.

    Returns:
        `[B, 1, H Dv]`.
    """
    rule = ScoreRule(scaling, sliding_window, softcap, sinks)
    layer = past_key_values.layers[layer_idx]
    keys, values = layer.keys, layer.values
    in_8_bits: Any = None
    if isinstance(layer, Fp8Layer):
        in_8_bits = layer
    position, starts = past_key_values.position, past_key_values.starts
    if (prompt := prefill_context.of(past_key_values)) is not None:
        if query.shape[2] > 1:
            if softcap is not None or sinks is not None or (sliding_window or query.shape[2]) < query.shape[2]:
                raise prefill_context.NoPromptForm(
                    "decode_attention", "scores are capped, cut by a window, or have sinks"
                )
            if in_8_bits is not None:
                keys, values = in_8_bits.of_prompt(query.shape[2])
            return prompt_attention(query, keys, values, scaling)
        position = prompt.last  # the token's keys are there: a kernel that no other overlaps chose its query
        if in_8_bits is not None:
            keys, values = (kept.contiguous() for kept in in_8_bits.of_prompt(prompt.tokens))
            in_8_bits = None
    if in_8_bits is None and backend.nothing_watches(query) and not backend.wants_gradient(query):
        found = aiter_unified.unified_attention(
            query, keys, values, position, starts, rule, functools.partial(_reference, rule=rule)
        )
        if found is not None:
            return found
    if (
        query.dtype in KERNEL_DTYPES
        and (in_8_bits is not None or keys.dtype == values.dtype == query.dtype)
        and keys.is_contiguous()
        and values.is_contiguous()
        and max(keys.shape[3], values.shape[3]) <= 256
        and backend.nothing_watches(query)
        and not backend.wants_gradient(query)
        and backend.uses_triton(query)
    ):
        kv_heads, capacity, head_dim = keys.shape[1:]
        split = choose(query.shape[0], query.shape[1], kv_heads, capacity, head_dim, keys.element_size())
        arrived = past_key_values.arrived(query.shape[0] * query.shape[1])
        slots: Any = None
        if in_8_bits is not None:
            split = for_8_bits(split, query.shape[0], kv_heads, capacity, head_dim)
            slots = in_8_bits.slots
        written = None if slots is not None else lazy_hooks.taken(keys, values)
        return launch(query, keys, values, position, starts, arrived, rule, split, slots, written)
    if in_8_bits is not None:
        keys, values = in_8_bits.read(keys.shape[2])
    return _reference(query, keys, values, position, starts, rule)


def choose(batch: int, heads: int, kv_heads: int, capacity: int, head_dim: int, element_size: int = 2) -> Split:
    """Return how to divide the work: as it was measured, else by a rule."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    name = attention_key(batch, kv_heads, heads // kv_heads, head_dim, capacity)
    programs, shared = 2 * in_one_turn(processors(device)), shared_memory(device)

    def ruled() -> Split:
        split = _rule(batch, heads, kv_heads, capacity, head_dim, programs)
        tile = max(1, shared - (10 << 10)) // (4 * head_dim * element_size)  # two of keys and two of values in flight
        return split if HIP or split.slots <= tile else split._replace(slots=max(16, next_power(tile + 1) // 2))

    found = entry(name, device, ruled)
    if found is None or len(found) != len(Split._fields):
        backend.warn_once(f"tuned.json says {found} of '{name}', which is no division of attention: a rule decides")
        return ruled()
    heads, splits, slots, dot, num_warps = found
    return Split(heads, splits, slots, bool(dot), num_warps)


@functools.cache
def _rule(batch: int, heads: int, kv_heads: int, capacity: int, head_dim: int, programs: int) -> Split:
    """Return a division that was not measured.

    With few slots every program has one tile, loaded before the query is there; with many it streams. Found in whole
    steps of eleven widths with 512 tokens on an H200, of twelve with 1,024 to 32,768 on an H100
    (`bench/step_tiles.py`, Triton 3.6, 2026-11-26). Where there are no more programs than processors, each has twice
    the warps. On AMD, where nothing was measured, they have not: 8 waves of one program share four SIMD units, and its
    vector instructions and those of the last one's sum took 6.7 µs by the model for gfx942, 4 waves' 3.6 (Llama 8B,
    1,024 slots, Triton 3.8); nor more parts than there are tiles, nor tiles of 64 slots (11.1 µs, of 32 3.2, 8 rows).
    Two heads a program, where all programs run at a time, halve what the last one adds up.
    """
    group = heads // kv_heads
    rows = batch * kv_heads
    twice = max(1, 2 * programs // rows)
    if head_dim > 128 and not HIP:
        return _of_wide_heads(rows, group, capacity, programs)
    alike = group == 1 and rows <= programs // 16 and capacity > 4 * programs  # no heads share keys: wide tiles
    if alike and head_dim > 64 and not HIP:
        return Split(1, _splits(max(1, programs // 2 // rows), capacity, 128), 128, True, 8)
    few = group <= 2 and rows <= programs // 32  # heads to put together: more parts are no matter
    if capacity <= (128 if few and not HIP else 32) * twice:
        if head_dim > 128:
            slots = 64 if group >= 4 else 32
            return Split(group, _splits(twice, capacity, slots), slots, True, 4)
        tiles = rows * -(-capacity // 32)
        if head_dim <= 64 and tiles < programs // 4:
            return Split(group, _splits(twice, capacity, 32), 32, True, 4)
        if HIP:
            splits = _splits(twice, capacity, 32)
            apart = group % 2 == 0 and rows * splits * (group // 2) <= programs
            return Split(2 if apart else group, splits, 32, True, 4)
        splits = next_power(min(64, twice))
        alone = min(tiles, rows * splits) <= programs // 2
        return Split(group, splits, 32, True, 8 if head_dim > 64 and alone else 4)
    if programs // 32 < rows and group > 1 and capacity <= 4 * programs and head_dim <= 128:
        if HIP:
            return Split(group, _splits(max(4, twice // 4), capacity, 64), 32, True, 4)
        return Split(group, _splits(twice, capacity, 64), 128 if head_dim <= 64 else 64, True, 4)
    wanted, slots = _streaming(rows, group, head_dim, programs)
    splits = _splits(max(1, wanted // rows), capacity, slots)
    return Split(group, splits, slots, True, 8 if 64 < head_dim <= 128 and rows * splits <= programs // 2 else 4)


def _of_wide_heads(rows: int, group: int, capacity: int, programs: int) -> Split:
    """Return a division for heads of 256: one program a processor, where few queries share few slots narrow tiles.

    Tiles of 64 slots have eight warps: with four they take 1 µs less on an H100 (Triton 3.6), and spill with 3.9.
    """
    narrow = group < 4 and rows * -(-capacity // 32) <= programs // 2
    slots = 32 if narrow else 64
    splits = _splits(max(1, programs // (1 if narrow else 2) // rows), capacity, slots)
    return Split(group, splits, slots, True, 4 if narrow else 8)


def _streaming(rows: int, group: int, head_dim: int, programs: int) -> tuple[int, int]:
    """Return how many programs read many slots each, and the slots of their tiles.

    Wide tiles need few programs to have enough on its way, narrow ones many. Each part costs its program, and the
    last one of its head, what the heads of a group hold.
    """
    if HIP:  # not measured: tiles of 32 KiB of keys and values leave two programs to a compute unit
        return programs, min(64, 8192 // head_dim)
    if head_dim <= 64:
        return 4 * programs, 64 if rows <= programs // 32 else 128
    if rows > programs // 8:
        return 4 * programs, 64
    if group <= 2:
        return (2 * programs, 32) if group == 1 else (programs, 64)
    return (programs, 32) if rows <= programs // 32 else (programs // 2, 128)


def for_8_bits(split: Split, batch: int, kv_heads: int, capacity: int, head_dim: int) -> Split:
    """Return a division for keys and values in 8 bits, which a thread also holds as they are converted.

    As compiled for gfx942 (Triton 3.8) a Llama's tile of 64 slots keeps scalar registers in lanes of others, and
    Gemma's of 32 leaves one wave where 16 bits have two; half of that fits. On NVIDIA's heads of 256 spill with four
    warps (Triton 3.4, 3.9). The number of parts is what was fastest on an H200 (Triton 3.6): with 64 parts and with
    32, a kernel of the same loads that converted to bf16 took 18.0 and 12.7 µs for 8,192 tokens. With as many as 16
    bits have, 8 rows of 8,192 took 7.95 ms of a Llama 8B's step on an H100 and not 7.38.
    """
    if HIP:
        return split._replace(slots=max(16, split.slots // 2))
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    programs = (2 if head_dim > 64 else 4) * in_one_turn(processors(device))
    slots, num_warps = (32, 8) if head_dim > 128 else (64, 4)
    splits = min(32, _splits(max(1, programs // (batch * kv_heads)), capacity, slots))
    return split._replace(slots=slots, splits=splits, num_warps=num_warps)


def _splits(wanted: int, capacity: int, slots: int) -> int:
    return min(64, next_power(max(1, min(wanted, -(-capacity // slots)))))


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor,
    arrived: Tensor,
    rule: ScoreRule,
    split: Split,
    slots: Any = None,
    write: Write | None = None,
) -> Tensor:
    """Run the kernel with a division of the work.

    `arrived` is `[B H]` int32 zeros, and zeros again afterwards. Keys and values in 8 bits are those of `Fp8Slots`.
    With a write the kernel puts the token's key and value there, which nobody has done yet.
    """
    new = (query, query) if write is None else (write.key, write.value)
    scales, form = query, (False, False, False)
    if slots is not None:
        keys, values, scales, form = slots.keys, slots.values, slots.pairs, slots.form
    batch, heads, _, head_dim = query.shape
    kv_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    out = query.new_empty(batch, 1, heads * value_dim)
    top, total = query.new_empty((2, batch * heads * split.splits), dtype=torch.float32)
    parts = query.new_empty(batch * heads * split.splits * value_dim, dtype=torch.float32)
    # Of the parts, the last program to finish holds at most 4,096 numbers a warp at a time.
    held = next_power(split.heads) * next_power(value_dim)
    parts_at_once = max(1, min(split.splits, 4096 * split.num_warps // held))
    overlap = overlaps(query)
    heads_held = next_power(split.heads)
    constants = _Constants(
        H=heads,
        HK=kv_heads,
        D=head_dim,
        DV=value_dim,
        WINDOW=rule.sliding_window is not None,
        SOFTCAP=rule.softcap is not None,
        SINKS=rule.sinks is not None,
        OVERLAP=overlap,
        WAIT=wait_for_stores(query),
        HEADS=split.heads,
        HEADS_HELD=heads_held,
        BLOCK_HEADS=max(16, heads_held) if split.dot else heads_held,
        BLOCK_D=max(16, next_power(head_dim)),  # the least that is summed over in a product of matrices
        BLOCK_DV=max(16, next_power(value_dim)),
        BLOCK_SLOTS=split.slots,
        SPLITS=split.splits,
        PARTS=parts_at_once,
        DOT=split.dot,
        WRITES=write is not None,
        FP8_CACHE=form[0],
        DECODE=form[1],
        FNUZ=form[2],
    )
    with backend.device_guard(query):
        decode_attention_kernel.launch(
            (batch, heads // split.heads, split.splits),
            split.num_warps,
            (
                query.contiguous(), keys, values, position, starts, query if rule.sinks is None else rule.sinks, top,
                total, parts, arrived, out, scales, *new,
            ),
            (capacity, rule.sliding_window or 0),
            (0, 0, 0, 0) if write is None else (*write.key.stride()[:2], *write.value.stride()[:2]),
            (rule.scaling, rule.softcap or 1.0),
            constants,
            overlap=overlap,
        )  # fmt: skip
    return out


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor,
    rule: ScoreRule,
) -> Tensor:
    batch, heads, _, _ = query.shape
    kv_heads, capacity = keys.shape[1:3]
    slots = torch.arange(capacity, device=keys.device)
    visible = (slots <= position) & (slots >= starts[:, None])
    if rule.sliding_window is not None:
        visible = visible & (slots > position - rule.sliding_window)
    visible = visible[:, None, None]
    grouped = query.view(batch, kv_heads, heads // kv_heads, -1)
    scores = score(torch.matmul(grouped, keys.transpose(2, 3)), position - slots, rule)
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if rule.sinks is not None:
        logits = rule.sinks.view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1).float()
        weights = torch.softmax(torch.cat([scores, logits], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    # A slot that nothing has written may hold anything, and 0 * NaN is NaN.
    values = values.masked_fill(~visible.squeeze(2).unsqueeze(-1), 0.0)
    return torch.matmul(weights.to(values.dtype), values).view(batch, 1, -1)
