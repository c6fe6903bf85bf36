"""References of attention to a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs, put, rms, rotated


def _starts(a: Arguments) -> Tensor:
    return torch.arange(a.values["starts_ptr"].shape[0]) * 5 % 13


_PLACES = {"position_ptr": lambda a: torch.tensor(a.capacity - 2), "starts_ptr": _starts}


def _decode_attention(a: Arguments) -> Outputs:
    slots, at = torch.arange(a.capacity), a.position_ptr
    keys = put(a.keys_ptr, at, a.new_key_ptr) if a.WRITES else a.keys_ptr
    values = put(a.values_ptr, at, a.new_value_ptr) if a.WRITES else a.values_ptr
    query = a.query_ptr.view(-1, a.HK, a.H // a.HK, a.D)
    scores = query @ keys.mT * a.scaling
    scores = torch.tanh(scores / a.softcap) * a.softcap if a.SOFTCAP else scores
    seen = (slots <= at) & (slots >= a.starts_ptr[:, None]) & (slots > at - (a.window if a.WINDOW else a.capacity))
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if a.SINKS:
        scores = torch.cat((scores, a.sinks_ptr.view(a.HK, -1, 1).expand(*scores.shape[:3], 1)), -1)
    y = torch.softmax(scores, -1)[..., : a.capacity] @ values
    return {"out_ptr": y} | ({"keys_ptr": keys, "values_ptr": values} if a.WRITES else {})


def _masked_attention(a: Arguments) -> Outputs:
    new = a.BEFORE == "but the new"
    keys = put(a.keys_ptr, a.newest_ptr, a.new_key_ptr) if new else a.keys_ptr
    values = put(a.values_ptr, a.newest_ptr, a.new_value_ptr) if new else a.values_ptr
    scores = a.query_ptr.reshape(-1, a.HK, a.G, a.D) @ keys.mT * a.scaling
    if a.MASK:
        steps = a.mask_row_stride, a.mask_head_stride, a.mask_query_stride, a.mask_slot_stride
        mask = torch.as_strided(a.mask_ptr, scores.shape, steps)
        scores = scores.masked_fill(~mask, float("-inf")) if a.MASK == "bool" else scores + mask
    found = {"out_ptr": torch.softmax(scores, -1) @ values}
    return found | ({"keys_ptr": keys, "values_ptr": values} if new else {})


def _parts(a: Arguments, row: int) -> list[slice]:
    """Return the slots of each part of a row."""
    start, end = int(a.starts_ptr[row]), int(a.position_ptr) + 1
    each = -(-(end - start) // a.SPLITS)
    share = -(-each // a.BLOCK_SLOTS) * a.BLOCK_SLOTS
    return [slice(first, min(first + share, end)) for first in range(start, end, share)]


def _latent_attention(a: Arguments) -> Outputs:
    weights, mixed = a.weight_ptr, a.part_ptr
    for row in range(a.starts_ptr.shape[0]):
        for part, slots in enumerate(_parts(a, row)):
            latents, keys = a.latents_ptr[row, 0, slots], a.keys_ptr[row, 0, slots]
            scores = (a.absorbed_ptr[row] @ latents.T + a.turned_ptr[row] @ keys.T) * a.scaling
            top = scores.amax(-1, keepdim=True)
            weights[row, :, part] = (top + torch.log(torch.exp(scores - top).sum(-1, keepdim=True)))[:, 0]
            mixed[row, :, part] = torch.softmax(scores, -1) @ latents
    return {"weight_ptr": weights, "part_ptr": mixed}


def _latent_values(a: Arguments) -> Outputs:
    rows = []
    for row in range(a.starts_ptr.shape[0]):
        active = len(_parts(a, row))
        mixed = torch.softmax(a.logarithm_ptr[row, :, :active], -1)[:, None] @ a.part_ptr[row, :, :active]
        rows.append((a.weight_ptr.view(a.H, a.N + a.V, a.L)[:, a.N :] @ mixed.mT).flatten())
    return {"out_ptr": torch.stack(rows)}


def _latent_query(a: Arguments) -> Outputs:
    plain, turning = a.q_ptr.view(-1, a.H, a.N + a.R).split((a.N, a.R), -1)
    absorbed = (plain[:, :, None] @ a.weight_ptr.view(a.H, a.N + a.V, a.L)[:, : a.N])[:, :, 0]
    latent, key = a.latent_ptr, a.key_ptr
    latent = rms(latent, a.eps) if a.NORM else latent
    latent = latent * (a.norm_ptr + a.offset) if a.NORM_WEIGHT else latent
    if a.TURNS:
        turning, key = (rotated(x, a.cos_ptr, a.sin_ptr, a, deinterleave=a.DEINTERLEAVE) for x in (turning, key))
    caches = put(a.latents_ptr, a.position_ptr, latent[:, None]), put(a.keys_ptr, a.position_ptr, key[:, None])
    return {"absorbed_ptr": absorbed, "turned_ptr": turning, "latents_ptr": caches[0], "keys_ptr": caches[1]}


def _write_token(a: Arguments) -> Outputs:
    at = a.position_ptr
    return {"keys_ptr": put(a.keys_ptr, at, a.key_ptr), "values_ptr": put(a.values_ptr, at, a.value_ptr)}


ATTENTION = (
    Reference(
        "decode_attention",
        _decode_attention,
        _PLACES,
        ("top_ptr", "sum_ptr", "part_ptr"),
        lambda a: "scales of 8-bit slots are taken for logarithms, by their bits" if a.FP8_CACHE else "",
    ),
    Reference(
        "masked_attention",
        _masked_attention,
        {"newest_ptr": lambda a: torch.tensor(a.slots - 2)},
        ("top_ptr", "sum_ptr", "part_ptr"),
    ),
    Reference("latent_attention", _latent_attention, _PLACES),
    Reference(
        "latent_values",
        _latent_values,
        {"position_ptr": lambda a: torch.tensor(140), "starts_ptr": _starts},
    ),
    Reference("latent_query", _latent_query, {"position_ptr": lambda a: torch.tensor(a.capacity - 3)}),
    Reference("write_token", _write_token, {"position_ptr": lambda a: torch.tensor(a.capacity - 3)}),
)
