"""Every kernel compiles for Hopper and for AMD data-centre GPUs, without one: Triton ships both compilers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter stands in for the compiler"),
]

TARGETS = {
    "sm_90": ("cuda", 90, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
NORM = {"WEIGHTED": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 4096}
WIDE = {"H": 131072, "BLOCK_COLS": 8192}
ROTARY = {
    "D": 128,
    "R": 128,
    "ONE_SEQUENCE": False,
    "INTERLEAVED": False,
    "HALF_TABLE": False,
    "DEINTERLEAVE": False,
    "ROUND": True,
    "BLOCK_HEADS": 8,
    "BLOCK_PAIRS": 64,
    "BLOCK_PASS": 1,
}
QWEN3_MOE = {"E": 128, "K": 8, "H": 2048, "M": 768}
MIXTRAL = {"E": 8, "K": 2, "H": 4096, "M": 14336}
DOWN = {"RESIDUAL": True, "OVERLAP": False, "BLOCK_H": 4}
LOGITS = {
    "E": 128,
    "H": 2048,
    "NORM": True,
    "WEIGHTED": True,
    "WEIGHT_IN_FP32": False,
    "BIASED": False,
    "ROUND": True,
    "OVERLAP": False,
}
PRODUCT = {"NORM": True, "NORM_WEIGHT": True, "BIAS": False, "OVERLAP": False}
NO_NORM = {"NORM": False, "NORM_WEIGHT": False}
SKINNY = PRODUCT | {"M": 16, "STAGES": 0, "SPLITS": 4}
STEP = {"D": 64, "R": 64, "INTERLEAVED": False, "HALF_TABLE": False, "OVERLAP": False}  # of a Llama-3.2-1B
QKV = PRODUCT | STEP | {"I": 2048, "H": 32, "HK": 8, "BLOCK_ROWS": 2, "BLOCK_COLS": 1024}
ROPE_CACHE = STEP | {"H": 32, "HK": 8, "D": 128, "R": 128, "Q_NORM": True, "K_NORM": True, "BLOCK": 64}
ATTENTION = {
    "H": 32,
    "HK": 8,
    "D": 64,
    "DV": 64,
    "WINDOW": False,
    "SOFTCAP": False,
    "SINKS": False,
    "OVERLAP": False,
    "HEADS": 4,
    "HEADS_HELD": 4,
    "PARTS": 16,
    "BLOCK_HEADS": 16,
    "BLOCK_D": 64,
    "BLOCK_DV": 64,
    "BLOCK_SLOTS": 64,
    "SPLITS": 16,
    "DOT": True,
}
WIDE_HEADS = {
    "HK": 16,
    "D": 256,
    "DV": 256,
    "HEADS": 2,
    "HEADS_HELD": 2,
    "BLOCK_D": 256,
    "BLOCK_DV": 256,
    "BLOCK_SLOTS": 32,
}
SELECT = {"E": 128, "K": 8, "OVERLAP": False, "BLOCK_E": 128, "CHUNK": 16}
# module, kernel, constants, threads a program
KERNELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "rms_norm": ("rms_norm", "rms_norm", NORM | {"H": 4096, "ADD": False, "WEIGHT_IN_FP32": False}, 256),
    "add_rms_norm": ("rms_norm", "rms_norm", NORM | {"H": 4096, "ADD": True, "WEIGHT_IN_FP32": True}, 256),
    "add_rms_norm, wide": ("rms_norm", "rms_norm", NORM | {"ADD": True, "WEIGHT_IN_FP32": False} | WIDE, 512),
    "layer_norm": ("layer_norm", "layer_norm", NORM | {"H": 4096, "G": 1, "ADD": False, "BIASED": False}, 256),
    "add_layer_norm": ("layer_norm", "layer_norm", NORM | {"H": 4096, "G": 1, "ADD": True, "BIASED": True}, 256),
    "layer_norm, wide": ("layer_norm", "layer_norm", NORM | {"G": 1, "ADD": True, "BIASED": True} | WIDE, 512),
    **{
        f"gated_activation, {activation}": (
            "gated_activation",
            "gated_activation",
            {"FLAT": flat, "ACTIVATION": activation, "BLOCK": 1024},
            256,
        )
        for activation, flat in (
            ("silu", True),
            ("gelu", False),
            ("gelu_tanh", False),
            ("relu", False),
            ("relu2", False),
        )
    },
    "rotary": ("rotary", "rotary", ROTARY, 128),
    "rotary, some columns": ("rotary", "rotary", ROTARY | {"R": 96, "BLOCK_PASS": 32}, 128),
    "rotary, interleaved": ("rotary", "rotary", ROTARY | {"INTERLEAVED": True}, 128),
    "rotary_rows": ("rotary_rows", "rotary_rows", {"R": 128, "BLOCK_COLS": 128}, 64),
    "router_logits": ("router", "router_logits", LOGITS | {"BLOCK_E": 2, "BLOCK_H": 2048}, 128),
    "router_logits, wide": ("router", "router_logits", LOGITS | {"H": 7168, "BLOCK_E": 2, "BLOCK_H": 8192}, 256),
    "select_experts": (
        "router",
        "select_experts",
        SELECT | {"SIGMOID": False, "CORRECTED": False, "NORMALIZE": True},
        128,
    ),
    "select_experts, corrected": (
        "router",
        "select_experts",
        SELECT | {"SIGMOID": True, "CORRECTED": True, "NORMALIZE": True},
        128,
    ),
    "experts_gate_up": (
        "experts",
        "experts_gate_up",
        QWEN3_MOE | {"ACTIVATION": "silu", "OVERLAP": False, "BLOCK_M": 4, "BLOCK_H": 1024},
        128,
    ),
    "experts_down": ("experts", "experts_down", QWEN3_MOE | DOWN | {"BLOCK_K": 8, "BLOCK_M": 128}, 128),
    "experts_down, wide": ("experts", "experts_down", MIXTRAL | DOWN | {"BLOCK_K": 2, "BLOCK_M": 512}, 128),
    "linear": (
        "linear",
        "linear",
        PRODUCT | NO_NORM | {"I": 8192, "O": 2048, "RESIDUAL": True, "BLOCK_ROWS": 4, "BLOCK_COLS": 4096},
        512,
    ),
    "linear, head": (
        "linear",
        "linear",
        PRODUCT | {"I": 2048, "O": 128256, "RESIDUAL": False, "BLOCK_ROWS": 2, "BLOCK_COLS": 2048},
        128,
    ),
    "gated": (
        "linear",
        "gated",
        PRODUCT | {"I": 2048, "O": 8192, "ACTIVATION": "silu", "BLOCK_ROWS": 2, "BLOCK_COLS": 1024},
        128,
    ),
    "qkv": ("qkv_step", "qkv", QKV, 128),
    "qkv, interleaved": ("qkv_step", "qkv", QKV | {"INTERLEAVED": True, "HALF_TABLE": True, "R": 32}, 128),
    "rope_cache": ("rope_cache", "rope_cache", ROPE_CACHE, 32),
    "rope_cache, no norms": ("rope_cache", "rope_cache", ROPE_CACHE | {"Q_NORM": False, "K_NORM": False}, 32),
    "decode_attention": ("decode_attention", "decode_attention", ATTENTION, 128),
    "decode_attention, few slots": ("decode_attention", "decode_attention", ATTENTION | {"BLOCK_SLOTS": 32}, 64),
    "decode_attention, all forms": (
        "decode_attention",
        "decode_attention",
        ATTENTION | {"WINDOW": True, "SOFTCAP": True, "SINKS": True},
        256,
    ),
    "decode_attention, wide heads": ("decode_attention", "decode_attention", ATTENTION | WIDE_HEADS, 256),
    "best_of_block": ("greedy", "best_of_block", {"OVERLAP": False, "BLOCK": 2048}, 256),
    "take_best": ("greedy", "take_best", {"ENDS": 2, "OVERLAP": False, "BLOCK_ROWS": 1, "BLOCK_BLOCKS": 64}, 128),
    "take_best, many rows": (
        "greedy",
        "take_best",
        {"ENDS": 2, "OVERLAP": False, "BLOCK_ROWS": 32, "BLOCK_BLOCKS": 128},
        128,
    ),
    "skinny_linear": (
        "skinny",
        "skinny_linear",
        SKINNY | NO_NORM | {"I": 8192, "O": 2048, "RESIDUAL": True, "BLOCK_ROWS": 64, "BLOCK_COLS": 128},
        128,
    ),
    "skinny_linear, head": (
        "skinny",
        "skinny_linear",
        SKINNY | {"I": 2048, "O": 128256, "RESIDUAL": False, "BLOCK_ROWS": 64, "BLOCK_COLS": 128, "SPLITS": 1},
        128,
    ),
    "skinny_linear, 32 rows": (
        "skinny",
        "skinny_linear",
        SKINNY | {"I": 4096, "O": 6144, "RESIDUAL": False, "BLOCK_ROWS": 64, "BLOCK_COLS": 128, "M": 32},
        128,
    ),
    "rotary, half table": ("rotary", "rotary", ROTARY | {"INTERLEAVED": True, "HALF_TABLE": True}, 128),
}


POINTERS = {
    "arrived_ptr": "*i32",
    "best_ptr": "*fp32",
    "eos_ptr": "*i64",
    "finished_ptr": "*i1",
    "index_ptr": "*i64",
    "input_ids_ptr": "*i64",
    "logits_ptr": "*fp32",
    "pad_ptr": "*i64",
    "part_ptr": "*fp32",
    "position_ids_ptr": "*i64",
    "position_ptr": "*i64",
    "sequence_ptr": "*i64",
    "square_ptr": "*fp32",
    "starts_ptr": "*i64",
    "sum_ptr": "*fp32",
    "top_ptr": "*fp32",
}
"""What is no bf16; the indices of `greedy` are int32 where a model runs, which makes no difference here."""
FLOATS = ("eps", "offset", "scaling", "softcap")
NARROW = ("rotary", "select", "rope_cache", "take_best")
"""A rotary program of 8 heads has 4 elements a thread; on wave 64 the two halves of a head are loaded apart. A
router's scores are one a thread, as are the pairs of one head in `rope_cache` and the blocks' best tokens."""


def compiled(kernel: Any, constants: dict[str, Any], threads: int, target: tuple[str, Any, int]) -> Any:
    """Compile for bf16 tensors and strides that are multiples of 16, as a model's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(position,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*bf16")
        else:
            signature[name] = "fp32" if name.endswith(FLOATS) else "i32"
        if name.endswith("_ptr") or "stride" in name or name in ("intermediate_size", "vocabulary"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": max(1, threads // target[2])})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills_and_with_wide_loads(name: str, target: str, tmp_path: Path) -> None:
    module, kernel, constants, threads = KERNELS[name]
    nvidia = target == "sm_90"
    constants = constants | {
        key: value for key, value in {"OVERLAP": nvidia, "STAGES": 4 if nvidia else 2}.items() if key in constants
    }
    jit = getattr(importlib.import_module(f"rewrite.runtime.{module}"), f"{kernel}_kernel").jit_function
    assembly = compiled(jit, constants, threads, TARGETS[target]).asm
    if nvidia:
        loads = re.findall(r"ld\.global(?:\.\w+)*", assembly["ptx"])
        assert loads
        wide = [load for load in loads if re.search(r"v[24]\.b32|b64", load)]
        wide += re.findall(r"cp\.async\.cg", assembly["ptx"])  # a pipelined loop's loads, 16 bytes each
        assert spilled(assembly["cubin"], tmp_path) == 0
        waits = re.findall(r"griddepcontrol\.(?:wait|launch_dependents)", assembly["ptx"])
        assert bool(waits) == constants.get("OVERLAP", False)
    else:
        loads = re.findall(r"(?:global|buffer)_load_\w+", assembly["amdgcn"])
        assert re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly["amdgcn"]) == ["0"]
        wide = [load for load in loads if re.search(r"dwordx[24]", load)]
    assert wide or name.startswith(NARROW)


def spilled(cubin: bytes, folder: Path) -> int:
    """Bytes of local memory of a kernel, by the tool that comes with Triton."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(importlib.import_module("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage).groups()
    return int(stack) + int(local)
