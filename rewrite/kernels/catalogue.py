"""Every launch of every kernel that is worth a look: what the operators of `runtime/` do at the shapes of real models.

A case is one call of an operator with tensors that are never read. The operator itself chooses the kernel, its tile
and its options, as it would on the chip that `launch.pretend` named; nothing of that is repeated here. A kernel that
no case reaches fails `tests/runtime/test_ahead_of_time.py`.

Import this after `launch.pretend`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rewrite.runtime.attention.decode_attention import choose as choose_split
from rewrite.runtime.attention.decode_attention import launch as launch_attention
from rewrite.runtime.attention.qkv_step import launch_qkv
from rewrite.runtime.attention.rope_cache import Rotation, rope_cache
from rewrite.runtime.attention.rotary import rotary
from rewrite.runtime.attention.rotary_rows import _op as rotary_rows
from rewrite.runtime.decode import greedy
from rewrite.runtime.decode.sampling import Sampling, StepState
from rewrite.runtime.fp8 import add_rms_norm as fp8_add_rms_norm
from rewrite.runtime.fp8 import format as fp8_format
from rewrite.runtime.fp8 import gated_activation as fp8_gated_activation
from rewrite.runtime.fp8 import rows as fp8_rows
from rewrite.runtime.fp8 import step as fp8_step
from rewrite.runtime.moe.experts import fused_experts
from rewrite.runtime.moe.router import RoutingRule, router
from rewrite.runtime.norms.add_layer_norm import add_layer_norm
from rewrite.runtime.norms.add_rms_norm import add_rms_norm
from rewrite.runtime.norms.layer_norm import layer_norm
from rewrite.runtime.norms.rms_norm import rms_norm
from rewrite.runtime.products.gated_activation import gated_activation
from rewrite.runtime.products.linear import _gated as gated_rows
from rewrite.runtime.products.linear import few_rows, tile_for
from rewrite.runtime.products.prologue import Prologue

from .cases import Case, int64, tensor
from .models import DEEPSEEK_V3, GEMMA_9B, LLAMA_1B, LLAMA_8B, LLAMAS, MIXTRAL, QWEN3_30B, QWEN3_MOE, Mixture, Model

CONTEXT = 1024
LONG_CONTEXT = 32768
PROMPT = 4096
"""Tokens."""
EPS = 1e-5


def norms() -> list[Case]:
    """RMSNorm and LayerNorm of the hidden states, of heads, and of rows that no block holds."""

    def plain(rows: int, size: int, **rounding: Any) -> Callable[[], object]:
        return lambda: rms_norm(tensor(rows, size), tensor(size), EPS, **rounding)

    def added(size: int, **rounding: Any) -> Callable[[], object]:
        return lambda: add_rms_norm(tensor(1, size), tensor(1, size), tensor(size), EPS, **rounding)

    def of_heads(model: Model) -> object:
        packed = tensor(1, PROMPT, model.heads + 2 * model.kv_heads, model.head_dim)
        return rms_norm(packed[:, :, : model.heads], tensor(model.head_dim), EPS)

    def layer(size: int, bias: bool) -> object:
        return layer_norm(tensor(1, size), tensor(size), tensor(size) if bias else None, EPS)

    def added_layer(size: int) -> object:
        return add_layer_norm(tensor(1, size), tensor(1, size), tensor(size), tensor(size), EPS)

    return [
        *(Case(model.name, plain(1, model.hidden_size)) for model in LLAMAS),
        Case("Gemma 9B", plain(1, GEMMA_9B.hidden_size, offset=1.0, weight_in_fp32=True)),
        Case("131072 columns", plain(1, 131072)),
        Case("Qwen3, heads of a prompt", partial(of_heads, QWEN3_30B)),
        *(Case(f"{model.name}, adds", added(model.hidden_size)) for model in LLAMAS),
        Case("Gemma 9B, adds", added(GEMMA_9B.hidden_size, offset=1.0, weight_in_fp32=True)),
        Case("131072 columns, adds", added(131072)),
        Case("4096 columns", lambda: layer(4096, bias=False)),
        Case("4096 columns, adds", lambda: added_layer(4096)),
        Case("131072 columns, adds", lambda: added_layer(131072)),
    ]


def activations() -> list[Case]:
    """Gate times up, of the halves of a packed projection and of two tensors."""

    def halves(tokens: int, size: int, activation: nn.Module) -> Callable[[], object]:
        def call() -> object:
            gate, up = tensor(tokens, 2 * size).chunk(2, -1)
            return gated_activation(gate, up, activation)

        return call

    def whole(size: int) -> object:
        return gated_activation(tensor(PROMPT, size), tensor(PROMPT, size), nn.SiLU())

    size = LLAMA_8B.intermediate_size
    return [
        Case("8B, SiLU, prompt", halves(PROMPT, size, nn.SiLU())),
        Case("8B, SiLU, 1 token", halves(1, size, nn.SiLU())),
        Case("8B, SiLU, two tensors", lambda: whole(size)),
        Case("8B, GELU", halves(PROMPT, size, nn.GELU())),
        Case("Gemma 9B, GELU tanh", halves(PROMPT, GEMMA_9B.intermediate_size, nn.GELU("tanh"))),
        Case("8B, ReLU", halves(PROMPT, size, nn.ReLU())),
    ]


def rotations() -> list[Case]:
    """Rotary embeddings of a prompt, in the layouts of transformers' files, and the rows of a step's tables."""

    def rotate(model: Model, columns: int, table: int | None = None, **form: bool) -> Callable[[], object]:
        def call() -> object:
            packed = tensor(1, PROMPT, model.heads + model.kv_heads, model.head_dim).transpose(1, 2)
            q, k = torch.split(packed, [model.heads, model.kv_heads], 1)
            cos, sin = tensor(1, PROMPT, table or columns), tensor(1, PROMPT, table or columns)
            return rotary(q, k, cos, sin, **form)

        return call

    def rows() -> object:
        return rotary_rows(int64(1, 1), tensor(CONTEXT, 128), tensor(CONTEXT, 128))

    return [
        *(Case(model.name, rotate(model, model.head_dim)) for model in (LLAMA_8B, LLAMA_1B, GEMMA_9B)),
        Case("8B, 96 of 128 columns", rotate(LLAMA_8B, 96, partial=True)),
        Case("8B, interleaved", rotate(LLAMA_8B, 128, interleaved=True)),
        Case("8B, half table", rotate(LLAMA_8B, 128, 64, interleaved=True, half_table=True)),
        Case("8B", rows),
    ]


def products() -> list[Case]:
    """Linear layers of one row and of 8, with norm, activation and residual as a decode step has them."""

    def product(rows: int, cols: int, out: int, norm: bool, residual: bool) -> Callable[[], object]:
        return lambda: few_rows(
            tensor(rows, 1, cols),
            tensor(out, cols),
            None,
            Prologue(tensor(cols), EPS) if norm else None,
            tensor(rows, 1, out) if residual else None,
        )

    def gated(model: Model) -> object:
        size = model.hidden_size
        weight = tensor(2 * model.intermediate_size, size)
        return gated_rows(tensor(1, 1, size), weight, None, "silu", Prologue(tensor(size), EPS))

    cases = []
    for rows in (1, 8):
        name = "" if rows == 1 else f", {rows} rows"
        for model in LLAMAS:
            size, inner = model.hidden_size, model.intermediate_size
            cases.append(Case(f"{model.name}, down{name}", product(rows, inner, size, norm=False, residual=True)))
            cases.append(Case(f"{model.name}, head{name}", product(rows, size, model.vocabulary, True, False)))
    kv = LLAMA_8B.hidden_size + 2 * LLAMA_8B.kv_heads * LLAMA_8B.head_dim
    for rows in (8, 32):
        qkv = product(rows, LLAMA_8B.hidden_size, kv, norm=True, residual=False)
        cases.append(Case(f"Llama 8B, qkv, {rows} rows", qkv))
    return [*cases, *(Case(model.name, partial(gated, model)) for model in LLAMAS)]


def _cache(model: Model, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    shape = (rows, model.kv_heads, capacity, model.head_dim)
    return tensor(*shape), tensor(*shape)


def steps() -> list[Case]:
    """What a decode step does beside its products: query, key and value, attention, the token."""

    def qkv(model: Model, columns: int, **form: bool) -> object:
        keys, values = _cache(model, 1, CONTEXT)
        weight = tensor((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden_size)
        table = columns // 2 if form.get("half_table") else columns
        rotation = Rotation(tensor(1, 1, table), tensor(1, 1, table), **form)
        tile = tile_for("qkv", model.head_dim // 2, model.hidden_size, weight)
        assert tile is not None
        x, norm = tensor(1, 1, model.hidden_size), Prologue(tensor(model.hidden_size), EPS)
        return launch_qkv(x, weight, None, norm, keys, values, int64(1), rotation, tile)

    def write(model: Model, normed: bool) -> object:
        sizes = [model.heads * model.head_dim, *2 * [model.kv_heads * model.head_dim]]
        q, k, v = torch.split(tensor(8, 1, sum(sizes)), sizes, -1)
        rotation = Rotation(tensor(8, 1, model.head_dim), tensor(8, 1, model.head_dim))
        norm = Prologue(tensor(model.head_dim), EPS) if normed else None
        return rope_cache(q, k, v, *_cache(model, 8, CONTEXT), int64(1), rotation, norm, norm)

    def attend(model: Model, rows: int, capacity: int, all_forms: bool = False) -> object:
        keys, values = _cache(model, rows, capacity)
        query = tensor(rows, model.heads, 1, model.head_dim)
        return launch_attention(
            query,
            keys,
            values,
            int64(1),
            int64(rows),
            tensor(rows * model.heads, dtype=torch.int32),
            model.head_dim**-0.5,
            4096 if all_forms else None,
            50.0 if all_forms else None,
            tensor(model.heads) if all_forms else None,
            choose_split(rows, model.heads, model.kv_heads, capacity, model.head_dim),
        )

    def token(rows: int, model: Model) -> object:
        sampling = Sampling([], False, int64(2), int64(1))
        return greedy.choose(tensor(rows, model.vocabulary), StepState(rows, CONTEXT, int64(1)), sampling)

    return [
        *(Case(model.name, partial(qkv, model, model.head_dim)) for model in LLAMAS),
        Case("1B, 32 columns", partial(qkv, LLAMA_1B, 32, interleaved=True, half_table=True)),
        Case("8B, 8 rows", partial(write, LLAMA_8B, normed=False)),
        Case("Qwen3 30B-A3B, 8 rows", partial(write, QWEN3_30B, normed=True)),
        *(Case(model.name, partial(attend, model, 1, CONTEXT)) for model in (*LLAMAS, GEMMA_9B)),
        Case("Llama 8B, 8 rows", partial(attend, LLAMA_8B, 8, CONTEXT)),
        *(Case(f"{model.name}, 32k", partial(attend, model, 1, LONG_CONTEXT)) for model in (LLAMA_8B, GEMMA_9B)),
        Case("Gemma 9B, all forms", partial(attend, GEMMA_9B, 1, LONG_CONTEXT, all_forms=True)),
        Case("8B", partial(token, 1, LLAMA_8B)),
        Case("Gemma 9B, 16 rows", partial(token, 16, GEMMA_9B)),
    ]


class _Gate(nn.Module):
    """A router that chooses as DeepSeek V3's does, or by softmax."""

    def __init__(self, sizes: Mixture, corrected: bool):
        super().__init__()
        self.weight = nn.Parameter(tensor(sizes.experts, sizes.hidden_size), requires_grad=False)
        self.top_k = sizes.top_k
        self.correction = tensor(sizes.experts, dtype=torch.float32) if corrected else None

    def rule(self) -> RoutingRule:
        scores = "softmax" if self.correction is None else "sigmoid"
        return RoutingRule(self.weight, self.top_k, scores, correction_bias=self.correction)


class _Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = tensor(size)

    def prologue(self) -> Prologue:
        return Prologue(self.weight, EPS)


class _Experts(nn.Module):
    def __init__(self, sizes: Mixture):
        super().__init__()
        count, size, inner = sizes.experts, sizes.hidden_size, sizes.intermediate_size
        self.gate_up_proj = nn.Parameter(tensor(count, 2 * inner, size), requires_grad=False)
        self.down_proj = nn.Parameter(tensor(count, size, inner), requires_grad=False)
        self.act_fn = nn.SiLU()


def mixtures() -> list[Case]:
    """Routers and experts of one token."""

    def route(sizes: Mixture, corrected: bool) -> object:
        return router(tensor(1, 1, sizes.hidden_size), _Gate(sizes, corrected), norm=_Norm(sizes.hidden_size))

    def run(sizes: Mixture) -> object:
        x, chosen = tensor(1, 1, sizes.hidden_size), int64(1, sizes.top_k)
        return fused_experts(x, _Experts(sizes), chosen, tensor(1, sizes.top_k), residual=x)

    return [
        *(Case(sizes.name, partial(route, sizes, corrected=False)) for sizes in (QWEN3_MOE, MIXTRAL)),
        Case(DEEPSEEK_V3.name, partial(route, DEEPSEEK_V3, corrected=True)),
        *(Case(sizes.name, partial(run, sizes)) for sizes in (QWEN3_MOE, MIXTRAL)),
    ]


def eight_bits() -> list[Case]:
    """Products with weights in 8 bits, and rows that are quantised by who writes them."""

    def weight(rows: int, cols: int) -> fp8_format.Quantized:
        kind = fp8_format.dtype_for(tensor(1))
        return fp8_format.Quantized(tensor(rows, cols, dtype=kind), tensor(rows, dtype=torch.float32))

    def product(rows: int, cols: int, out: int, norm: bool) -> Callable[[], object]:
        prologue = Prologue(tensor(cols), EPS) if norm else None
        residual = None if norm else tensor(rows, 1, out)
        return lambda: fp8_step.few_rows(tensor(rows, 1, cols), weight(out, cols), None, prologue, residual)

    def gated(model: Model) -> object:
        size = model.hidden_size
        both = weight(2 * model.intermediate_size, size)
        return fp8_step.gated(tensor(1, 1, size), both, None, "silu", Prologue(tensor(size), EPS))

    def activated(model: Model) -> object:
        gate, up = tensor(PROMPT, 2 * model.intermediate_size).chunk(2, -1)
        return fp8_gated_activation.quantized_gated_activation(gate, up, "silu")

    def normed(model: Model) -> object:
        x = tensor(PROMPT, model.hidden_size)
        return fp8_add_rms_norm._op(x, x, tensor(model.hidden_size), EPS, 0.0, False)

    size, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
    return [
        Case("8B, qkv", product(1, size, 6144, norm=True)),
        Case("8B, down", product(1, inner, size, norm=False)),
        Case("8B, head", product(1, size, LLAMA_8B.vocabulary, norm=True)),
        Case("8B, qkv, 8 rows", product(8, size, 6144, norm=True)),
        Case("8B, down, 8 rows", product(8, inner, size, norm=False)),
        Case("8B", partial(gated, LLAMA_8B)),
        Case("8B, prompt", partial(activated, LLAMA_8B)),
        Case("8B, prompt", partial(normed, LLAMA_8B)),
        Case("8B, prompt", lambda: fp8_rows.quantized_rows(tensor(PROMPT, size))),
    ]


def cases() -> list[Case]:
    """Return the whole catalogue."""
    return [*norms(), *activations(), *rotations(), *products(), *eight_bits(), *steps(), *mixtures()]
