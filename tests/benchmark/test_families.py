"""What `bench/families.py` counts and writes: bytes of a step, the arguments behind a prompt, the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import families  # noqa: E402
import family_bytes  # noqa: E402
import family_inputs  # noqa: E402
import family_page  # noqa: E402
from family_sizes import BY_KEY, FAMILIES, at, every  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

HIDDEN, INNER, VOCAB, LENGTH = 32, 48, 64, 70
SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN // 2 * 2
NORMS = 3 * HIDDEN


def counted(model):
    prompt = family_inputs.prompt(model.eval(), "text", LENGTH)
    return family_bytes.moved(model, prompt.arguments)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_counts_where_it_is_the_head(tied):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    moved = counted(model)
    assert moved.weights == 4 * (ATTENTION + 3 * HIDDEN * INNER + NORMS + HIDDEN * VOCAB)
    assert moved.keys_and_values == 4 * 2 * LENGTH * HIDDEN // 2
    assert moved.states == 0


def test_of_experts_the_routed_share_counts():
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    experts, router = 2 * 3 * HIDDEN * INNER, 4 * HIDDEN
    assert counted(model).weights == 4 * (ATTENTION + experts + router + NORMS + HIDDEN * VOCAB)


def test_of_an_encoder_the_kept_keys_and_values_count():
    config = T5Config(
        d_model=HIDDEN, d_kv=8, d_ff=INNER, num_layers=3, num_decoder_layers=1, num_heads=4, vocab_size=VOCAB,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    moved = counted(T5ForConditionalGeneration(config))
    own, cross, inner = 4 * HIDDEN * HIDDEN, 2 * HIDDEN * HIDDEN, 2 * HIDDEN * INNER
    assert moved.weights == 4 * (own + cross + inner + 4 * HIDDEN + HIDDEN * VOCAB)
    assert moved.keys_and_values == 4 * 2 * HIDDEN * (LENGTH + 1)


def test_what_follows_a_prompt_is_fed_to_the_decoder():
    prompt = family_inputs.Prompt({"input_ids": torch.zeros(1, 5)}, 5, True, start=[7])
    assert prompt.followed_by(torch.tensor([[1, 2, 3]]))["decoder_input_ids"].tolist() == [[7, 1, 2]]


def test_what_follows_a_prompt_has_the_mark_of_new_tokens():
    given = {"input_ids": torch.zeros(1, 2), "attention_mask": torch.ones(1, 2), "token_type_ids": torch.zeros(1, 2)}
    prompt = family_inputs.Prompt(given, 2, False, new_marks={"token_type_ids": 1})
    assert prompt.followed_by(torch.tensor([[1, 2, 3]]))["token_type_ids"].tolist() == [[0, 0, 1, 1]]


def test_enough_families_and_names_of_their_own():
    assert len(BY_KEY) == len(FAMILIES) >= 48


def test_kinds_of_layers():
    assert every(3, 4, "full", "window") == ["window", "window", "full", "window"]
    assert at((1,), 3, "full", "conv") == ["conv", "full", "conv"]


def row(**more):
    shared = {"published": "Some-1B", "cut": "", "note": "", "tiny": False, "device": "card", "kernels": []}
    shared |= {"versions": {"torch": "2"}, "prompt": "text", "tokens_before": 512, "bytes": {"total": 2e9}}
    shared |= {"limit_ms": 0.5, "eager_ms": 10.0, "ours_ms": 1.0, "share": 0.5, "speed_up": 10.0}
    return shared | {"graph": True, "reason": "", "process_seconds": 1.0} | more


def test_the_page_says_what_has_no_graph_and_what_was_not_measured():
    rows = {
        "good": row(parity={"ratio": 1.01, "gap": 0.1, "own_gap": 0.2}),
        "slow": row(graph=False, reason="own_loop", speed_up=0.9, share=0.1),
        "bad": {"published": "Some-2B", "error": "OutOfMemoryError"},
    }
    page = family_page.page(rows, None)
    assert "2 families, 1 with the graph" in page
    assert "1 slower than their original; median share of the limit 30%" in page
    assert "| 10.0× | 50% | 1.01 | 0.1 (0.2) |" in page
    assert "- `slow`: the model has its own way from one step's inputs to the next" in page
    assert "- `bad`: OutOfMemoryError" in page
    assert "mean nothing" not in page
    assert "mean nothing" in family_page.page({"small": row(tiny=True)}, None)


def test_a_line_for_each_family():
    assert families.line("bad", {"error": "no memory"}).endswith("ERROR no memory")
    assert "no graph: own_loop" in families.line("slow", row(graph=False, reason="own_loop"))
