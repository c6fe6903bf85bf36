"""Which fields of a configuration the verifier sees a model read, what it gives them instead, and what it reports."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest

from rewrite.verify import Options, render, summary
from rewrite.verify.configuration.reader import FieldsRead, fields_read, read_in
from rewrite.verify.configuration.values import Choices, changed, choices
from rewrite.verify.judging.verdict import ConfigField, Verdict

SOURCE = """
class Layer:
    def __init__(self, config, index):
        text_config = config.get_text_config()
        own = copy.deepcopy(config)
        self.config = config
        self.size = config.hidden_size
        self.window = getattr(config, "window", None)
        self.depth = own.depth
        self.theta = config.rope_parameters["rope_theta"]
        self.share = config.rope_parameters[self.kind].get("partial_rotary_factor", 1.0)
        self.classes = config.get_text_config().classes
        config.written = 3

    def forward(self, x, layer):
        if self.config.kind == "wide" or layer.not_a_field:
            return self.text_config._private
        return {"kind": x} if hasattr(config, "flag") else None
"""


def test_fields_are_read_from_every_way_of_asking() -> None:
    found = read_in(ast.parse(SOURCE))
    assert found.names == {
        "get_text_config", "hidden_size", "window", "depth", "rope_parameters", "rope_parameters.rope_theta",
        "rope_parameters.partial_rotary_factor", "classes", "kind", "flag",
    }  # fmt: skip
    assert found.strings["kind"] == {"wide"}


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, rms_norm_eps=1e-3
    )


def by_field(config: Any, *names: str) -> dict[str, Choices]:
    return {one.field: one for one in choices(config, FieldsRead({*names}), 17, ())}


def test_what_a_model_imports_is_read_too() -> None:
    from transformers import LlamaForCausalLM, MambaForCausalLM

    names = fields_read(LlamaForCausalLM).names
    assert {"rms_norm_eps", "attention_bias", "rope_parameters.rope_theta"} <= names  # in the file
    assert {"tie_word_embeddings", "initializer_range"} <= names  # in the class it derives from
    assert "rope_parameters.low_freq_factor" in names  # in a function that it imports by way of a table
    assert "attention_bias" not in fields_read(MambaForCausalLM).names


def test_a_model_does_not_read_what_only_another_class_reads() -> None:
    from transformers import WhisperConfig, WhisperForCausalLM

    config = WhisperConfig(d_model=16, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2, vocab_size=64)
    config.pad_token_id = 0
    assert "encoder_attention_heads" not in fields_read(WhisperForCausalLM, WhisperForCausalLM(config)).names
    assert "encoder_attention_heads" in fields_read(WhisperForCausalLM).names


def test_values_are_away_from_neutral(llama: Any) -> None:
    found = by_field(llama, *llama.to_dict(), "rope_parameters.rope_theta")
    texts = {name: {variation.text for variation in one.variations} for name, one in found.items()}
    assert texts["rms_norm_eps"] == {"0.01", "1e-06"}
    assert texts["num_key_value_heads"] == {"1", "4", "4 of 8", "None"}
    assert texts["attention_bias"] == {"True"}
    assert texts["pad_token_id"] == {"17"}
    assert texts["rope_parameters.rope_type"] == {"linear", "dynamic", "yarn", "llama3", "longrope"}
    assert "silu" not in texts["hidden_act"]
    assert not texts.keys() & {"model_type", "architectures", "eos_token_id"}


def test_dropout_shows_in_training_only(llama: Any) -> None:
    found = by_field(llama, "attention_dropout", "rms_norm_eps")
    assert [variation.trains for variation in found["attention_dropout"].variations[:1]] == [True]
    assert not any(variation.trains for variation in found["rms_norm_eps"].variations)


def test_a_change_leaves_the_configuration_alone(llama: Any) -> None:
    before = copy.deepcopy(llama.to_dict())
    for one in by_field(llama, *llama.to_dict()).values():
        for variation in one.variations:
            try:
                other = changed(llama, (variation,))
            except Exception:  # a type that the configuration does not take
                continue
            assert other.to_dict() != before, variation.name
    assert llama.to_dict() == before


def test_lists_are_as_long_as_there_are_layers() -> None:
    from transformers import Gemma2Config

    config = Gemma2Config(num_hidden_layers=2)
    layers = by_field(config, "num_hidden_layers", "layer_types")["num_hidden_layers"].variations[0]
    other = changed(config, (layers,))
    assert other.num_hidden_layers == len(other.layer_types) == 3


def test_the_verdict_says_which_fields_kept_their_values() -> None:
    fields = (ConfigField("rms_norm_eps", ("0.01",)), ConfigField("return_dict", (), "the original raises"))
    verdict = Verdict(True, None, None, "Any", (), None, "", {}, Options(reach=False), 1.0, config_fields=fields)
    assert "not verified: 1 of 2 config fields" in summary(verdict)
    assert "return_dict: the original raises" in render(verdict)
    assert "varied      rms_norm_eps: 0.01" in render(verdict, verbose=True)
    assert verdict.to_json()["config_fields"][1]["reason"] == "the original raises"


def test_heads_that_follow_from_the_width_get_one_of_their_own() -> None:
    """Otherwise the projections of attention are square, and their sides can change places."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    assert {"head_dim": 32} in [one.changes for one in by_field(config, "head_dim")["head_dim"].variations]


def test_none_is_never_chosen_of_several() -> None:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(n_group=1, topk_group=1)
    values = [variation.changes["topk_group"] for variation in by_field(config, "topk_group")["topk_group"].variations]
    assert values
    assert 0 not in values


def test_a_size_that_is_not_given_gets_a_number() -> None:
    from transformers import Olmo2Config

    config = Olmo2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    found = by_field(config, "head_dim", "num_key_value_heads", "num_attention_heads", "hidden_size")
    values = [variation.changes.get("head_dim") for variation in found["head_dim"].variations]
    assert values[:2] == [8, 24]
    assert True not in values
