"""Where roundings to fp32 inside a model are larger than usual, they are measured; nothing else is let through."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from rewrite.verify.generation.loop_scenarios import Session
from rewrite.verify.judging.compare import DRAWS, Mismatch, NotRun, Observations, Triple, near_exact
from rewrite.verify.judging.fp32_free_reference import unrounded
from rewrite.verify.judging.requested import Record
from rewrite.verify.judging.tolerances import bound
from rewrite.verify.models.configs import Variant
from rewrite.verify.models.inputs import random_state_kept

TRUTH = torch.randn(4, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 4, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def off(by: float, direction: int) -> Observations:
    return {"logits": TRUTH + by * NOISE[direction]}


def exact() -> Observations:
    return {"logits": TRUTH}


def test_as_far_from_the_truth_as_the_original_passes() -> None:
    with pytest.raises(Mismatch, match="relative RMS error"):
        near_exact(off(4e-7, 0), off(4e-7, 1))
    figures = near_exact(off(4e-7, 0), off(4e-7, 1), unrounded=exact)
    assert figures["rms"] > bound("fp64 rms")
    assert figures["rms ratio of the roundings to fp32"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("own", "new"), [(4e-7, 8.5e-7), (1e-8, 4.5e-7), (0.0, 4.5e-7), (4.5e-7, 1e-7), (4.5e-7, 0.0)]
)
def test_further_from_the_truth_than_the_original_or_closer_fails(own: float, new: float) -> None:
    with pytest.raises(Mismatch, match="the original's own roundings to fp32 make"):
        near_exact(off(own, 0), off(new, 1), unrounded=exact)


def test_a_model_that_multiplies_roundings_may_be_as_far_off_as_the_original_makes_it() -> None:
    with pytest.raises(Mismatch, match="relative error"):
        near_exact(off(3e-6, 0), off(3e-6, 1))
    assert near_exact(off(3e-6, 0), off(3e-6, 1), unrounded=exact)["max"] > bound("fp64 max")
    for own, new in ((1e-7, 4e-6), (0.0, 4e-6), (1e-4, 1e-4)):  # the last: more than fp32 makes of anything
        with pytest.raises(Mismatch, match="relative error"):
            near_exact(off(own, 0), off(new, 1), unrounded=exact)


def test_gradients_may_be_as_far_off_as_the_original_s_own_roundings_make_them() -> None:
    def compared(own: float, new: float) -> float:
        return float(near_exact(off(own, 0), off(new, 1), "gradient max", exact)["max"])

    with pytest.raises(Mismatch, match="relative error"):
        near_exact(off(3e-5, 0), off(3e-5, 1), "gradient max")
    assert compared(3e-5, 3e-5) > bound("gradient max")
    assert compared(3e-5, 0.0) > bound("gradient max")  # nearer the truth than the original
    for own, new in ((0.0, 3e-5), (3e-6, 5e-5), (1e-3, 1e-3)):  # the last: more than fp32 makes of a gradient
        with pytest.raises(Mismatch, match="relative error"):
            compared(own, new)


def test_roundings_of_one_tensor_excuse_no_other() -> None:
    truth = {"logits": TRUTH, "hidden": TRUTH}
    expected = {"logits": TRUTH + 3e-6 * NOISE[0], "hidden": TRUTH}
    with pytest.raises(Mismatch, match="relative error"):
        near_exact(expected, {**expected, "hidden": TRUTH + 3e-6 * NOISE[1]}, unrounded=lambda: truth)


def drawn(own: float, new: float, asked: list[int]) -> Triple:
    """The truth and both sides on other inputs, each with noise of its own."""
    generator = torch.Generator().manual_seed(len(asked))
    noise = torch.randn(2, 4, 500, dtype=torch.float64, generator=generator)
    return {"logits#3": TRUTH}, {"logits#3": TRUTH + own * noise[0]}, {"logits#3": TRUTH + new * noise[1]}


@pytest.mark.parametrize(("own", "new", "passes"), [(4e-7, 4e-7, True), (4e-7, 9e-7, False), (4e-7, 1e-7, False)])
def test_further_off_in_one_draw_is_judged_by_many(own: float, new: float, passes: bool) -> None:
    asked: list[int] = []

    def more(number: int) -> Triple:
        asked.append(number)
        if number == 5:
            raise NotRun("not finite")
        return drawn(own, new, asked)

    expected = pytest.raises(Mismatch, match="roundings to fp32 make") if not passes else contextlib.nullcontext()
    with expected:
        near_exact(off(4e-7, 0), off(8.5e-7 if new > 3e-7 else 1e-7, 1), unrounded=exact, more=more)
    assert asked == list(range(1, DRAWS))


def test_a_truth_that_does_not_run_proves_nothing() -> None:
    def fails() -> Observations:
        raise NotRun("float expected")

    with pytest.raises(Mismatch, match="float expected"):
        near_exact(off(4e-7, 0), off(4e-7, 1), unrounded=fails)


def test_every_way_of_asking_for_fp32_is_widened() -> None:
    x = TRUTH
    wanted = torch.softmax(x, dim=-1)
    with unrounded():
        found = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.type(torch.float32),
            torch.softmax(x, dim=-1, dtype=torch.float32),
            F.softmax(x, dim=-1, dtype=torch.float32),
            x.softmax(-1, torch.float32),
        ]
        made = torch.zeros(2, dtype=torch.float32)
    assert all(torch.equal(value, x) for value in found[:4])
    assert all(torch.equal(value, wanted) for value in found[4:])
    assert made.dtype == torch.float64
    assert x.float().dtype == torch.float32


def test_weights_that_stay_in_fp32_are_widened_in_products() -> None:
    router = torch.nn.Linear(500, 3, bias=False, dtype=torch.float32)
    with unrounded(), torch.no_grad():
        found = [router(TRUTH.float()), TRUTH.float() @ router.weight.T, torch.matmul(TRUTH, router.weight.T)]
    wanted = TRUTH @ router.weight.double().T
    assert all(torch.equal(value, wanted) for value in found)
    with pytest.raises(RuntimeError):
        router(TRUTH)


def test_a_model_that_captures_is_made_anew_without_roundings() -> None:
    subject = SimpleNamespace(name="Model", accepts=lambda name: False)
    talk = Session(cast(Any, SimpleNamespace(record=Record(), subject=subject)), Variant("base", None), "float64")
    talk._pair = cast(Any, "with roundings")
    pairs: list[object] = []

    def run(asked: Session) -> None:
        pairs.append(asked._pair)
        asked._pair = cast(Any, "its own")
        both = (off(4e-7, 0), off(4e-7, 1)) if len(pairs) == 1 else (exact(), exact())
        asked._compared.append(both)
        near_exact(*both)

    figures = talk.about(run)
    assert figures["without roundings to fp32"] == 1
    assert pairs == ["with roundings", None]
    assert talk._pair is None


@pytest.mark.parametrize(("others", "passes"), [(1e-7, True), (9e-7, False)])
def test_one_text_is_a_sample_of_a_few_tokens(others: float, passes: bool) -> None:
    subject = SimpleNamespace(name="Model", accepts=lambda name: False)
    talk = Session(cast(Any, SimpleNamespace(record=Record(), subject=subject)), Variant("base", None), "float64")
    draws: list[int] = []

    def run(asked: Session) -> None:
        draws.append(asked._draw)
        exactly = asked._figures.get("without roundings to fp32") == 1
        both = (exact(), exact()) if exactly else (off(3e-7, 0), off(9e-7 if not asked._draw else others, 1))
        asked._compared.append(both)
        if not asked._draw:
            near_exact(*both)

    expected = pytest.raises(Mismatch, match="own roundings to fp32 make") if not passes else contextlib.nullcontext()
    with expected:
        talk.about(run)
    assert draws[:2] == [0, 0]
    assert (1 in draws, talk._draw) == (True, 0)


def test_random_state_is_kept_without_a_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail("a GPU's state is asked for"))
    before = torch.get_rng_state()
    with random_state_kept():
        torch.default_generator.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)
