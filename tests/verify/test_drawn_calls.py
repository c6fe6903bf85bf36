"""Drawn calls of `generate()` find what is planted, can be repeated, become small, and leave out no field."""

from __future__ import annotations

import random
import shutil
from itertools import islice
from pathlib import Path

import pytest

from rewrite.verify import Options, verify
from rewrite.verify.drawn import call_strategies
from rewrite.verify.drawn.call_arguments import text_of, tokenizer_of
from rewrite.verify.drawn.call_strategies import ALWAYS, ASSISTED, BEAMS, DRAFTS, DRAWS, GIVEN, Source, unknown
from rewrite.verify.drawn.drawn_calls import DrawnCall, Prompt, drawn_call, drawn_prompt
from rewrite.verify.drawn.drawn_comparison import Comparison, Difference
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.runner import settled

from .bugs import Bug
from .copies import generated, plant, upstream
from .drawn_bugs import DRAWN, Of

OPTIONS = Options(quick=True)
MOST, TRIED = 3000, 25
"""Calls that are drawn at most, and those of a kind that are tried, until one shows a bug."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def comparison(package: Path) -> Comparison:
    sides = (loaded_sides.load(loaded_sides.locate(side)) for side in (upstream("llama"), package))
    subject = find_subjects(*sides).main
    variants = small_variants(subject.original, subject.causal, OPTIONS.config)
    return Comparison(Workbench(subject, variants, OPTIONS), variants[0], tried=0)


def first_that_differs(package: Path, of: Of) -> Difference | None:
    with settled(OPTIONS):
        compared = comparison(package)
        seeds = islice((seed for seed in range(MOST) if of(compared.draw(seed))), TRIED)
        return next(compared.differences(seeds), None)


def source(seed: int) -> Source:
    return Source(random.Random(seed), 60, [[5, 6, 7]], [[8, 9, 10, 11]], text_of)


def drawn(seed: int) -> DrawnCall:
    return drawn_call(*drawn_prompt(f"{seed}"), source(seed))


def test_a_seed_is_a_call() -> None:
    calls = [str(drawn(seed)) for seed in range(200)]
    assert calls == [str(drawn(seed)) for seed in range(200)]
    assert len(set(calls)) == 200


def test_every_name_is_drawn() -> None:
    names = {name for seed in range(4000) for call in [drawn(seed)] for name in (*call.settings, *call.given)}
    wanted = {*ALWAYS, *DRAWS, *BEAMS, *DRAFTS, *ASSISTED, *GIVEN}
    assert wanted - names == {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs"}


def test_a_field_without_a_strategy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown() == []
    fewer = {name: value for name, value in call_strategies.ALWAYS.items() if name != "min_length"}
    monkeypatch.setattr(call_strategies, "ALWAYS", fewer)
    assert unknown() == ["min_length"]


def test_a_smaller_call_asks_for_less() -> None:
    call = DrawnCall(Prompt(1, 2, 2, "left"), {"eos_token_id": [4, 5], "do_sample": True}, {"cache": "empty"})
    smaller = list(call.smaller())
    assert call.without("cache") in smaller
    assert call.without("do_sample") in smaller
    assert DrawnCall(Prompt(1, 1, 2, "left"), call.settings, call.given) in smaller
    assert DrawnCall(call.prompt, {**call.settings, "eos_token_id": [5]}, call.given) in smaller


def test_strings_may_begin_and_end_inside_of_tokens() -> None:
    tokenizer = tokenizer_of(500)
    row = [5, 342, 343, 498]
    assert tokenizer.decode(row) == text_of(row)
    assert len(text_of(row)) == 18


def test_the_package_is_its_original(package: Path) -> None:
    with settled(OPTIONS):
        compared = comparison(package)
        assert not list(compared.differences(range(25)))
    assert compared.figures.calls > 20
    assert compared.figures.refused.total() < compared.figures.calls / 2


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "of"), DRAWN, ids=[bug.id for bug, _ in DRAWN])
def test_a_bug_shows_in_calls_of_a_kind(bug: Bug, of: Of, package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "llama"
    shutil.copytree(package, copy)
    assert bug.file is not None
    plant(copy, bug.file, bug.old, bug.new, bug.count)
    found = first_that_differs(copy, of)
    assert found is not None
    print(found)


@pytest.mark.slow
def test_a_verification_asks_some(package: Path, tmp_path: Path) -> None:
    name = "decode loop, calls drawn by seed"
    options = Options(gates=("generation",), checks=(name,), clean_process=False)
    verdict = verify(upstream("llama"), package, options)
    assert verdict.passed, verdict.reason
    (check,) = [check for gate in verdict.gates for check in gate.checks if check.name == name]
    assert check.figures["calls"] > 5
