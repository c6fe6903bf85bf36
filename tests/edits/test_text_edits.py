"""Each edit finds its place where layers have a method for a step, and where `forward` is all there is."""

from __future__ import annotations

import ast

import pytest

from .text_edits import EDITS, NoPlace

HEAD = """\
from collections.abc import Callable

import torch
from torch import nn


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    weights = nn.functional.dropout(scores(query, key) * scaling, p=dropout, training=module.training)
    return weights @ value, weights


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act_fn = ACT2FN[config.hidden_act]

    {mlp}


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.scaling = self.head_dim**-0.5

    {attention}


class Layer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)

    {layer}


class Model(PreTrainedModel):
    _no_split_modules = ["Layer"]

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])

    def forward(self, hidden_states, attention_mask, cache=None, **kwargs):
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, cache=cache, **kwargs)
        return hidden_states
"""
TWO_PATHS = {
    "mlp": """\
    def forward(self, x):
        gate, up = packed_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated_activation(gate, up, self.act_fn))

    def decode_residual(self, x, norm, residual):
        x = gated_linear(x, (self.gate_proj, self.up_proj), self.act_fn, norm=norm)
        return linear(x, self.down_proj, residual=residual)
""",
    "attention": """\
    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
        query, key, value = packed_linear(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        attended, weights = native_gqa(interface)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.p if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        attended = self.o_proj(attended)
        return attended, weights

    def decode_residual(self, hidden_states, norm, residual, position_embeddings, cache):
        query = qkv_step(hidden_states, (self.q_proj, self.k_proj, self.v_proj), position_embeddings, cache, norm=norm)
        attended = decode_attention(query, cache, self.layer_idx, scaling=self.scaling)
        return linear(attended, self.o_proj, residual=residual)
""",
    "layer": """\
    def forward(self, hidden_states, attention_mask=None, cache=None, position_embeddings=None, **kwargs):
        if is_decode_step(cache):
            return self.decode(hidden_states, position_embeddings, cache)
        residual = hidden_states
        hidden_states, _ = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, attention_mask)
        hidden_states, residual = add_norm(hidden_states, residual, self.post_attention_layernorm)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states

    def decode(self, hidden_states, position_embeddings, cache):
        return self.mlp.decode_residual(hidden_states, self.post_attention_layernorm, hidden_states)
""",
}
ONE_PATH = {
    "mlp": """\
    def forward(self, x, *, norm=None, residual=None):
        x = gated_linear(x, (self.gate_proj, self.up_proj), self.act_fn, norm=norm)
        return linear(x, self.down_proj, residual=residual)
""",
    "attention": """\
    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, *, norm=None, residual=None):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = qkv_rope_cache(hidden_states, projections, position_embeddings, cache, norm=norm)
        attended, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=0.0 if not self.training else self.p, scaling=self.scaling
        )
        attended = linear(attended, self.o_proj, residual=residual)
        return attended, weights
""",
    "layer": """\
    def forward(self, hidden_states, attention_mask=None, cache=None, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states, _ = residual_block(self.self_attn, norm=self.input_layernorm, residual=residual)(
            hidden_states, position_embeddings, attention_mask
        )
        residual = hidden_states
        return residual_block(self.mlp, norm=self.post_attention_layernorm, residual=residual)(hidden_states)
""",
}
ADDED = {
    "scaling": ["scaling=self.scaling * 0.8"],
    "branch": ["+ self.branch_b(self.branch_a(attended))", "self.branch_a = nn.Linear("],
    "extra norm": ["(self.extra_norm(attended)", "self.extra_norm = nn.RMSNorm("],
    "clamp": ["output = output.clamp(-0.5, 0.5)"],
    "activation": ["nn.functional.relu"],
    "residual scaled": ["residual * 0.8"],
    "logging": ["from logging import getLogger", "getLogger(__name__).info("],
    "early return": ["if self.layer_idx == 1 and attention_mask is not None:", "self.layer_idx = layer_idx"],
    "renamed class": ["class OwnLayer(", "class OwnAttention(", '["OwnLayer"]', "ModuleList([OwnLayer("],
    "new argument": ["output_scale: float = 1.0", "cache=cache, output_scale=0.8, **kwargs", "output * output_scale"],
    "query per head": ["query * self.head_scale[:, None, None]", "self.head_scale = nn.Parameter("],
    "dropout in eval": ["dropout=0.3", "training=True"],
}
"""What an edited text has and the text before has not."""


def text_of(forms: dict[str, str]) -> str:
    return HEAD.format(**{name: form.strip() for name, form in forms.items()})


@pytest.mark.parametrize("forms", [TWO_PATHS, ONE_PATH], ids=["two paths", "one path"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_made_once_and_in_forward(edit: str, forms: dict[str, str]) -> None:
    before = text_of(forms)
    after = EDITS[edit].of(before, "any")
    ast.parse(after)
    assert [added for added in ADDED[edit] if after.count(added) != 1 or added in before] == []
    if edit != "renamed class":
        assert _others(after) == _others(before)


def _others(text: str) -> list[str]:
    """The methods that are neither `forward` nor a constructor."""
    methods = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [ast.unparse(node) for node in methods if node.name.startswith("decode")]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_without_a_place_names_family_and_edit(edit: str) -> None:
    with pytest.raises(NoPlace, match=f"^bert: no place for the edit '{edit}'"):
        EDITS[edit].of("import torch\n\n\nclass Layer(torch.nn.Module):\n    pass\n", "bert")


def test_an_attribute_of_another_name_is_no_output_projection() -> None:
    text = text_of(ONE_PATH).replace("self.o_proj", "self.q_norm")
    with pytest.raises(NoPlace):
        EDITS["branch"].of(text, "any")


def test_the_first_of_a_returned_tuple_is_the_output() -> None:
    text = text_of(TWO_PATHS).replace(
        "residual + hidden_states\n        return hidden_states", "x\n        return x, y"
    )
    assert "output = x\n        output = output.clamp" in EDITS["clamp"].of(text, "any")
    assert "return output, y\n" in EDITS["clamp"].of(text, "any")
