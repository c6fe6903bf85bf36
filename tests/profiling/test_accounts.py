"""Every µs of a span is somewhere exactly once."""

from __future__ import annotations

import random

import pytest

from rewrite.profile import accounts
from rewrite.profile.measure import _shortened
from rewrite.profile.operator_work import amount_of
from rewrite.profile.origins import Matcher, Origin
from rewrite.profile.trace import Activity, Enclosing, Launch, Mark, Operator


def activity(name: str, start: float, end: float, launched: tuple[float, float] | None = None) -> Activity:
    launch = Launch("cudaLaunchKernel", *launched, 1, 1) if launched else None
    return Activity(name, start, end, 0, 1, launch)


def test_what_overlaps_counts_once_and_for_the_first() -> None:
    account = accounts.of_device([activity("a", 0, 10), activity("b", 5, 8), activity("c", 9, 12)], 0, 12)
    found = [(share.item.name, share.start, share.taken) for share in account.shares]
    assert found == [("a", 0, 10), ("b", 10, 0), ("c", 10, 2)]
    assert account.waits == ()


def test_a_gap_is_the_hosts_until_its_call_has_ended() -> None:
    account = accounts.of_device([activity("a", 0, 10, (0, 0)), activity("b", 20, 30, (12, 16))], 0, 34)
    assert account.waited(accounts.HOST) == pytest.approx(6 + 4)
    assert account.waited(accounts.BETWEEN) == pytest.approx(4)


def test_what_was_launched_long_ago_waits_for_no_host() -> None:
    account = accounts.of_device([activity("a", 0, 10, (-9, -5)), activity("b", 12, 20, (-4, -1))], 0, 20)
    assert (account.waited(accounts.HOST), account.waited(accounts.BETWEEN)) == (0, 2)


def test_without_launches_the_cause_is_not_known() -> None:
    account = accounts.of_device([activity("a", 2, 10), activity("b", 12, 20)], 0, 20)
    assert account.waited(accounts.UNKNOWN) == pytest.approx(4)


def test_the_parts_always_make_up_the_span() -> None:
    generator = random.Random(0)
    for _ in range(200):
        found = []
        for number in range(generator.randrange(30)):
            start = generator.uniform(-5, 100)
            launched = start - generator.uniform(0, 20)
            launch = (launched, launched + generator.uniform(0, 3)) if number % 3 else None
            found.append(activity(str(number), start, start + generator.uniform(0, 12), launch))
        found.sort(key=lambda each: each.start)
        account = accounts.of_device(found, 0, 90)
        parts = account.busy + sum(wait.taken for wait in account.waits)
        assert parts == pytest.approx(90)
        assert all(share.taken >= 0 for share in account.shares)
        assert all(wait.taken >= 0 for wait in account.waits)


def test_operators_of_a_host_have_what_their_inner_ones_leave() -> None:
    spans = [("linear", 0, 10), ("t", 1, 2), ("mm", 3, 9), ("add", 12, 14)]
    account = accounts.of_host([Operator(name, start, end, 1) for name, start, end in spans], 0, 20)
    assert [share.taken for share in account.shares] == [3, 1, 6, 2]
    assert account.waited(accounts.HOST) == 8


def test_enclosing_spans_are_found_on_their_thread() -> None:
    spans = [Mark("outer", 0, 100, 1), Mark("inner", 10, 20, 1), Mark("next", 20, 30, 1), Mark("other", 0, 100, 2)]
    found = Enclosing(spans)
    names = {at: [span.name for span in found.at(1, at)] for at in (-1, 5, 10, 19, 20, 30, 100)}
    assert names == {
        -1: [],
        5: ["outer"],
        10: ["outer", "inner"],
        19: ["outer", "inner"],
        20: ["outer", "next"],
        30: ["outer"],
        100: [],
    }
    assert [span.name for span in found.at(3, 5)] == []


def test_steps_are_matched_by_the_order_of_names() -> None:
    matcher = Matcher([Origin(name) for name in ("fill", "a", "b", "a", "c")])
    found = matcher.match(["a", "b", "x", "a", "c"])
    assert [origin.name if origin else None for origin in found] == ["a", "b", None, "a", "c"]


def operator(
    name: str, shapes: list[list[int]], *, dtype: str = "c10::BFloat16", values: tuple[str, ...] = ()
) -> Operator:
    return Operator(f"aten::{name}", 0, 1, 1, shapes, [dtype] * len(shapes), (), values)


def test_work_follows_from_shapes() -> None:
    product = amount_of(operator("mm", [[4, 8], [8, 16]]))
    assert product is not None
    assert (product.bytes, product.operations) == (2 * (32 + 128 + 64), 2 * 4 * 8 * 16)
    batched = amount_of(operator("bmm", [[3, 4, 8], [3, 8, 16]]))
    assert batched is not None
    assert batched.operations == 3 * 2 * 4 * 8 * 16
    taken = amount_of(operator("embedding", [[1000, 8], [1, 4]]))
    assert taken is not None
    assert taken.bytes == 2 * 4 * 8 * 2
    added = amount_of(operator("add", [[4, 8], [4, 8]]))
    assert added is not None
    assert (added.bytes, added.operations) == (3 * 64, 32)
    assert amount_of(Operator("aten::mm", 0, 1, 1)) is None


def test_causal_attention_takes_half_the_products() -> None:
    shapes = [[1, 2, 64, 8]] * 3
    whole = amount_of(operator("_scaled_dot_product_flash_attention", shapes, values=("", "", "", "0.", "False")))
    half = amount_of(operator("_scaled_dot_product_flash_attention", shapes, values=("", "", "", "0.", "True")))
    assert whole is not None
    assert half is not None
    assert half.operations / whole.operations == pytest.approx(65 / 128)


def test_what_is_expanded_is_read_once() -> None:
    dims, strides = [[4, 8], [4, 8]], [[8, 1], [0, 1]]
    found = amount_of(Operator("aten::mul", 0, 1, 1, dims, ["float", "float"], strides))
    assert found is not None
    assert found.bytes == 4 * (32 + 8 + 32)


@pytest.mark.parametrize("count", [6, 7])
def test_a_timeline_that_cannot_be_shortened_ends(count: int) -> None:
    apart = [[float(n), 1.0, f"kind {n}", "name"] for n in range(count)]
    assert _shortened(apart, 4) == apart
    alike = [[float(n), 1.0, "kind", "name"] for n in range(count)]
    short = _shortened(alike, 4)
    assert len(short) <= 4
    assert sum(span[1] for span in short) == count
