"""Small models of every kind are found: the smallest configuration, and what the class is fed."""

from __future__ import annotations

import importlib
from typing import ClassVar

import numpy
import pytest
import torch
import transformers

from rewrite.errors import VerificationError
from rewrite.verify.models import configs, inputs, model_inputs
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.sizes import HIDDEN, VOCAB
from rewrite.verify.models.smoke_test import MAX_PARAMETERS, parameter_count
from rewrite.verify.state import checkpoints

KINDS = {
    "bert.BertForMaskedLM": ("input_ids",),
    "apertus.ApertusForCausalLM": ("input_ids",),
    "clip.CLIPModel": ("input_ids", "pixel_values"),
    "dbrx.DbrxForCausalLM": ("input_ids",),
    "dinov2.Dinov2Model": ("pixel_values",),
    "florence2.Florence2ForConditionalGeneration": ("input_ids",),
    "fuyu.FuyuForCausalLM": ("input_ids",),
    "gemma3.Gemma3ForConditionalGeneration": ("input_ids",),
    "gemma3n.Gemma3nForCausalLM": ("input_ids",),
    "git.GitForCausalLM": ("input_ids",),
    "jamba.JambaForCausalLM": ("input_ids",),
    "moshi.MoshiForCausalLM": ("input_ids",),
    "phi.PhiForCausalLM": ("input_ids",),
    "phi4_multimodal.Phi4MultimodalForCausalLM": ("input_ids",),
    "siglip.SiglipVisionModel": ("pixel_values",),
    "t5.T5ForConditionalGeneration": ("input_ids", "decoder_input_ids"),
    "vit.ViTForImageClassification": ("pixel_values",),
    "wav2vec2.Wav2Vec2Model": ("input_values",),
    "whisper.WhisperForConditionalGeneration": ("input_features", "decoder_input_ids"),
    "zamba.ZambaForCausalLM": ("input_ids",),
    "zamba2.Zamba2ForCausalLM": ("input_ids",),
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


class Part:
    def __init__(self, hidden_size=512, pad_token_id=None):
        self.hidden_size, self.pad_token_id = hidden_size, pad_token_id

    def to_dict(self):
        return vars(self)


def test_parts_are_handed_over_as_dicts_where_a_class_reads_them_as_such():
    class Whole:
        def __init__(self, part):
            self.part = Part(**part)

    assert configs._configured(Whole, {"part": Part(64)}).part.hidden_size == 64
    with pytest.raises(TypeError):
        configs._configured(Whole, {"other": 1})


def test_a_part_that_is_absent_by_default_is_made_for_a_model_that_reads_it():
    class Whole:
        sub_configs: ClassVar = {"part": Part}

        def __init__(self, part=None):
            self.part = part

        def to_dict(self):
            return {"part": None}

    found = list(configs._candidates(Whole, {}, []))
    assert found[0].part is None
    assert found[-1].part.hidden_size == 64


def test_the_padding_token_is_set_where_the_class_does_not_declare_it():
    class Whole:
        def to_dict(self):
            return {"vocab_size": 32000}

    assert configs.small_fields(configs._with_padding(Whole()))["pad_token_id"] == 0
    assert "pad_token_id" not in configs.small_fields(Whole().to_dict())


def test_kinds_of_layers_repeat_until_they_fit_the_number_of_layers():
    profile, kinds = {"num_hidden_layers": 4, "n_layer": 4}, {"layers_block_type": ["mamba", "hybrid"]}
    changed = configs._changed(profile, {"num_hidden_layers": 54}, kinds)
    assert changed == {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    assert configs._changed({"head_dim": 8}, {"head_dim": 64}, kinds) == {"head_dim": 8}


def test_a_model_of_a_part_that_does_not_say_so_is_built_and_loaded_as_the_part(tmp_path):
    class Depth(named("csm.CsmDepthDecoderForCausalLM")):
        config_class = named("csm.CsmForConditionalGeneration").config_class

    base = small_variants(Depth, True, {})[0]
    assert type(base.config).__name__ == "CsmDepthDecoderConfig"
    Depth._from_config(base.config).save_pretrained(tmp_path)
    loaded, _ = checkpoints._load(Depth, tmp_path, base)
    assert type(loaded.config).__name__ == "CsmDepthDecoderConfig"


@pytest.mark.parametrize("width", [8, 8192])
def test_a_model_that_reads_a_value_as_it_is_made_is_counted(width):
    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.start = self.scale.detach().item()
            self.projection = torch.nn.Linear(width, width, bias=False)

        @classmethod
        def _from_config(cls, config):
            return cls()

    count = parameter_count(Reading, None)
    assert count == width * width + 1


def test_a_field_that_counts_steps_is_no_epsilon():
    fields = configs.small_fields({"rms_norm_eps": 1e-6, "num_inference_steps": 10})
    assert fields == {"rms_norm_eps": 1e-3}


def test_every_vocabulary_is_small_whatever_it_is_called():
    large = {"vocab_size": 201024, "unpadded_vocab_size": 200058, "mel_vocab_size": 256, "entity_vocab_size": None}
    small = {"vocab_size": VOCAB, "unpadded_vocab_size": VOCAB, "mel_vocab_size": VOCAB}
    assert configs.small_fields(large) == small
    assert configs.small_fields({"label_vocab_size": 5}) == {}  # smaller than any that this makes
    assert all(map(configs._is_essential, small))


def test_a_part_that_says_how_wide_another_is_agrees_with_it():
    class Vision(transformers.PreTrainedConfig):
        hidden_size: int = 1024
        text_hidden_size: int = 4608

    class Whole(transformers.PreTrainedConfig):
        sub_configs: ClassVar = {"text_config": Part, "vision_config": Vision}

        def __init__(self, text_config=None, vision_config=None, **kwargs):
            super().__init__(**kwargs)
            self.text_config, self.vision_config = text_config or Part(), vision_config or Vision()
            if text_config and self.vision_config.text_hidden_size != text_config.hidden_size:
                raise ValueError("the widths differ")

    problems = []
    found = next(configs._candidates(Whole, configs._nested_fields(Whole), problems))
    assert not problems
    assert found.vision_config.text_hidden_size == found.text_config.hidden_size == HIDDEN


@pytest.mark.parametrize("rotated", ["head_dim", "qk_rope_head_dim"])
def test_sections_of_a_rotary_embedding_fill_half_of_what_is_rotated(rotated):
    defaults = {rotated: 128, "rope_parameters": {"mrope_section": [8, 12, 12]}}
    section = configs._rope_fields(Part, defaults)["rope_parameters"]["mrope_section"]
    assert len(section) == 3
    assert 2 * sum(section) == configs.small_fields(defaults)[rotated]


def test_widths_by_stage_are_divided_by_one_power_of_two():
    lists = {
        "embed_dim": [128, 256, 512, 1024],
        "conv_dim": (512,) * 7,
        "hidden_sizes": [96, 192, 384, 768],
        "neck_hidden_sizes": [16, 32, 512],
        "odd_channels": [333, 512],
        "hidden_size": 4096,
        "eos_token_id": [1024, 2048],
        "image_size": [512, 512],
        "out_channels": [None, 512],
    }
    narrow = {"embed_dim": [16, 32, 64, 128], "conv_dim": [128] * 7, "hidden_sizes": [24, 48, 96, 192]}
    assert configs._narrow_fields(lists) == narrow


def test_lists_of_widths_stay_where_no_model_runs_otherwise():
    class Whole:
        def __init__(self, out_channels=(512, 512)):
            self.out_channels = out_channels

        def to_dict(self):
            return vars(self)

    assert [one.out_channels for one in configs._candidates(Whole, {}, [])] == [[128, 128], (512, 512), (512, 512)]


def test_what_numpy_draws_is_seeded_and_put_back():
    numpy.random.seed(1)
    before = numpy.random.get_state()[1].tolist()
    with inputs.random_state_kept():
        inputs.seed_all(7)
        first = numpy.random.rand()
        inputs.seed_all(7)
        assert numpy.random.rand() == first
    assert numpy.random.get_state()[1].tolist() == before


def test_a_policy_is_given_its_state_and_noise_in_the_sizes_of_its_configuration():
    class Policy(transformers.PreTrainedConfig):
        max_state_dim: int = 6
        max_action_dim: int = 4
        chunk_size: int = 8

    made = model_inputs.make(("state", "noise"), Policy(), 2, 0, torch.float32)
    assert {name: tuple(value.shape) for name, value in made.items()} == {"state": (2, 6), "noise": (2, 8, 4)}
