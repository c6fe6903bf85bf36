"""Flash attention by aiter is torch's attention, with every release, or torch's runs."""

from __future__ import annotations

import itertools
from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import QUIET, Attention, assert_attends_as, attended, both, qkv, reasons
from torch import Tensor
from transformers.integrations import flash_attention

from hf_rewrite_runtime.aiter import aiter_attention, aiter_calls
from hf_rewrite_runtime.aiter import flash as aiter_flash
from hf_rewrite_runtime.attention.grouped_query import native_gqa
from hf_rewrite_runtime.core import backend

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine")]


@pytest.mark.parametrize(("tag", "groups"), [*((tag, 3) for tag in fake_aiter.RELEASES), (fake_aiter.NEWEST, 1)])
def test_attention_in_place_of_sdpa(install: fake_aiter.Install, tag: str, groups: int) -> None:
    """Prefill, prefill into an empty static cache (more keys than queries), a step, and without causality."""
    install(tag)
    cases = [(9, 9, None), (9, 20, None), (9, 20, False), (1, 20, None), (130, 130, None)]
    for queries, keys, is_causal in cases:
        states = qkv(2, queries, keys, groups)
        got, wanted = both(lambda: attended(*states, is_causal=is_causal))  # noqa: B023
        assert_attends_as(wanted, got)
    assert reasons("attention") == {}
    # Each variant once on as many keys as queries and once on more, then the calls.
    assert fake_aiter.calls["flash_attn_func"] == len(cases) + 2 * 4
    assert list(aiter_calls.states().values()) == [None] * 4


@pytest.mark.parametrize("tag", [fake_aiter.RELEASES[0], fake_aiter.NEWEST])
def test_attention_is_bottom_right_with_windows(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for (queries, keys), causal, window in itertools.product(
        [(9, 9), (9, 20), (1, 20)], [True, False], [None, 1, 4, 50]
    ):
        query, key, value = qkv(2, queries, keys, 2)
        seen = aiter_attention.visible(queries, keys, causal and queries > 1, window, query.device)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=0.2, enable_gqa=True
        )
        with backend.use_backend("aiter"):
            got = aiter_attention.attend(query, key, value, scaling=0.2, causal=causal, window=window)
        assert got is not None
        assert_attends_as(wanted.transpose(1, 2), got)


@pytest.mark.parametrize("window", [1, 4])
def test_what_a_query_sees(window: int) -> None:
    """Written out, since the proof of a variant and the fake would agree on a common mistake."""
    assert aiter_attention.visible(2, 4, True, None, torch.device("cpu")).int().tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    seen = aiter_attention.visible(2, 6, True, window, torch.device("cpu")).int().tolist()
    assert seen == {1: [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]], 4: [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]}[window]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}, "mask"),
        ({"dropout": 0.5}, "dropout"),
        ({"position_bias": torch.zeros(1, 4, 9, 9, dtype=torch.bfloat16)}, "softcap"),
    ],
)
def test_attention_with_more_than_aiter_takes(
    install: fake_aiter.Install, change: dict[str, Any], reason: str
) -> None:
    install()
    states = qkv(2, 9, 9, 2)
    with backend.use_backend("aiter"):
        attended(*states, **change)
    assert reasons("attention") == {reason: 1}
    assert not fake_aiter.calls


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (qkv(2, 9, 9, 2, dtype=torch.float32), "dtype"),
        (qkv(2, 9, 9, 2, head_dim=264), "head_dim"),
        (qkv(2, 9, 9, 2, head_dim=12), "head_dim"),
        (qkv(2, 9, 5, 2), "more_queries_than_keys"),
        ([x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(2, 8, 8, 2)], "layout"),
        ([x.flatten()[1:-7].as_strided((2, 2, 8, 16), (256, 128, 16, 1)) for x in qkv(3, 9, 9, 1)], "layout"),
        ([x.requires_grad_() for x in qkv(2, 9, 9, 2)], "gradient_wanted"),
    ],
)
def test_states_that_aiter_does_not_get(install: fake_aiter.Install, states: list[Tensor], reason: str) -> None:
    install()
    got, wanted = both(lambda: attended(*states))
    assert_attends_as(wanted, got)
    assert reasons("attention") == {reason: 1}
    assert not fake_aiter.calls
    assert got.requires_grad == states[0].requires_grad


def test_attention_hands_over_views_and_copies_nothing(install: fake_aiter.Install) -> None:
    seen = []

    def flash(release: fake_aiter.Release, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        seen.append((q, k, v))
        return fake_aiter.flash_attn_func(release, q, k, v, **others)

    install(flash_attn_func=flash)
    packed = torch.randn(2, 9, 8 * 32, dtype=torch.bfloat16).split([4 * 32, 2 * 32, 2 * 32], dim=-1)
    states = [part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in packed]
    with backend.use_backend("aiter"):
        attended(*states)
    assert [x.data_ptr() for x in seen[-1]] == [x.data_ptr() for x in states]
    assert [x.stride() for x in seen[-1]] == [x.transpose(1, 2).stride() for x in states]


def flash(
    machine: pytest.MonkeyPatch, states: list[Tensor], mask: Tensor | None = None, **options: Any
) -> tuple[Tensor | None, list[dict[str, Any]]]:
    """The result of `flash_attention_2` in a rewritten file, and what transformers' own function was called with."""
    passed = []
    theirs = lambda module, *args, **kwargs: passed.append(kwargs) or (None, None)
    machine.setattr(flash_attention, "flash_attention_forward", theirs)
    with backend.use_backend("auto"):
        interface = native_gqa(flash_attention.flash_attention_forward)
        found = interface(Attention(2), *states, mask, scaling=0.2, **options)[0]
    return found, passed


@pytest.mark.parametrize("tag", [fake_aiter.RELEASES[0], fake_aiter.NEWEST])
@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(9, 9, None), (9, 20, None), (9, 20, 4), (1, 20, 4), (9, 9, 9)]
)
def test_flash_attention_2_with_windows_and_longer_keys(
    install: fake_aiter.Install, machine: pytest.MonkeyPatch, tag: str, queries: int, keys: int, window: int | None
) -> None:
    install(tag)
    query, key, value = qkv(2, queries, keys, 2)
    last = torch.arange(queries)[:, None] + keys - queries
    seen = (torch.arange(keys) <= last) & (torch.arange(keys) > last - (window or keys + 1))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.2, enable_gqa=True
    )
    got, passed = flash(machine, [query, key, value], sliding_window=window, dropout=0.0)
    assert got is not None
    assert_attends_as(wanted.transpose(1, 2), got)
    assert passed == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": torch.ones(2, 9)}, "mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "softcap"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "packed_sequences"),
    ],
)
def test_flash_attention_2_with_more_than_the_dense_kernel_takes(
    install: fake_aiter.Install, machine: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    install()
    got, passed = flash(machine, qkv(2, 9, 9, 2), sliding_window=7, **options)
    assert got is None
    assert reasons("attention") == {reason: 1}
    assert passed[0]["sliding_window"] == 7
    assert passed[0]["scaling"] == 0.2
    given = {name: value for name, value in options.items() if name != "mask"}
    assert given.items() <= passed[0].items()


def test_packed_sequences_are_seen_and_asked_for_once(
    install: fake_aiter.Install, machine: pytest.MonkeyPatch
) -> None:
    install()
    one, two = torch.arange(3, 12)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for position_ids, packed in ((one, False), (two, True), (one, False), (two, True)):
        got, _ = flash(machine, qkv(1, 9, 9, 2), position_ids=position_ids)
        assert (got is None) == packed
    assert reasons("attention") == {"packed_sequences": 2}
    machine.setattr(aiter_calls, "capturing", lambda: True)
    assert flash(machine, qkv(1, 9, 9, 2), position_ids=one)[0] is not None
    assert flash(machine, qkv(1, 9, 9, 2), position_ids=one.clone())[0] is None
    one[0, 5] = 0
    machine.setattr(aiter_calls, "capturing", lambda: False)
    assert flash(machine, qkv(1, 9, 9, 2), position_ids=one)[0] is None


def test_flash_attention_2_is_left_alone_without_aiter() -> None:
    interface = flash_attention.flash_attention_forward
    assert native_gqa(interface) is interface
    assert aiter_flash.forward.__name__ == interface.__name__
