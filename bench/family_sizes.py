"""The architectures that `bench/families.py` measures, at their published sizes.

A field that is not here keeps the default of transformers. `cut` says what was left out of a published model so that
it fits one card or one minute; widths are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT, IMAGE, SOUND = "text", "image", "sound"


@dataclass(frozen=True)
class Family:
    """One model: the modeling file (`models/<file>`), the class that generates, whose sizes, and the sizes."""

    file: str
    class_name: str
    published: str
    fields: dict[str, Any]
    feed: str = TEXT
    """What its prompt holds beside text."""
    cut: str = ""
    note: str = ""
    """Why the prompt holds less than the class could take."""
    tiny: dict[str, Any] = field(default_factory=dict)
    """Fields of the tiny configuration that do not follow from their names."""


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """The rotary embedding's fields."""
    return {"rope_type": "default", "rope_theta": theta, **more}


def every(period: int, layers: int, last: str, others: str) -> list[str]:
    """The kinds of layers where each `period`-th is of another kind."""
    return [others if (index + 1) % period else last for index in range(layers)]


def at(places: tuple[int, ...], layers: int, there: str, elsewhere: str) -> list[str]:
    """The kinds of layers where those at `places` are of another kind."""
    return [there if index in places else elsewhere for index in range(layers)]


def sizes(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int) -> dict[str, Any]:
    """The fields that most decoders have; `heads` are those of queries and of keys."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab,
    }  # fmt: skip


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "vision_use_head": False, "image_size": 224, "patch_size": 14}
SO400M = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
          "num_hidden_layers": 27, "num_attention_heads": 16} | SIGLIP  # fmt: skip
CLIP_LARGE = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
              "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "projection_dim": 768}  # fmt: skip
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_KINDS = {"M": LINEAR, "-": "mlp", "*": FULL}

DECODERS = (
    Family("llama", "LlamaForCausalLM", "Llama-3.2-1B", sizes(2048, 8192, 16, (32, 8), 128256) | {
        "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2.5-1.5B", sizes(1536, 8960, 28, (12, 2), 151936) | {
        "tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3-1.7B", sizes(2048, 6144, 28, (16, 8), 151936) | {
        "head_dim": 128, "tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    Family("mistral", "MistralForCausalLM", "Mistral-7B-v0.3", sizes(4096, 14336, 32, (32, 8), 32768) | {
        "head_dim": 128, "sliding_window": None, "rope_parameters": rope(1e6)}),
    Family("ministral3", "Ministral3ForCausalLM", "Ministral-3-8B", sizes(4096, 14336, 34, (32, 8), 131072) | {
        "head_dim": 128}),
    Family("phi3", "Phi3ForCausalLM", "Phi-3-mini-4k", sizes(3072, 8192, 32, (32, 32), 32064) | {
        "sliding_window": 2047}),
    Family("gemma2", "Gemma2ForCausalLM", "gemma-2-2b", sizes(2304, 9216, 26, (8, 4), 256000) | {"head_dim": 256}),
    Family("gemma3", "Gemma3ForCausalLM", "gemma-3-1b", sizes(1152, 6912, 26, (4, 1), 262144) | {
        "head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256}),
    Family("gemma3n", "Gemma3nForCausalLM", "gemma-3n-E2B", sizes(2048, 8192, 30, (8, 2), 262400) | {
        "head_dim": 256, "num_kv_shared_layers": 10, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "layer_types": every(5, 30, FULL, SLIDING)}, note="its vision tower comes from another library"),
    Family("granite", "GraniteForCausalLM", "granite-3.1-2b", sizes(2048, 8192, 40, (32, 8), 49155) | {
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
        "attention_multiplier": 0.015625, "tie_word_embeddings": True, "rope_parameters": rope(5e6)}),
    Family("olmo2", "Olmo2ForCausalLM", "OLMo-2-1B", sizes(2048, 8192, 16, (16, 16), 100352) | {
        "rope_parameters": rope(5e5)}),
    Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3-3B", sizes(2048, 11008, 36, (16, 4), 128256) | {
        "tie_word_embeddings": True, "rope_parameters": rope(5e6)}),
    Family("nemotron", "NemotronForCausalLM", "Minitron-4B", sizes(3072, 9216, 32, (24, 8), 256000) | {
        "head_dim": 128}),
    Family("starcoder2", "Starcoder2ForCausalLM", "starcoder2-3b", sizes(3072, 12288, 30, (24, 2), 49152) | {
        "sliding_window": 4096, "rope_parameters": rope(999999.4420358813)}),
    Family("cohere2", "Cohere2ForCausalLM", "c4ai-command-r7b", sizes(4096, 14336, 32, (32, 8), 256000) | {
        "sliding_window": 4096, "logit_scale": 0.25, "layer_types": every(4, 32, FULL, SLIDING),
        "rope_parameters": rope(5e4)}),
    Family("glm4", "Glm4ForCausalLM", "GLM-4-9B-0414", sizes(4096, 13696, 40, (32, 2), 151552) | {
        "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1e-5}),
    Family("stablelm", "StableLmForCausalLM", "stablelm-2-1_6b", sizes(2048, 5632, 24, (32, 32), 100352) | {
        "use_qkv_bias": True}),
    Family("falcon", "FalconForCausalLM", "falcon-7b", {
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
        "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False}),
    Family("gpt_neox", "GPTNeoXForCausalLM", "pythia-1b", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8,
        "vocab_size": 50304}),
    Family("gpt2", "GPT2LMHeadModel", "gpt2-large", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    Family("opt", "OPTForCausalLM", "opt-1.3b", {
        "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "word_embed_proj_dim": 2048}),
    Family("bloom", "BloomForCausalLM", "bloom-1b7", {"hidden_size": 2048, "n_layer": 24, "n_head": 16}),
    Family("minicpm3", "MiniCPM3ForCausalLM", "MiniCPM3-4B", sizes(2560, 6400, 62, (40, 40), 73448)),
)  # fmt: skip

EXPERTS = (
    Family("mixtral", "MixtralForCausalLM", "Mixtral-8x7B", sizes(4096, 14336, 8, (32, 8), 32000),
           cut="8 of 32 layers"),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-30B-A3B", sizes(2048, 6144, 16, (32, 4), 151936) | {
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "rope_parameters": rope(1e6)}, cut="16 of 48 layers"),
    Family("olmoe", "OlmoeForCausalLM", "OLMoE-1B-7B", sizes(2048, 1024, 16, (16, 16), 50304)),
    Family("gpt_oss", "GptOssForCausalLM", "gpt-oss-20b", sizes(2880, 2880, 12, (64, 8), 201088) | {
        "num_local_experts": 32, "num_experts_per_tok": 4}, cut="12 of 24 layers"),
    Family("llama4", "Llama4ForCausalLM", "Llama-4-Scout", sizes(5120, 8192, 4, (40, 8), 202048) | {
        "num_local_experts": 16, "num_experts_per_tok": 1}, cut="4 of 48 layers"),
    Family("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMax-M2", sizes(3072, 1536, 2, (48, 8), 200064) | {
        "num_local_experts": 256, "num_experts_per_tok": 8}, cut="2 of 62 layers"),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ERNIE-4.5-21B-A3B", sizes(2560, 12288, 12, (20, 4), 103424) | {
        "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
        "moe_layer_end_index": 11}, cut="12 of 28 layers"),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek-V2-Lite", sizes(2048, 10944, 27, (16, 16), 102400) | {
        "moe_intermediate_size": 1408, "q_lora_rank": None, "kv_lora_rank": 512, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek-V3", sizes(7168, 18432, 4, (128, 128), 129280) | {
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
        cut="4 of 61 layers, of which 3 dense"),
    Family("glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5-Air", sizes(4096, 10944, 5, (96, 8), 151552) | {
        "head_dim": 128, "attention_bias": True, "moe_intermediate_size": 1408, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "rope_parameters": rope(1e6, partial_rotary_factor=0.5)},
        cut="5 of 46 layers"),
)  # fmt: skip

HYBRIDS = (
    Family("qwen3_5", "Qwen3_5ForCausalLM", "Qwen3.5-2B", sizes(2048, 6144, 24, (8, 2), 248320) | {
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "layer_types": every(4, 24, FULL, LINEAR), "tie_word_embeddings": True,
        "rope_parameters": rope(1e7, partial_rotary_factor=0.25)}),
    Family("qwen3_next", "Qwen3NextForCausalLM", "Qwen3-Next-80B-A3B", sizes(2048, 5632, 8, (16, 2), 151936) | {
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "layer_types": every(4, 8, FULL, LINEAR), "rope_parameters": rope(1e7, partial_rotary_factor=0.25)},
        cut="8 of 48 layers"),
    Family("olmo_hybrid", "OlmoHybridForCausalLM", "Olmo-Hybrid-7B", sizes(3840, 11008, 32, (30, 30), 100352) | {
        "layer_types": every(4, 32, FULL, LINEAR)}),
    Family("lfm2", "Lfm2ForCausalLM", "LFM2-1.2B", sizes(2048, 12288, 16, (32, 8), 65536) | {
        "layer_types": at((2, 5, 8, 10, 12, 14), 16, FULL, "conv"), "tie_word_embeddings": True}),
    Family("mamba", "MambaForCausalLM", "mamba-1.4b", {
        "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 48, "state_size": 16,
        "time_step_rank": 128, "vocab_size": 50280, "tie_word_embeddings": True}),
    Family("mamba2", "Mamba2ForCausalLM", "mamba2-1.3b", {
        "hidden_size": 2048, "num_hidden_layers": 48, "state_size": 128, "num_heads": 64, "head_dim": 64,
        "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True}),
    Family("falcon_h1", "FalconH1ForCausalLM", "Falcon-H1-1.5B", sizes(2048, 4096, 24, (8, 2), 65536) | {
        "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256,
        "rope_parameters": rope(1e11)}),
    Family("jamba", "JambaForCausalLM", "Jamba-v0.1", sizes(4096, 14336, 8, (32, 8), 65536) | {
        "num_experts": 16, "num_experts_per_tok": 2}, cut="8 of 32 layers"),
    Family("bamba", "BambaForCausalLM", "Bamba-9B-v2", sizes(4096, 14336, 16, (32, 8), 128256) | {
        "attn_layer_indices": [9], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128},
        cut="16 of 32 layers"),
    Family("nemotron_h", "NemotronHForCausalLM", "Nemotron-H-8B", {
        "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "vocab_size": 131072, "layers_block_type": [NEMOTRON_H_KINDS[kind] for kind in NEMOTRON_H_8B]}),
    Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", "granite-4.0-h-tiny",
           sizes(1536, 512, 40, (12, 4), 100352) | {
        "layer_types": at((5, 15, 25, 35), 40, FULL, LINEAR), "shared_intermediate_size": 1024,
        "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "position_embedding_type": "nope"}),
    Family("zamba2", "Zamba2ForCausalLM", "Zamba2-1.2B", sizes(2048, 8192, 38, (32, 32), 32000) | {
        "n_mamba_heads": 64, "num_mem_blocks": 1, "use_shared_attention_adapter": True, "use_mem_rope": True,
        "layers_block_type": at((5, 11, 17, 23, 29, 35), 38, "hybrid", LINEAR)}),
    Family("recurrent_gemma", "RecurrentGemmaForCausalLM", "recurrentgemma-2b",
           sizes(2560, 15360, 26, (10, 1), 256000) | {"lru_width": 2560}),
    Family("rwkv", "RwkvForCausalLM", "rwkv-4-1b5-pile", {
        "hidden_size": 2048, "attention_hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}),
)  # fmt: skip

QWEN_IDS = {"image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": True}
WITH_IMAGES = (
    Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL-3B", QWEN_IDS | {
        "text_config": sizes(2048, 11008, 36, (16, 2), 151936) | {
            "rope_parameters": rope(1e6, mrope_section=[16, 24, 24]), "tie_word_embeddings": True},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048, "intermediate_size": 3420, "depth": 32,
                          "num_heads": 16}}, IMAGE,
        tiny={"vision_config": {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "depth": 2,
                                "num_heads": 4, "patch_size": 8, "window_size": 64, "fullatt_block_indexes": [1]}}),
    Family("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3-VL-2B", QWEN_IDS | {
        "text_config": sizes(2048, 6144, 28, (16, 8), 151936) | {
            "head_dim": 128, "rope_parameters": rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True),
            "tie_word_embeddings": True},
        "vision_config": {"hidden_size": 1024, "out_hidden_size": 2048, "intermediate_size": 4096, "depth": 24,
                          "num_heads": 16, "deepstack_visual_indexes": [5, 11, 17]}}, IMAGE),
    Family("gemma3", "Gemma3ForConditionalGeneration", "gemma-3-4b", {
        "text_config": sizes(2560, 10240, 34, (8, 4), 262208) | {"head_dim": 256, "sliding_window": 1024},
        "vision_config": SO400M | {"image_size": 896}, "mm_tokens_per_image": 256}, IMAGE,
        tiny={"mm_tokens_per_image": 16}),
    Family("gemma4", "Gemma4ForConditionalGeneration", "gemma-4-E2B", {
        "text_config": sizes(1536, 6144, 35, (8, 1), 262144) | {
            "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": every(5, 35, FULL, SLIDING), "final_logit_softcapping": 30.0},
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
                          "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16,
                          "pooling_kernel_size": 3, "position_embedding_size": 10240}}, IMAGE,
        tiny={"vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "patch_size": 8,
                                "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}}),
    Family("llava", "LlavaForConditionalGeneration", "llava-1.5-7b", {
        "text_config": sizes(4096, 11008, 32, (32, 32), 32064) | {"model_type": "llama"},
        "vision_config": CLIP_LARGE}, IMAGE),
    Family("paligemma", "PaliGemmaForConditionalGeneration", "paligemma-3b-224", {
        "text_config": sizes(2048, 16384, 18, (8, 1), 257216) | {"model_type": "gemma", "head_dim": 256},
        "vision_config": SO400M, "projection_dim": 2048, "image_token_index": 257152}, IMAGE),
)  # fmt: skip

BART_LARGE = {
    "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip
ENCODER_DECODERS = (
    Family("whisper", "WhisperForConditionalGeneration", "whisper-large-v3-turbo", {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 4, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
        "vocab_size": 51866, "max_source_positions": 1500, "max_target_positions": 448}, SOUND),
    Family("moonshine", "MoonshineForConditionalGeneration", "moonshine-base", {
        "hidden_size": 416, "intermediate_size": 1664, "encoder_num_hidden_layers": 8,
        "decoder_num_hidden_layers": 8, "encoder_num_attention_heads": 8, "decoder_num_attention_heads": 8,
        "max_position_embeddings": 194, "pad_head_dim_to_multiple_of": 8,
        "rope_parameters": rope(1e4, partial_rotary_factor=0.62)}, SOUND),
    Family("t5", "T5ForConditionalGeneration", "t5-large", {
        "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16,
        "decoder_start_token_id": 0}),
    Family("bart", "BartForConditionalGeneration", "bart-large", BART_LARGE),
    Family("m2m_100", "M2M100ForConditionalGeneration", "m2m100-1.2B", BART_LARGE | {
        "encoder_layers": 24, "decoder_layers": 24, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192,
        "vocab_size": 128112}),
    Family("florence2", "Florence2ForConditionalGeneration", "Florence-2-large", {
        "text_config": BART_LARGE | {"vocab_size": 51328},
        "vision_config": {"embed_dim": [256, 512, 1024, 2048], "num_heads": [8, 16, 32, 64],
                          "num_groups": [8, 16, 32, 64], "projection_dim": 1024}}, IMAGE,
        tiny={"text_config": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 128},
              "vision_config": {"embed_dim": [32, 32, 64, 64], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4],
                                "depths": [1, 1, 1, 1], "projection_dim": 64}}),
)  # fmt: skip

FAMILIES = (*DECODERS, *EXPERTS, *HYBRIDS, *WITH_IMAGES, *ENCODER_DECODERS)


def key(family: Family) -> str:
    """A name for files and the command line: the modeling file, and where two families share it, what is fed too."""
    first = next(other for other in FAMILIES if other.file == family.file)
    return family.file if family is first else f"{family.file}_{family.feed}"


BY_KEY = {key(family): family for family in FAMILIES}
