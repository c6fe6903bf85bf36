"""Checkpoints in FP8 and MXFP4, as they are published: loaded by a package, computed with, saved again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from published import write_fp8, write_mxfp4
from safetensors.torch import load_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from rewrite.measure.runtime_part import runtime_part

ENDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "initializer_range": 0.2, **ENDS,
}  # fmt: skip
IDS = torch.arange(2, 22).view(2, 10)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that rewrites a model and imports its modeling file, and its package."""
    folder = tmp_path_factory.mktemp("published")

    def made(name: str) -> tuple[Any, Any]:
        package = f"published_{name}"
        command = [sys.executable, "-m", "rewrite.cli", name, "--out", str(folder / package), "--no-verify", "--quiet"]
        subprocess.run(command, check=True)
        return importlib.import_module(f"{package}.modeling_{name}"), importlib.import_module(package)

    sys.path.insert(0, str(folder))
    yield made
    sys.path.remove(str(folder))


def same_bytes(folder: Path, tensors: dict[str, Tensor]) -> None:
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype, name
        assert torch.equal(saved[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def in_fp32(model: Any) -> Any:
    """Widen what is in 16 bits: transformers leaves that of a quantised checkpoint as it is."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.bfloat16:
            tensor.data = tensor.data.float()
    return model.eval()


@torch.no_grad()
def as_the_original(model: Any, original: Any) -> None:
    in_fp32(original)
    in_fp32(model)
    wanted, got = original(IDS).logits, model(IDS).logits
    assert (got - wanted).norm() <= 2e-5 * wanted.norm()
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), original.generate(IDS, **options))


def test_fp8(packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=128, head_dim=128, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, tie_word_embeddings=False, **SIZES,
    )  # fmt: skip
    tensors = write_fp8(Qwen3MoeForCausalLM(config).bfloat16(), tmp_path / "published")
    original = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "published")
    assert not any("FP8" in type(module).__name__ for module in original.modules()), "transformers did not dequantise"
    # It would not on a GPU.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **options: None)
    modeling, _ = packages("qwen3_moe")
    model = modeling.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "published")
    products = runtime_part("published_qwen3_moe", "linear/block_linear")
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, products.BlockLinear)
    assert layer.self_attn.q_proj.weight.dtype == torch.float8_e4m3fn
    assert type(layer.mlp.experts).__name__ == "FP8Experts"
    model.save_pretrained(tmp_path / "saved")
    as_the_original(model, original)
    same_bytes(tmp_path / "saved", tensors)


def test_mxfp4(packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GptOssConfig(
        hidden_size=64, intermediate_size=96, head_dim=32, num_local_experts=4, num_experts_per_tok=2, **SIZES
    )
    model = GptOssForCausalLM(config).bfloat16()
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.data.normal_(0, 0.1)
    tensors = write_mxfp4(model, tmp_path / "published")
    dense = Mxfp4Config(dequantize=True)
    original = GptOssForCausalLM.from_pretrained(tmp_path / "published", quantization_config=dense)
    modeling, _ = packages("gpt_oss")
    mxfp4 = runtime_part("published_gpt_oss", "moe/mxfp4")
    loaded = modeling.GptOssForCausalLM.from_pretrained(tmp_path / "published")
    assert torch.cuda.is_available() or not isinstance(loaded.model.layers[0].mlp.experts, mxfp4.MxExperts)
    monkeypatch.setattr(mxfp4.MxExperts, "wanted", staticmethod(lambda quantization: True))  # as on a GPU
    loaded, about = modeling.GptOssForCausalLM.from_pretrained(tmp_path / "published", output_loading_info=True)
    assert not any(about.values())
    assert isinstance(loaded.model.layers[0].mlp.experts, mxfp4.MxExperts)
    loaded.save_pretrained(tmp_path / "saved")
    as_the_original(loaded, original)
    same_bytes(tmp_path / "saved", tensors)
    again = modeling.GptOssForCausalLM.from_pretrained(tmp_path / "saved")
    as_the_original(again, original)
    asked = modeling.GptOssForCausalLM.from_pretrained(tmp_path / "published", quantization_config=dense)
    assert not isinstance(asked.model.layers[0].mlp.experts, mxfp4.MxExperts)
