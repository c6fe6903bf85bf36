"""Which of torch's attention kernels runs: the one that was named, or the fastest of those that were measured.

B rows, S query length, T key length, H query heads, Hk key/value heads, D and Dv head_dim of keys and values.

torch chooses among its kernels by what they take, in an order of its own, and on ROCm among two libraries of flash
attention by a preference of the process. Here a call takes one of them:

    flash, efficient, cudnn, math       torch's `SDPBackend`s
    aotriton, ck                        flash attention by either of ROCm's libraries

by `set_attention_backend` (`named_backends`) or the environment variable `REWRITE_ATTENTION` for all attention outside
captured decode steps, which have a kernel of this package; else, for prompts, by `attention.json` beside the package's
modeling file, which `rewrite tune DIR --attention` writes:

    {"AMD Instinct MI300X": {"bfloat16 1x32/8x128 512:512 causal": {"backend": "ck", "us": {"ck": 40.1, …}}, …}, …}

Where a kernel does not take a call, heads are repeated for it; where that does not help either the call goes its
ordinary way, and `explain` counts it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core import backend
from ..launching import card_tables
from ..launching.tiles import next_power

BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
    "aotriton": SDPBackend.FLASH_ATTENTION,
    "ck": SDPBackend.FLASH_ATTENTION,
}
ENVIRONMENT_VARIABLE = backend.ATTENTION_VARIABLE

_ROCM_LIBRARIES = frozenset({"aotriton", "ck"})
_runs: set[str] = set()
"""What was found to run on this machine."""
_counts: Counter[str] = Counter()
_listener: Callable[[Size], None] | None = None


class AttentionBackendUnavailable(RuntimeError):
    """An attention backend was asked for by name and cannot run on this machine."""

    def __init__(self, name: str, why: str):
        super().__init__(
            f"attention backend '{name}' was asked for and cannot run here: {why}. "
            f"Choose another with set_attention_backend() or {ENVIRONMENT_VARIABLE} ({', '.join(BACKENDS)})."
        )


class Size(NamedTuple):
    """A call, as the tables have it: rows and lengths are rounded up to powers of two."""

    dtype: str
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    kind: str
    """`causal`, `full`, or what the mask is of: `bool`, `number`; and `heads` where each head has its own."""

    def __str__(self) -> str:
        wide = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}-{self.value_dim}"
        heads = f"{self.rows}x{self.heads}/{self.kv_heads}x{wide}"
        return f"{self.dtype} {heads} {self.queries}:{self.keys} {self.kind}"


def check(name: str) -> None:
    """Find out whether a backend runs on this machine, once a process.

    Raises:
        ValueError: if `name` is none of `BACKENDS`.
        AttentionBackendUnavailable: if it cannot.
    """
    if name in _runs:
        return
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend '{name}': choose one of {', '.join(BACKENDS)}")
    if (why := failure(name)) is not None:
        raise AttentionBackendUnavailable(name, why)
    _runs.add(name)


def failure(name: str) -> str | None:
    """Return why a backend cannot run on this machine, None where it can."""
    if name == "math":
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if name in _ROCM_LIBRARIES:
        return _library_failure(name)
    if name == "cudnn":
        if torch.version.hip is not None:
            return "cuDNN is NVIDIA's"
        return None if torch.backends.cudnn.is_available() else "torch was built without cuDNN"
    if name == "flash" and not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without flash attention"
    return None


def _library_failure(name: str) -> str | None:
    if torch.version.hip is None:
        return "it is a library of ROCm, and torch was not built for it"
    if not hasattr(torch.backends.cuda, "preferred_rocm_fa_library"):
        return "this torch has no choice among ROCm's libraries of flash attention"
    try:
        with _preferring(name) as preferred:
            return None if name in str(preferred).lower() else f"torch stays with {preferred}"
    except RuntimeError as error:
        return str(error).partition("\n")[0]


@contextlib.contextmanager
def _preferring(name: str) -> Iterator[object]:
    """Prefer one of ROCm's libraries: torch's preference, which holds for the process, and here for a call.

    Another thread's attention in the same moment may take that library too: the same numbers from other kernels.
    """
    prefer = torch.backends.cuda.preferred_rocm_fa_library
    before = prefer()
    try:
        yield prefer(name)
    finally:
        prefer(before)


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> str | None:
    """Return the backend for a call, as it was named or as the table has it; None for the ordinary way.

    Named ones hold for every call (a compiler's with gradients excepted, which it makes itself), those of the table
    for prompts of which no gradients are wanted.
    """
    if not isinstance(query, Tensor):  # a tracer's
        return None
    if (named := backend.named_besides["attention"]) is not None:
        traced = torch.compiler.is_compiling() and backend.wants_gradient(query, key, value, mask)
        return None if traced or named == backend.OWN_ATTENTION else named
    if torch.compiler.is_compiling() or (_listener is None and not _tables()):
        return None
    if backend.wants_gradient(query, key, value, mask) or query.shape[2] == 1 or not backend.nothing_watches(query):
        return None
    size = size_of(query, key, value, mask, is_causal)
    if _listener is not None:
        _listener(size)
    return _table(query.get_device() if query.is_cuda else None).get(str(size))


def size_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Size:
    """Return the size under which the tables have a call."""
    rows, heads, queries, head_dim = query.shape
    causal = mask is None and is_causal
    keys = queries if causal else key.shape[2]
    if mask is None:
        kind = "causal" if causal else "full"
    else:
        kind = ("bool" if mask.dtype == torch.bool else "number") + (" heads" if mask.shape[1] > 1 else "")
    dtype = str(query.dtype).removeprefix("torch.")
    lengths = next_power(queries), next_power(keys)
    return Size(dtype, next_power(rows), heads, key.shape[1], head_dim, value.shape[3], *lengths, kind)


def attend(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
) -> Tensor | None:
    """Return attention by one backend, `[B, H, S, Dv]`; None where it does not take the call.

    Args:
        name: one of `BACKENDS`.
        query: `[B, H, S, D]`.
        key: `[B, Hk, T, D]`.
        value: `[B, Hk, T, Dv]`.
        mask: of bools, or added to the scores; it broadcasts to `[B, H, S, T]`.
        scaling: of the scores; None is `D ** -0.5`.
        is_causal: whether a query sees the keys up to its own number.

    Raises:
        ValueError: if `name` is none of `BACKENDS`.
        AttentionBackendUnavailable: if it cannot run on this machine.
    """
    check(name)
    causal = is_causal and mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # a prompt read into an empty static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    groups = query.shape[1] // key.shape[1]
    with contextlib.ExitStack() as stack:
        if name in _ROCM_LIBRARIES:
            stack.enter_context(_preferring(name))
        stack.enter_context(sdpa_kernel([BACKENDS[name]]))
        shared = groups > 1
        if not _takes(name, query, key, value, mask, causal, shared):
            if not shared:
                return None
            shared, key, value = False, *(tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
            if not _takes(name, query, key, value, mask, causal, shared):
                return None
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=causal, enable_gqa=shared
        )
    _counts[name] += 1
    return out


def _takes(
    name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shared: bool
) -> bool:
    """Return whether a backend that alone is enabled takes a call, as torch itself asks it."""
    if name == "math":
        return True
    if not query.is_cuda:
        return False
    asked = torch.backends.cuda
    parameters = asked.SDPAParams(query, key, value, mask, 0.0, causal, shared)
    kind = BACKENDS[name]
    if kind is SDPBackend.FLASH_ATTENTION:
        return asked.can_use_flash_attention(parameters, False)
    if kind is SDPBackend.EFFICIENT_ATTENTION:
        return asked.can_use_efficient_attention(parameters, False)
    return asked.can_use_cudnn_attention(parameters, False)


# ---- tables ----


@card_tables.cached
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return what was measured, by chip."""
    return card_tables.read(card_tables.ATTENTION)


@card_tables.cached
def _table(device: int | None) -> Mapping[str, str]:
    """Return the backends of a card by size, without those that run no more."""
    name = "cpu" if device is None else torch.cuda.get_device_properties(device).name
    found = {
        size: entry["backend"]
        for size, entry in _tables().get(name, {}).items()
        if entry["backend"] != backend.OWN_ATTENTION
    }
    for chosen in sorted({*found.values()}):
        why = failure(chosen) if chosen in BACKENDS else f"it is none of {', '.join(BACKENDS)}"
        if why is not None:
            backend.warn_once(f"attention.json says '{chosen}', which cannot run here: {why}")
            backend.count_fallback("attention_backend", f"{chosen}_unavailable")
            found = {size: other for size, other in found.items() if other != chosen}
    return found


def listen(listener: Callable[[Size], None] | None) -> None:
    """Tell `listener` the size of every call that the table is asked for; None for nobody."""
    global _listener
    _listener = listener


def describe_process() -> list[str]:
    """Return lines for `explain`: what was asked for, and how many calls each backend took; of a graph its capture."""
    named = backend.named_besides["attention"]
    asked = [f"attention: {named} was asked for by name"] if named is not None else []
    by = ", ".join(f"{count} by {name}" for name, count in sorted(_counts.items()))
    return [*asked, *([f"attention outside decode steps: {by}"] if by else [])]
