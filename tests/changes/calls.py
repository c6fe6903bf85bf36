"""What is called of a model before and after a change, what comes of it, and whether two results are the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .families import Side
from .told import COUNTS, watch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tolerances import WHOLE_FORWARD_IN_FP32

NEW_TOKENS = 6
ROUNDINGS = 16
"""Of the coarsest dtype that takes part, where that is none of 32 bits: of each layer's sums, in another order."""


@dataclass
class Said:
    """What one call gave."""

    error: str = ""
    detail: str = ""
    sequences: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Scores and logits of every token, the returned cache, the outputs of plain forwards."""
    plain: dict[str, Any] = field(default_factory=dict)
    eps: float = 0.0
    """Of the coarsest dtype that took part."""
    replays: dict[str, int] = field(default_factory=dict)
    """Of steps, prompts and whole forwards."""
    reasons: list[str] = field(default_factory=list)


def prompt(side: Side) -> Tensor:
    """Return two texts of nine tokens."""
    return torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(3), device="cpu").to(side.device)


def call(side: Side) -> Said:
    """Return what a model says now: a text that it generates, and its plain forward, twice.

    The same exception of both sides is one result of many, so all of them are caught.
    """
    if not side.thread:
        return _call(side)
    found: list[Said] = []
    thread = threading.Thread(target=lambda: found.append(_call(side)))
    thread.start()
    thread.join()
    return found[0]


def _call(side: Side) -> Said:
    said = Said()
    watch(side)
    COUNTS.clear()
    if side.runtime:
        side.part("core/backend").reset_fallbacks()
    torch.manual_seed(0)
    try:
        said.eps = _eps(side)
        if side.family.generates:
            _generate(side, said)
        _forward(side, said)
    except Exception as error:  # judged by whoever compares
        said.error = type(error).__name__
        said.detail = " ".join(str(error).split())[:200]
    if side.runtime:
        said.reasons = sorted(f"{where}: {why}" for where, why in side.part("core/backend").fallbacks())
        said.replays = dict(COUNTS)
        said.reasons += [f"forward: {why}" for why in side.part("forward/forward_cache").store_of(side.model).reasons]
    return said


def _eps(side: Side) -> float:
    kinds = {tensor.dtype for tensor in side.model.parameters() if tensor.is_floating_point()}
    if torch.is_autocast_enabled(side.device):
        kinds.add(torch.get_autocast_dtype(side.device))
    if side.device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-10
    return max(torch.finfo(kind).eps for kind in kinds)


def _generate(side: Side, said: Said) -> None:
    keywords: dict[str, Any] = {
        "input_ids": prompt(side),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    keywords |= {name: value() if name == "past_key_values" else value for name, value in side.keywords.items()}
    if "inputs_embeds" in keywords:
        del keywords["input_ids"]
    outputs = side.callee.generate(**keywords)
    said.sequences = outputs.sequences
    for what in ("scores", "logits"):
        for number, scores in enumerate(getattr(outputs, what, None) or ()):
            said.tensors[f"{what} {number}"] = scores
    cache = getattr(outputs, "past_key_values", None)
    if cache is not None:
        said.plain["cache"] = type(cache).__name__
        for name, value in _contents(cache, "cache", 0):
            (said.tensors if isinstance(value, Tensor) else said.plain)[name] = value


def _contents(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, (bool, int, float, str)) or value is None:
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _contents(part, f"{name}.{key}", depth)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _contents(part, f"{name}.{number}", depth)
    elif type(value).__module__ == "transformers.cache_utils" and depth < 4 and hasattr(value, "__dict__"):
        for key, part in vars(value).items():
            if not key.startswith("_"):
                yield from _contents(part, f"{name}.{key}", depth + 1)


def _forward(side: Side, said: Said) -> None:
    ids = prompt(side)
    more: dict[str, Any] = {"use_cache": False} if side.family.generates else {}
    if side.family.seq2seq:
        more["decoder_input_ids"] = ids[:, :4]
    for number in range(2):
        with torch.no_grad():
            outputs = side.callee(input_ids=ids, **more)
        said.tensors[f"forward {number}"] = outputs.logits.detach().clone()


def limit_of(*sides: Said) -> float:
    """Return how far tensors may be apart, relative to the largest element."""
    eps = max(said.eps for said in sides)
    return WHOLE_FORWARD_IN_FP32 if eps <= torch.finfo(torch.float32).eps else ROUNDINGS * eps


def difference(wanted: Said, got: Said, limit: float | None = None) -> str:
    """Return what differs between two results, the first of it; nothing if they are the same.

    Args:
        wanted: of the original.
        got: of the package.
        limit: as `limit_of` has it, or another one.
    """
    if wanted.error or got.error:
        same = wanted.error == got.error
        return "" if same else f"raises {got.error or 'nothing'} instead of {wanted.error or 'nothing'}: {got.detail}"
    limit = limit_of(wanted, got) if limit is None else limit
    tied = False
    for name in [*wanted.tensors, *(name for name in got.tensors if name not in wanted.tensors)]:
        if name not in wanted.tensors or name not in got.tensors:
            return f"{name} is only in one"
        if tied and not name.startswith("forward"):
            continue
        a, b = wanted.tensors[name], got.tensors[name]
        if found := _apart(a, b, limit):
            return f"{name} {found}"
        tied = tied or (name.startswith("scores") and _is_tie(a, limit) and not _same_sequences(wanted, got))
    if not tied and not _same_sequences(wanted, got):
        return "tokens differ"
    for name in wanted.plain.keys() | got.plain.keys():
        if wanted.plain.get(name) != got.plain.get(name):
            return f"{name} is {got.plain.get(name)} instead of {wanted.plain.get(name)}"
    return ""


def own_error(said: Said, exact: Said) -> float:
    """Return how far a result is from that of the same model in fp64, relative to the largest element."""
    both = [(exact.tensors[name], tensor) for name, tensor in said.tensors.items() if name in exact.tensors]
    pairs = [(a.double(), b.double()) for a, b in both if a.shape == b.shape and a.numel() and b.isfinite().all()]
    return max((((a - b).abs().max() / a.abs().max()).item() for a, b in pairs), default=0.0)


def _same_sequences(wanted: Said, got: Said) -> bool:
    if wanted.sequences is None or got.sequences is None:
        return wanted.sequences is got.sequences
    return torch.equal(wanted.sequences, got.sequences)


def _is_tie(scores: Tensor, limit: float) -> bool:
    """Return whether the two best tokens of a row are as near as roundings are."""
    best = scores.float().topk(2, dim=-1).values
    finite = scores[scores.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return bool(((best[:, 0] - best[:, 1]) <= 2 * limit * largest).any())


def _apart(wanted: Tensor, got: Tensor, limit: float) -> str:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"is {tuple(got.shape)} of {got.dtype} instead of {tuple(wanted.shape)} of {wanted.dtype}"
    if wanted.device.type == "meta" or got.device.type == "meta":
        return "" if wanted.device == got.device else f"is on {got.device}"
    if not wanted.numel() or torch.equal(wanted, got):
        return ""
    a, b = wanted.double(), got.double()
    both = a.isfinite() & b.isfinite()
    if not torch.equal(a[~both].nan_to_num(), b[~both].nan_to_num()):
        return "is not finite elsewhere"
    largest = a[both].abs().max().item() if both.any() else 0.0
    far = (a[both] - b[both]).abs().max().item() if both.any() else 0.0
    return f"differs by {far / max(largest, 1e-30):.2g}" if far > limit * largest else ""
