"""Who attends: times torch's attention kernels for the prompts of a model, and writes `attention.json`.

The calls are those that prompts of the given lengths make, with and without padding. A backend is timed alone, inside
a graph; one that does not take a call, computes something else than plain attention in fp32, or cannot be captured is
left out. What runs otherwise is among them, as `own`: torch's own choice, or aiter where it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching.card_tables import ATTENTION
from rewrite.benchmark.benchmark_models import lock_of
from rewrite.errors import NothingToTune
from rewrite.measure.runtime_part import runtime_part

from .choices import Choice, Outcome, choose
from .timed_calls import in_turn, timer
from .tuning_run import Plan, require_gpu, small_model
from .write import write as write_entries

OWN = "own"
LENGTHS = (512, 2048, 8192)
FURTHEST = 0.02
"""Relative distance from attention in fp32: a kernel in bf16 is at some 0.004, in an order of its own."""
LARGEST = 1 << 30
"""Scores of a call, as plain torch holds them several times over, at 2 or 4 bytes; beyond, `math` is not tried."""
HEADINGS = ("dtype rows x heads/kv x head_dim, queries:keys, kind", "n", "us", "backend", "us")


def write(folder: Path, chip: str, choices: Sequence[Choice]) -> Path:
    """Put what was found into `attention.json` of a folder; what it says of other sizes and chips stays."""
    found = {choice.size: {"backend": choice.way, "us": dict(sorted(choice.us.items()))} for choice in choices}
    return write_entries(folder, ATTENTION, chip, lambda sizes: dict(sorted({**sizes, **found}.items())))


def tune_attention(
    plan: Plan, lengths: Sequence[int] = LENGTHS, progress: Callable[[str], None] = lambda message: None
) -> Outcome:
    """Time the attention of prompts of `lengths` tokens, in batches of `plan.batches`.

    Raises:
        NeedsGpu: there is no GPU, or no triton.
        NothingToTune: the attention of the package does not go where a backend can be chosen.
        RewriteError: the package cannot be loaded or built.
    """
    lock_of(plan.package)
    require_gpu()
    import torch

    progress("building the model")
    attention = Attention(small_model(plan))
    sizes = attention.sizes(lengths, plan.batches)
    if not sizes:
        raise NothingToTune(type(attention.model).__name__, "its attention is no call of transformers' for sdpa")
    choices = choose(attention, sizes, OWN, progress)
    chip = torch.cuda.get_device_properties(attention.device).name
    path = write(plan.tables, chip, choices)
    attention.tables.forget()
    return Outcome(chip, choices, path)


class Attention:
    """A model of the package whose attention is timed."""

    def __init__(self, model: Any):
        package = type(model).__module__.rpartition(".")[0]
        self.backends = runtime_part(package, "attention/backends")
        self.named = runtime_part(package, "attention/named_backends")
        self.native = runtime_part(package, "attention/grouped_query")
        self.tables = runtime_part(package, "launching/card_tables")
        self.model, self.device = model, model.device

    def sizes(self, lengths: Sequence[int], batches: Sequence[int] = (1,)) -> dict[Any, int]:
        """Return the sizes of the calls that prompts of these lengths make, plain and padded, and how many calls."""
        import torch

        found: dict[Any, int] = {}

        def heard(size: Any) -> None:
            found[size] = found.get(size, 0) + 1

        self.backends.listen(heard)
        try:
            with torch.no_grad():
                for batch in batches:
                    for length in lengths:
                        ids = torch.full((batch, length), 4, device=self.device)
                        seen = torch.ones_like(ids)
                        seen[0, 0] = 0
                        for mask in (None, seen):
                            self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        finally:
            self.backends.listen(None)
        return found

    def times(self, size: Any) -> dict[str, float]:
        """Return the microseconds of a call by each backend that computes a size."""
        import torch

        query, key, value, mask = self.tensors(size)
        causal = size.kind == "causal"
        scores = size.rows * size.heads * size.queries * size.keys
        names = [name for name in self.backends.BACKENDS if self.backends.failure(name) is None]
        names = [name for name in names if name != "math" or scores <= LARGEST]
        with torch.no_grad():
            wanted = plain_attention(query, key, value, mask, causal)
            ways = {OWN: functools.partial(self._own, key=key, value=value, mask=mask, causal=causal)}
            for name in names:
                ways[name] = functools.partial(self._by_name, name, key=key, value=value, mask=mask, causal=causal)
            timers = {}
            for name, run in ways.items():
                found = self._tried(run, query)
                if found is not None and near(found, wanted):
                    timed = timer(run, [query], self.device, calls=20 if scores <= LARGEST else 4)
                    if timed is not None:
                        timers[name] = timed
            return in_turn(timers)

    @staticmethod
    def _tried(run: Callable[[Any], Any], query: Any) -> Any:
        """Return what a call returns; None where a kernel fails that said it would take it."""
        try:
            return run(query)
        except RuntimeError:
            return None

    def tensors(self, size: Any) -> tuple[Any, Any, Any, Any]:
        """Return the queries, keys, values and mask of a call, as they lie in a prompt."""
        import torch

        dtype = getattr(torch, size.dtype)

        def drawn(length: int, heads: int, width: int) -> Any:
            return torch.randn(size.rows, length, heads, width, device=self.device).to(dtype).transpose(1, 2)

        query = drawn(size.queries, size.heads, size.head_dim)
        key = drawn(size.keys, size.kv_heads, size.head_dim)
        value = drawn(size.keys, size.kv_heads, size.value_dim)
        if size.kind in ("causal", "full"):
            return query, key, value, None
        heads = size.heads if size.kind.endswith("heads") else 1
        seen = torch.ones(size.queries, size.keys, dtype=torch.bool, device=self.device)
        seen = seen.tril(size.keys - size.queries).expand(size.rows, heads, -1, -1).contiguous()
        seen[:, :, 1:, 0] = False
        if size.kind.startswith("bool"):
            return query, key, value, seen
        added = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, torch.finfo(dtype).min)
        return query, key, value, added

    def _by_name(self, name: str, query: Any, *, key: Any, value: Any, mask: Any, causal: bool) -> Any:
        out = self.backends.attend(name, query, key, value, mask, None, causal)
        return None if out is None else out.transpose(1, 2).contiguous()

    def _own(self, query: Any, *, key: Any, value: Any, mask: Any, causal: bool) -> Any:
        """Attend as a package without a table does: its table is not asked, which may be of another run."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        module = _Module(query.shape[1] // key.shape[1])
        with self.named.use_attention_backend(OWN):
            attend = self.native.native_gqa(sdpa_attention_forward)
            return attend(module, query, key, value, mask, is_causal=causal)[0]


@dataclass(frozen=True)
class _Module:
    """What an attention function asks of its module."""

    num_key_value_groups: int


def near(found: Any, wanted: Any) -> bool:
    """Return whether a result `[B, S, H, D]` is attention to the rounding of 16 bits."""
    return bool((found.float() - wanted).norm() <= FURTHEST * wanted.norm())


def plain_attention(query: Any, key: Any, value: Any, mask: Any, causal: bool) -> Any:
    """Return attention in fp32 by its definition, `[B, S, H, D]`, a head at a time."""
    import torch

    groups = query.shape[1] // key.shape[1]
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3], dtype=torch.float32)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[row, head].float() @ key[row, head // groups].float().T * query.shape[3] ** -0.5
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
            elif mask is not None:
                own = mask[row, head if mask.shape[1] > 1 else 0]
                scores = scores.masked_fill_(~own, float("-inf")) if own.dtype == torch.bool else scores.add_(own)
            out[row, :, head] = scores.softmax(-1) @ value[row, head // groups].float()
    return out
