"""What is timed is what the original can do: what it cannot is no fault of the rewritten file."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaModel

from rewrite.verify import Options
from rewrite.verify.generation.latency import latency_checks
from rewrite.verify.judging.checks import run_check
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import Subject


class NoCache(LlamaModel):  # type: ignore[misc]
    """An encoder, as far as its arguments tell."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class Fails(LlamaModel):  # type: ignore[misc]
    """A prompt of the length that is timed is too long for it."""

    def forward(self, input_ids: Any = None, use_cache: Any = None) -> Any:
        if input_ids.shape[1] > 30:
            raise IndexError("no position behind 30")
        return super().forward(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize(("cls", "status"), [(NoCache, "passed"), (Fails, "not run")])
def test_a_prefill_is_timed_as_far_as_the_original_goes(cls: Any, status: str) -> None:
    bench = Workbench(Subject(cls, cls, False), small_variants(cls, False, {})[:1], Options(seeds=1))
    (check,) = latency_checks(bench)
    result = run_check(check)
    assert (result.status, "raises IndexError" in result.detail) == (status, cls is Fails)
