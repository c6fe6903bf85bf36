"""Vector instructions against AMD's own pseudocode, as tinygrad carries it: a parser of its expressions, and no more.

Only what is an assignment of one expression is read; the rest, and what the emulator does not know, is left out. How
many are compared, and that a wrong one shows, is held too. Needs `pip install tinygrad`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from .isa_errors import UnknownInstruction
from .one_instruction import bits, execute, number, pair, scalar, signed, split, vector, wave, words
from .test_isa_floats import floats, rounded

_TOKEN = re.compile(
    r"\s*(\d+'[A-Z]+(?=\()|\d+\.\d+F?|0x[0-9a-fA-F]+(?:U?L*)|\d+(?:'\d+)?(?:U?L*)(?!\.\d)|[A-Za-z_]\w*|\*\*|<<|>>|[<>=!]=|<>|&&|\|\||.)"
)
_LEVELS = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!=", "<>"],
    ["<", ">", "<=", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/"],
    ["**"],
]
_KINDS = {"f16": "e", "f32": "f", "f64": "d"}
Number = Any


def typed(value: Number, kind: str) -> Number:
    """Return bits as a number of a type: `u16`, `i24`, `f32`."""
    if kind in _KINDS:
        return number(value & ((1 << int(kind[1:])) - 1), _KINDS[kind]) if isinstance(value, int) else value
    width = int(kind[1:])
    return signed(int(value), width) if kind[0] == "i" else int(value) & ((1 << width) - 1)


class Expression:
    """Evaluates one expression of the pseudocode."""

    def __init__(self, text: str, names: dict[str, Number]):
        self.tokens = [token for token in _TOKEN.findall(text) if token.strip()]
        self.names, self.at = names, 0

    def take(self, token: str | None = None) -> str:
        found = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if token is not None and found != token:
            raise SyntaxError(f"{token} wanted: {self.tokens}")
        self.at += 1
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def whole(self) -> Number:
        found = self.choice()
        if self.peek():
            raise SyntaxError(f"{self.peek()} is left: {self.tokens}")
        return found

    def choice(self) -> Number:
        found = self.binary(0)
        if self.peek() != "?":
            return found
        self.take("?")
        first = self.choice()
        self.take(":")
        second = self.choice()
        return first if found else second

    def binary(self, level: int) -> Number:
        if level == len(_LEVELS):
            return self.unary()
        found = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            sign = self.take()
            found = _OPERATIONS[sign](found, self.binary(level + 1))
        return found

    def unary(self) -> Number:
        if self.peek() in ("-", "~", "!"):
            sign, value = self.take(), self.unary()
            return -value if sign == "-" else ~value if sign == "~" else not value
        return self.member(self.atom())

    def member(self, value: Number) -> Number:
        while self.peek() in (".", "["):
            if self.take() == ".":
                value = typed(value, self.take())
                continue
            high = self.choice()
            low = high
            if self.peek() == ":":
                self.take(":")
                low = self.choice()
            self.take("]")
            value = value >> low & ((1 << (high - low + 1)) - 1)
        return value

    def atom(self) -> Number:
        token = self.take()
        if token == "(":
            found = self.choice()
            self.take(")")
            return found
        if token == "{":  # of two words
            high = self.choice()
            self.take(",")
            low = self.choice()
            self.take("}")
            return high << 32 | low
        if cast := re.fullmatch(r"(\d+)'([A-Z])", token):
            self.take("(")
            value = self.choice()
            self.take(")")
            return float(value) if cast[2] == "F" else typed(value, ("i" if cast[2] == "I" else "u") + cast[1])
        if re.fullmatch(r"\d+\.\d+F?", token):
            return float(token.rstrip("F"))
        if re.fullmatch(r"0x[0-9a-fA-F]+U?L*|\d+('\d+)?U?L*", token):
            return int(re.sub(r"^\d+'|[UL]+$", "", token), 0)
        if self.peek() == "(":
            self.take("(")
            given = [self.choice()]
            while self.peek() == ",":
                self.take(",")
                given.append(self.choice())
            self.take(")")
            return _FUNCTIONS[token](*given)
        return self.names[token]


def shift_left(a: int, b: int) -> int:
    return a << b if b < 64 else 0


_OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "||": lambda a, b: a or b, "&&": lambda a, b: a and b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "<<": shift_left,
    ">>": lambda a, b: a >> b, "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "**": lambda a, b: a**b,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{f"v_{name}_{kind}{width}": function for name, function in (("max", max), ("min", min)) for kind in "iuf"
       for width in (16, 32, 64)},
    **{f"v_{name}3_{kind}{width}": function for name, function in (("max", max), ("min", min)) for kind in "iuf"
       for width in (16, 32)},
    "fma": lambda a, b, c: rounded(Fraction(a) * Fraction(b) + Fraction(c)), "abs": abs, "trunc": math.trunc,
    "floor": math.floor, "isNAN": math.isnan,
}  # fmt: skip


def pseudocode() -> dict[str, str]:
    """Return the text of each instruction of VOP3, by its name in assembly."""
    module = pytest.importorskip("tinygrad.runtime.autogen.amd.cdna.str_pcode", reason="tinygrad is not installed")
    texts = {key.name.lower(): text for key, text in module.PCODE.items() if key.name.startswith("V_")}
    return {name.removesuffix("_e64"): text for name, text in texts.items() if not name.endswith("_e32")}


def compare(name: str, text: str) -> bool:
    """Compare an instruction with its text; return False if one of both is not read."""
    text = re.sub(r"//[^\n]*", "", text).replace("\n", " ").strip().rstrip(";")
    match = re.fullmatch(r"D0\.([uifb]\d+)(\[laneId\])? = ([^;]*)", text)
    if match is None:
        return False
    kind, is_test, expression = match[1].replace("b", "u"), match[2] is not None, match[3]
    operands = re.findall(r"\bS(\d)(?:\.\w(\d+))?", expression)
    widths = {int(n): max(int(w or 32) for m, w in operands if m == n) for n, _ in sorted(operands)}
    of_floats = bool(re.search(r"S\d\.f", expression))
    if not widths or "f16" in expression + kind or list(widths) != list(range(len(widths))) or kind == "f64":
        return False
    wide = {n: width == 64 for n, width in widths.items()}
    given = [_values(n, wide[n], of_floats) for n in widths]
    held: dict[int, list[int]] = {}
    for n, values in enumerate(given):
        held |= split(values, 2 * n) if wide[n] else {2 * n: values}
    named = [f"v[{2 * n}:{2 * n + 1}]" if wide[n] else f"v{2 * n}" for n in widths]
    to = "s[4:5]" if is_test else "v[20:21]" if kind.endswith("64") else "v20"
    lanes = list(zip(*given, strict=True))
    try:
        found = execute(wave(held), f"{name} {to}, {', '.join(named)}")
        wanted = [Expression(expression, {f"S{n}": one for n, one in enumerate(lane)}).whole() for lane in lanes]
    except (UnknownInstruction, SyntaxError, KeyError, ValueError, IndexError, OverflowError):
        return False
    if is_test:
        bits_of = scalar(found, 4) | scalar(found, 5) << 32
        assert [bool(bits_of >> lane & 1) for lane in range(64)] == [bool(one) for one in wanted], f"{name}: {text}"
        return True
    got = pair(found, 20) if kind.endswith("64") else vector(found, 20)
    mask = (1 << int(kind[1:])) - 1
    coded = [bits(float(one)) if kind == "f32" else int(one) & mask for one in wanted]
    assert [value & mask for value in got] == coded, f"{name}: {text}"
    return True


def _values(operand: int, is_wide: bool, of_floats: bool) -> list[int]:
    if not of_floats:
        pairs = zip(words(operand), words(9 + operand), strict=True)
        found = [low | high << 32 for low, high in pairs] if is_wide else words(operand)
    else:
        kind = "d" if is_wide else "f"
        exact = [
            round(value * 16) / 16 if abs(value) < 1e3 else 1.5 for value in floats(operand, kind)
        ]  # sums are exact
        found = [bits(value, kind) for value in exact]
    return [found[0] if lane % 4 == 0 else one for lane, one in enumerate(found)]


def test_instructions_do_what_amd_says() -> None:
    compared = [name for name, text in pseudocode().items() if compare(name, text)]
    assert len(compared) >= 100, compared
    assert {"v_add_u32", "v_mul_hi_u32", "v_lshl_add_u32", "v_max3_u32", "v_xad_u32"} <= set(compared)


def test_another_text_is_seen() -> None:
    with pytest.raises(AssertionError, match="v_add_u32"):
        compare("v_add_u32", "D0.u32 = S0.u32 - S1.u32")
