"""Query and key norms, rotary embedding and the cache write of a whole prompt, in one kernel.

B rows, N tokens, H and Hk heads, D head_dim, R <= D rotated columns:

    query[b, t, h] = rotate(q_norm(q[b, t, h]), t)
    keys[b, h, t] = rotate(k_norm(k[b, t, h]), t)
    values[b, h, t] = v[b, t, h]

`rotate` is that of `rotary`; norms are over one head. Everything is fp32 between the load and the store, and each
number is read once and written once: queries in the order in which attention reads them, keys and values in the slots
of the cache. It is to a prompt what `rope_cache` is to one token a row.
"""

from __future__ import annotations

from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, grid, overlaps
from ..norms.norm_form import Prologue
from .rope_cache import Rotation, head_scale, head_weight, turning

CASES = """
def read(model, normed, table=None, **form):
    sizes = [model.heads * model.head_dim, *2 * [model.kv_heads * model.head_dim]]
    q, k, v = torch.split(tensor(1, PROMPT, sum(sizes)), sizes, -1)
    columns = table or model.head_dim
    rotation = Rotation(tensor(1, PROMPT, columns), tensor(1, PROMPT, columns), **form)
    norm = prologue(model.head_dim) if normed else None
    return qkv_prompt(q, k, v, *cache(model, 1, CONTEXT), rotation, norm, norm)

for model in LLAMAS:
    case(f"{model.name}, prompt", read, model, normed=False)
case("Qwen3 30B, prompt", read, QWEN3_30B, normed=True)
case("8B, 64 columns, prompt", read, LLAMA_8B, False, 32, interleaved=True, half_table=True)
"""

PAIRS, THREADS = 512, 128
"""Pairs of columns of a program, which takes some heads of one token: a thread has four, two loads of 8 bytes. With
eight it spills (heads of 64, Triton 3.8)."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow
    from .rope_cache import load_pairs, pair_columns, rotated, store_pairs

    @triton.jit
    def _normed(  # type: ignore[no-untyped-def]
        first, second, norm_ptr, column, other_column, live, eps, offset, D: tl.constexpr
    ):
        """Apply a norm over a head to the columns of its pairs, `[BLOCK_HEADS, BLOCK]` each."""
        inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        first *= inverse * (tl.load(norm_ptr + column, mask=live, other=0.0).to(tl.float32) + offset)
        second *= inverse * (tl.load(norm_ptr + other_column, mask=live, other=0.0).to(tl.float32) + offset)
        return first, second

    @triton.jit(do_not_specialize=["capacity", "token_count", "tokens"])
    def _qkv_prompt_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        q_norm_ptr,
        k_norm_ptr,
        cos_ptr,
        sin_ptr,
        query_ptr,
        keys_ptr,
        values_ptr,
        capacity,
        token_count,
        tokens,
        q_stride,
        k_stride,
        v_stride,
        table_stride_b,
        table_stride_s,
        q_eps,
        q_offset,
        k_eps,
        k_offset,
        H: tl.constexpr,
        HK: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write some heads of a token: of queries, of keys or of values."""
        follow(OVERLAP)
        Q_BLOCKS: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
        K_BLOCKS: tl.constexpr = (HK + BLOCK_HEADS - 1) // BLOCK_HEADS
        token = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        if token >= token_count:
            return
        b = token // tokens
        t = token % tokens
        block = tl.program_id(0)
        pair = tl.arange(0, BLOCK)[None, :]
        column, other_column, turns = pair_columns(pair, R, D, INTERLEAVED)
        table = b * table_stride_b + t * table_stride_s
        if block < Q_BLOCKS:
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            live = (head < H) & (pair < D // 2)
            first, second = load_pairs(q_ptr + token * q_stride + head * D, column, other_column, live)
            if Q_NORM:
                first, second = _normed(
                    first, second, q_norm_ptr, column, other_column, pair < D // 2, q_eps, q_offset, D
                )
            if R > 0:
                first, second = rotated(
                    first, second, cos_ptr + table, sin_ptr + table, pair, column, other_column,
                    turns & (pair < D // 2), HALF_TABLE,
                )  # fmt: skip
            store_pairs(query_ptr + (token * H + head) * D, column, other_column, live, first, second)
        elif block < Q_BLOCKS + K_BLOCKS:
            head = (block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            live = (head < HK) & (pair < D // 2)
            first, second = load_pairs(k_ptr + token * k_stride + head * D, column, other_column, live)
            if K_NORM:
                first, second = _normed(
                    first, second, k_norm_ptr, column, other_column, pair < D // 2, k_eps, k_offset, D
                )
            if R > 0:
                first, second = rotated(
                    first, second, cos_ptr + table, sin_ptr + table, pair, column, other_column,
                    turns & (pair < D // 2), HALF_TABLE,
                )  # fmt: skip
            store_pairs(keys_ptr + ((b * HK + head) * capacity + t) * D, column, other_column, live, first, second)
        else:
            head = (block - Q_BLOCKS - K_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            live = (head < HK) & (pair < D // 2)
            first, second = load_pairs(v_ptr + token * v_stride + head * D, column, other_column, live)
            store_pairs(values_ptr + ((b * HK + head) * capacity + t) * D, column, other_column, live, first, second)

    qkv_prompt_kernel = Kernel(_qkv_prompt_kernel)


def qkv_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    rotation: Rotation | None,
    q_norm: Prologue | None,
    k_norm: Prologue | None,
) -> Tensor:
    """Write keys and values of N tokens a row into the first slots and return their queries.

    Args:
        q: `[B, N, H D]` whose rows are dense and follow each other at one stride; `k`, `v` `[B, N, Hk D]` likewise.
        keys, values: `[B, Hk, S, D]`, contiguous, S >= N.
        rotation: by tables `[B or 1, N, R]`; None for none.
        q_norm, k_norm: RMSNorms over one head, with a weight; None for none.

    Returns:
        `[B, H, N, D]`, a view of `[B, N, H, D]`.
    """
    batch, tokens = q.shape[:2]
    kv_heads, capacity, head_dim = keys.shape[1:]
    heads = q.shape[-1] // head_dim
    query = q.new_empty(batch, tokens, heads, head_dim)
    tables, strides, turns = turning(rotation, q)
    block = 1 << (head_dim // 2 - 1).bit_length()
    block_heads = max(1, PAIRS // block)
    overlap = overlaps(q)
    with backend.device_guard(q):
        qkv_prompt_kernel.launch(
            grid(-(-heads // block_heads) - 2 * (-kv_heads // block_heads), batch * tokens),
            THREADS // WAVE,
            (q, k, v, head_weight(q_norm, q), head_weight(k_norm, q), *tables, query, keys, values),
            (capacity, batch * tokens, tokens),
            (q.stride(1), k.stride(1), v.stride(1), *strides),
            (*head_scale(q_norm), *head_scale(k_norm)),
            (
                heads, kv_heads, head_dim, *turns, q_norm is not None, k_norm is not None, overlap, block_heads, block,
            ),
            overlap=overlap,
        )  # fmt: skip
    return query.transpose(1, 2)


def has_dense_rows(*tensors: Tensor) -> bool:
    """Return whether each row of `[B, N, X]` is dense and rows follow each other at one stride."""
    return all(x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)) for x in tensors)
