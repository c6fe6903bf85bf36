"""On the CPU every operator is bit-equal to the code of transformers that it replaces; its gradients agree too."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_same_gradient
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.linear.gated_activation import activation_kind, gated_activation
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.rotary import rotary, rotary_single

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def modeling(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def assert_same(original: Callable[..., Any], ours: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """Compare results bit for bit, and the gradients of a random projection of them."""
    outcomes, gradients = [], []
    for function in (original, ours):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            plain = function(*inputs)
        recorded = function(*leaves)
        outputs = recorded if isinstance(recorded, tuple) else (recorded,)
        plain = plain if isinstance(plain, tuple) else (plain,)
        torch.manual_seed(1)
        sum((out.float() * torch.randn(out.shape)).sum() for out in outputs).backward()
        outcomes.append((*plain, *outputs))
        gradients.append([leaf.grad for leaf in leaves])
    for theirs, mine in zip(*outcomes, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.equal(theirs, mine)
    for theirs, mine in zip(*gradients, strict=True):
        assert_same_gradient(theirs, mine)


RMS_NORMS = {
    ("llama", "LlamaRMSNorm"): {},
    ("phi3", "Phi3RMSNorm"): {},
    ("granite", "GraniteRMSNorm"): {},
    ("gemma", "GemmaRMSNorm"): {"offset": 1.0, "weight_in_fp32": True},
    ("gemma2", "Gemma2RMSNorm"): {"offset": 1.0, "weight_in_fp32": True},
    ("olmo2", "Olmo2RMSNorm"): {"weight_in_fp32": True},
    ("gpt_oss", "GptOssRMSNorm"): {"weight_in_fp32": True},
}


@dtypes
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["same_dtype", "fp32_weight"])
@pytest.mark.parametrize("name", RMS_NORMS, ids=lambda name: name[0])
def test_rms_norm(name: tuple[str, str], dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    module = getattr(modeling(name[0]), name[1])(80, eps=1e-5)
    weight = torch.randn(80).to(weight_dtype or dtype)

    def original(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    assert_same(
        original, lambda x, w: rms_norm(x, w, 1e-5, **RMS_NORMS[name]), (torch.randn(3, 5, 80).to(dtype), weight)
    )


@dtypes
def test_rms_norm_without_weight(dtype: torch.dtype) -> None:
    original = modeling("nanochat").NanoChatRMSNorm(eps=1e-6)
    assert_same(original, lambda x: rms_norm(x, None, 1e-6), (torch.randn(3, 5, 80).to(dtype),))


@dtypes
@pytest.mark.parametrize("shape", [(64,), (4, 64)], ids=str)
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = modeling("cohere").CohereLayerNorm(hidden_size=shape, eps=1e-5)

    def original(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    inputs = (torch.randn(2, 3, 4, 64).to(dtype), torch.randn(shape).to(dtype))
    assert_same(original, lambda x, w: layer_norm(x, w, None, 1e-5), inputs)


FUSED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dtypes
@pytest.mark.parametrize("name", [*FUSED, "gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "mish", "gelu_10"])
def test_gated_activation(name: str, dtype: torch.dtype) -> None:
    activation = ACT2FN[name]
    assert activation_kind(activation) == FUSED.get(name)
    inputs = tuple(torch.randn(2, 3, 70).to(dtype))
    assert_same(lambda g, u: activation(g) * u, lambda g, u: gated_activation(g, u, activation), inputs)
    assert_same(lambda g, u: u * activation(g), lambda g, u: gated_activation(g, u, activation), inputs)
    assert (("gated_activation", "activation_observed_or_unknown") in backend.fallbacks()) == (name not in FUSED)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_by_the_argument_of_the_call(approximate: str) -> None:
    gate, up = torch.randn(2, 3, 8)
    expected = torch.nn.functional.gelu(gate, approximate=approximate) * up
    assert torch.equal(gated_activation(gate, up, torch.nn.functional.gelu, approximate=approximate), expected)
    assert not [count for count in backend.fallbacks() if count[0] == "gated_activation" and "unknown" in count[1]]


@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        (torch.nn.functional.silu, "silu"),
        (torch.nn.functional.gelu, "gelu"),
        (torch.nn.SiLU(), "silu"),
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
        (torch.nn.ReLU(), "relu"),
        (torch.nn.Tanh(), None),
        (torch.tanh, None),
    ],
)
def test_activation_kind(activation: Callable[[torch.Tensor], torch.Tensor], kind: str | None) -> None:
    assert activation_kind(activation) == kind


def test_an_observed_activation_is_called() -> None:
    activation, calls = torch.nn.SiLU(), []
    activation.register_forward_hook(lambda *_: calls.append(1))
    gated_activation(*torch.randn(2, 3, 8), activation)
    assert calls == [1]
    assert backend.fallbacks() == {("gated_activation", "activation_observed_or_unknown"): 1}


def with_first_half(cos: torch.Tensor) -> torch.Tensor:
    return cos[..., : cos.shape[-1] // 2]


def as_glm(**form: bool) -> Callable[..., Any]:
    return lambda q, k, cos, sin: rotary(
        q, k, with_first_half(cos), with_first_half(sin), interleaved=True, half_table=True, **form
    )


# model, width of the tables, dtype of the tables (None: the input's), our call
ROTARY: dict[str, tuple[int, torch.dtype | None, Callable[..., Any]]] = {
    "llama": (32, None, rotary),
    "granite": (32, None, rotary),
    "stablelm": (32, None, rotary),
    "gpt_neox": (8, None, lambda *i: rotary(*i, partial=True)),
    "phi3": (24, None, lambda *i: rotary(*i, partial=True)),
    "gpt_oss": (16, None, lambda *i: rotary(*i, half_table=True)),
    "olmo2": (32, torch.float32, lambda *i: rotary(*i, keep_dtype=True)),
    "modernbert": (32, None, lambda *i: rotary(*i, in_fp32=True)),
    "nanochat": (32, None, lambda q, k, cos, sin: rotary(q, k, cos, -sin)),
    "cohere": (32, None, lambda *i: rotary(*i, interleaved=True, in_fp32=True)),
    "cohere2": (32, None, lambda *i: rotary(*i, interleaved=True, in_fp32=True)),
    "blt": (32, None, lambda *i: rotary(*i, interleaved=True)),
    "glm": (16, None, as_glm(partial=True)),
    "glm4": (16, None, as_glm(partial=True)),
    "helium": (32, None, as_glm()),
    "ernie4_5": (32, None, as_glm(in_fp32=True)),
}


def rotary_inputs(dtype: torch.dtype, table: int, table_dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    states = torch.randn(2, 5, 6 * 32).to(dtype)
    q, k = (x.view(2, 5, -1, 32).transpose(1, 2) for x in states.split((4 * 32, 2 * 32), dim=-1))
    angle = 6.28 * torch.rand(2, 5, table)
    return q, k, angle.cos().to(table_dtype or dtype), angle.sin().to(table_dtype or dtype)


@dtypes
@pytest.mark.parametrize("model", ROTARY)
def test_rotary(model: str, dtype: torch.dtype) -> None:
    table, table_dtype, ours = ROTARY[model]
    assert_same(modeling(model).apply_rotary_pos_emb, ours, rotary_inputs(dtype, table, table_dtype))


@dtypes
def test_rotary_that_separates_the_halves(dtype: torch.dtype) -> None:
    original = modeling("deepseek_v3").apply_rotary_pos_emb_interleave
    assert_same(original, as_glm(deinterleave=True), rotary_inputs(dtype, 32, None))


@dtypes
@pytest.mark.parametrize("columns", [8, 9])
def test_rotary_by_chunks(columns: int, dtype: torch.dtype) -> None:
    """Of an odd number of columns the first chunk is the longer half, the first slice the shorter one."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((-right, left), dim=-1)

    q, k = torch.randn(2, 1, 2, 5, columns).to(dtype)
    cos, sin = torch.randn(2, 1, 5, columns).to(dtype)
    expected = [x * cos.unsqueeze(1) + turned(x) * sin.unsqueeze(1) for x in (q, k)]
    for got in (rotary(q, k, cos, sin, chunked=True), [rotary_single(x, cos, sin, chunked=True) for x in (q, k)]):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    unlike = rotary(q, k, cos, sin)
    assert torch.equal(unlike[0], expected[0]) == (columns % 2 == 0)


@dtypes
def test_rotary_of_vision_models(dtype: torch.dtype) -> None:
    q, k, cos, sin = rotary_inputs(dtype, 32, torch.float32)
    inputs = (q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    original = modeling("qwen2_vl").apply_rotary_pos_emb_vision
    assert_same(original, lambda *i: rotary(*i, -2, in_fp32=True), inputs)


@dtypes
def test_rotary_of_one_tensor(dtype: torch.dtype) -> None:
    q, _, cos, sin = rotary_inputs(dtype, 16, None)
    assert_same(
        modeling("gptj").apply_rotary_pos_emb,
        lambda x, sin, cos: rotary_single(x, cos, sin, 2, interleaved=True, half_table=True),
        (q.transpose(1, 2), sin, cos),
    )
    q, _, cos, sin = rotary_inputs(dtype, 32, None)
    assert_same(modeling("gemma3n").apply_rotary_pos_emb, rotary_single, (q, cos, sin))


def test_one_tensor_is_rotated_beside_keys_whose_fake_lies_as_they_do() -> None:
    """Of a part of a head, as GPT-J's: fake tensors give the copy of an empty view other strides than torch does."""
    x, table = torch.randn(5, 11, 8, 16)[..., :8], torch.rand(1, 11, 4)
    promised: list[tuple[object, ...]] = []

    class Faked(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace not in ("aten", "prim"):
                with FakeTensorMode() as mode:
                    faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                    promised.extend((out.shape, out.stride()) for out in func(*faked))
                found = func(*args)
                assert [(out.shape, out.stride()) for out in found] == promised
                return found
            return func(*args, **(kwargs or {}))

    with Faked():
        rotary_single(x, table.cos(), table.sin(), unsqueeze_dim=2, interleaved=True, half_table=True)
    assert len(promised) == 2


@pytest.mark.parametrize("interleaved", [False, True])
def test_half_a_table_of_one_column_turns_two(interleaved: bool) -> None:
    """Moonshine with heads of which a pair is turned; as a table that is broadcast, an odd column was left."""
    q, k = torch.randn(2, 2, 3, 5, 6)
    cos, sin = torch.rand(2, 1, 5, 1)
    turned = rotary(q, k, cos, sin, interleaved=interleaved, half_table=True, partial=True)
    for got, x in zip(turned, (q, k), strict=True):
        first, second = x[..., :1], x[..., 1:2]
        pair = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
        torch.testing.assert_close(got, torch.cat((*pair, x[..., 2:]), -1))
