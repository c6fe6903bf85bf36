"""Sizes of real models, as far as kernels depend on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes that kernels depend on."""

    name: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer of experts."""

    name: str
    experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


LLAMA_1B = Model("Llama 1B", 2048, 8192, 32, 8, 64, 128256)
LLAMA_8B = Model("Llama 8B", 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = Model("Llama 70B", 8192, 28672, 64, 8, 128, 128256)
LLAMAS = (LLAMA_1B, LLAMA_8B, LLAMA_70B)
QWEN3_30B = Model("Qwen3 30B-A3B", 2048, 6144, 32, 4, 128, 151936)
GEMMA_9B = Model("Gemma 9B", 3584, 14336, 16, 8, 256, 256000)
QWEN3_MOE = Mixture("Qwen3 30B-A3B", 128, 8, 2048, 768)
MIXTRAL = Mixture("Mixtral 8x7B", 8, 2, 4096, 14336)
DEEPSEEK_V3 = Mixture("DeepSeek V3", 256, 8, 7168, 2048)
GPT_OSS = Mixture("gpt-oss 20B", 32, 4, 2880, 2880)
LLAMA4_SCOUT = Mixture("Llama 4 Scout", 16, 1, 5120, 8192)
WIDE_COLUMNS = Mixture("wide columns", 16, 4, 5120, 8192)
MINIMAX_M3 = Mixture("MiniMax M3", 256, 8, 6144, 2048)


@dataclass(frozen=True)
class Step:
    """What a decode step of a whole model runs."""

    model: Model
    layers: int
    head_norms: bool = False
    """Whether queries and keys are normalised."""
    mixture: Mixture | None = None
    rows: tuple[int, ...] = (1, 8, 32)
    """Of sequences, for which it is modelled."""


MISTRAL_7B = Model("Mistral 7B", 4096, 14336, 32, 8, 128, 32768)
QWEN2_1_5B = Model("Qwen2.5 1.5B", 1536, 8960, 12, 2, 128, 151936)
QWEN3_1_7B = Model("Qwen3 1.7B", 2048, 6144, 16, 8, 128, 151936)
STEPS = {
    "1b": Step(LLAMA_1B, 16),
    "8b": Step(LLAMA_8B, 32),
    "70b": Step(LLAMA_70B, 80),
    "mistral-7b": Step(MISTRAL_7B, 32),
    "1.5b": Step(QWEN2_1_5B, 28),
    "qwen3-1.7b": Step(QWEN3_1_7B, 28, head_norms=True),
    # from 32 rows on its tokens are sorted by expert (torch's grouped product), which is not modelled
    "30b-a3b": Step(QWEN3_30B, 48, head_norms=True, mixture=QWEN3_MOE, rows=(1, 8)),
}
"""By the names that `rewrite bench --shape` has, where it has them."""
