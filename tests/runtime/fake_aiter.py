"""Packages that look like a release of AMD's aiter: recorded signatures over strict torch bodies.

`aiter_signatures.json` has the parameters of each function from the release on where they changed. `install` writes a
package of one release; its functions check what the real kernels take for granted, and count their calls. Functions
that the real package compiles are registered as operators that claim to write to every tensor, and lose their names.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_aiter_attention
import fake_aiter_eight
import fake_aiter_moe
import record_aiter
import torch
import torch.nn.functional as F
from torch import Tensor

SIGNATURES = json.loads(record_aiter.RECORD.read_text())["functions"]
RELEASES = ("v0.1.7.post5", "v0.1.8", "v0.1.10", "v0.1.14", "v0.1.17", "v0.1.20", record_aiter.MAIN)
NEWEST = RELEASES[-1]
MARKERS = ("jit/core.py", "ops/mha.py", "ops/rmsnorm.py")
SCHEMA_TYPES = {
    "epsilon": "float", "eps": "float", "limit": "float",
    "use_model_sensitive_rmsnorm": "SymInt", "gemma_norm": "bool", "x_bias": "Tensor?",
    "need_renorm": "bool", "num_shared_experts": "SymInt", "shared_expert_scoring_func": "str",
    "out_before_quant": "Tensor?",
    "bias": "Tensor?", "dtype": "ScalarType?", "check": "bool", "isBpreshuffled": "bool", "scale": "Tensor?",
    "quant_dtype": "ScalarType?", "group_size": "SymInt", "transpose_scale": "bool", "num_rows": "Tensor?",
    "num_rows_factor": "SymInt", "scale_type": "ScalarType?",
}  # fmt: skip
RETURNS = {
    "rms_norm": "Tensor", "layernorm2d_fwd": "Tensor", "gemm_a8w8_bpreshuffle": "Tensor",
    "gemm_a8w8_blockscale": "Tensor", "per_group_quant_hip": "(Tensor, Tensor)",
}  # fmt: skip

calls: Counter[str] = Counter()
"""How often each function was called."""
OF_TENSORS = 1
"""The card that all tensors are on."""
card = 0
"""The current one, on whose stream aiter launches: another, except under a guard."""


@contextlib.contextmanager
def device_guard(tensor: Tensor) -> Iterator[None]:
    """Stand for `backend.device_guard`, which makes the device of a tensor the current one."""
    global card
    before, card = card, OF_TENSORS
    try:
        yield
    finally:
        card = before


def recorded(path: str, release: str) -> dict[str, Any] | None:
    """The record of a function in a release; None where it did not have it yet."""
    known = [
        entry for entry in SIGNATURES[path] if record_aiter.number(entry["since"]) <= record_aiter.number(release)
    ]
    return known[-1] if known else None


class Release:
    """The functions of a release, as the package of that release has them."""

    def __init__(self, tag: str, bodies: dict[str, Callable[..., Any]] | None = None):
        self.tag = tag
        self.bodies = {**BODIES, **(bodies or {})}
        self.library = torch.library.Library("aiter", "FRAGMENT")

    def functions(self, module: str) -> dict[str, Callable[..., Any]]:
        """The functions of a module of the package, `aiter.ops.rmsnorm`."""
        found = {}
        for path in SIGNATURES:
            record = recorded(path, self.tag)
            if path.rpartition(".")[0] == module and record is not None:
                name = path.rpartition(".")[2]
                found[name] = self._function(name, record)
        return found

    def _function(self, name: str, record: dict[str, Any]) -> Callable[..., Any]:
        stub = self._stub(name, record["parameters"])
        return self._compiled(name, record, stub) if record["decorators"] else stub

    def _stub(self, name: str, parameters: list[str]) -> Callable[..., Any]:
        names = [parameter.split("=")[0] for parameter in parameters]
        arguments = ", ".join(f"{each}={each}" for each in names if each != "self")
        space: dict[str, Any] = {"call": self._counted(name), **fake_aiter_moe.DEFAULTS}
        exec(f"def {name}({', '.join(parameters)}):\n    return call({arguments})", space)
        return space[name]

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert card == OF_TENSORS, f"{name} would be launched on the stream of another card"
            calls[name] += 1
            return self.bodies[name](self, **arguments)

        return call

    def _compiled(self, name: str, record: dict[str, Any], stub: Callable[..., Any]) -> Callable[..., Any]:
        """An operator whose schema says that it writes to all it gets, behind a function of `*args`."""
        clean = record["decorators"] == ["torch_compile_guard"]
        parts = []
        for index, parameter in enumerate(record["parameters"]):
            own, _, default = parameter.partition("=")
            kind = SCHEMA_TYPES.get(own, "Tensor") if own != "bias" or default else "Tensor"
            if kind.startswith("Tensor") and (
                not clean or own in ("out", "residual_out", "yscale", "out_before_quant")
            ):
                kind = kind.replace("Tensor", f"Tensor(a{index}!)")
            written = "None" if default.startswith("dtypes.") else default.replace("'", '"')
            parts.append(f"{kind} {own}" + (f"={written}" if written else ""))
        returned = RETURNS.get(name, "()")
        self.library.define(f"{name}({', '.join(parts)}) -> {returned}")
        self.library.impl(name, stub, "CompositeExplicitAutograd")

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            assert all(isinstance(arg, Tensor) for arg in args), "only tensors are passed by position"
            return getattr(torch.ops.aiter, name)(*args, **kwargs)

        return wrapper

    def take_back(self) -> None:
        """Unregister the operators."""
        self.library._destroy()
        sys.modules.pop("aiter", None)
        for name in [name for name in sys.modules if name.startswith("aiter.")]:
            del sys.modules[name]
        for name in SIGNATURES:
            torch.ops.aiter.__dict__.pop(name.rpartition(".")[2], None)


def install(folder: Path, release: Release) -> None:
    """Write the package of a release below `folder`, which is to be on `sys.path`."""
    global installed
    installed = release
    module = "import fake_aiter as _fake\n\nglobals().update(_fake.installed.functions(__name__))\n"
    tuned = f"{module}\n\nclass TunedGemm:\n    mm = mm\n\n\ntgemm = TunedGemm()\n"
    top = (
        "from .ops.mha import *\nfrom .ops.rmsnorm import *\nfrom .ops.norm import *\nfrom .ops.activation import *\n"
        "from .ops.moe_op import *\nfrom .ops.topk import *\nfrom .ops.gemm_op_a8w8 import *\n"
        "from .ops.quant import *\n"
    )
    files = {
        "__init__.py": top,
        "jit/__init__.py": "",
        "jit/core.py": "",
        "ops/__init__.py": "",
        "tuned_gemm.py": tuned,
        "fused_moe.py": module,
        "mla.py": module,
    }
    files |= {
        f"ops/{name}.py": module
        for name in ("mha", "rmsnorm", "norm", "activation", "moe_op", "shuffle", "topk", "gemm_op_a8w8", "quant")
    }
    for name in ("attention.unified_attention", "unified_attention"):
        if release.functions(f"aiter.ops.triton.{name}"):
            files |= {f"ops/triton/{folder}__init__.py": "" for folder in ("", "attention/")}
            files[f"ops/triton/{name.replace('.', '/')}.py"] = module
    for name, text in files.items():
        path = folder / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


installed: Release
Install = Callable[..., Release]
"""The fixture `install`: a function of a release's tag and of bodies that replace its own."""


def rows(*tensors: Tensor) -> None:
    """What the norm kernels take for granted."""
    for tensor in tensors:
        assert tensor.dtype in (torch.float16, torch.bfloat16), "garbage"
        assert tensor.dtype == tensors[0].dtype, "garbage"
        assert tensor.is_contiguous(), "memory fault"
        assert tensor.shape[-1] == tensors[0].shape[-1]
    assert tensors[0].ndim == 2, "memory fault"
    assert tensors[0].shape[-1] % 8 == 0, "neighbouring rows are written to"
    assert all(not tensor.data_ptr() % 16 for tensor in tensors), "memory fault"


def normed(x: Tensor, weight: Tensor, epsilon: float, mode: int, gemma: bool, dtype: torch.dtype) -> Tensor:
    """Modes 0 (one rounding), 1 (rounded before the weight) and gemma_norm, of an fp32 input."""
    scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon)
    if mode:
        return scaled.to(dtype) * weight
    return (scaled * (weight.float() + (1.0 if gemma else 0.0))).to(dtype)


def rms_norm(
    release: Release, input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> Tensor:
    rows(input, weight)
    assert weight.ndim == 1
    return normed(input.float(), weight, epsilon, use_model_sensitive_rmsnorm, False, input.dtype)


def rmsnorm(
    release: Release, out: Tensor, input: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool = False
) -> None:
    rows(input, weight, out)
    out.copy_(normed(input.float(), weight, epsilon, 0, gemma_norm, input.dtype))


def rmsnorm2d_fwd_with_add(
    release: Release,
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    """From 0.1.18 on mode 1 takes the rounded sum; what the older kernels took is not known: here the exact one."""
    rows(input, residual_in, residual_out, out, weight)
    summed = input.float() + residual_in.float()
    residual_out.copy_(summed)
    if use_model_sensitive_rmsnorm and record_aiter.number(release.tag) >= record_aiter.number("v0.1.18"):
        summed = residual_out.float()
    out.copy_(normed(summed, weight, epsilon, use_model_sensitive_rmsnorm, gemma_norm, input.dtype))


def layernorm2d_fwd(
    release: Release, input: Tensor, weight: Tensor, bias: Tensor, epsilon: float, x_bias: Tensor | None = None
) -> Tensor:
    rows(input, weight, bias)
    x = input.float()
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + epsilon)
    return (scaled * weight.float() + bias.float()).to(input.dtype)


def _halves(out: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    rows(input)
    assert out.is_contiguous(), "raw addresses"
    assert out.dtype == input.dtype
    assert out.shape == (input.shape[0], input.shape[1] // 2)
    first, second = input.float().chunk(2, -1)
    return first, second


def silu_and_mul(release: Release, out: Tensor, input: Tensor, limit: float = 0.0) -> None:
    gate, up = _halves(out, input)
    assert not limit
    out.copy_(gate * torch.sigmoid(gate) * up)


def gelu_and_mul(release: Release, out: Tensor, input: Tensor) -> None:
    gate, up = _halves(out, input)
    out.copy_(F.gelu(gate) * up)


def gelu_tanh_and_mul(release: Release, out: Tensor, input: Tensor) -> None:
    gate, up = _halves(out, input)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def flash_attn_func(
    release: Release,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, ...],
    **others: Any,
) -> Tensor:
    """`[B, S, H, D]`, bottom right; a window that covers all keys is none, and a single query is not causal."""
    for tensor in (q, k, v):
        assert tensor.stride(-1) == 1
        assert tensor.dtype == q.dtype
        assert tensor.dtype in (torch.float16, torch.bfloat16)
        assert tensor.shape[-1] <= 256
    assert q.shape[2] % k.shape[2] == 0
    assert len(window_size) == 2 or (
        len(window_size) == 3 and record_aiter.number(release.tag) >= record_aiter.number("v0.1.8")
    )
    assert not dropout_p
    assert not any(others.get(name) is not None for name in ("bias", "alibi_slopes", "sink_ptr"))
    assert not others["return_lse"]
    queries, keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    left, right = window_size[:2]
    last = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal and queries > 1:
        right = 0
    if right >= 0:
        hidden |= key > last + right
    if left >= 0 and left < keys:
        hidden |= key < last - left
    k, v = (x.float().repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * (softmax_scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype).contiguous()


def mm(release: Release, inp: Tensor, weights: Tensor, bias: Tensor | None, **others: Any) -> Tensor:
    assert inp.ndim == 2
    assert inp.dtype == weights.dtype
    assert inp.is_contiguous()
    assert not any(other is not None for other in others.values())
    product = inp.float() @ weights.float().T
    return (product if bias is None else product + bias.float()).to(inp.dtype)


BODIES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        rms_norm, rmsnorm, rmsnorm2d_fwd_with_add, layernorm2d_fwd, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul,
        flash_attn_func, mm, *fake_aiter_moe.FUNCTIONS, *fake_aiter_attention.FUNCTIONS,
        *fake_aiter_eight.FUNCTIONS,
    )
}  # fmt: skip
