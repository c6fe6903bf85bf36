"""Small checkpoints as they are published: FP8 with blocks of 128 x 128, MXFP4 experts, written by definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def to_fp8(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Return `[O, I]` in e4m3, and what its blocks are times: powers of two, so that no bf16 of it is rounded."""
    rows, cols = weight.shape
    padded = torch.zeros(-(-rows // block) * block, -(-cols // block) * block)
    padded[:rows, :cols] = weight.float()
    blocks = padded.view(padded.shape[0] // block, block, -1, block)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)).clamp_min(1e-8) / 448)))
    codes = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[E, I, O]` as `[E, O, I / 32, 16]` bytes of two e2m1 and `[E, O, I / 32]` exponents."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-60))) - 2
    values = groups / torch.exp2(exponent)[..., None]
    codes = (values.abs()[..., None] - FOURS).abs().argmin(-1).to(torch.uint8) | (values.signbit() * 8).to(torch.uint8)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous(), (exponent + 127).to(torch.uint8)


def write_fp8(model: Any, folder: Path) -> dict[str, Tensor]:
    """Write a model with its projections in FP8, its experts one by one; return the tensors."""
    model.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor)
        else:
            tensors[name] = tensor
    _write(model, folder, tensors, {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    })  # fmt: skip
    return tensors


def write_mxfp4(model: Any, folder: Path) -> dict[str, Tensor]:
    """Write a model with its experts in MXFP4; return the tensors."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            tensors[name] = tensor.contiguous()
    _write(model, folder, tensors, {"modules_to_not_convert": LEFT_OUT, "quant_method": "mxfp4"})
    return tensors


def _write(model: Any, folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": quantization}))
