"""The kernels of a decode step against fp64, with the plain form's own error as the yardstick."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.attention.decode_attention import (
    ScoreRule,
    Split,
    _reference,
    decode_attention,
    decode_attention_kernel,
    launch,
)
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.cache.token import Write
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device import split_k_semaphores
from hf_rewrite_runtime.device.graph_capture import capture
from hf_rewrite_runtime.launching import tiles
from hf_rewrite_runtime.launching.launch import collect
from hf_rewrite_runtime.lazy.step_products import StepProducts
from hf_rewrite_runtime.linear.linear import gated_linear, linear
from hf_rewrite_runtime.linear.skinny import launch_skinny_linear, takes_norm
from hf_rewrite_runtime.norms.norm_form import Prologue, norm_form
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.qkv_batch import launch_qkv_rows
from hf_rewrite_runtime.rope.qkv_step import qkv_step
from hf_rewrite_runtime.rope.rope_cache import Rotation
from hf_rewrite_runtime.rope.rotary import rotary
from hf_rewrite_runtime.sampling.greedy import choose
from hf_rewrite_runtime.sampling.prompt_lookup import look_up
from hf_rewrite_runtime.sampling.sampling import Lookup, Sampling, StepState

one_row = importlib.import_module("hf_rewrite_runtime.linear.gemv")

qkv_module = importlib.import_module("hf_rewrite_runtime.rope.qkv_step")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


class Norm(nn.Module):
    """An RMSNorm as `fuse_rms_norm` and `decode_layers` leave it."""

    def __init__(self, size: int, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-5, offset=self.offset)


def projection(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    made.weight.data.normal_(0, inputs**-0.5)
    return made


def exactly(run: Any, *modules: nn.Module) -> Tensor:
    """Run the plain form in fp64 and bring the modules back."""
    dtype = next(modules[0].parameters()).dtype
    for module in modules:
        module.double()
    with backend.use_backend("reference"):
        result: Tensor = run(torch.float64)
    for module in modules:
        module.to(dtype)
    return result


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
@pytest.mark.parametrize(("inputs", "outputs", "bias", "offset"), [(64, 48, True, 0.0), (290, 7, False, 1.0)])
def test_few_rows(
    inputs: int,
    outputs: int,
    bias: bool,
    offset: float,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    norm, one, two = Norm(inputs, offset), projection(inputs, outputs, bias), projection(inputs, outputs, bias)
    for module in (norm, one, two):
        module.to(device, dtype)
    x = torch.randn(rows, 1, inputs, device=device).to(dtype)
    x[-1] *= 50.0  # a row with a norm of its own
    residual = torch.randn(rows, 1, outputs, device=device).to(dtype)
    forms = [
        lambda kind: linear(x.to(kind), one, norm=norm, residual=residual.to(kind)),
        lambda kind: gated_linear(x.to(kind), (one, two), nn.functional.silu, norm=norm),
    ]
    heard: list[str] = []
    for form in forms:
        tiles.listen(lambda name, entry: heard.append(name.split()[0]))
        got = form(dtype)
        tiles.listen(None)
        assert not backend.fallbacks()
        with backend.use_backend("reference"):
            plain = form(dtype)
        if heard:
            assert_as_exact_as(plain, got, exactly(form, norm, one, two), torch.finfo(dtype).eps)
        else:  # torch's own products, packed or not, round as they like
            torch.testing.assert_close(got, plain)
    several = [] if dtype == torch.float32 else ["skinny_linear"] * 2
    taller = [] if dtype == torch.float32 else ["skinny_linear_32"] * 2
    kernels = {1: ["linear", "gated"], 17: taller, 33: []}
    assert heard == kernels.get(rows, several)


def test_what_is_collected_does_not_run(device: torch.device) -> None:
    x, weight = torch.ones(2, 32, device=device), torch.ones(16, 32, device=device)
    out = torch.zeros(2, 16, device=device)
    found: dict[Any, Any] = {}
    collect(lambda key, compile: found.setdefault(key, compile))
    for tile in ((16, 16, 1), (16, 32, 1), (16, 32, 1)):
        launch_skinny_linear(x, weight, None, None, None, out, tile)
    collect(None)
    assert len(found) == 2
    assert not out.any()
    launch_skinny_linear(x, weight, None, None, None, out, (16, 32, 1))
    assert (out == 32).all()


HALVES = [dtype for dtype in KERNEL_DTYPES if dtype.itemsize == 2]
WHOLE = [(16, 32, 1), (32, 64, 4), (64, 256, 8, 1, 3)]
SPLIT = [(16, 32, 1, 2, 3), (32, 32, 2, 6, 3), (64, 64, 4, 3, 4), (16, 64, 2, 9)]


def skinny_product(
    form: tuple[int, ...], dtype: torch.dtype, device: torch.device, rows: int, normed: bool, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, product, bias and residual by the plain form, by the kernel, and exactly."""
    inputs, outputs = (192, 112) if whole else (200, 107)  # 107 x 200 is no multiple of any tile
    norm = Norm(inputs).to(device, dtype)
    prologue = norm_form(norm) if normed and takes_norm(torch.empty(0, dtype=dtype)) else None
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    x[-1] *= 50.0
    bias, residual = torch.randn(outputs, device=device).to(dtype), torch.randn(rows, outputs, device=device).to(dtype)
    y = torch.full((rows, outputs), torch.nan, device=device, dtype=dtype)
    launch_skinny_linear(x, weight, bias, prologue, residual, y, form)

    def plain(kind: torch.dtype) -> Tensor:
        rounded = x.to(kind)
        if prologue is not None:
            rounded = rms_norm(rounded, norm.weight.to(kind), 1e-5)
        return nn.functional.linear(rounded, weight.to(kind), bias.to(kind)) + residual.to(kind)

    with backend.use_backend("reference"):
        return plain(dtype), y, plain(torch.float64)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", WHOLE + SPLIT, ids=str)
@pytest.mark.parametrize(("rows", "whole"), [(5, True), (16, False), (17, True)])
def test_forms_of_skinny_products(
    form: tuple[int, ...], rows: int, whole: bool, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    for _ in range(2):  # the second finds the counters as the first left them
        plain, got, exact = skinny_product(form, dtype, device, rows, True, whole)
        assert_as_exact_as(plain, got, exact, torch.finfo(dtype).eps)
    assert not any(counters.any() for counters in split_k_semaphores._by_stream.get((exact.get_device(), 0), []))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", WHOLE + SPLIT, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 192, 56), (17, 200, 51)])
def test_forms_of_gated_products(
    form: tuple[int, ...],
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    norm = Norm(inputs).to(device, dtype)
    prologue = norm_form(norm) if takes_norm(torch.empty(0, dtype=dtype)) else None
    weight = (torch.randn(2 * outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    x, bias = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(2 * outputs, device=device).to(dtype)
    got = torch.full((rows, outputs), torch.nan, device=device, dtype=dtype)
    launch_skinny_linear(x, weight, bias, prologue, None, got, form, "silu", gated=True)

    def plain(kind: torch.dtype) -> Tensor:
        rounded = x.to(kind)
        if prologue is not None:
            rounded = rms_norm(rounded, norm.weight.to(kind), 1e-5)
        gate, up = nn.functional.linear(rounded, weight.to(kind), bias.to(kind)).chunk(2, -1)
        return nn.functional.silu(gate) * up

    with backend.use_backend("reference"):
        assert_as_exact_as(plain(dtype), got, plain(torch.float64), torch.finfo(dtype).eps)


ROTATIONS = [(16, False, False), (8, False, True), (8, True, False), (0, False, False)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("columns", "interleaved", "half_table"), ROTATIONS)
@pytest.mark.parametrize(
    ("form", "normed", "batch"),
    [((32, 32, 4, 1), False, 3), ((64, 32, 2, 3), False, 17), ((16, 32, 1, 1), True, 5), ((16, 32, 1, 3), True, 32)],
    ids=str,
)
def test_queries_and_cache_writes_of_several_rows(
    form: tuple[int, ...],
    normed: bool,
    batch: int,
    columns: int,
    interleaved: bool,
    half_table: bool,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    heads, kv_heads, head_dim, hidden, capacity = 5, 2, 16, 96, 12
    weight = (torch.randn((heads + 2 * kv_heads) * head_dim, hidden, device=device) * hidden**-0.5).to(dtype)
    bias, x = (torch.randn(size, device=device).to(dtype) for size in ((len(weight),), (batch, 1, hidden)))
    of_heads = [(torch.rand(head_dim, device=device) + 0.5).to(dtype) for _ in range(2)] if normed else [None, None]
    angle = torch.rand(batch, 1, max(columns // 2 if half_table else columns, 1), device=device)
    tables = (angle.cos().to(dtype), angle.sin().to(dtype))
    position, sizes = torch.tensor([7], device=device), [count * head_dim for count in (heads, kv_heads, kv_heads)]
    prologue = Prologue(torch.ones(hidden, device=device, dtype=dtype), 1e-5) if takes_norm(x) else None

    def written(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        for cached in (keys, values):
            assert not cached[:, :, :7].any()
            assert not cached[:, :, 8:].any()
        return torch.cat([t.flatten(1) for t in (query, keys[:, :, 7], values[:, :, 7])], 1)

    def caches(kind: torch.dtype) -> list[Tensor]:
        return [torch.zeros(batch, kv_heads, capacity, head_dim, device=device, dtype=kind) for _ in range(2)]

    def plain(kind: torch.dtype) -> Tensor:
        keys, values = caches(kind)
        rounded = x.to(kind) if prologue is None else rms_norm(x.to(kind), prologue.weight.to(kind), 1e-5)
        both = nn.functional.linear(rounded, weight.to(kind), bias.to(kind))
        parts = [part.view(batch, 1, -1, head_dim).transpose(1, 2) for part in both.split(sizes, -1)]
        query, key = (
            part if norm is None else rms_norm(part, norm.to(kind), 1e-5)
            for part, norm in zip(parts, of_heads, strict=False)
        )
        if columns:
            cos, sin = (table.to(kind) for table in tables)
            query, key = rotary(
                query, key, cos, sin, partial=True, interleaved=interleaved, half_table=half_table,
            )  # fmt: skip
        keys[:, :, 7:8], values[:, :, 7:8] = key, parts[2]
        return written(keys, values, query)

    keys, values = caches(dtype)
    norms = (prologue, *(None if norm is None else Prologue(norm, 1e-5) for norm in of_heads))
    rotation = Rotation(*tables, interleaved, half_table) if columns else None
    query = launch_qkv_rows(x, weight, bias, norms, keys, values, position, rotation, form)
    with backend.use_backend("reference"):
        wanted, exact = plain(dtype), plain(torch.float64)
    assert_as_exact_as(wanted, written(keys, values, query), exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", [(16, 32, 1), (32, 32, 2, 6, 3)], ids=str)
def test_a_norm_sums_its_squares_over_the_splits(
    form: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16, whose norm no model has in the kernel: the interpreter has no bf16, and nothing overflows here."""
    monkeypatch.setitem(globals(), "takes_norm", lambda input: True)
    plain, got, exact = skinny_product(form, torch.float16, device, 7, True, True)
    assert_as_exact_as(plain, got, exact, torch.finfo(torch.float16).eps)


def test_parts_are_added_in_one_order(device: torch.device) -> None:
    torch.manual_seed(1)
    x, weight = (torch.randn(size, 512, device=device, dtype=torch.float16) for size in (3, 64))
    products = []
    for _ in range(3):
        y = torch.empty(3, 64, device=device, dtype=torch.float16)
        launch_skinny_linear(x, weight, None, None, None, y, (16, 32, 1, 16))
        products.append(y)
    assert all(torch.equal(products[0], other) for other in products[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs need a CUDA or ROCm device")
def test_graphs_and_streams_count_apart() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, weight = (torch.randn(size, 8192, device=device, dtype=torch.bfloat16) for size in (8, 2048))
    form = (16, 256, 2, 4)
    wanted = torch.empty(8, 2048, device=device, dtype=torch.bfloat16)
    launch_skinny_linear(x, weight, None, None, None, wanted, form)
    outs = [torch.full_like(wanted, torch.nan) for _ in range(3)]
    graphs, streams = [], [torch.cuda.Stream() for _ in outs]

    def run(out: Tensor) -> None:
        for _ in range(20):
            launch_skinny_linear(x, weight, None, None, None, out, form)

    for out in outs[:2]:
        again = functools.partial(run, out)
        graphs.append(capture(again, again, device, torch.cuda.graph_pool_handle()))
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):  # a graph that somebody else captures
        run(outs[2])
    for out in outs:
        out.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip((*graphs, theirs), streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        run(wanted)
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


def test_torch_s_own_products_run_where_the_table_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, heads, kv_heads, head_dim = 64, 4, 2, 16
    norm, one, two = (m.to(device) for m in (Norm(hidden), *(projection(hidden, hidden, True) for _ in range(2))))
    qkv = [projection(hidden, count * head_dim, False).to(device) for count in (heads, kv_heads, kv_heads)]
    x = torch.randn(1, 1, hidden, device=device)

    def run() -> list[Tensor]:
        cache = PreallocatedCache(1, 1, 32, device)
        cache.layers[0].allocate(kv_heads, head_dim, head_dim, x.dtype, device)
        with cache.step():
            query = qkv_step(x, qkv, None, cache, 0, head_dim=head_dim, norm=norm)
        products = [linear(x, one, norm=norm, residual=x), gated_linear(x, (one, two), nn.functional.silu, norm=norm)]
        return [query, cache.layers[0].keys, *products]

    heard: list[str] = []
    tiles.listen(lambda name, entry: heard.append(name))
    fused = run()
    names = dict.fromkeys(heard)
    assert [name.split()[0] for name in names] == ["qkv", "linear", "gated"]
    tiles.try_out(dict.fromkeys((*names, tiles.key("linear", 128, hidden, 4))))
    kernels = [one_row.linear_kernel, one_row.gated_kernel, qkv_module.qkv_kernel]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "launch", lambda *arguments, **options: pytest.fail("a kernel ran"))
    try:
        plain = run()
    finally:
        tiles.listen(None)
        tiles.try_out({})
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@dtypes
@pytest.mark.parametrize("q_norm", [False, True])
@pytest.mark.parametrize(("columns", "interleaved"), [(16, False), (8, False), (16, True), (0, False)])
@pytest.mark.parametrize("batch", [1, 3])
def test_query_and_cache_write(
    batch: int, columns: int, interleaved: bool, q_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    heads, kv_heads, head_dim, hidden = 4, 2, 16, 64
    modules: list[nn.Module] = [projection(hidden, count * head_dim, True) for count in (heads, kv_heads, kv_heads)]
    norms = [Norm(hidden), Norm(head_dim), Norm(head_dim)]
    for module in (*modules, *norms):
        module.to(device, dtype)
    x = torch.randn(batch, 1, hidden, device=device).to(dtype)
    angle = torch.rand(batch, 1, max(columns, 2), device=device)

    def run(kind: torch.dtype) -> Tensor:
        cache = PreallocatedCache(1, batch, 32, device)
        cache.layers[0].allocate(kv_heads, head_dim, head_dim, kind, device)
        cache.position.fill_(5)
        tables = (angle.cos().to(dtype).to(kind), angle.sin().to(dtype).to(kind)) if columns else None
        with cache.step():
            query = qkv_step(
                x.to(kind), modules, tables, cache, 0, head_dim=head_dim, norm=norms[0],
                q_norm=norms[1] if q_norm else None, k_norm=norms[2] if q_norm else None, interleaved=interleaved,
            )  # fmt: skip
        layer = cache.layers[0]
        assert not layer.keys[:, :, :5].any()
        assert not layer.values[:, :, 6:].any()
        written = [layer.keys[:, :, 5].flatten(1), layer.values[:, :, 5].flatten(1)]
        return torch.cat([query.flatten(1), *written], dim=1)

    got = run(dtype)
    assert not backend.fallbacks()
    with backend.use_backend("reference"):
        plain = run(dtype)
    assert_as_exact_as(plain, got, exactly(run, *modules, *norms), torch.finfo(dtype).eps)


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"softcap": 2.0}, {"softcap": 50.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("position", [0, 70, 230])
def test_attention(
    position: int, options: dict[str, Any], dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    batch, heads, kv_heads, head_dim, capacity = 2, 6, 2, 24, 240
    cache = PreallocatedCache(1, batch, capacity, device)
    cache.layers[0].allocate(kv_heads, head_dim, head_dim, dtype, device)
    cache.position.fill_(position)
    cache.starts.copy_(torch.tensor([0, position // 2]))
    layer = cache.layers[0]
    layer.keys.normal_()
    layer.values.normal_()
    query = torch.randn(batch, heads, 1, head_dim, device=device).to(dtype)
    given = dict(options)
    if "sinks" in given:
        given["sinks"] = torch.randn(heads, device=device).to(dtype)
    window, softcap, sinks = (given.get(name) for name in ("sliding_window", "softcap", "sinks"))

    def plain(kind: torch.dtype) -> Tensor:
        tensors = [t.to(kind) for t in (query, layer.keys, layer.values)]
        return _reference(
            *tensors,
            cache.position,
            cache.starts,
            ScoreRule(0.2, window, softcap, None if sinks is None else sinks.to(kind)),
        )

    wanted, exact = plain(dtype), plain(torch.float64)
    layer.keys[:, :, position + 1 :] = torch.nan
    layer.values[:, :, position + 1 :] = torch.nan
    with cache.step():
        got = decode_attention(query, cache, 0, scaling=0.2, **given)
    assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps)
    assert not cache.arrived(1).any()
    for split in (Split(3, 4, 16, True, 1), Split(1, 8, 16, False, 1), Split(3, 1, 32, True, 1)):
        got = launch(
            query, layer.keys, layer.values, cache.position, cache.starts, cache.arrived(1),
            ScoreRule(0.2, window, softcap, sinks), split,
        )  # fmt: skip
        assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps)


@dtypes
@pytest.mark.parametrize("in_a_step", [False, True])
def test_attention_writes_the_token(in_a_step: bool, dtype: torch.dtype, device: torch.device, poisoned: None) -> None:
    """The token's key and value lie among a product's columns, and nowhere else yet."""
    batch, heads, kv_heads, head_dim, value_dim, capacity, position = 2, 6, 2, 24, 16, 96, 70
    cache = PreallocatedCache(1, batch, capacity, device)
    layer = cache.layers[0]
    layer.allocate(kv_heads, head_dim, value_dim, dtype, device)
    cache.position.fill_(position)
    cache.starts.copy_(torch.tensor([0, 9]))
    layer.keys.normal_()
    layer.values.normal_()
    query = torch.randn(batch, heads, 1, head_dim, device=device).to(dtype)
    packed = torch.randn(batch, 1, kv_heads, head_dim + value_dim, device=device).to(dtype).transpose(1, 2)
    key, value = packed.split([head_dim, value_dim], -1)
    layer.keys[:, :, position], layer.values[:, :, position] = key.squeeze(2), value.squeeze(2)
    given = cache.position, cache.starts, ScoreRule(0.2)
    wanted = _reference(query, layer.keys, layer.values, *given)
    exact = _reference(query.double(), layer.keys.double(), layer.values.double(), *given)
    kept = layer.keys.clone(), layer.values.clone()
    layer.keys[:, :, position:] = layer.values[:, :, position:] = torch.nan
    if in_a_step:
        launches: list[Any] = []
        collect(lambda key, launch: launches.append(launch))
        try:
            with StepProducts(), cache.step():
                cache.update(key, value, 0)
                decode_attention(query, cache, 0, scaling=0.2)
        finally:
            collect(None)
        assert [launch.kernel for launch in launches] == [decode_attention_kernel]
        with StepProducts(), cache.step():
            cache.update(key, value, 0)
            got = decode_attention(query, cache, 0, scaling=0.2)
        assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps)
    for split in () if in_a_step else (Split(3, 4, 16, True, 1), Split(1, 8, 16, False, 1), Split(3, 1, 32, True, 1)):
        layer.keys[:, :, position:] = layer.values[:, :, position:] = torch.nan
        write = Write(layer.keys, layer.values, key, value, cache.position)
        got = launch(
            query, layer.keys, layer.values, cache.position, cache.starts, cache.arrived(1), ScoreRule(0.2), split,
            None, write,
        )  # fmt: skip
        assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps)
    for buffer, before in zip((layer.keys, layer.values), kept, strict=True):
        assert torch.equal(buffer[:, :, : position + 1], before[:, :, : position + 1])
        assert buffer[:, :, position + 1 :].isnan().all()


@dtypes
@pytest.mark.parametrize("ends", [0, 2])
def test_greedy_choice(ends: int, dtype: torch.dtype, device: torch.device, poisoned: None) -> None:
    rows, vocabulary, capacity = 3, 5000, 8
    logits = torch.randn(rows, vocabulary, device=device).round(decimals=1).to(dtype)
    logits[2, 4100] = torch.nan
    best = logits.argmax(-1)
    eos, pad = best[1:].clone(), torch.tensor([7], device=device)
    sampling = Sampling([], False, eos if ends else None, pad if ends else None)
    state, wanted = (StepState(rows, capacity, torch.full((1,), 3, device=device)) for _ in range(2))
    for each in (state, wanted):
        each.finished[2] = True
    choose(logits, state, sampling)
    with backend.use_backend("reference"):
        choose(logits, wanted, sampling)
    for name, tensor in vars(wanted).items():
        assert torch.equal(getattr(state, name), tensor), name
    assert state.input_ids[0] == best[0]
    assert state.finished.tolist() == ([False, True, True] if ends else [False, False, True])


@pytest.mark.parametrize("ends", [0, 2])
@pytest.mark.parametrize(("tokens", "ngram"), [(1, 1), (5, 2), (8, 3)])
def test_tokens_are_looked_up(tokens: int, ngram: int, ends: int, device: torch.device) -> None:
    capacity, generator = 2200, torch.Generator().manual_seed(tokens)
    eos = torch.tensor([3, 5], device=device) if ends else None
    for length, words in ((1, 3), (2, 2), (9, 3), (60, 12), (2048, 500), (2049, 40), (2199, 5000)):
        text = torch.randint(words, (1, capacity + 1), generator=generator)
        state, wanted = (StepState(1, capacity, torch.tensor([length - 1], device=device)) for _ in range(2))
        for each in (state, wanted):
            each.sequence.copy_(text)
            each.drafted.fill_(77)
        look_up(state, Lookup(tokens, ngram), eos)
        with backend.use_backend("reference"):
            look_up(wanted, Lookup(tokens, ngram), eos)
        for name, tensor in vars(wanted).items():
            assert torch.equal(getattr(state, name), tensor), (name, length)
