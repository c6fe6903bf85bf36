"""Logits processors as a graph holds them: what they forbid is what transformers' own forbid."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    AlternatingCodebooksLogitsProcessor,
    BarkEosPrioritizerLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from hf_rewrite_runtime.sampling.sampling import graph_forms


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_are_forbidden_as_by_the_processors(size):
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(5, (4, 40), generator=generator)
    for length in (1, 2, 3, 11, 40):
        for rows, width in ((2, 14), (4, 28), (4, 1)):
            found = [
                NoRepeatNGramLogitsProcessor(size),
                EncoderNoRepeatNGramLogitsProcessor(size, text[:rows, :width]),
            ]
            scores = torch.randn(4, 6, generator=generator)
            forms = graph_forms(found, scores.device, length)
            for processor, form in zip(found, forms, strict=True):
                expected = processor(text[:, :length], scores)
                assert torch.equal(form.run(text, scores, torch.tensor([length])), expected)


def test_codebooks_take_turns_and_an_end_that_is_likely_comes_first():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(11, (3, 9), generator=generator)
    for start in (3, 4):
        found = [AlternatingCodebooksLogitsProcessor(start, 2, 4), BarkEosPrioritizerLogitsProcessor([1, 6], 0.3)]
        for length in (4, 5, 6):
            scores = 2 * torch.randn(3, 11, generator=generator)
            forms = graph_forms(found, scores.device, start)
            for processor, form in zip(found, forms, strict=True):
                expected = processor(text[:, :length], scores)
                assert torch.equal(form.run(text, scores, torch.tensor([length])), expected)
                each = form.run(text, scores, torch.tensor([[length]] * 3))
                assert torch.equal(each, expected)
