"""Which modeling files may keep states of fixed size in a cache: a no has to be certain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rewrite.package.kept_states import may_keep_states

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")


def of(text: str) -> bool:
    return may_keep_states(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "cache.update_recurrent_state(state, layer_idx)", "def forward(self, conv_states): ...", "ssm_state = 1",
        "cache.has_previous_state(0)", 'kind == "linear_attention"', 'layers["conv"]',
    ],
)  # fmt: skip
def test_states_are_seen_by_name(text: str) -> None:
    assert of(text)


@pytest.mark.parametrize("text", ["hidden_states + residual", "output.last_hidden_state", "conv = nn.Conv1d(3, 3, 3)"])
def test_other_names_are_none(text: str) -> None:
    assert not of(text)


def test_no_configuration_of_transformers_has_them_where_its_file_names_none() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    seen = 0
    layer = getattr(cache_utils, "LinearAttentionLayer", ())
    for name in (
        "llama",
        "qwen3_next",
        "mamba2",
        "lfm2",
        "minimax",
        "gemma3_text",
        "jamba",
        "zamba2",
        "t5",
        "whisper",
    ):
        if name not in CONFIG_MAPPING_NAMES:
            continue
        config = transformers.AutoConfig.for_model(name).get_text_config(decoder=True)
        folder = Path(transformers.__file__).parent.joinpath(*type(config).__module__.split(".")[1:-1])
        named = any(of(file.read_text("utf-8")) for file in folder.glob("modeling_*.py"))
        has = any(isinstance(one, layer) for one in transformers.DynamicCache(config=config).layers)
        assert named or not has, name
        seen += has
    assert seen > 3
