"""A convolution whose kernels lie side by side, as one product.

B batch, C channels in, O out, g_i places and k_i the kernel's size along dimension i, of which there are one to three:

    y[b, o, g] = Σ_{c,k} x[b, c, g k_size + k] W[o, c, k] + b[o]       W viewed as [O, C Πk_i], x as [B Πg_i, C Πk_i]

No number of the input is read twice, so there is nothing that a convolution's kernels could save, and libraries choose
badly among them where there are three channels: they bring the image into another order and pad its channels, or take
a kernel without matrix units. The weight is the convolution's own, viewed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..core import backend, output_layout
from . import packing

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SMALL_KERNEL = 16
"""Places of a kernel, Πk_i, up to which a GPU takes a convolution sooner than a product whose result is copied into
torch's order: 2 x 2 (ConvNeXt) 26.6 and 27.1 us, without the copy 17.0; 4 x 4 (Swin) 25.8 and 30.7, 12.7. From
14 x 14 on the product is 2.6 times as fast or more, with the copy (H200, bf16; figures in docs/forwards.md)."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def patch_product(input: Tensor, convolution: nn.Module) -> Tensor:
    """Return `convolution(input)`, as a product where its kernels lie side by side and cover the input.

    The module itself is called, and the reason counted, where a kernel overlaps the next one or leaves something out,
    where something observes the module, under autocast, where gradients are wanted, and where a product is not sooner
    done (`_pays`). While a compiler looks it is called, too.

    Args:
        input: `[B, C, S_i, …]`.
        convolution: `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`.

    Returns:
        `[B, O, S_i / k_i, …]`, laid out as torch does, in a captured forward with the channels last.
    """
    if is_compiling():
        called: Tensor = convolution(input)
        return called
    reason = _reason(input, convolution)
    if reason is not None:
        backend.count_fallback("patch_product", reason, convolution)
        called = convolution(input)
        return called
    weight = convolution._parameters["weight"]
    assert weight is not None
    return multiplied(input, weight, convolution._parameters["bias"])


def multiplied(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of an input `[B, C, S_i, …]` and a weight `[O, C, k_i, …]` that divides it."""
    batch, channels, *sizes = input.shape
    outputs, kernel = weight.shape[0], weight.shape[2:]
    places = [size // k for size, k in zip(sizes, kernel, strict=True)]
    split = [number for pair in zip(places, kernel, strict=True) for number in pair]
    count = len(places)
    patches = input.view(batch, channels, *split).permute(
        0, *range(2, 2 + 2 * count, 2), 1, *range(3, 3 + 2 * count, 2)
    )
    rows = patches.reshape(batch * math.prod(places), -1)
    result = F.linear(rows, weight.view(outputs, -1), bias)
    if math.prod(places) == 1:
        return result.view(batch, outputs, *places)
    result = result.view(batch, *places, outputs).movedim(-1, 1)
    return result if output_layout.is_free() else result.contiguous()


def _reason(input: Tensor, convolution: nn.Module) -> str | None:
    """Return why the module is to be called, None where the product is what it computes."""
    if type(convolution) not in CONVOLUTIONS:
        return "not_convolution"
    if (unsafe := packing.unsafe(input, (convolution,), CONVOLUTIONS)) is not None:
        return unsafe
    if backend.get_backend() == "reference" or backend.runs_plainly():
        return "reference"
    if not _side_by_side(input, convolution):
        return "not_patches"
    weight, bias = convolution._parameters["weight"], convolution._parameters["bias"]
    assert weight is not None
    operands = [input, weight] if bias is None else [input, weight, bias]
    if len({(one.dtype, one.device) for one in operands}) > 1 or input.dtype not in _DTYPES:
        return "different_weights"
    if not _pays(input, weight):
        return "slower"
    return None if input.is_contiguous() and weight.is_contiguous() else "strided"


def _pays(input: Tensor, weight: Tensor) -> bool:
    """Return whether a product takes no longer than a convolution; a backend that was named is honoured.

    On a GPU not in fp32, where torch lets convolutions round to TF32, and products not; nor for small kernels where
    the result is copied into torch's order: a captured forward takes it as it is, and one patch has no other. On a
    CPU the copy of an image in fp32 takes longer than is saved (224 x 224, 1.2 and 2.3 ms, one core, torch 2.14); with
    a patch a row there is none, as in Qwen2-VL (64 patches, 6.7 and 1.9 ms), and in 16 bits oneDNN's convolution is
    slower (1.0 and 0.7 ms).
    """
    if not backend.named_none() and backend.uses_triton(input):
        return True
    if input.is_cuda:
        kernel = weight.shape[2:]
        copied = not output_layout.is_free() and input.shape[2:] != kernel
        return input.element_size() == 2 and not (copied and math.prod(kernel) <= SMALL_KERNEL)
    return input.device.type == "cpu" and (input.element_size() == 2 or input.shape[2:] == weight.shape[2:])


def _side_by_side(input: Tensor, convolution: nn.Module) -> bool:
    """Return whether the kernels cover the input, each number once, and have more than one number a channel."""
    assert isinstance(convolution, CONVOLUTIONS)
    weight = convolution._parameters["weight"]
    assert weight is not None
    kernel = tuple(weight.shape[2:])
    plain = convolution.groups == 1 and {*convolution.dilation} == {1}
    unpadded = convolution.padding == "valid" or {*convolution.padding} == {0}
    if not plain or not unpadded or kernel != tuple(convolution.stride) or math.prod(kernel) == 1:
        return False
    fits = input.dim() == weight.dim() and input.shape[1] == weight.shape[1] and input.numel() > 0
    return fits and all(size % k == 0 for size, k in zip(input.shape[2:], kernel, strict=True))
