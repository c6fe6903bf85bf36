"""Strict bodies of aiter's attention on caches, for `fake_aiter`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def unified_attention(
    release: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sinks: Tensor | None = None,
    **others: Any,
) -> None:
    """One token a row; pages `[pages, P, Hk, D]` of any strides, each read as a whole, the last one too."""
    assert causal
    assert q_descale is None
    assert k_descale is None
    assert v_descale is None
    assert not any(others.values())
    assert max_seqlen_q == 1
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert q.is_contiguous(), "raw addresses"
    assert out.is_contiguous(), "raw addresses"
    for tensor in (cu_seqlens_q, seqused_k, block_table):
        assert tensor.dtype == torch.int32, "raw addresses"
        assert tensor.is_contiguous(), "raw addresses"
    rows, heads, _ = q.shape
    assert cu_seqlens_q.tolist() == list(range(rows + 1))
    assert seqused_k.shape == (rows,)
    assert window_size[1] == 0
    window, page, groups = 1 + window_size[0], k.shape[1], heads // k.shape[2]
    assert page in (16, 32, 64), "the tile of older releases"
    assert sinks is None or (sinks.shape == (heads,) and sinks.is_contiguous())
    for row in range(rows):
        length = int(seqused_k[row])
        assert 0 < length <= max_seqlen_k
        keys, values = (_row(pages, block_table[row], length) for pages in (k, v))
        scores = torch.einsum("hgd,thd->hgt", q[row].float().unflatten(0, (-1, groups)), keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        at = torch.arange(scores.shape[-1])
        seen = (at < length) & ((length - 1 - at < window) if window > 0 else True)
        scores = scores.masked_fill(~seen, -torch.inf).flatten(0, 1)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], -1)
        weights = scores.softmax(-1)[:, : at.numel()].unflatten(0, (-1, groups))
        out[row] = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1).to(out.dtype)


def _row(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """`[tokens, Hk, D]` of the pages that a row touches: all of each is read, so all of each is to be memory."""
    count = -(-length // pages.shape[1])
    number = table[:count].long()
    assert int(number.min()) >= 0
    within = [(size - 1) * stride for size, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True)]
    last = int(number.max()) * pages.stride(0) + sum(within)
    assert pages.storage_offset() + last < pages.untyped_storage().nbytes() // pages.element_size(), "memory fault"
    found = [
        pages.as_strided(pages.shape[1:], pages.stride()[1:], pages.storage_offset() + int(n) * pages.stride(0))
        for n in number
    ]
    return torch.stack(found).flatten(0, 1).float()


def mla_decode_fwd(
    release: Any,
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    logit_cap: float,
    num_kv_splits: int,
    num_kv_splits_indptr: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """One token a row, pages of one slot, 16 or 128 heads: the assembly of bf16 queries and latents."""
    assert all(others[name] == 1 for name in ("page_size", "nhead_kv", "cp_world_size") if name in others)
    assert not any(v for name, v in others.items() if name not in ("page_size", "nhead_kv", "cp_world_size", "causal"))
    assert others.get("causal", True)
    assert not logit_cap
    rows, heads, width = q.shape
    assert heads in (16, 128), "cannot get heuristic kernel"
    assert q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16
    assert width == 576
    assert o.shape == (rows, heads, 512)
    assert kv_buffer.shape[1:] == (1, 1, 576)
    for tensor in (q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, num_kv_splits_indptr):
        assert tensor.is_contiguous(), "raw addresses"
    for tensor in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, num_kv_splits_indptr):
        assert tensor.dtype == torch.int32, "raw addresses"
    assert max_seqlen_q == 1
    assert qo_indptr.tolist() == list(range(rows + 1))
    assert kv_last_page_lens.tolist() == [1] * rows
    assert num_kv_splits >= 1
    assert num_kv_splits_indptr.tolist() == [row * num_kv_splits for row in range(rows + 1)]
    ends = kv_indptr.tolist()
    assert ends[0] == 0
    assert ends[-1] <= len(kv_indices)
    assert int(kv_indices.min()) >= 0, "memory fault"
    assert int(kv_indices.max()) < len(kv_buffer), "memory fault"
    for row, (first, last) in enumerate(itertools.pairwise(ends)):
        assert last > first
        read = kv_buffer[kv_indices[first:last].long(), 0, 0].float()
        weights = (q[row].float() @ read.t() * sm_scale).softmax(-1)
        o[row] = (weights @ read[:, :512]).to(o.dtype)
    return o, None


FUNCTIONS = (unified_attention, mla_decode_fwd)
