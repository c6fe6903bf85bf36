"""Which window a decode step takes, by what the masks of the model hide and what attention is told."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.windows import agreed_window, stacked_in
from rewrite.analysis.terms.computation import Run
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.module import Module

FILE = """
from torch import nn
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.masking_utils import create_sliding_window_causal_mask as make_windowed


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        self.config = config
        self.layer_idx = layer_idx
        layer_type = config.layer_types[layer_idx] if hasattr(config, "layer_types") else None
        self.is_sliding = layer_type == "sliding_attention"
        self.always = getattr(config, "sliding_window", None)
        self.by_type = config.sliding_window if self.is_sliding else None
        self.switched = config.sliding_window if config.use_sliding_window and self.is_sliding else None
        self.other = config.other_window


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        self.self_attn = Attention(config, layer_idx)


class Model(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([Layer(config, i) for i in range(2)])

    def forward(self, hidden_states):
{masks}
        for i, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, attention_mask={mask})
        return hidden_states
"""
TYPES = """\
        causal_mask_mapping = {
            "full_attention": create_causal_mask(),
            "sliding_attention": create_sliding_window_causal_mask(),
        }"""
CHOICE = """\
        make = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        mask = make()"""
TURNED = """\
        window = self.config.sliding_window
        mask = make_windowed() if window is not None else create_causal_mask()"""
EXCHANGED = """\
        causal_mask_mapping = {
            "full_attention": create_sliding_window_causal_mask(),
            "sliding_attention": create_causal_mask(),
        }"""
BY_TYPE = (TYPES, "causal_mask_mapping[self.config.layer_types[i]]")
KEPT = (TYPES + "\n        kinds = self.config.layer_types", "causal_mask_mapping[kinds[i]]")
WRONG_TYPE = (EXCHANGED, "causal_mask_mapping[self.config.layer_types[i]]")
SOME_TYPE = (TYPES, "causal_mask_mapping[self.types[i]]")
ALWAYS = (CHOICE, "mask")
NEVER = ("        mask = create_causal_mask()", "mask")
CHUNKED = ("        mask = create_chunked_causal_mask()", "mask")
DERIVED = 'self.config.sliding_window if self.config.layer_types[self.layer_idx] == "sliding_attention" else None'


@pytest.mark.parametrize(
    ("masks", "told", "expected"),
    [
        (NEVER, "None", "None"),
        (NEVER, "self.always", None),
        (NEVER, "self.by_type", None),
        (ALWAYS, "self.always", "self.always"),
        (ALWAYS, "self.config.sliding_window", "self.config.sliding_window"),
        (ALWAYS, "None", "self.config.sliding_window"),
        (ALWAYS, "self.by_type", None),
        (ALWAYS, "self.other", None),
        (BY_TYPE, "self.by_type", "self.by_type"),
        (BY_TYPE, "self.always if self.is_sliding else None", "self.always if self.is_sliding else None"),
        (BY_TYPE, "self.switched", DERIVED),
        (BY_TYPE, "self.other", DERIVED),
        ((TURNED, "mask"), "self.always", "self.always"),
        ((TURNED, "mask"), "None", "self.config.sliding_window"),
        (KEPT, "self.switched", DERIVED),
        (WRONG_TYPE, "self.by_type", None),
        (SOME_TYPE, "self.by_type", "self.by_type"),
        (SOME_TYPE, "self.switched", None),
        (CHUNKED, "None", None),
    ],
)
def test_the_window_is_the_masks(masks, told, expected):
    module = Module(cst.parse_module(FILE.format(masks=masks[0], mask=masks[1])))
    attention, layer = module.classes["Attention"], module.classes["Layer"]
    term = NONE if told == "None" else Run(module, attention, 0).expression(cst.parse_expression(told), {})
    found = agreed_window(term, Term("attribute", (), "layer_idx"), attention, stacked_in(layer, module), module)
    assert (None if found is None else source(found, module)) == expected
