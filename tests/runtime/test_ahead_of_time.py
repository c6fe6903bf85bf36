"""Every kernel compiles for Hopper and for AMD data-centre GPUs, without one: Triton ships both compilers."""

from __future__ import annotations

import importlib.util
import re
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
    "rotary, half table": ("rotary", "rotary", ROTARY | {"INTERLEAVED": True, "HALF_TABLE": True}, 128),
}


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
            signature[name] = {"index_ptr": "*i64", "logits_ptr": "*fp32"}.get(name, "*bf16")
        else:
            signature[name] = "fp32" if name in ("eps", "offset", "scaling") else "i32"
        if name.endswith("_ptr") or "stride" in name or name == "intermediate_size":
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": threads // target[2]})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills_and_with_wide_loads(name: str, target: str) -> None:
    module, kernel, constants, threads = KERNELS[name]
    jit = getattr(importlib.import_module(f"rewrite.runtime.{module}"), f"{kernel}_kernel").jit_function
    assembly = compiled(jit, constants, threads, TARGETS[target]).asm
    if target == "sm_90":
        loads = re.findall(r"ld\.global(?:\.\w+)*", assembly["ptx"])
        assert loads
        wide = [load for load in loads if re.search(r"v[24]\.b32|b64", load)]
        wide += re.findall(r"cp\.async\.cg", assembly["ptx"])  # a pipelined loop's loads, 16 bytes each
    else:
        loads = re.findall(r"(?:global|buffer)_load_\w+", assembly["amdgcn"])
        assert re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly["amdgcn"]) == ["0"]
        wide = [load for load in loads if re.search(r"dwordx[24]", load)]
    # A rotary program of 8 heads has 4 elements a thread; on wave 64 the two halves of a head are loaded apart. A
    # router's scores are one a thread.
    assert wide or name.startswith(("rotary", "select"))
