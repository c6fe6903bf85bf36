"""Whatever is rewritten computes what it computed before: odd but legal modules, one by one."""

from __future__ import annotations

import pytest

from soundness.case import Case, cases
from soundness.compare import IN_TRAINING, all_transforms, examine

EVERY = {transform.name for transform in (*all_transforms(), *all_transforms(IN_TRAINING))}
CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_computes_what_it_did(case: Case) -> None:
    verdict = examine(case, all_transforms(case.transforms))
    assert verdict.original[0].raised == case.raises
    text = verdict.rewritten.text if verdict.rewritten is not None else case.text
    assert not verdict.difference, f"{verdict.difference}\nby {', '.join(verdict.sites)}\n{text}"
    assert {*_listed(case.must_rewrite)} <= {*verdict.sites}, text
    assert {*_listed(case.must_not_rewrite)}.isdisjoint(verdict.sites), text


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_transform_has_a_harmless_twin() -> None:
    assert {name for case in CASES for name in _listed(case.must_rewrite)} >= EVERY


def _listed(names: str) -> list[str]:
    return [name for name in names.split(", ") if name]
