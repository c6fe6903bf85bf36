"""aiter's attention on the preallocated cache: as its release wants it, of what the cache holds, or not at all."""

from __future__ import annotations

import itertools
from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import DTYPES, QUIET, both, reasons
from tolerances import assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.aiter import unified as aiter_unified
from hf_rewrite_runtime.attention.decode_attention import decode_attention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import aiter_probe, backend

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine")]

HEADS, KV_HEADS, CAPACITY = 8, 2, 256
RULES: list[dict[str, Any]] = [
    {}, {"sliding_window": 40}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 3, HEADS)}, {"scaling": 0.7},
    {"sliding_window": 40, "softcap": 3.0, "sinks": torch.linspace(-1, 3, HEADS).bfloat16()},
]  # fmt: skip


def stepping(
    rows: int,
    last: int,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 32,
    capacity: int = CAPACITY,
    kv: int = KV_HEADS,
) -> PreallocatedCache:
    """A cache in a step, whose rows start in different slots and hold a loud number behind the token."""
    cache = PreallocatedCache(1, rows, capacity, "cpu")
    with backend.use_backend("aiter"):
        cache.update(*torch.randn(2, rows, kv, last + 1, dim, dtype=dtype), 0)
    cache.layers[0].spoil(last + 1, 64.0)
    cache.position.fill_(last)
    cache.pad(torch.arange(rows) * 5)
    cache.stepping = True
    return cache


def attended(cache: PreallocatedCache, query: Tensor, **rule: Any) -> tuple[Tensor, Tensor]:
    got, wanted = both(lambda: decode_attention(query, cache, 0, **{"scaling": 0.2, **rule}))
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    return got, wanted


def query(rows: int, dtype: torch.dtype = torch.bfloat16, dim: int = 32, heads: int = HEADS) -> Tensor:
    return torch.randn(rows, 1, heads, dim, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_attention_on_the_cache(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for dtype, rows, rule in itertools.product(DTYPES, (1, 3), RULES):
        for last in (20, 100, CAPACITY - 1):
            cache, asked = stepping(rows, last, dtype), query(rows, dtype)
            got, wanted = attended(cache, asked, **rule)
            layer = cache.layers[0]
            layer.keys, layer.values = layer.keys.double(), layer.values.double()
            with backend.use_backend("reference"):
                exact = decode_attention(asked.double(), cache, 0, **{"scaling": 0.2, **rule})
            assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps)
    assert fake_aiter.calls["unified_attention"] == 2 * 2 * len(RULES) * (2 + 3), (
        "two proofs of a variant, three calls"
    )
    assert reasons("unified_attention") == {}


def test_nothing_is_copied(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    """Pages are the cache's own memory, of which the fake reads no byte that is not there."""
    seen = []

    def body(release: Any, k: Tensor, v: Tensor, **others: Any) -> None:
        seen.append((k.data_ptr(), v.data_ptr()))
        fake_aiter.BODIES["unified_attention"](release, k=k, v=v, **others)

    install(unified_attention=body)
    cache = stepping(2, CAPACITY - 1)
    attended(cache, query(2))
    assert seen[-1] == (cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr())


FAULTS = {
    "no heads in the table": lambda t, n: (t % CAPACITY, n),
    "no padding": lambda t, n: (t - torch.arange(len(n))[:, None].int() * 5, n),
    "pages twice as wide": lambda t, n: (t + (t - t[:, :1]), n),
    "a token less": lambda t, n: (t, n - 1),
    "one row for all": lambda t, n: (t[:1].expand_as(t).contiguous(), n),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_table_is_found(install: fake_aiter.Install, machine: pytest.MonkeyPatch, fault: str) -> None:
    right = aiter_unified.page_tables
    machine.setattr(aiter_unified, "page_tables", lambda *given: FAULTS[fault](*right(*given)))
    install()
    cache, asked = stepping(3, 100), query(3)
    for _ in range(2):
        got, wanted = attended(cache, asked)
        assert torch.equal(got, wanted)
    assert reasons("unified_attention") in ({"differs": 2}, {"raised": 2})
    assert fake_aiter.calls["unified_attention"] <= 2


@pytest.mark.parametrize("fault", ["keys for values", "unscaled", "window", "no sinks", "raises", "missing"])
def test_an_attention_that_aiter_gets_wrong(install: fake_aiter.Install, fault: str) -> None:
    def body(release: Any, **given: Any) -> None:
        changed = {
            "keys for values": {"k": given["v"], "v": given["k"]}, "unscaled": {"softmax_scale": 1.0},
            "window": {"window_size": (30, 0)}, "no sinks": {"sinks": None},
        }  # fmt: skip
        if fault == "raises":
            raise KeyError("no gfx942")
        fake_aiter.BODIES["unified_attention"](release, **given | changed[fault])

    release = install(**({} if fault == "missing" else {"unified_attention": body}))
    if fault == "missing":
        release.functions = lambda module: {}  # type: ignore[method-assign]
    cache, asked = stepping(2, 100), query(2)
    for _ in range(2):
        got, wanted = attended(cache, asked, sliding_window=40, sinks=torch.linspace(-1, 3, HEADS))
        assert torch.equal(got, wanted)
    assert reasons("unified_attention") == {{"raises": "raised", "missing": "missing"}.get(fault, "differs"): 2}


def test_gates(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    odd: dict[str, list[tuple[PreallocatedCache, Tensor, dict[str, Any]]]] = {
        "dtype": [(stepping(1, 20, torch.float32), query(1, torch.float32), {})],
        "head_dim": [
            (stepping(1, 20, dim=24), query(1, dim=24), {}),
            (stepping(1, 20, dim=272), query(1, dim=272), {}),
        ],
        "heads": [(stepping(1, 20, kv=1), query(1), {"sinks": torch.zeros(1, HEADS)})],
        "layout": [(stepping(1, 20, capacity=100), query(1), {})],
    }
    small = stepping(1, 20)
    small.layers[0].values = small.layers[0].values.clone()  # as made without aiter: a page would end behind it
    odd["layout"].append((small, query(1), {}))
    for cache, asked, rule in itertools.chain(*odd.values()):
        got, wanted = attended(cache, asked, **rule)
        assert torch.equal(got, wanted)
    assert reasons("unified_attention") == {reason: len(cases) for reason, cases in odd.items()}
    with backend.use_backend("auto"):
        decode_attention(query(1), stepping(1, 20), 0, scaling=0.2)
    machine.setattr(aiter_probe, "chip", lambda device=None: "gfx1100")
    with backend.use_backend("aiter"):
        decode_attention(query(1), stepping(1, 20), 0, scaling=0.2)
    assert reasons("unified_attention")["chip"] == 1
    assert not fake_aiter.calls
