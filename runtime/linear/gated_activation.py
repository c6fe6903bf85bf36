"""`activation(gate) * up`, the middle of a gated MLP (Shazeer, 2020), for an activation known only at run time.

N is any leading shape, I the intermediate size. The activation is computed in fp32 and rounded to the gate's dtype, as
torch does, then multiplied:

    silu       g / (1 + exp(-g))                               SiLU, also called swish
    gelu       g * (1 + erf(g / sqrt(2))) / 2                  GELU
    gelu_tanh  g / (1 + exp(-2 t)),  t = sqrt(2 / pi) * (g + 0.044715 g³); equal to g * (1 + tanh(t)) / 2
    relu       max(g, 0)
    relu2      round(max(g, 0)²)
    quick_gelu g / (1 + exp(-1.702 g))                         in a product's kernel only (`step_products`)

The gradients of both are made in one pass from gate and up, which is all that is kept; the activation is computed
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS

from ..aiter import activation as aiter_activation
from ..core import backend
from ..device import row_tiles
from ..device.launch_bound import is_launch_bound
from ..launching.launch import HIP, WAVE, Kernel, grid, overlaps

CASES = """
def halves(tokens, size, activation):
    gate, up = tensor(tokens, 2 * size).chunk(2, -1)
    return gated_activation(gate, up, activation)

size = LLAMA_8B.intermediate_size
case("8B, SiLU, prompt", halves, PROMPT, size, nn.SiLU())
case("8B, SiLU, 1 token", halves, 1, size, nn.SiLU())
case("8B, SiLU, two tensors", gated_activation, tensor(PROMPT, size), tensor(PROMPT, size), nn.SiLU())
case("8B, GELU", halves, PROMPT, size, nn.GELU())
case("Gemma 9B, GELU tanh", halves, PROMPT, GEMMA_9B.intermediate_size, nn.GELU("tanh"))
case("8B, ReLU", halves, PROMPT, size, nn.ReLU())

def gradients(kind):
    tensors = [tensor(PROMPT, size) for _ in range(3)]
    gated_activation_backward(*tensors, kind)

for kind in ("silu", "gelu", "gelu_tanh", "relu2"):
    case(kind, gradients, kind)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit
    def _activate(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        if ACTIVATION == "silu":
            activated = gate / (1.0 + tl.exp(-gate))
        elif ACTIVATION == "gelu":
            activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        elif ACTIVATION == "gelu_tanh":
            activated = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
        elif ACTIVATION == "quick_gelu":
            activated = gate / (1.0 + tl.exp(-1.702 * gate))
        else:
            tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
            activated = tl.where(gate < 0.0, 0.0, gate)
            if ACTIVATION == "relu2":
                activated = activated * activated
        return activated

    @triton.jit(do_not_specialize=["row_count"])
    def _gated_activation_kernel(  # type: ignore[no-untyped-def]
        gate_ptr,
        up_ptr,
        out_ptr,
        row_count,
        intermediate_size,
        gate_stride,
        up_stride,
        FLAT: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        follow(OVERLAP)
        if FLAT:
            row = tl.zeros((), tl.int64)
            col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        else:
            row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            if row >= row_count:
                return
            col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = col < intermediate_size
        gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0)
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0)
        activated = _activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
        product = activated.to(tl.float32) * up.to(tl.float32)
        tl.store(out_ptr + row * intermediate_size + col, product.to(out_ptr.dtype.element_ty), mask=mask)

    gated_activation_kernel = Kernel(_gated_activation_kernel)

    @triton.jit
    def _slope(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the derivative of the activation."""
        if ACTIVATION == "silu":
            share, rest = 1.0 / (1.0 + tl.exp(-gate)), 1.0 / (1.0 + tl.exp(gate))
            slope = share + gate * share * rest
        elif ACTIVATION == "gelu":
            density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
            slope = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) + gate * density
        elif ACTIVATION == "gelu_tanh":
            bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            share, rest = 1.0 / (1.0 + tl.exp(-bent)), 1.0 / (1.0 + tl.exp(bent))  # 1 - share would lose its digits
            slope = share + gate * share * rest * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        elif ACTIVATION == "relu":
            slope = tl.where(gate > 0.0, 1.0, 0.0)
        else:
            tl.static_assert(ACTIVATION == "relu2")
            slope = tl.where(gate > 0.0, 2.0 * gate, 0.0)
        return slope

    @triton.jit(do_not_specialize=["row_count"])
    def _gated_activation_backward_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr,
        gate_ptr,
        up_ptr,
        of_gate_ptr,
        of_up_ptr,
        product_ptr,
        row_count,
        intermediate_size,
        gate_stride,
        up_stride,
        FLAT: tl.constexpr,
        ACTIVATION: tl.constexpr,
        AGAIN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write both gradients; with AGAIN also the product itself, as the forward rounded it."""
        row = tl.zeros((), tl.int64)
        if not FLAT:
            row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            if row >= row_count:
                return
        col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = col < intermediate_size
        place = row * intermediate_size + col
        gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0)
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
        wide = gate.to(tl.float32)
        activated = _activate(wide, ACTIVATION).to(gate.dtype).to(tl.float32)
        of_gate = gradient * up * _slope(wide, ACTIVATION)
        tl.store(of_gate_ptr + place, of_gate.to(of_gate_ptr.dtype.element_ty), mask=mask)
        tl.store(of_up_ptr + place, (gradient * activated).to(of_up_ptr.dtype.element_ty), mask=mask)
        if AGAIN:
            tl.store(product_ptr + place, (activated * up).to(product_ptr.dtype.element_ty), mask=mask)

    gated_activation_backward_kernel = Kernel(_gated_activation_backward_kernel)


_REFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda gate: torch.square(F.relu(gate)),
}
_BY_FUNCTION = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
_BY_CLASS = {
    ACT2CLS["silu"]: "silu",
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    ACT2CLS["relu2"]: "relu2",
}
_GELU_CLASSES = (ACT2CLS["gelu"], ACT2CLS["gelu_pytorch_tanh"])


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: Callable[..., torch.Tensor],
    *,
    approximate: str | None = None,
) -> torch.Tensor:
    """Return `activation(gate) * up`.

    One kernel for SiLU, GELU (erf or tanh), ReLU and squared ReLU, given as torch's or transformers' modules or as
    torch's functions. Any other activation, a module that writes its argument, or one whose call is observed
    (`backend.observed`), is called as it stands and counted; so are numbers, and tensors whose dimensions were
    permuted, of which torch makes a permuted product.

    Args:
        gate: `[N, I]`, any strides; usually a column slice of a packed projection.
        up: `[N, I]`, likewise, or anything that broadcasts with it. For files that activate the second half, pass that
            half as `gate`.
        activation: a module or function.
        approximate: what `activation`, which is `F.gelu` then, is given as its argument of that name.

    Returns:
        `[N, I]` in torch's promotion of the two, contiguous when the kernel ran. Differentiable, by a kernel or in the
        torch form.
    """
    if approximate is not None:
        activation = functools.partial(activation, approximate=approximate)
    if not isinstance(up, torch.Tensor) or not isinstance(gate, torch.Tensor):
        backend.count_fallback("gated_activation", "no_tensor")
        return activation(gate) * up
    if backend.composes():
        return activation(gate) * up
    kind = activation_kind(activation)
    if kind is None:
        backend.count_fallback("gated_activation", "activation_observed_or_unknown")
        return activation(gate) * up
    if backend.wants_gradient(gate, up):
        reason = not_learned(gate, up)
        if reason is None:
            product: torch.Tensor = _GatedActivation.apply(gate, up, kind)
            return product
        backend.count_fallback("gated_activation", str(reason))
        return activation(gate) * up
    if is_launch_bound(gate):
        return activation(gate) * up
    if not (_is_in_order(gate) and _is_in_order(up)):
        backend.count_fallback("gated_activation", "permuted")
        return activation(gate) * up
    return _op(gate, up, kind)


class _GatedActivation(torch.autograd.Function):
    """The product, and its gradients from what it was given."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return launch_gated_activation(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            reference = lambda gate, up: _REFERENCE[ctx.kind](gate) * up
            return (*backend.again(reference, (gate, up), ctx.needs_input_grad[:2], [gradient]), None)
        return (*gated_activation_backward(gradient, gate, up, ctx.kind), None)


def not_learned(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(gate, up):
        return "gradient_wanted"
    if not gate.numel() or not (_is_in_order(gate) and _is_in_order(up)):
        return "permuted"
    return _refusal(gate, up)


def torch_form(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of a name in torch's operators."""
    return _REFERENCE[kind]


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether the strides fall from the first dimension to the last: else torch's product is permuted too."""
    if tensor.is_contiguous():
        return True
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return strides == sorted(strides, reverse=True)


def activation_kind(activation: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Return the kernel's name of `activation`, or None if the kernel does not compute exactly that."""
    if not isinstance(activation, nn.Module):
        return _function_kind(activation)
    if backend.observed(activation) or getattr(activation, "inplace", False):
        return None
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    if type(activation) in _GELU_CLASSES:
        return _function_kind(activation.act)  # type: ignore[arg-type]
    return _BY_CLASS.get(type(activation))


def _function_kind(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    if isinstance(function, functools.partial):
        if function.func is F.gelu and not function.args and {*function.keywords} == {"approximate"}:
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(function.keywords["approximate"])
        return None
    return _BY_FUNCTION.get(function)


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if (product := aiter_activation.gated_activation(gate, up, activation)) is not None:
        return product
    if backend.uses_triton(gate):
        reason = _refusal(gate, up)
        if reason is None:
            return launch_gated_activation(gate, up, activation)
        backend.count_fallback("gated_activation", reason)
    return (_REFERENCE[activation](gate) * up).contiguous()


def _refusal(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    if gate.dtype not in row_tiles.KERNEL_DTYPES or up.dtype not in row_tiles.KERNEL_DTYPES:
        return "dtype"
    same = gate.shape == up.shape and gate.device == up.device and gate.dim() > 0
    return None if same else "shapes_differ"


def launch_gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Run the kernel."""
    out = _fake(gate, up, activation)
    count = out.numel()
    if count == 0:
        return out
    gate, gate_stride, up, up_stride, size, flat = _rows(gate, up)
    block, threads = (1024, 256) if count >= 1 << 20 else (512, 128)
    num_warps = threads // (2 * WAVE if HIP else WAVE)  # AMD's memory units want 16 bytes a thread
    overlap = overlaps(out)
    with backend.device_guard(out):
        gated_activation_kernel.launch(
            grid(-(-size // block), count // size),
            num_warps,
            (gate, up, out),
            (count // size,),
            (size, gate_stride, up_stride),
            (),
            (flat, activation, block, overlap),
            overlap=overlap,
        )
    return out


def gated_activation_backward(
    gradient: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    product: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, contiguous and in their dtypes.

    Args:
        gradient: `[N, I]`, of the product.
        gate: `[N, I]`, as in `gated_activation`.
        up: `[N, I]`.
        activation: its name in a kernel.
        product: `[N, I]`, contiguous, where the product is written once more; None where nobody needs it.
    """
    of_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    of_up = torch.empty_like(up, memory_format=torch.contiguous_format)
    gradient = gradient.contiguous()
    gate, gate_stride, up, up_stride, size, flat = _rows(gate, up)
    count = gate.numel()
    block, threads = (1024, 256) if count >= 1 << 20 else (512, 128)
    num_warps = threads // (2 * WAVE if HIP else WAVE)
    with backend.device_guard(gate):
        gated_activation_backward_kernel.launch(
            grid(-(-size // block), count // size),
            num_warps,
            (gradient, gate, up, of_gate, of_up, of_gate if product is None else product),
            (count // size,),
            (size, gate_stride, up_stride),
            (),
            (flat, activation, product is not None, block),
        )
    return of_gate, of_up


def _rows(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int, int, bool]:
    """Return both with the strides of their rows, the size of a row, and whether all of it is taken as one."""
    count = gate.numel()
    if count < 1 << 31 and gate.is_contiguous() and up.is_contiguous():
        return gate, count, up, count, count, True
    return *row_tiles.flatten(gate), *row_tiles.flatten(up), gate.shape[-1], False


def _fake(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate.shape == up.shape and gate.dtype == up.dtype:
        return torch.empty_like(gate, memory_format=torch.contiguous_format)
    shape = torch.broadcast_shapes(gate.shape, up.shape)
    device = gate.device if gate.dim() else up.device
    return torch.empty(shape, dtype=torch.result_type(gate, up), device=device)


_op = backend.register("gated_activation", "(Tensor gate, Tensor up, str activation) -> Tensor", _forward, _fake)
