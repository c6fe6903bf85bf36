"""The gradients of every operator that makes its own, against fp64, with those of its torch form as the yardstick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EMULATED, INTERPRETED, KERNEL_DTYPES
from differentiated import all_as_exact, check
from experts_of import Mixture
from tolerances import LOSS, assert_as_exact_as, assert_same_gradient
from torch import Tensor
from torch.nn import functional as F

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.linear.gated_product import gated_product
from hf_rewrite_runtime.loss.cross_entropy import Shape, losses_and_gradients, total_loss
from hf_rewrite_runtime.norms.add_layer_norm import add_layer_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.rotary import rotary, rotary_single

adding = importlib.import_module("hf_rewrite_runtime.norms.add_layer_norm")
experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
gated = importlib.import_module("hf_rewrite_runtime.linear.gated_activation")
cross_entropy = importlib.import_module("hf_rewrite_runtime.loss.cross_entropy")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

EPS = 1e-5
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"offset": 1.0, "weight_in_fp32": True},
    "olmo2": {"weight_in_fp32": True},
}
ACTIVATIONS = {
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.nn.ReLU(),
}
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "halves": (16, {}),
    "interleaved": (16, {"interleaved": True}),
    "half table": (8, {"half_table": True, "interleaved": True}),
    "partial": (8, {"partial": True}),
    "in fp32": (16, {"in_fp32": True}),
}
SHAPES = [(1, 7), (3, 33), (9, 127), (5, 1000), (2, 3, 2, 80)]
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


def exact_norm(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + offset)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_shapes(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:]))
    check(lambda x, w: rms_norm(x, w, EPS), exact_norm, x, weight)


@dtypes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_rms_norm_families(device: torch.device, poisoned: None, family: str, dtype: torch.dtype, added: bool) -> None:
    given = FAMILIES[family]
    offset = given.get("offset", 0.0)
    x, y, weight = (torch.randn(s, device=device, dtype=dtype) for s in ((7, 96), (7, 96), (96,)))
    if not added:
        check(lambda x, w: rms_norm(x, w, EPS, **given), lambda x, w: exact_norm(x, w, offset), x, weight)
        return
    total = (y + x).double()  # rounded once, as the norm sees it

    def exact(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + y + (total - x - y).detach()
        return exact_norm(summed, w, offset), summed

    check(lambda x, y, w: add_rms_norm(x, y, w, EPS, **given), exact, x, y, weight)


def exact_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(device: torch.device, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:], shape[-1:]))
    check(lambda *inputs: layer_norm(*inputs, EPS), exact_layer_norm, x, weight, bias)
    check(lambda x, w: layer_norm(x, w, None, EPS), lambda x, w: exact_layer_norm(x, w, None), x, weight)
    check(lambda x: layer_norm(x, None, None, EPS), lambda x: exact_layer_norm(x, None, None), x)


@dtypes
@pytest.mark.parametrize("groups", [(4,), (3, 4)], ids=str)
def test_layer_norm_of_each_head(
    device: torch.device, poisoned: None, groups: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As Cohere's: a row of the weight for each head, of heads that lie beside others."""
    x = torch.randn(2, 5, *groups[:-1], groups[-1] + 2, 16, device=device, dtype=dtype)
    weight = torch.randn(*groups, 16, device=device, dtype=dtype)
    of_heads = lambda x: x[..., : groups[-1], :]
    check(
        lambda x, w: layer_norm(of_heads(x), w, None, EPS), lambda x, w: exact_layer_norm(of_heads(x), w, None),
        x, weight,
    )  # fmt: skip


@dtypes
@pytest.mark.parametrize("parameters", [0, 1, 2], ids=["bare", "weight", "weight and bias"])
@pytest.mark.parametrize("shape", [(1, 7), (9, 127), (5, 1000)], ids=str)
def test_add_layer_norm(
    device: torch.device, poisoned: None, shape: tuple[int, ...], parameters: int, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(s, device=device, dtype=dtype) for s in (shape, shape, *[shape[-1:]] * parameters)]
    total = (inputs[1] + inputs[0]).double()  # rounded once, as the norm sees it
    given = lambda parameters: (*parameters, None, None)[:2]

    def exact(x: Tensor, y: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + y + (total - x - y).detach()
        return exact_layer_norm(summed, *given(parameters)), summed

    check(lambda x, y, *parameters: add_layer_norm(x, y, *given(parameters), EPS), exact, *inputs)


@pytest.mark.skipif(EMULATED, reason="autocast is of a device, and tensors are on the CPU")
@dtypes
def test_add_layer_norm_under_autocast(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch on a GPU: the norm in fp32, whatever comes in, and gradients in the dtypes of the inputs."""
    if INTERPRETED:
        monkeypatch.setattr(adding, "_widens", lambda tensor: True)
    inputs = [*torch.randn(2, 9, 40, device=device).to(dtype), *torch.randn(2, 40, device=device)]

    def plain(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.layer_norm((y + x).float(), (40,), weight, bias, EPS), y + x

    found = []
    for form in (lambda *inputs: add_layer_norm(*inputs, EPS), plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast(device.type, dtype=torch.float16, enabled=not INTERPRETED):
            normed, summed = form(*leaves)
        assert normed.dtype == torch.float32
        assert summed.dtype == dtype
        found.append([normed.detach(), *torch.autograd.grad(normed.square().sum() + summed.float().sum(), leaves)])
    assert not backend.fallbacks()
    for mine, theirs in zip(*found, strict=True):
        assert_same_gradient(theirs, mine, dtype)


def test_layer_norm_gives_what_is_wanted(device: torch.device) -> None:
    """A frozen norm has no gradients, an input that needs none gets none, and a norm has the same bits each time."""
    x, weight, bias = (torch.randn(s, device=device) for s in ((40, 32), (32,), (32,)))
    out = layer_norm(x.requires_grad_(), weight, bias, EPS)
    (wanted,) = torch.autograd.grad(out.square().sum(), x)
    x.requires_grad_(False)
    grads = [
        torch.autograd.grad(add_layer_norm(x, x, *given, EPS)[0].square().sum(), given)
        for given in [[t.clone().requires_grad_() for t in (weight, bias)] for _ in range(2)]
    ]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert wanted.shape == x.shape


def test_norm_and_sum_that_are_added_again_have_one_gradient(device: torch.device) -> None:
    x, y, w = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    normed, summed = add_rms_norm(x, y, w, EPS)
    (normed + summed).square().sum().backward()
    found = [tensor.grad for tensor in (x, y, w)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, y, w)]
    total = exact[0] + exact[1]
    (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * exact[2] + total).square().sum().backward()
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1], ids=["norm", "sum"])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_one_of_norm_and_sum_alone_is_read(device: torch.device, name: str, place: int) -> None:
    """For the other no gradient is made up."""
    function, shapes = TWICE[name]
    inputs = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    found = []
    for form in ("triton", "reference"):
        with backend.use_backend(form):
            total = function(*inputs)[place].square().sum()
            found.append(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
    for mine, theirs in zip(*found, strict=True):
        assert_same_gradient(theirs, mine)


def test_heads_of_a_packed_projection(device: torch.device) -> None:
    packed = torch.randn(2, 5, 6, 32, device=device)
    check(lambda x, w: rms_norm(x[:, :, :4], w, EPS), lambda x, w: exact_norm(x[:, :, :4], w), packed, packed[0, 0, 0])


@dtypes
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("halves", [False, True], ids=["two tensors", "halves"])
def test_gated_activation(device: torch.device, poisoned: None, kind: str, dtype: torch.dtype, halves: bool) -> None:
    activation = ACTIVATIONS[kind]

    def form(*tensors: Tensor) -> Tensor:
        gate, up = tensors[0].chunk(2, -1) if halves else tensors
        return gated.gated_activation(gate, up, activation)

    def exact(*tensors: Tensor) -> Tensor:
        gate, up = tensors[0].chunk(2, -1) if halves else tensors
        return activation(gate) * up

    shapes = [(9, 2 * 65)] if halves else [(9, 65), (9, 65)]
    check(form, exact, *(2 * torch.randn(s, device=device, dtype=dtype) for s in shapes))


@dtypes
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_gated_product(device: torch.device, poisoned: None, dtype: torch.dtype, frozen: bool) -> None:
    """As the two calls, with gate, up and weights kept and nothing else."""
    projection = torch.nn.Linear(65, 24, device=device, dtype=dtype).requires_grad_(not frozen)
    parameters = [] if frozen else list(projection.parameters())
    inputs = [torch.randn(3, 3, 65, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    kept: list[Tensor] = []
    found = []
    for form in (gated_product, lambda g, u, act, down: down(gated.gated_activation(g, u, act))):
        keep = lambda x, form=form: (kept.append(x) if form is gated_product else None, x)[1]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = form(*inputs, ACTIVATIONS["silu"], projection)
        direction = torch.ones_like(out) * torch.arange(24, device=device, dtype=dtype) / 24
        found.append([out, *torch.autograd.grad(out, [*inputs, *parameters], direction)])
    assert {x.data_ptr() for x in kept} <= {x.data_ptr() for x in (*inputs, *projection.parameters())}
    for mine, theirs in zip(*found, strict=True):
        assert_same_gradient(theirs, mine)


@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_rotary(device: torch.device, poisoned: None, form: str, dtype: torch.dtype) -> None:
    columns, given = FORMS[form]
    q, k = (torch.randn(2, 5, heads, 16, device=device, dtype=dtype) for heads in (3, 1))
    angles = torch.randn(2, 5, columns, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # a table whose halves differ, too

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        kept = [x.to(q.dtype) for x in (cos, sin)]
        return rotary(q.transpose(1, 2), k.transpose(1, 2), *kept, **given)

    def exact(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        with backend.use_backend("reference"):
            return turned(q, k)

    check(turned, exact, q, k)
    check(
        lambda q: rotary_single(q, cos.to(q.dtype), sin.to(q.dtype), 2, **given),
        lambda q: turned(q, k.to(q.dtype))[0].transpose(1, 2), q,
    )  # fmt: skip


SHAPED = [Shape(), Shape(0.25), Shape(1 / 3, 3.0, True), Shape(1 / 30, 30.0, True)]


VOCABULARIES = [(2, Shape()), *((37, shape) for shape in SHAPED), (9001, Shape()), (9001, Shape(1 / 30, 30.0, True))]


@dtypes
@pytest.mark.parametrize(("vocabulary", "shape"), VOCABULARIES, ids=str)
def test_loss_of_a_row(device: torch.device, vocabulary: int, shape: Shape, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(12, vocabulary, device=device)).to(dtype)
    labels = torch.randint(vocabulary, (12,), device=device)
    labels[2] = -100
    exact = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(shape.of(exact), labels, reduction="none")
    (truth_gradient,) = torch.autograd.grad(truth.sum(), exact)
    ours, theirs = logits.clone(), logits.clone()
    losses = losses_and_gradients(ours, labels, -100, shape)
    with backend.use_backend("reference"):
        reference = losses_and_gradients(theirs, labels, -100, shape)
    eps = torch.finfo(torch.float32).eps
    assert_as_exact_as(reference, losses, truth.detach(), eps, LOSS)
    lift = cross_entropy._lift(dtype, shape)
    assert_as_exact_as(theirs / lift, ours / lift, truth_gradient, torch.finfo(dtype).eps, LOSS)
    assert not ours[2].any()


def test_loss_of_several_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocabulary, size: 4)
    x, weight, bias = (torch.randn(s, device=device) for s in ((9, 16), (50, 16), (50,)))
    labels = torch.randint(50, (9,), device=device)

    def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w.T + b, labels, reduction="sum")

    check(lambda x, w, b: total_loss(x, w, b, labels), exact, x, weight, bias)


DOWN = torch.nn.Linear(8, 4)
TWICE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, EPS), ((3, 8), (8,))),
    "add_rms_norm": (lambda x, y, w: add_rms_norm(x, y, w, EPS), ((3, 8), (3, 8), (8,))),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, EPS), ((48, 64), (64,), (64,))),
    "add_layer_norm": (lambda x, y, w, b: add_layer_norm(x, y, w, b, EPS), ((48, 64), (48, 64), (64,), (64,))),
    "gated_activation": (lambda g, u: gated.gated_activation(g, u, ACTIVATIONS["silu"]), ((3, 8), (3, 8))),
    "gated_product": (lambda g, u: gated_product(g, u, ACTIVATIONS["silu"], DOWN.to(g.device)), ((3, 8), (3, 8))),
    "rotary": (
        lambda q, k: rotary(q, k, *torch.full((2, 1, 3, 8), 0.3, device=q.device)), ((1, 2, 3, 8), (1, 1, 3, 8))
    ),
    "experts": (
        lambda x, w, gate_up, down: experts.fused_experts(
            x, Mixture(gate_up, down), torch.tensor([[0, 1], [1, 2], [2, 0]], device=x.device), w
        ), ((3, 8), (3, 2), (3, 16, 8), (3, 8, 8))
    ),
    "loss": (lambda x, w: total_loss(x, w, None, torch.arange(3, device=x.device)), ((3, 8), (6, 8))),
}  # fmt: skip


LAYER_NORMS: dict[str, Any] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
    "add_layer_norm": lambda x, y, w, b: (F.layer_norm(x + y, x.shape[-1:], w, b, EPS), x + y),
}
"""What a gradient of a gradient of multiplies by how narrow a row is, cubed: torch's own is some roundings off."""


@pytest.mark.parametrize("name", TWICE)
def test_differentiated_twice(device: torch.device, name: str) -> None:
    """The first gradient comes from a kernel in the usual case, and from torch's operators where it is to be used."""
    function, shapes = TWICE[name]
    draw = torch.randn if name in LAYER_NORMS else torch.rand
    inputs = [draw(s, device=device) + 0.1 for s in shapes]

    def second(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        total = torch.stack([out.square().sum() for out in outputs]).sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return [*first, *torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)]

    ours = second(function, inputs)
    with backend.use_backend("reference"):
        theirs = second(function, inputs)
    if name in LAYER_NORMS:
        all_as_exact(theirs, ours, second(LAYER_NORMS[name], [x.double() for x in inputs]))
        return
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_same_gradient(wanted, mine)
