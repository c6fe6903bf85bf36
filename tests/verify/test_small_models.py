"""Small models of every kind are found: the smallest configuration, and what the class is fed."""

from __future__ import annotations

import importlib

import pytest

from rewrite.errors import VerificationError
from rewrite.verify.configs import MAX_PARAMETERS, small_variants

KINDS = {
    "bert.BertForMaskedLM": ("input_ids",),
    "clip.CLIPModel": ("input_ids", "pixel_values"),
    "dbrx.DbrxForCausalLM": ("input_ids",),
    "dinov2.Dinov2Model": ("pixel_values",),
    "gemma3.Gemma3ForConditionalGeneration": ("input_ids",),
    "gemma3n.Gemma3nForCausalLM": ("input_ids",),
    "jamba.JambaForCausalLM": ("input_ids",),
    "siglip.SiglipVisionModel": ("pixel_values",),
    "t5.T5ForConditionalGeneration": ("input_ids", "decoder_input_ids"),
    "vit.ViTForImageClassification": ("pixel_values",),
    "wav2vec2.Wav2Vec2Model": ("input_values",),
    "whisper.WhisperForConditionalGeneration": ("input_features", "decoder_input_ids"),
}


def named(name):
    folder, cls = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_small_model_is_found(name):
    model_class = named(name)
    base = small_variants(model_class, name.endswith("CausalLM"), {})[0]
    model = model_class._from_config(base.config)
    assert base.inputs == KINDS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) < MAX_PARAMETERS


def test_a_class_that_does_not_run_says_why():
    class Broken(named("llama.LlamaForCausalLM")):
        def forward(self, input_ids):
            raise RuntimeError("no kernel for this")

    with pytest.raises(VerificationError, match=r"Broken runs \(RuntimeError: no kernel for this\)"):
        small_variants(Broken, True, {})
