"""Small values for fields of configurations, beside those that the runtime knows, and for single model types.

Every switch that a rewrite could drop is off its neutral value: eps is large, multipliers differ from 1, the
sliding window is shorter than the prompts, heads are grouped. An indexer chooses fewer keys than a prompt has, and has
so many heads that no two keys get the score of those that no head looks at: which of them is chosen is chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .small_fields import FIELDS

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW, POSITIONS = 64, 4, 2, 16, 128, 8, 512
IMAGE, PATCH = 32, 8

CHOICES = ("index_topk",)
"""How many keys an indexer chooses for each query."""

EVERY_KEY = 2048
"""So many are all of them, in every prompt of a verification."""

SMALL: dict[str, Any] = {
    **FIELDS,
    **dict.fromkeys(
        ("dim", "embed_dim", "emb_dim", "hidden_dim", "encoder_hidden_size", "decoder_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("projection_dim", "out_hidden_size", "proj_dim", "adapter_dim", "hidden_size_global"), HIDDEN),
    **dict.fromkeys(("text_hidden_size", "projection_hidden_dim"), HIDDEN),
    **dict.fromkeys(("ffn_hidden_size", "vision_output_dim", "dim_feedforward"), 96),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size"), 80
    ),
    **dict.fromkeys(("n_layers", "depth", "num_blocks", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_global_layers", "num_layers_encoder", "num_layers_decoder"), 2),
    **dict.fromkeys(("n_heads", "attention_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("attention_head_dim", "d_kv", "d_k", "d_v", "cross_attention_dim_head"), HEAD_DIM),
    "index_head_dim": HEAD_DIM,
    "index_n_heads": 4 * HEADS,
    **dict.fromkeys(CHOICES, 6),
    **dict.fromkeys(("n_words", "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"), VOCAB),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), HEAD_DIM),
    **dict.fromkeys(("max_sequence_length", "original_max_position_embeddings"), POSITIONS),
    **dict.fromkeys(("window_size", "attention_window_size", "sliding_window_size"), WINDOW),
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "swa_head_dim": HEAD_DIM,
    "rel_extent": 6,
    **dict.fromkeys(("n_layers_per_attn_res_block", "loop_layer_index_start"), 1),
    **dict.fromkeys(("loop_layer_index_end", "loop_num_passes"), 2),
    "loop_gate_rank": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logit_scale": 0.7,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD_DIM),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "use_mamba_kernels": False,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "img_size": IMAGE,
    "num_mel_bins": 16,
    "num_queries": 6,
    "mm_tokens_per_image": 4,
    "num_labels": 3,
}
ESSENTIAL = (
    "hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "d_ff", "num_hidden_layers", "n_layer",
    "n_layers", "num_layers", "num_attention_heads", "n_head", "n_heads", "num_heads", "vocab_size", "n_words",
    "pad_token_id", "num_decoder_layers", "encoder_layers", "decoder_layers", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "num_key_value_heads", "text_hidden_size",
)  # fmt: skip
"""What has to be small for a model to be small; used alone where the rest does not fit together."""

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "is_decoder": True},
    "xlm": {"emb_dim": HIDDEN, "n_words": VOCAB},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bailing_hybrid": {"num_key_value_heads": HEADS, "head_dim": 8},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dory": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "n_input_layers": 1,
             "n_recurrent_layers": 2, "n_output_layers": 1, "initializer_range": 1.0},  # it divides scales by that
    "dots3_note_text": {"num_key_value_heads": HEADS, "head_dim": 24, "per_layer_config": {}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "qwen4_exp_text": {"indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM,
                       "indexer_budget": 8, "indexer_compress_ratio": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"block_size": WINDOW},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "rotary_dim": 8,
                           "mlp_layer_types": ["dense", "sparse"], "dense_intermediate_size": 96,
                           "index_n_heads": KV_HEADS, "index_block_size": 4, "index_topk_blocks": 2},
    "mistral4": {"head_dim": 24},  # a third of it is rotated
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "num_mem_blocks": 1,
               "use_mem_rope": True},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
}  # fmt: skip
"""Fields by model type, where no rule finds a model that runs, or one in which every kind of layer does something."""
