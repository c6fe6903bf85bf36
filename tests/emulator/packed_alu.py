"""Vector instructions on pairs: two float32 in two registers, two of 16 bits in one, sums of products."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import Instruction, Operand
from .float_alu import fma
from .integer_alu import WORD
from .isa_errors import UnknownInstruction
from .operands import Read, as_float, constant, floating, half, source, vector
from .small_floats import Format, float16_bits, from_bfloat16, from_float16
from .waves import U32, Waves

Run = Callable[[Waves], Any]
_OF_WORDS: dict[str, Callable[..., Any]] = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": fma}
_OF_HALVES: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": fma, "max": np.fmax, "min": np.fmin,
}  # fmt: skip
_INTEGERS = {
    "lshlrev_b16": "lshlrev_b16", "lshrrev_b16": "lshrrev_b16", "ashrrev_i16": "ashrrev_i16", "add_u16": "add_u16",
    "sub_u16": "sub_u16", "add_i16": "add_u16", "sub_i16": "sub_u16", "mul_lo_u16": "mul_lo_u16", "mad_u16": "mad_u16",
    "max_u16": "max_u16", "min_u16": "min_u16", "max_i16": "max_i16", "min_i16": "min_i16",
}  # fmt: skip


def packed(one: Instruction, name: str, eight: dict[str, Format]) -> Run | None:
    """Return what an instruction of this file does; None if it is another's."""
    if name == "pk_mov_b32":
        return _moves(one)
    if match := re.fullmatch(r"pk_(add|mul|fma)_f32", name):
        return _of_words(one, _OF_WORDS[match[1]])
    if match := re.fullmatch(r"pk_(add|mul|fma|max|min)_f16", name):
        return _of_halves(one, _OF_HALVES[match[1]])
    if (match := re.fullmatch(r"pk_(\w+)", name)) and match[1] in _INTEGERS:
        return _of_integers(one, WORD[_INTEGERS[match[1]]])
    if name in ("fma_mix_f32", "fma_mixlo_f16", "fma_mixhi_f16"):
        return _mixes(one, name)
    if match := re.fullmatch(r"dot2c?_f32_(f16|bf16)", name):
        return _dot(one, from_bfloat16 if match[1] == "bf16" else from_float16)
    return None


def _refuse_modifiers(one: Instruction) -> None:
    if "clamp" in one.modifiers:
        raise UnknownInstruction(one.text)


def _word(operand: Operand, upper: int) -> Read:
    """Return a reader of one of two float32: of a constant but zero there is only the lower."""
    if operand.kind == "constant":
        if upper and operand.value:
            raise UnknownInstruction(f"the upper half of {operand.text}")
        found = constant(operand, 32)
        return lambda waves: found
    moved = Operand(operand.text, operand.kind, operand.number + upper)
    return vector(moved)


def _of_words(one: Instruction, function: Callable[..., Any]) -> Run:
    _refuse_modifiers(one)
    count, to = len(one.operands) - 1, one.operands[0].number
    parts = []
    for selection, negation in (("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi")):
        chosen, negated = one.flags(selection, int(selection == "op_sel_hi"), count), one.flags(negation, 0, count)
        parts.append([_float(_word(operand, upper), minus)
                      for operand, upper, minus in zip(one.operands[1:], chosen, negated, strict=True)])  # fmt: skip
    lower, upper = parts

    def run(waves: Waves) -> None:
        first, second = function(*[read(waves) for read in lower]), function(*[read(waves) for read in upper])
        waves.write(to, np.asarray(first).view(U32))
        waves.write(to + 1, np.asarray(second).view(U32))

    return run


def _float(read: Read, minus: int) -> Read:
    if minus:
        return lambda waves: -np.asarray(read(waves)).view(np.float32)
    return lambda waves: np.asarray(read(waves)).view(np.float32)


def _moves(one: Instruction) -> Run:
    to, chosen = one.operands[0].number, one.flags("op_sel", 0, 2)
    first, second = (_word(operand, upper) for operand, upper in zip(one.operands[1:], chosen, strict=True))

    def run(waves: Waves) -> None:
        lower, upper = np.array(first(waves)), np.array(second(waves))
        waves.write(to, lower)
        waves.write(to + 1, upper)

    return run


def _half_readers(one: Instruction, floats: bool) -> list[list[Read]]:
    """Return readers of the lower halves, and of the upper ones, of all operands."""
    count, found = len(one.operands) - 1, []
    for name in ("op_sel", "op_sel_hi"):
        parts = []
        for operand, upper in zip(one.operands[1:], one.flags(name, int(name == "op_sel_hi"), count), strict=True):
            # a float's code stands in the lower half alone, an integer in all of 32 bits
            width = 16 if operand.kind == "constant" and isinstance(operand.value, float) else 32
            parts.append(half(vector(operand, width), upper))
        found.append(parts)
    return found


def _pair(waves: Waves, to: int, lower: Any, upper: Any) -> None:
    waves.write(to, np.asarray(lower, U32) | np.asarray(upper, U32) << U32(16))


def _of_integers(one: Instruction, function: Callable[..., Any]) -> Run:
    _refuse_modifiers(one)
    to = one.operands[0].number
    lower, upper = _half_readers(one, False)
    return lambda waves: _pair(waves, to, function(*[r(waves) for r in lower]), function(*[r(waves) for r in upper]))


def _of_halves(one: Instruction, function: Callable[..., Any]) -> Run:
    _refuse_modifiers(one)
    to, count = one.operands[0].number, len(one.operands) - 1
    signs = [one.flags(name, 0, count) for name in ("neg_lo", "neg_hi")]
    parts = [
        [_half_float(read, minus) for read, minus in zip(reads, negated, strict=True)]
        for reads, negated in zip(_half_readers(one, True), signs, strict=True)
    ]

    def run(waves: Waves) -> None:
        lower, upper = (np.asarray(function(*[read(waves) for read in reads])) for reads in parts)
        _pair(waves, to, lower.view(np.uint16).astype(U32), upper.view(np.uint16).astype(U32))

    return run


def _half_float(read: Read, minus: int) -> Read:
    sign = np.float16(-1 if minus else 1)
    return lambda waves: np.asarray(read(waves)).astype(np.uint16).view(np.float16) * sign


def _mixes(one: Instruction, name: str) -> Run:
    """A product and a sum in float32, of operands that are float32 or either half of a register."""
    chosen, halves = one.flags("op_sel", 0, 3), one.flags("op_sel_hi", 0, 3)
    to, clamp = one.operands[0].number, "clamp" in one.modifiers
    reads = []
    for operand, upper, is_half in zip(one.operands[1:], chosen, halves, strict=True):
        if is_half:
            width = 16 if operand.kind == "constant" and isinstance(operand.value, float) else 32
            reads.append(as_float(half(vector(operand, width), upper), operand, 16))
        else:
            reads.append(as_float(vector(operand), operand))

    def run(waves: Waves) -> None:
        value = fma(*[np.asarray(read(waves)).astype(np.float32) for read in reads])
        value = np.clip(value, np.float32(0), np.float32(1)) if clamp else value
        if name == "fma_mix_f32":
            waves.write(to, value.view(U32))
            return
        rounded, old = float16_bits(value), waves.vector[to]
        low, high = (old & U32(0xFFFF), rounded) if name == "fma_mixhi_f16" else (rounded, old >> U32(16))
        _pair(waves, to, low, high)

    return run


def _dot(one: Instruction, number: Callable[[Any], Any]) -> Run:
    """The sum of both products and of the third operand, or of what is there, rounded once."""
    _refuse_modifiers(one)
    to, first, second = one.operands[0].number, source(one, 1), source(one, 2)
    total = floating(one, 3 if len(one.operands) > 3 else 0)

    def run(waves: Waves) -> None:
        a, b, found = first(waves), second(waves), total(waves).astype(np.float64)
        for upper in (0, 16):
            x, y = (number(value >> U32(upper) & U32(0xFFFF)).astype(np.float64) for value in (a, b))
            found = found + x * y
        waves.write(to, found.astype(np.float32).view(U32))

    return run
