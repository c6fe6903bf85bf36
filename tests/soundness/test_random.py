"""Whatever is rewritten in random modules computes what it did: `--examples 3000` for the proof, a few otherwise."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from rewrite.transforms import select
from soundness.case import Case
from soundness.compare import IN_TRAINING, all_transforms, examine_quickly
from soundness.places import PLACES

SAME_EACH_TIME = 100
"""Up to this number of examples they are the same in every run; beyond, every run draws others."""


@pytest.mark.parametrize("name", sorted(PLACES))
def test_random_modules_compute_what_they_did(name: str, examples: int) -> None:
    transforms = select((name, *PLACES[name].also))
    rewritten = 0

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=examples <= SAME_EACH_TIME,
    )
    @given(PLACES[name].cases)
    def compute_what_they_did(case: Case) -> None:
        nonlocal rewritten
        verdict = examine_quickly(case, transforms, name)
        text = verdict.rewritten.text if verdict.rewritten is not None else ""
        assert not verdict.difference, f"{verdict.difference}\n{case.text}\n=>\n{text}"
        rewritten += name in verdict.sites

    compute_what_they_did()
    assert rewritten > examples // 50, "nothing was at stake"


def test_every_transform_has_a_generator() -> None:
    assert {transform.name for transform in (*all_transforms(), *all_transforms(IN_TRAINING))} == {*PLACES}
