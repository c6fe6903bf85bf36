"""Logits processors as a graph holds them: what they forbid is what transformers' own forbid."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from rewrite.runtime.decode.sampling import graph_forms


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
