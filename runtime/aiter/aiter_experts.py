"""aiter's fused experts (`fused_moe`) in place of the bundled kernels.

N tokens, H hidden size, E experts, K experts a token, M intermediate size:

    y_n = Σ_k p(n, k) W_down[e] (silu(W_gate[e] x_n) * (W_up[e] x_n))

It sorts on the device and asks nothing of the host. Its kernels check nothing, and for shapes that its table does not
have it takes forms that were reported to write where they may not (ROCm/aiter issues 2946, 4783, 5049): a fault of
that kind cannot be caught. So it runs where the user's own table (`AITER_CONFIG_FMOE`, read when aiter is imported)
has the very shape, for the card, in every number of tokens that a release may look it up by. The kernels read weights
in an order of their own: a copy, which takes the experts' memory once more.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import aiter_probe
from ..launching import launch
from . import aiter_calls
from .aiter_gemm import near
from .aiter_norms import DTYPES

TABLE = "AITER_CONFIG_FMOE"
MOST_TOKENS = 32767
"""Beyond, releases look up tokens in steps of which some have two and others one."""
BLOCK = 128
"""What sizes have to be multiples of: the widest tile of the kernels."""
_TENSORS = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids")


class _Row(NamedTuple):
    """What a row of the table is about, as it is written there."""

    token: str
    model_dim: str
    inter_dim: str
    expert: str
    topk: str
    dtype: str
    cu_num: str
    """Compute units: releases look up rows by them, and by the chip where a table has a column for it."""
    gfx: str


_UNQUANTISED = {"act_type": "ActivationType.Silu", "q_type": "QuantType.No", "use_g1u1": "1", "doweight_stage1": "0"}


def fused_experts(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    both: tuple[Tensor, Tensor],
    copy_of: Callable[[Tensor], Tensor | None],
) -> Tensor | None:
    """Return what experts make of `tokens`, `[N, H]` and contiguous; None where the bundled form is to run.

    Args:
        tokens: `[N, H]`.
        index: `[N, K]`, integers below E.
        weights: `[N, K]`.
        both: `[E, 2 M, H]`, gates first, and `[E, H, M]`.
        copy_of: returns a weight in aiter's order; None where there is none.
    """
    if not aiter_calls.chosen("fused_moe", tokens):
        return None
    reason = _refusal(tokens, index, weights, both)
    if reason is not None:
        aiter_calls.refuse("fused_moe", reason)
        return None
    function = aiter_calls.function("fused_moe", "fused_moe", _TENSORS, (), "aiter.fused_moe")
    if function is None:
        return None
    copies = [copy_of(weight) for weight in both]
    if any(copy is None for copy in copies):
        aiter_calls.refuse("fused_moe", "no_copy")
        return None

    def call(x: Tensor, shares: Tensor, chosen: Tensor) -> Any:
        # what is left out stands for silu, and weights that are not quantised, in every release
        return function(x, *copies, shares, chosen)

    def checked() -> Tensor | None:
        found = call(x, weights.float().contiguous(), index.to(torch.int32).contiguous())
        return found if aiter_calls.is_result(found, tuple(x.shape), x) else None

    def proof() -> bool:
        sample, shares = aiter_calls.samples(tokens, tuple(tokens.shape), tuple(index.shape))
        numbers = torch.arange(index.numel(), device=index.device).view(index.shape) % both[0].shape[0]
        found = call(sample, shares.float().softmax(-1), numbers.to(torch.int32))
        wanted = _by_definition(sample, numbers, shares.float().softmax(-1), both)
        return aiter_calls.is_result(found, tuple(sample.shape), sample) and near(found, wanted)

    x = tokens.contiguous()
    variant = (tokens.dtype, tokens.device, tuple(both[0].shape), index.shape[1], _power(tokens.shape[0]))
    return aiter_calls.run("fused_moe", tokens, variant, checked, proof)


def _refusal(tokens: Tensor, index: Tensor, weights: Tensor, both: tuple[Tensor, Tensor]) -> str | None:
    gate_up, down = both
    if tokens.dtype not in DTYPES or any(weight.dtype != tokens.dtype for weight in both):
        return "dtype"
    if not tokens.numel():
        return "empty"
    experts, hidden_size, size = down.shape
    lies = gate_up.shape == (experts, 2 * size, hidden_size) and gate_up.is_contiguous() and down.is_contiguous()
    together = all(tensor.device == tokens.device for tensor in (index, weights, *both))
    shaped = tokens.shape[-1] == hidden_size and index.shape == weights.shape == (tokens.shape[0], index.shape[-1])
    if not (lies and together and shaped) or hidden_size % BLOCK or size % BLOCK:
        return "layout"
    count = tokens.shape[0]
    rows = {_power(count), max(16, min(_power(count), 1024))}  # by the newest releases, and up to 0.1.10
    wanted = (hidden_size, size, experts, index.shape[1], tokens.dtype, launch.processors(tokens.device.index))
    known = tuned(os.environ.get(TABLE, ""))
    chips = ("", aiter_probe.chip(tokens.device))
    there = all(any(_Row(*map(str, (row, *wanted, chip))) in known for chip in chips) for row in rows)
    return None if there and count <= MOST_TOKENS else "untuned_experts"


@functools.lru_cache(maxsize=4)
def tuned(paths: str) -> frozenset[_Row]:
    """Return the rows of tables, files separated as in `PATH`, about weights that are not quantised and silu.

    Releases do not read the rows that are tagged `flydsl_fallback`.
    """
    found = set()
    for path in filter(None, paths.split(os.pathsep)):
        if Path(path).is_file():
            with Path(path).open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    about = all(row.get(name) == value for name, value in _UNQUANTISED.items())
                    if about and row.get("_tag") != "flydsl_fallback":
                        found.add(_Row(*(row.get(name) or "" for name in _Row._fields)))
    return frozenset(found)


def _power(count: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()


def _by_definition(x: Tensor, index: Tensor, shares: Tensor, both: tuple[Tensor, Tensor]) -> Tensor:
    """Compute one expert after the other, their sum in fp32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in index.unique().tolist():
        token, place = torch.where(index == expert)
        gate, up = F.linear(x[token], both[0][expert]).chunk(2, -1)
        part = F.linear(F.silu(gate) * up, both[1][expert]).float() * shares[token, place].unsqueeze(-1)
        out.index_add_(0, token, part)
    return out.to(x.dtype)
