"""Every operator inside `torch.func`, forward-mode differentiation and double backward: as torch's own operators."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mixture import EPS, Every, Gate, Norm
from tolerances import assert_same_gradient
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from hf_rewrite_runtime.attention.grouped_query import grouped_attention, grouped_matmul, native_gqa
from hf_rewrite_runtime.attention.segment_attention import segment_attention, segment_attention_weights
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.fp8.fp8_add_rms_norm import fp8_add_norm
from hf_rewrite_runtime.fp8.fp8_linear import fp8_gated_linear, fp8_gated_product, fp8_linear, fp8_packed_linear
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.linear.gated_product import gated_product
from hf_rewrite_runtime.linear.gemm import routed_linear, routed_packed_linear
from hf_rewrite_runtime.linear.linear import gated_linear, linear
from hf_rewrite_runtime.linear.packed_gemv import packed_step
from hf_rewrite_runtime.linear.packing import packed_linear, packed_linear_dense
from hf_rewrite_runtime.linear.patch_product import patch_product
from hf_rewrite_runtime.norms.add_norm import add_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.rotary import rotary, rotary_single
from rewrite import operators

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
router = importlib.import_module("hf_rewrite_runtime.moe.router")
every_expert = importlib.import_module("hf_rewrite_runtime.moe.every_expert")

H, E, K = 16, 4, 2


class Layer(nn.Module):
    """Weights that no gradient is wanted of, as in inference."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(2)
        self.q, self.k, self.v = (nn.Linear(H, size, bias=size == H) for size in (H, 8, 8))
        self.norm, self.patches = nn.LayerNorm(H), nn.Conv2d(3, 5, (2, 4), stride=(2, 4))
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 12, H) / 4)
        self.down_proj = nn.Parameter(torch.randn(E, H, 6) / 4)
        self.gate, self.rms = Gate(torch.randn(E, H), K, normalize=True, weights_in_fp32=True), Norm(torch.rand(H))
        self.every = Every(self.gate_up_proj.detach().mT.contiguous(), self.down_proj.detach().mT.contiguous())
        self.num_key_value_groups = 2
        self.to(dtype).requires_grad_(False)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Call the experts, as their module does, without a look at the index."""
        gate, up = torch.einsum("nkmh,nh->nkm", self.gate_up_proj[index], tokens).chunk(2, -1)
        return torch.einsum("nkhm,nkm,nk->nh", self.down_proj[index], F.silu(gate) * up, weights)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[B, H, S, D]` by halves."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def centred(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 - mean).pow(2).mean(-1, keepdim=True)
    scaled = (x32 - mean) * torch.rsqrt(variance + 1e-5)
    return (weight.float() * scaled).to(x.dtype)


def attend(layer: Layer, interface: Callable[..., Any], *states: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, 3, 3, dtype=states[0].dtype)
    with sdpa_kernel(SDPBackend.MATH):  # torch's own other kernels know no forward mode
        out: Tensor = interface(layer, *states, mask, scaling=0.3)[0]
    return out


def written(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call something that attends, by torch's kernel that knows every mode."""
    with sdpa_kernel(SDPBackend.MATH):
        return function(*args, **given)


def segments(layer: Layer, operator: Callable[..., Any], *states: Tensor) -> Any:
    return written(operator, sdpa_attention_forward, layer, *states, [2, 1], None, scaling=0.3)


def each_segment(layer: Layer, *states: Tensor) -> Tensor:
    pieces = zip(*(tensor.split([2, 1], 2) for tensor in states), strict=True)
    return torch.cat([written(sdpa_attention_forward, layer, *piece, None, scaling=0.3)[0] for piece in pieces], 1)


class Case(NamedTuple):
    """An operator beside what it stands for, of a layer and inputs of these shapes."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


THROUGH_FP32 = {"rms_norm", "add_rms_norm", "layer_norm", "linear", "gated_linear", "packed_step", "router"}
"""Operators that the modeling files compute in fp32, whatever comes in."""
STATES, HEADS, TABLE = (2, 3, H), (2, 4, 3, 8), (2, 3, 8)
SHARES = torch.eye(E)[:2]
INDEX = torch.tensor([[0, 2], [1, 3], [2, 1]])
CASES: dict[str, Case] = {
    "rms_norm": Case(lambda _, x, w: rms_norm(x, w, EPS), lambda _, x, w: normed(x, w), (STATES, (H,))),
    "add_rms_norm": Case(
        lambda _, x, y, w: add_rms_norm(x, y, w, EPS), lambda _, x, y, w: (normed(y + x, w), y + x),
        (STATES, STATES, (H,)),
    ),
    "add_norm": Case(
        lambda m, x, y: add_norm(x, y, m.norm), lambda m, x, y: (m.norm(y + x), y + x), (STATES, STATES)
    ),
    "layer_norm": Case(
        lambda _, x, w: layer_norm(x, w, None, 1e-5), lambda _, x, w: centred(x, w), (STATES, (H,))
    ),
    "gated_activation": Case(
        lambda _, x, y: gated_activation(x, y, F.silu), lambda _, x, y: F.silu(x) * y, (STATES, STATES)
    ),
    "gated_product": Case(
        lambda m, x, y: gated_product(x, y, F.silu, m.q), lambda m, x, y: m.q(F.silu(x) * y), (STATES, STATES)
    ),
    "rotary": Case(
        lambda _, q, k, cos, sin: rotary(q, k, cos, sin),
        lambda _, q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin)), (HEADS, (2, 2, 3, 8), TABLE, TABLE),
    ),
    "rotary_single": Case(
        lambda _, q, cos, sin: rotary_single(q, cos, sin), lambda _, q, cos, sin: turn(q, cos, sin),
        (HEADS, TABLE, TABLE),
    ),
    "grouped_matmul": Case(
        lambda _, p, v: grouped_matmul(p, v, 2), lambda _, p, v: p @ repeat_kv(v, 2), ((2, 4, 3, 3), (2, 2, 3, 8))
    ),
    "grouped_attention": Case(
        lambda _, *states: written(grouped_attention, *states, key_groups=2, value_groups=2),
        lambda _, q, k, v: written(F.scaled_dot_product_attention, q, repeat_kv(k, 2), repeat_kv(v, 2)),
        (HEADS, (2, 2, 3, 8), (2, 2, 3, 8)),
    ),
    "segment_attention": Case(
        lambda m, *states: segments(m, segment_attention, *states), each_segment,
        ((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)),
    ),
    "segment_attention_weights": Case(
        lambda m, *states: segments(m, segment_attention_weights, *states)[0], each_segment,
        ((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)),
    ),
    "native_gqa": Case(
        lambda m, *states: attend(m, native_gqa(sdpa_attention_forward), *states),
        lambda m, *states: attend(m, sdpa_attention_forward, *states), (HEADS, (2, 2, 3, 8), (2, 2, 3, 8)),
    ),
    "packed_linear": Case(
        lambda m, x: packed_linear(x, m.q, m.k, m.v), lambda m, x: (m.q(x), m.k(x), m.v(x)), (STATES,)
    ),
    "routed_linear": Case(lambda m, x: routed_linear(x, m.q), lambda m, x: m.q(x), (STATES,)),
    "packed_linear_dense": Case(
        lambda m, x: packed_linear_dense(x, m.q, m.k, m.v), lambda m, x: (m.q(x), m.k(x), m.v(x)), (STATES,)
    ),
    "routed_packed_linear": Case(
        lambda m, x: routed_packed_linear(x, m.q, m.k, m.v), lambda m, x: (m.q(x), m.k(x), m.v(x)), (STATES,)
    ),
    "linear": Case(
        lambda m, x, y: linear(x, m.q, norm=m.rms, residual=y), lambda m, x, y: y + m.q(normed(x, m.rms.weight)),
        ((1, 1, H), (1, 1, H)),
    ),
    "gated_linear": Case(
        lambda m, x: gated_linear(x, (m.k, m.v), F.silu, norm=m.rms),
        lambda m, x: F.silu(m.k(normed(x, m.rms.weight))) * m.v(normed(x, m.rms.weight)), ((1, 1, H),),
    ),
    "packed_step": Case(
        lambda m, x: packed_step(x, m.q, m.k, norm=m.rms),
        lambda m, x: (m.q(normed(x, m.rms.weight)), m.k(normed(x, m.rms.weight))), ((1, 1, H),),
    ),
    "router": Case(
        lambda m, x: router.router(x, m.gate, norm=m.rms)[:2],
        lambda m, x: (normed(x, m.rms.weight), m.gate(normed(x, m.rms.weight))[1]), ((3, H),),
    ),
    "fused_experts": Case(
        lambda m, x, w: experts.fused_experts(x, m, INDEX, w), lambda m, x, w: m(x, INDEX, w), ((3, H), (3, K))
    ),
    "chosen_experts": Case(
        lambda m, x: every_expert.chosen_experts(x, m.every, SHARES, 1), lambda m, x: m.every(x), ((2 * E, H),)
    ),
    "fp8_linear": Case(lambda m, x: fp8_linear(x, m.q), lambda m, x: m.q(x), (STATES,)),
    "fp8_packed_linear": Case(
        lambda m, x: fp8_packed_linear(x, m.q, m.k), lambda m, x: (m.q(x), m.k(x)), (STATES,)
    ),
    "fp8_gated_linear": Case(
        lambda m, x: fp8_gated_linear(x, (m.k, m.v), F.silu), lambda m, x: F.silu(m.k(x)) * m.v(x), (STATES,)
    ),
    "fp8_gated_product": Case(
        lambda m, x, y: fp8_gated_product(x, y, F.silu, m.q), lambda m, x, y: m.q(F.silu(x) * y), (STATES, STATES)
    ),
    "patch_product": Case(
        lambda m, x: patch_product(x, m.patches), lambda m, x: m.patches(x), ((2, 3, 2, 4),)
    ),
    "fp8_add_norm": Case(
        lambda m, x, y: fp8_add_norm(x, y, m.norm), lambda m, x, y: (m.norm(y + x), y + x), (STATES, STATES)
    ),
}  # fmt: skip
WRITES = "writes a cache in place, which torch transforms for nobody; it asks `wants_gradient` as the others do"
OTHERS = {
    "attend_step": WRITES,
    "residual_block": "a call of a module, with the operators that this and its norm consist of",
    "fp8_qkv_rope_cache": "the operators of `qkv_rope_cache`, by products of `fp8_packed_linear`",
    "cached_attention": "an attention function of transformers, which is differentiated as it stands",
    "qkv_rope_cache": "products, norms, rotation, each an operator with a case",
    "decode_attention": WRITES,
    "qkv_step": WRITES,
    "latent_attention": WRITES,
    "projected_step": WRITES,
    "fp8_qkv_step": WRITES,
    "conv_step": WRITES,
    "state_space_step": WRITES,
    "selective_scan_step": WRITES,
    "gated_norm": "None, and the file's own operators run, wherever something is differentiated",
    "log_decay": "the torch form runs wherever something is differentiated; its rates are no module of these tests",
    "delta_rule_step": "None, and the file's own operators run, wherever something is differentiated",
    "rotary_rows": "rows of tables by integer positions, which nothing differentiates",
}
"""Operators without a case, and why."""
OTHER_KERNELS = {name for name in CASES if name.startswith("fp8_")} | {
    "grouped_attention", "grouped_matmul", "native_gqa", "packed_linear", "patch_product", "routed_linear",
    "packed_linear_dense", "routed_packed_linear", "segment_attention", "segment_attention_weights",
}  # fmt: skip
"""Operators whose kernels, if any, are for other rows and other chips."""


def test_every_operator_has_a_case() -> None:
    offered = {offer.name for offer in operators.offers() if offer.shapes}
    assert offered == {*CASES, *OTHERS}
    assert not {*CASES} & {*OTHERS}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def jvp(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        value, tangent = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    return tensors(value) + tensors(tangent)


def duals(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), forward_ad.dual_level():
        pairs = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        parts = [forward_ad.unpack_dual(out) for out in tensors(function(*pairs))]
    assert all(part.tangent is not None for part in parts), "no tangent"
    return [part.primal for part in parts] + [part.tangent for part in parts]


def double_backward(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    total = sum(out.square().sum() for out in tensors(function(*leaves)))
    first = torch.autograd.grad(total, leaves, create_graph=True)
    along = sum((gradient * t).sum() for gradient, t in zip(first, tangents, strict=True))
    return [*first, *torch.autograd.grad(along, leaves)]


def forward_over_reverse(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    def total(*inputs: Tensor) -> Tensor:
        return torch.stack([out.square().sum() for out in tensors(function(*inputs))]).sum()

    gradient = torch.func.grad(total, argnums=tuple(range(len(inputs))))
    return [part for pair in torch.func.jvp(gradient, tuple(inputs), tuple(tangents)) for part in pair]


def vmap(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    stacked = [torch.stack((x, t)) for x, t in zip(inputs, tangents, strict=True)]
    with torch.no_grad():
        return tensors(torch.func.vmap(function)(*stacked))


def jacobian(function: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return tensors(torch.func.jacfwd(lambda x: function(x, *inputs[1:]))(inputs[0]))


TRANSFORMS = [jvp, duals, double_backward, forward_over_reverse, vmap, jacobian]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_is_what_torch_computes(name: str, transform: Callable[..., list[Tensor]], warm: bool) -> None:
    case, layer = CASES[name], Layer(torch.float64)
    inputs, tangents = ([torch.rand(s, dtype=torch.float64) + 0.1 for s in case.shapes] for _ in range(2))
    twin, state = copy.deepcopy(layer), {key: value.clone() for key, value in layer.state_dict().items()}
    if warm:
        with torch.no_grad():
            case.ours(layer, *inputs)
    ours = transform(lambda *x: case.ours(layer, *x), inputs, tangents)
    plain = transform(lambda *x: case.plain(twin, *x), inputs, tangents)
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_same_gradient(theirs, mine, torch.float32 if name in THROUGH_FP32 else None)
    assert all(type(parameter) is nn.Parameter for parameter in layer.parameters())
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("transform", [jvp, duals, vmap], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("name", CASES)
def test_no_kernel_runs(name: str, transform: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel knows nothing of tangents: on a GPU, too, torch's own operators run, and elsewhere still the kernel."""

    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel ran")

    case, layer = CASES[name], Layer(torch.float32)
    inputs, tangents = ([torch.rand(s) + 0.1 for s in case.shapes] for _ in range(2))
    monkeypatch.setattr(backend, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(launch.Kernel, "launch", launched)
    transform(lambda *x: case.ours(layer, *x), inputs, tangents)
    if name not in OTHER_KERNELS:
        with pytest.raises(AssertionError, match="a kernel ran"), torch.no_grad():
            case.ours(layer, *inputs)
