"""Sub-models that a file builds through an Auto class."""

import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaPreTrainedModel

from hf_rewrite_runtime.loading.auto import from_config

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class LlamaModel(LlamaPreTrainedModel):
    """Has the name of the class that AutoModel picks for the config."""

    def __init__(self, config, flag=False):
        super().__init__(config)
        self.flag = flag


@pytest.mark.parametrize("call", [lambda auto, c, m: from_config(auto, c, module=m), None])
def test_the_class_of_the_file_is_built_however_the_config_is_passed(call):
    call = call or (lambda auto, c, m: from_config(auto, config=c, module=m, attn_implementation="eager"))
    assert type(call(AutoModel, LlamaConfig(**SMALL), __name__)) is LlamaModel


def test_another_file_gets_the_original():
    with torch.device("meta"):
        built = from_config(AutoModel, LlamaConfig(**SMALL), module="tests_without_such_a_class")
    assert type(built).__module__ == "transformers.models.llama.modeling_llama"
