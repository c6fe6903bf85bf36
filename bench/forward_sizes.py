"""The models of `bench/forwards.py`, at their published sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclass(frozen=True)
class Model:
    """One model; `tokens` is the length of its texts by batch size, `part` the attribute that is called."""

    name: str
    file: str
    class_name: str
    published: str
    fields: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, int] = (128, 512)
    """Of one text, and of many."""
    config: str = ""
    """The class of the configuration where it is not the class's own."""


MODELS = (
    Model("bert", "bert", "BertModel", "bert-large-uncased", {**LARGE, "vocab_size": 30522}),
    Model("modernbert", "modernbert", "ModernBertModel", "ModernBERT-base"),
    Model(
        "xlm_roberta",
        "xlm_roberta",
        "XLMRobertaModel",
        "xlm-roberta-large",
        {**LARGE, "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
        (128, 512),
    ),
    Model("vit", "vit", "ViTModel", "vit-large-patch16-224", LARGE),
    Model("siglip", "siglip", "SiglipVisionModel", "siglip-base-patch16-224", {"image_size": 224}),
    Model(
        "clip",
        "clip",
        "CLIPModel",
        "clip-vit-large-patch14",
        {
            "vision_config": {**LARGE, "patch_size": 14},
            "text_config": {
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
            },
            "projection_dim": 768,
        },
        (77, 77),
    ),
    Model("dinov3", "dinov3_vit", "DINOv3ViTModel", "dinov3-vitl16", {**LARGE, "image_size": 224}),
    Model(
        "wav2vec2",
        "wav2vec2",
        "Wav2Vec2Model",
        "wav2vec2-large-lv60",
        {**LARGE, "feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True},
    ),
    Model(
        "whisper_encoder",
        "whisper",
        "WhisperEncoder",
        "whisper-large-v3-turbo",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "decoder_layers": 4,
            "vocab_size": 51866,
        },
    ),
)
BY_NAME = {model.name: model for model in MODELS}
