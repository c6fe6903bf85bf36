"""MXFP4 experts of few tokens in bf16, on NVIDIA's matrix units (`linear.mma_fp4`).

The letters are those of `experts`. A program has WARPS warps of 32 threads: thread `4 r + q` of one has row `r` of 8,
and of its columns a group of 32, the warps and the four `q` next to each other. UNROLL steps of these are loaded at
once, of TILES tiles of rows, which share the input's pairs. No load is masked: the last step of a row begins in the
one before, whose columns then count as zeros, and so does the last tile of rows, which two programs then write alike.

    gate and up   a gate and its up are a thread's two words, for one input
    down          rows of two experts are, each with its own states: a program has all experts of its rows

The states between the two are pairs times 2^64 already, as the second kernel takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..launching.launch import chip_of, collects, overlaps
from ..launching.tiles import Tile
from ..linear.blocks import Blocks
from ..linear.mma_fp4 import ROWS
from .form import Gating

CASES = """
from hf_rewrite_runtime.launching.launch import HIP

if not HIP:
    def few(sizes, top_k):
        def weight(rows, cols):
            codes = tensor(sizes.experts, rows, cols // 2, dtype=torch.uint8)
            return Blocks(codes, tensor(sizes.experts, rows, cols // 32, dtype=torch.uint8), 1, 32)
        gate_up = weight(2 * sizes.intermediate_size, sizes.hidden_size)
        down = weight(sizes.hidden_size, sizes.intermediate_size)
        how, biases = Gating("swish", 1.7, 7.0, 1.0, interleaved=True), (None, None)
        x = tensor(1, sizes.hidden_size)
        launch_mxfp4_experts(x, int64(1, top_k), tensor(1, top_k), gate_up, down, biases, None, x, how)

    case("gpt-oss 20B", few, GPT_OSS, GPT_OSS.top_k)
"""

if backend.triton_installed():
    from .mxfp4_kernels import mxfp4_down_kernel, mxfp4_gate_up_kernel

LEAST_GROUPS = 4
"""Groups of 32 columns that a row has at least."""


def takes(x: Tensor, gate_up: Blocks, down: Blocks) -> bool:
    """Return whether these kernels compute experts of MXFP4: their input is bf16, and a chip multiplies that.

    AMD's chips have other matrix units: theirs sum up more, and share what a thread says with fewer.
    """
    chip = chip_of(x)
    multiplies = chip is None or (chip.backend == "cuda" and int(chip.arch.removeprefix("sm_")) >= 80)
    form = all(weight.four and (weight.rows, weight.columns) == (1, 32) for weight in (gate_up, down))
    if not (multiplies and form and x.dtype == torch.bfloat16 and _in_words(x)):
        return False
    _, hidden_size, size = down.shape
    return min(hidden_size, size) >= 32 * LEAST_GROUPS


_agrees: dict[tuple[object, ...], bool] = {}
"""Whether the threads of a variant were seen to be where its products need them."""


def _variant(x: Tensor, index: Tensor, gate_up: Blocks, down: Blocks, how: Gating) -> tuple[object, ...]:
    return x.device, *gate_up.shape, *down.shape, index.shape[1], how


def run(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Blocks,
    down: Blocks,
    biases: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
) -> bool:
    """Write what the experts return if these kernels compute them; return whether they did.

    The host looks at what a variant's first launch outside a capture wrote: threads that are not where they should be
    write no numbers, and then the other kernels are asked, which `judge` whether there are any.
    """
    variant = _variant(x, index, gate_up, down, how)
    if not takes(x, gate_up, down) or _agrees.get(variant) is False:
        return False
    launch_mxfp4_experts(x, index, weights, gate_up, down, biases, residual, out, how)
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if variant not in _agrees and not captured and not collects():
        if bool(out.isnan().any()):
            return False
        _agrees[variant] = True
    return True


def judge(x: Tensor, index: Tensor, gate_up: Blocks, down: Blocks, out: Tensor, how: Gating) -> None:
    """Count that the other kernels wrote `out`; the first time, leave a variant to them if these are numbers."""
    if not takes(x, gate_up, down):
        return
    variant = _variant(x, index, gate_up, down, how)
    if variant not in _agrees and not bool(out.isnan().any()):
        _agrees[variant] = False
    if _agrees.get(variant) is False:
        backend.count_fallback("fused_experts", "threads_elsewhere")


def _in_words(x: Tensor) -> bool:
    """Return whether rows of 16 bits begin at multiples of 32."""
    *strides, last = x.stride()
    return bool(last == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in strides))


def launch_mxfp4_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Blocks,
    down: Blocks,
    biases: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    """Write what the experts return for `x` `[N, H]`, plus `residual`, into `out`."""
    _, hidden_size, size = down.shape
    first, second = tiles or rule(hidden_size, size, index.shape[1])
    states = torch.empty(*index.shape, size, dtype=x.dtype, device=x.device)
    launch_gate_up(x, index, gate_up, biases[0], states, how, first)
    launch_down(states, index, weights, down, biases[1], residual, out, how.scaling, second)


def launch_gate_up(
    x: Tensor, index: Tensor, weight: Blocks, bias: Tensor | None, states: Tensor, how: Gating, tile: Tile
) -> None:
    """Write the gated states `[N, K, M]` times 2^64, each eight of them in pairs."""
    experts, both, hidden_size = weight.shape
    x, x_stride = row_tiles.flatten(x)
    index, index_stride = row_tiles.flatten(index)
    overlap, size = overlaps(x), both // 2
    with backend.device_guard(x):
        mxfp4_gate_up_kernel.launch(
            (-(-size // (ROWS * tile[0])), index.shape[1], index.shape[0]),
            tile[1],
            (
                x.view(torch.int32), index, weight.values.view(torch.int32), weight.scale.view(torch.uint8),
                x if bias is None else bias, states,
            ),
            (),
            (x_stride // 2, index_stride),
            (how.alpha, how.largest, how.shift),
            (
                experts, index.shape[1], hidden_size // 32, size, how.activation, how.bounded, how.interleaved,
                bias is not None, overlap, chip_of(x) is not None, *tile[:3], tile[3] == 1,
            ),
            overlap=overlap,
        )  # fmt: skip


def launch_down(
    states: Tensor,
    index: Tensor,
    weights: Tensor,
    weight: Blocks,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    scaling: float,
    tile: Tile,
) -> None:
    """Write what the experts make of `launch_gate_up`'s states."""
    experts, hidden_size, size = weight.shape
    tokens, top_k = index.shape
    index, index_stride = row_tiles.flatten(index)
    weights, weights_stride = row_tiles.flatten(weights)
    added, added_stride = (out, hidden_size) if residual is None else row_tiles.flatten(residual)
    overlap = overlaps(states)
    with backend.device_guard(states):
        mxfp4_down_kernel.launch(
            (-(-hidden_size // (ROWS * tile[0])), tokens, 1),
            tile[1],
            (
                states.view(torch.int32), index, weights, weight.values.view(torch.int32),
                weight.scale.view(torch.uint8), out if bias is None else bias, added, out,
            ),
            (),
            (index_stride, weights_stride, added_stride),
            (scaling,),
            (
                experts, top_k, size // 32, hidden_size, bias is not None, residual is not None, overlap,
                chip_of(states) is not None, _pairs(top_k), *tile[:3], tile[3] == 1,
            ),
            overlap=overlap,
        )  # fmt: skip


def _pairs(top_k: int) -> int:
    """Return warps of two experts each."""
    return 1 << ((top_k + 1) // 2 - 1).bit_length()


def rule(hidden_size: int, size: int, top_k: int) -> tuple[Tile, Tile]:
    """Return tiles of rows, warps and steps at once of a program of either kernel, and 1 where they load ahead."""
    pairs = _pairs(top_k)
    warps, steps = _fitting(hidden_size, 4, 3)
    shared, other_steps = _fitting(size, max(1, 8 // pairs), 2)
    return (2, warps, steps, 0), (1, pairs * shared, other_steps, 1)


def _fitting(columns: int, warps: int, steps: int) -> tuple[int, int]:
    """Return warps and steps that a row has groups for."""
    quads = columns // 32 // 4
    warps = min(warps, 1 << (quads.bit_length() - 1))
    return warps, min(steps, quads // warps)
