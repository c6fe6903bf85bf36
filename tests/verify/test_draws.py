"""A low-precision error beyond its bound is judged over many draws: chance goes, what is lost each time stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from rewrite.verify.judging.compare import DRAWS, Mismatch, NotRun
from rewrite.verify.judging.low_precision_bound import FEW_DRAWS, Runs, compare, compare_draws

HEADS, DIM, TOKENS, WIDTH = 4, 16, 160, 64
LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps
Rotary = Callable[[Tensor, Tensor, Tensor], Tensor]
Softmax = Callable[[Tensor], Tensor]


def halves(x: Tensor) -> Tensor:
    return torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)


def rounded_each(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + halves(x) * sin


def rounded_once(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rounded_each(x.double(), cos.double(), sin.double()).to(x.dtype)


def rounded_again(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """There, back and there again: two roundings more than needed."""
    return rounded_each(rounded_each(rounded_each(x, cos, sin), cos, -sin), cos, sin)


def in_fp32(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.float32 if scores.dtype is LOW else torch.float64).to(scores.dtype)


def summed_in_16_bits(scores: Tensor) -> Tensor:
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(powers[..., :1])
    for column in powers.unbind(-1):
        total = total + column[..., None]
    return powers / total


def attention(x: Tensor, seed: int, rotary: Rotary, softmax: Softmax, scale: float = 1.0) -> dict[str, Tensor]:
    """Weights and output of a causal attention with rotary positions, in the dtype of `x` [tokens, width]."""
    generator = torch.Generator().manual_seed(seed)
    weights = [(1.5 * WIDTH**-0.5 * torch.randn(WIDTH, WIDTH, generator=generator)).to(LOW) for _ in range(3)]
    query, key, value = ((x @ one.to(x.dtype).T).view(-1, HEADS, DIM).transpose(0, 1) for one in weights)
    angles = torch.arange(TOKENS)[:, None] * 1e4 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([part, part], -1).to(LOW).to(x.dtype) for part in (angles.cos(), angles.sin()))
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    scores = query @ key.transpose(1, 2) * (scale * DIM**-0.5)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    found = softmax(scores.masked_fill(hidden, torch.finfo(x.dtype).min))
    return {"output": found @ value, "weights": found}


def draws(
    seed: int, size: float, own: Rotary, rotary: Rotary, softmax: Softmax = in_fp32, scale: float = 1.0
) -> Callable[[int], Runs]:
    """Hidden states of a size, another number another draw; our side has its own rotary embedding and softmax."""

    @functools.cache
    def draw(number: int) -> Runs:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        x = (size * torch.randn(TOKENS, WIDTH, generator=generator)).to(LOW)
        truth = attention(x.double(), seed, rounded_each, in_fp32)
        return Runs(truth, attention(x, seed, own, in_fp32), attention(x, seed, rotary, softmax, scale))

    return draw


def ratio(draw: Callable[[int], Runs], number: int) -> float:
    """Our error over the original's in one draw alone."""
    own, new = (
        float((side["weights"].double() - draw(number).truth["weights"]).square().sum().sqrt())
        for side in (draw(number).original, draw(number).rewritten)
    )
    return new / own


PAIRS = [(rounded_once, rounded_each), (rounded_each, rounded_once)]


@pytest.mark.parametrize(("own", "new"), PAIRS)
@pytest.mark.parametrize("seed", range(4))
def test_of_two_good_roundings_neither_is_blamed(own: Rotary, new: Rotary, seed: int) -> None:
    compare_draws(draws(seed, 8.0, own, new), EPS, routed=False)


def test_a_single_draw_would_blame_one_of_them() -> None:
    draw = draws(0, 8.0, rounded_once, rounded_each)
    found = [ratio(draw, number) for number in range(DRAWS)]
    assert max(found) > 1.25
    worst = found.index(max(found))
    order = [worst, *(number for number in range(DRAWS) if number != worst)]
    runs = draw(worst)
    with pytest.raises(Mismatch, match="error"):
        compare(runs.truth, runs.original, runs.rewritten, EPS, routed=False)
    assert compare_draws(lambda number: draw(order[number]), EPS, routed=False)["draws"] == DRAWS


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("size", "new", "softmax", "scale"),
    [
        (1.0, rounded_again, in_fp32, 1.0),
        (8.0, rounded_again, in_fp32, 1.0),
        (0.5, rounded_once, in_fp32, 1.01),
        (0.5, rounded_once, summed_in_16_bits, 1.0),
    ],
    ids=["rotary rounded again", "the same, large", "scores off by 1%", "softmax summed in 16 bits"],
)
def test_what_is_lost_each_time_is_found(size: float, new: Rotary, softmax: Softmax, scale: float, seed: int) -> None:
    with pytest.raises(Mismatch, match="draws"):
        compare_draws(draws(seed, size, rounded_once, new, softmax, scale), EPS, routed=False)


def noise(factor: float, asked: list[int]) -> Callable[[int], Runs]:
    def draw(number: int) -> Runs:
        asked.append(number)
        generator = torch.Generator().manual_seed(number)
        truth, own, new = (torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in range(3))
        return Runs({"logits": truth}, {"logits": truth + 0.05 * own}, {"logits": truth + factor * 0.05 * new})

    return draw


@pytest.mark.parametrize(("factor", "count"), [(1.0, 1), (1.5, DRAWS), (4.0, FEW_DRAWS)])
def test_no_more_is_drawn_than_is_needed(factor: float, count: int) -> None:
    asked: list[int] = []
    with nullcontext() if count == 1 else pytest.raises(Mismatch, match=f"{count} draws"):
        compare_draws(noise(factor, asked), EPS, routed=False)
    assert asked == list(range(count))


def test_other_outputs_are_no_matter_of_chance() -> None:
    asked: list[int] = []

    def draw(number: int) -> Runs:
        runs = noise(1.0, asked)(number)
        return Runs(runs.truth, runs.original, {**runs.rewritten, "more": runs.truth["logits"]})

    with pytest.raises(Mismatch, match="unexpected"):
        compare_draws(draw, EPS, routed=False)
    assert asked == [0]


def test_a_draw_that_the_original_does_not_run_is_left_out() -> None:
    def draw(number: int) -> Runs:
        if number % 2:
            raise NotRun("not finite")
        return noise(1.5, [])(number)

    with pytest.raises(Mismatch, match=f"{DRAWS // 2} draws"):
        compare_draws(draw, EPS, routed=False)
    with pytest.raises(NotRun):
        compare_draws(lambda number: draw(1), EPS, routed=False)
