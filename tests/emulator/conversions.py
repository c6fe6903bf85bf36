"""Vector instructions that turn numbers of one type into another's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import Instruction
from .float_alu import exponent
from .integer_alu import low, short, signed
from .operands import floating, half, source, vector, writer
from .small_floats import FP4, Format, bfloat16_bits, float16_bits, from_bfloat16
from .waves import U32, U64, Waves

Run = Callable[[Waves], Any]
F32, F64 = np.float32, np.float64
_EIGHT = "(fp8|bf8)"


def conversion(one: Instruction, name: str, eight: dict[str, Format]) -> Run | None:
    """Return what an instruction of this file does; None if it is another's."""
    for find in (_from_eight, _to_eight, _from_four):
        if (run := find(one, name, eight)) is not None:
            return run
    if name in _TO_PAIRS:
        return _to_pairs(one, _TO_PAIRS[name])
    if name == "pack_b32_f16":
        return _packs(one)
    to, write = one.operands[0].number, writer(one)
    for pattern, convert, wide in _PLAIN:
        if match := re.fullmatch(pattern, name):
            given, position = convert(match), 16 if match["from"] == "f16" else 64 if match["from"] == "f64" else 32
            read: Any = (floating if match["from"][0] == "f" else source)(one, 1, position)
            if wide:
                return lambda waves: waves.write_pair(to, given(read(waves)).view(U64))
            return lambda waves: write(waves, given(read(waves)))
    return None


def _integer_of(match: re.Match[str]) -> Callable[[Any], Any]:
    bits, is_signed = int(match["bits"]), match["to"][0] == "i"
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
    mask = U32((1 << bits) - 1)

    def convert(value: Any) -> Any:
        whole = np.clip(np.trunc(np.asarray(value).astype(F64)), least, most)
        return low(np.where(np.isnan(whole), 0, whole).astype(np.int64)) & mask

    return convert


def _byte_of(match: re.Match[str]) -> Callable[[Any], Any]:
    shift = U32(8 * int(match["byte"]))
    return lambda value: (value >> shift & U32(0xFF)).astype(F32).view(U32)


_PLAIN: tuple[tuple[str, Callable[[re.Match[str]], Callable[[Any], Any]], bool], ...] = (
    (r"cvt_(?P<to>f16)_(?P<from>f32)", lambda m: float16_bits, False),
    (r"cvt_(?P<to>f32)_(?P<from>f16)", lambda m: lambda x: x.astype(F32).view(U32), False),
    (r"cvt_(?P<to>f32)_(?P<from>bf16)", lambda m: lambda x: from_bfloat16(x & U32(0xFFFF)).view(U32), False),
    (r"cvt_(?P<to>f32)_(?P<from>f64)", lambda m: lambda x: x.astype(F32).view(U32), False),
    (r"cvt_(?P<to>f64)_(?P<from>f32)", lambda m: lambda x: x.astype(F64), True),
    (r"cvt_(?P<to>f32)_(?P<from>i32)", lambda m: lambda x: signed(x).astype(F32).view(U32), False),
    (r"cvt_(?P<to>f32)_(?P<from>u32)", lambda m: lambda x: np.asarray(x).astype(F32).view(U32), False),
    (r"cvt_(?P<to>f64)_(?P<from>i32)", lambda m: lambda x: signed(x).astype(F64), True),
    (r"cvt_(?P<to>f64)_(?P<from>u32)", lambda m: lambda x: np.asarray(x).astype(F64), True),
    (r"cvt_(?P<to>f16)_(?P<from>u16)", lambda m: lambda x: float16_bits(x & U32(0xFFFF)), False),
    (r"cvt_(?P<to>f16)_(?P<from>i16)", lambda m: lambda x: float16_bits(short(x)), False),
    (r"cvt_(?P<to>[iu](?P<bits>32))_(?P<from>f32|f64)", _integer_of, False),
    (r"cvt_(?P<to>[iu](?P<bits>16))_(?P<from>f16)", _integer_of, False),
    (r"cvt_(?P<to>f32)_(?P<from>ubyte)(?P<byte>\d)", _byte_of, False),
)  # fmt: skip
"""Pattern of the name, the function it stands for, and whether it gives 64 bits."""


def _truncated(value: Any) -> Any:
    """Return the float16 towards zero."""
    nearest = np.asarray(value).astype(np.float16)
    wider = (np.abs(nearest.astype(F32)) > np.abs(value)) & np.isfinite(value)
    return float16_bits(np.where(wider, np.nextafter(nearest, np.float16(0)), nearest))


_TO_PAIRS: dict[str, Callable[[Any], Any]] = {
    "cvt_pk_bf16_f32": bfloat16_bits, "cvt_pk_f16_f32": float16_bits, "cvt_pkrtz_f16_f32": _truncated,
}  # fmt: skip


def _to_pairs(one: Instruction, bits: Callable[[Any], Any]) -> Run:
    to, first, second = one.operands[0].number, floating(one, 1), floating(one, 2)
    return lambda waves: waves.write(to, bits(first(waves)) | bits(second(waves)) << U32(16))


def _packs(one: Instruction) -> Run:
    to, chosen, reads = one.operands[0].number, one.flags("op_sel", 0, 3), []
    for operand, upper in zip(one.operands[1:], chosen, strict=False):
        width = 16 if operand.kind == "constant" and isinstance(operand.value, float) else 32
        read = half(vector(operand, width), upper)
        reads.append(_modified(read, operand))
    first, second = reads
    return lambda waves: waves.write(to, first(waves) | second(waves) << U32(16))


def _modified(read: Any, operand: Any) -> Any:
    def found(waves: Waves) -> Any:
        value = read(waves)
        value = value & U32(0x7FFF) if operand.absolute else value
        return value ^ U32(0x8000) if operand.negated else value

    return found


def _from_eight(one: Instruction, name: str, eight: dict[str, Format]) -> Run | None:
    to = one.operands[0].number
    if match := re.fullmatch(rf"cvt_f32_{_EIGHT}", name):
        read, numbers = source(one, 1), eight[match[1]].numbers
        shift = U32(8 * (one.flags("op_sel", 0, 2)[0] << 1 | one.flags("op_sel", 0, 2)[1]))
        return lambda waves: waves.write(to, numbers[read(waves) >> shift & U32(0xFF)].view(U32))
    match = re.fullmatch(rf"cvt_(scalef32_)?pk_f32_{_EIGHT}", name)
    if match is None:
        return None
    numbers = eight[match[2]].numbers
    read = half(source(one, 1), one.flags("op_sel", 0, 3)[0])
    scale = _scale(one, 2) if match[1] else None

    def run(waves: Waves) -> None:
        codes, factor = read(waves), F32(1) if scale is None else scale(waves)
        lower, upper = (numbers[codes >> U32(shift) & U32(0xFF)] * factor for shift in (0, 8))
        waves.write(to, lower.view(U32))
        waves.write(to + 1, upper.view(U32))

    return run


def _scale(one: Instruction, position: int) -> Run:
    """Return a reader of the power of two that an operand's exponent is."""
    read = floating(one, position)
    return lambda waves: np.ldexp(F32(1), exponent(read(waves)) - 127).astype(F32)


def _to_eight(one: Instruction, name: str, eight: dict[str, Format]) -> Run | None:
    match = re.fullmatch(rf"cvt_(scalef32_)?pk_{_EIGHT}_f32", name)
    if match is None:
        return None
    to, kind = one.operands[0].number, eight[match[2]]
    first, second = floating(one, 1), floating(one, 2)
    scale = _scale(one, 3) if match[1] else None
    upper = one.flags("op_sel", 0, 4)[3 if match[1] else 2]

    def run(waves: Waves) -> None:
        factor = F32(1) if scale is None else scale(waves)
        low_code, high_code = (kind.encode(read(waves) / factor, waves.saturates) for read in (first, second))
        pair, old = low_code | high_code << U32(8), waves.vector[to]
        waves.write(to, old & U32(0xFFFF) | pair << U32(16) if upper else old & U32(0xFFFF0000) | pair)

    return run


def _from_four(one: Instruction, name: str, eight: dict[str, Format]) -> Run | None:
    match = re.fullmatch(r"cvt_scalef32_pk_(f32|bf16|f16)_fp4", name)
    if match is None:
        return None
    to, read, scale = one.operands[0].number, source(one, 1), _scale(one, 2)
    chosen = one.flags("op_sel", 0, 2)
    shift = 8 * (chosen[0] | chosen[1] << 1)
    bits: Any = bfloat16_bits if match[1] == "bf16" else float16_bits

    def run(waves: Waves) -> None:
        codes, factor = read(waves) >> U32(shift), scale(waves)
        lower, upper = (FP4[codes >> U32(at) & U32(15)] * factor for at in (0, 4))
        if match[1] == "f32":
            waves.write(to, lower.view(U32))
            waves.write(to + 1, upper.view(U32))
        else:
            waves.write(to, bits(lower) | bits(upper) << U32(16))

    return run
