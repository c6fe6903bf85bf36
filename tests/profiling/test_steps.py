"""Where steps begin and end in a recording, what our own kernels take, and what is advised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rewrite.measure import categories
from rewrite.profile import advice
from rewrite.profile.accounts import BETWEEN, HOST
from rewrite.profile.kernel_work import WORK, Held, Launches
from rewrite.profile.origins import of_device
from rewrite.profile.places import Place, Places
from rewrite.profile.profiled_calls import _replays, forwards_noted
from rewrite.profile.trace import Activity, Launch, Mark, Trace


def replay(number: int, start: float, kernels: int) -> list[Activity]:
    launch = Launch("cudaGraphLaunch", start - 50, start - 45, 1, number)
    return [Activity(f"k{n}", start + 10 * n, start + 10 * n + 8, 0, number, launch) for n in range(kernels)]


def test_a_step_of_a_graph_lasts_until_the_next_begins() -> None:
    prompt, steps = replay(1, 0, 9), [replay(n, 100 * n, 3) for n in range(2, 7)]
    lone = Activity("Memcpy DtoH", 635, 640, 0, 99, Launch("cudaMemcpyAsync", 600, 601, 1, 99))
    found = _replays([*prompt, *(activity for step in steps for activity in step), lone])
    assert found == [(300, 400), (400, 500), (500, 600)]
    assert _replays(prompt) == []


def test_a_forward_is_noted_and_put_back() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: int, *, twice: bool = False) -> int:
            return 2 * x if twice else x

    class Child(Model):
        pass

    for kind, own in ((Model, True), (Child, False)):
        model, other = kind(), kind()
        before = kind.__dict__.get("forward")
        with forwards_noted(model) as clock:
            assert model(3, twice=True) == 6
            other(1)
            assert len(clock.begun) == 1
            assert "forward" not in model.__dict__
        assert kind.__dict__.get("forward") is before
        assert (before is not None) == own


def launches(**config: Any) -> tuple[Launches, Any, Places]:
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(64, 256, bias=False)
    model.experts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(8, 32, 64))])
    fields = {"num_attention_heads": 8, "num_key_value_heads": 2, **config}
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))  # type: ignore[assignment]
    places = Places(model, set())
    return Launches(model, places, Held(100, 400), 1), model, places


def test_the_work_of_a_product_is_its_weights() -> None:
    found, model, _ = launches()
    x, out = torch.zeros(1, 1, 64), torch.zeros(1, 1, 256)
    amount = found._amount("_linear_kernel", (x, model.lm_head.weight, out))
    assert amount.operations == 2 * 64 * 256
    assert amount.bytes == 4 * (64 * 256 + 64 + 256)
    assert found._module((x, model.lm_head.weight)) == "lm_head"
    assert found._module((x, out)) == "?"


def test_of_experts_the_chosen_ones_count() -> None:
    found, model, _ = launches(num_experts=8, num_experts_per_tok=2)
    amount = found._amount("_experts_gate_up_kernel", (torch.zeros(1, 64), model.experts[0]))
    assert amount.bytes == pytest.approx(4 * (64 + 2 * 32 * 64))
    assert amount.operations == pytest.approx(2 * 2 * 32 * 64)


def test_a_cache_counts_by_what_it_holds() -> None:
    found, _, _ = launches()
    cache = torch.zeros(1, 2, 400, 16)
    reads = found._amount("_decode_attention_kernel", (torch.zeros(1, 8, 1, 16), cache))
    assert reads.bytes == 4 * (8 * 16 + 2 * 100 * 16)
    assert reads.operations == 2 * 4 * (2 * 100 * 16)  # each key is multiplied by 4 heads' queries
    assert found._amount("_rope_cache_kernel", (cache,)).bytes == 4 * 2 * 16
    table = torch.zeros(4096, 16)
    assert found._amount("_rotary_rows_kernel", (table,)).bytes == pytest.approx(4 * 16)


def test_places_have_numbers_of_their_own() -> None:
    places = Places(torch.nn.Module(), set())
    for line in (3, 4, 3):
        places.opened(Place("a.py", line, "f", "m")).__exit__(None, None, None)
    assert [place.line for place in places.list] == [3, 4]
    assert places.of("rewrite line #1") == Place("a.py", 4, "f", "m")
    assert places.of("ProfilerStep#1") is None
    assert Place("_linear_kernel", 0, WORK, "lm_head") not in places.list


def record(**changes: Any) -> dict[str, Any]:
    def row(category: str, us: float, limit: float, where: str | None = None, bound: str = "memory") -> dict[str, Any]:
        return {"category": category, "us": us, "limit_us": limit, "bound": bound, "where": where, "name": category}

    def side(rows: list[dict[str, Any]], **waits: float) -> dict[str, Any]:
        total = sum(row["us"] for row in rows) + sum(waits.values())
        made = {"rows": rows, "waits": waits, "sum_us": total, "activities": 80.0, "captured": False, "lines": []}
        return made | {"explain": ["model: generate: beams"]}

    ours = side(
        [row(categories.GEMM, 130, 100), row(categories.ELEMENTWISE, 20, 1, "A.forward")], **{HOST: 50, BETWEEN: 20}
    )
    theirs = side([row(categories.GEMM, 200, 100), row(categories.ELEMENTWISE, 90, 1, "Norm.forward")], **{HOST: 900})
    made = {
        "device": "NVIDIA H200",
        "kind": "decode",
        "dtype": "bfloat16",
        "sides": {"original": theirs, "ours": ours},
    }
    return made | changes


LOCK = {
    "transforms": {
        "fuse_rms_norm": {"rewritten": ["Norm.forward"], "skipped": []},
        "fuse_rope": {"rewritten": [], "skipped": [{"site": "A.forward: rotate", "reason": "not_exclusive"}]},
    }
}


def test_advice_is_bounded_and_has_its_reason() -> None:
    found = {each["what"]: each for each in advice.derive(record(), LOCK)}
    assert found.keys() == {HOST, BETWEEN, "tune", "fp8", "skip", "done"}
    assert found[HOST]["most_us"] == 50
    assert "generate: beams" in found[HOST]["why"]
    assert found["tune"]["most_us"] == pytest.approx(30)
    assert found["fp8"]["most_us"] == pytest.approx(30 + 50)
    assert found["skip"]["most_us"] == pytest.approx(19)
    assert found["skip"]["why"] == "fuse_rope: not_exclusive"
    assert found["done"]["text"].startswith("Norm.forward: 90 µs before, now none")
    assert all("at most" in each["text"] for what, each in found.items() if what != "done")


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"dtype": "float32"}, {"fp8"}),
        ({"kind": "prompt"}, {"fp8"}),
        ({"device": "CPU, 1 threads"}, {"fp8", "tune", HOST}),
    ],
)
def test_advice_that_does_not_apply_is_not_given(changes: dict[str, Any], gone: set[str]) -> None:
    assert not gone & {each["what"] for each in advice.derive(record(**changes), LOCK)}


def test_fp8_is_not_advised_twice() -> None:
    lock = {"transforms": {**LOCK["transforms"], "fp8": {"rewritten": ["A"], "skipped": []}}}
    assert "fp8" not in {each["what"] for each in advice.derive(record(), lock)}


def test_what_a_graph_replays_has_no_line_of_its_own() -> None:
    places = Places(torch.nn.Module(), set())
    places.opened(Place("a.py", 7, "f", "m")).__exit__(None, None, None)
    mark = Mark("rewrite line #0", 0, 1000, 1)
    plain = Launch("cudaLaunchKernel", 10, 12, 1, 8)
    trace = Trace(activities=[*replay(1, 100, 2), Activity("k", 300, 310, 0, 8, plain)], marks=[mark])
    found = of_device(trace, places, {})
    assert [origin.place.line if origin.place else None for origin in found] == [None, None, 7]
