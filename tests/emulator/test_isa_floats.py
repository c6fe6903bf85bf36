"""Vector instructions on floats, against exact fractions that are rounded once.

Sources: "MI300 Instruction Set Architecture", VOP1 to VOP3P; IEEE 754, which it names for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from .one_instruction import bits, execute, number, pair, scalar, split, vector, wave

INF, NAN = math.inf, math.nan
DIGITS = {"e": (11, -24, 15), "f": (24, -149, 127), "d": (53, -1074, 1023)}
"""Of a kind: digits, the exponent of the smallest number, that of the largest."""


def rounded(value: Fraction, kind: str = "f") -> float:
    """Return the nearest float of a kind, ties to even; Python's own are of 64 bits."""
    if value == 0:
        return 0.0
    digits, least, most = DIGITS[kind]
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - digits, least)
    while abs(value) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    while exponent > least and abs(value) < Fraction(2) ** (exponent + digits - 1):
        exponent -= 1
    found = Fraction(round(value / Fraction(2) ** exponent)) * Fraction(2) ** exponent  # Python rounds ties to even
    if abs(found) >= Fraction(2) ** (most + 1):
        return INF if value > 0 else -INF
    return math.copysign(float(found), value)


def floats(seed: int, kind: str = "f", count: int = 64) -> list[float]:
    """Return finite numbers of all sizes."""
    chance = np.random.default_rng(seed)
    most = {"e": 6, "f": 30, "d": 60}[kind]
    values = chance.standard_normal(count) * 2.0 ** chance.integers(-most, most, count)
    special = [0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0]
    return [number(bits(float(value), kind), kind) for value in [*special, *values][:count]]


def registers(values: Sequence[float], at: int, kind: str) -> dict[int, list[int]]:
    coded = [bits(value, kind) for value in values]
    return split(coded, at) if kind == "d" else {at: coded}


def name_of(at: int, kind: str) -> str:
    return f"v[{at}:{at + 1}]" if kind == "d" else f"v{at}"


def run(name: str, given: Sequence[Sequence[float]], kind: str, modifiers: str = "", **state: Any) -> list[float]:
    held: dict[int, list[int]] = {}
    for position, values in enumerate(given):
        held |= registers(values, 2 * position, kind)
    operands = ", ".join(name_of(2 * position, kind) for position in range(len(given)))
    found = execute(wave(held, **state), f"{name} {name_of(20, kind)}, {operands}{modifiers}")
    coded = pair(found, 20) if kind == "d" else vector(found, 20)
    return [number(value & 0xFFFF if kind == "e" else value, kind) for value in coded]


def same(got: Sequence[float], wanted: Sequence[float]) -> None:
    assert [value if value == value else "nan" for value in got] == [v if v == v else "nan" for v in wanted]


def fractions(function: Callable[..., Fraction], kind: str) -> Callable[..., float]:
    return lambda *lane: rounded(function(*map(Fraction, lane)), kind)


EXACT: dict[str, tuple[int, Callable[..., Fraction]]] = {
    "add": (2, lambda a, b: a + b), "sub": (2, lambda a, b: a - b), "subrev": (2, lambda a, b: b - a),
    "mul": (2, lambda a, b: a * b), "max": (2, max), "min": (2, min), "max3": (3, max), "min3": (3, min),
    "med3": (3, lambda *given: sorted(given)[1]), "fma": (3, lambda a, b, c: a * b + c),
    "rndne": (1, lambda a: Fraction(round(a))), "trunc": (1, lambda a: Fraction(math.trunc(a))),
    "floor": (1, lambda a: Fraction(math.floor(a))), "ceil": (1, lambda a: Fraction(math.ceil(a))),
}  # fmt: skip
KINDS = {"e": "f16", "f": "f32", "d": "f64"}
EMITTED = [
    "v_add_f32 v_sub_f32 v_subrev_f32 v_mul_f32 v_max_f32 v_min_f32 v_max3_f32 v_fma_f32 v_rndne_f32 v_trunc_f32",
    "v_floor_f32 v_ceil_f32 v_add_f64 v_mul_f64 v_fma_f64 v_rndne_f64 v_mul_f16 v_med3_f32 v_min3_f32",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_rounded_once(name: str, kind: str) -> None:
    """All of `EMITTED` and more; a fused product and sum of float64 is not (see `float_alu.fma`)."""
    count, function = EXACT[name]
    for seed in range(3):
        given = [floats(seed * 3 + position, kind) for position in range(count)]
        wanted = [fractions(function, kind)(*lane) for lane in zip(*given, strict=True)]
        got = run(f"v_{name}_{KINDS[kind]}", given, kind)
        if (name, kind) == ("fma", "d"):
            assert all(abs(a - b) <= math.ulp(b) for a, b in zip(got, wanted, strict=True))
        else:
            same(got, wanted)


def test_a_fused_sum_is_not_rounded_twice() -> None:
    """Halfway between two float32 in float64, by what the product's last digits leave of it."""
    a, b = 1 + 2.0**-12, 1 + 2.0**-12  # 1 + 2**-11 + 2**-24: halfway
    for c in (2.0**-60, -(2.0**-60), 0.0, 2.0**-149):
        same(
            run("v_fma_f32", [[a] * 64, [b] * 64, [c] * 64], "f"),
            [rounded(Fraction(a) * Fraction(b) + Fraction(c))] * 64,
        )


@pytest.mark.parametrize(("name", "order"), [
    ("v_fmaak_f32", (0, 1, 2)), ("v_madak_f32", (0, 1, 2)), ("v_fmamk_f32", (0, 1, 2)), ("v_madmk_f32", (0, 1, 2)),
])  # fmt: skip
def test_constants_within(name: str, order: tuple[int, int, int]) -> None:
    """…ak adds the constant, …mk multiplies by it: both are printed where they stand in a * b + c."""
    a, b = floats(1), floats(2)
    held = registers(a, 0, "f") | registers(b, 2, "f")
    constant = "0x40490fdb"  # 3.14159274
    operands = f"v0, v2, {constant}" if "ak" in name else f"v0, {constant}, v2"
    found = execute(wave(held), f"{name} v9, {operands}")
    k = Fraction(number(0x40490FDB))
    wanted = [
        Fraction(x) * Fraction(y) + k if "ak" in name else Fraction(x) * k + Fraction(y)
        for x, y in zip(a, b, strict=True)
    ]
    same([number(value) for value in vector(found, 9)], [rounded(value) for value in wanted])


@pytest.mark.parametrize(("name", "kind"), [("v_fmac_f32", "f"), ("v_fmac_f64", "d")])
def test_accumulates(name: str, kind: str) -> None:
    a, b, c = (floats(seed, kind) for seed in (1, 2, 3))
    held = registers(a, 0, kind) | registers(b, 2, kind) | registers(c, 4, kind)
    found = execute(wave(held), f"{name}_e32 {name_of(4, kind)}, {name_of(0, kind)}, {name_of(2, kind)}")
    got = pair(found, 4) if kind == "d" else vector(found, 4)
    wanted = [rounded(Fraction(x) * Fraction(y) + Fraction(z), kind) for x, y, z in zip(a, b, c, strict=True)]
    assert all(
        abs(number(g, kind) - w) <= (math.ulp(w) if kind == "d" else 0) for g, w in zip(got, wanted, strict=True)
    )


NOT_A_NUMBER: dict[str, tuple[tuple[float, ...], float]] = {
    "add": ((INF, -INF), NAN), "mul": ((0.0, INF), NAN), "max": ((NAN, 2.0), 2.0), "min": ((-3.0, NAN), -3.0),
    "med3": ((NAN, 5.0, 2.0), 2.0), "fma": ((INF, 0.0, 1.0), NAN), "max3": ((NAN, 1.0, 2.0), 2.0),
    "sub": ((INF, 1.0), INF),
    "fract": ((-0.25,), 0.75), "mul_legacy": ((0.0, INF), 0.0), "maximum3": ((NAN, 1.0, 2.0), NAN),
    "rcp": ((0.0,), INF),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_A_NUMBER)
def test_no_numbers(name: str) -> None:
    given, wanted = NOT_A_NUMBER[name]
    same(run(f"v_{name}_f32", [[value] * 64 for value in given], "f"), [wanted] * 64)


TRANSCENDENTAL: dict[str, Callable[[float], float]] = {
    "rcp": lambda a: 1 / a, "rcp_iflag": lambda a: 1 / a, "rsq": lambda a: 1 / math.sqrt(a), "sqrt": math.sqrt,
    "exp": lambda a: 2.0**a, "log": math.log2, "sin": lambda a: math.sin(2 * math.pi * a),
    "cos": lambda a: math.cos(2 * math.pi * a),
}  # fmt: skip


@pytest.mark.parametrize("name", [f"{name}_f32" for name in TRANSCENDENTAL] + ["rcp_f64", "rsq_f64"])
def test_transcendental(name: str) -> None:
    """v_exp_f32, v_log_f32, v_rcp_f32, v_rcp_f64, v_rcp_iflag_f32, v_rsq_f32, v_rsq_f64, v_sqrt_f32."""
    kind = "d" if name.endswith("64") else "f"
    function = TRANSCENDENTAL[name[:-4]]
    given = [abs(value) % 100 + 0.01 for value in floats(7, kind)]
    given = [number(bits(value, kind), kind) for value in given]
    for got, value in zip(run(f"v_{name}", [given], kind), given, strict=True):
        wanted = function(value)
        assert abs(got - wanted) <= max(abs(wanted), 0.01) * 2.0 ** (-52 if kind == "d" else -23), value


@pytest.mark.parametrize(
    ("name", "value"), [("rcp", 2.0**-130), ("rcp", 2.0**127.5), ("exp", -140.0), ("rsq", 2.0**-140)]
)
def test_subnormals_are_zeros_there(name: str, value: float) -> None:
    wanted = INF if value < 1 and name != "exp" else 0.0
    same(run(f"v_{name}_f32", [[number(bits(value))] * 64], "f"), [wanted] * 64)


@pytest.mark.parametrize("kind", ["f", "d"])
def test_ldexp(kind: str) -> None:
    """v_ldexp_f32, v_ldexp_f64."""
    values = floats(3, kind)
    exponents = [-200 + 6 * lane for lane in range(64)]
    held = registers(values, 0, kind) | {4: [exponent & 0xFFFFFFFF for exponent in exponents]}
    found = execute(wave(held), f"v_ldexp_{KINDS[kind]} {name_of(20, kind)}, {name_of(0, kind)}, v4")
    got = [number(value, kind) for value in (pair(found, 20) if kind == "d" else vector(found, 20))]
    same(got, [rounded(Fraction(v) * Fraction(2) ** e, kind) for v, e in zip(values, exponents, strict=True)])


def test_frexp() -> None:
    values = [1.0, -0.75, 1000.0, 2.0**-140, 0.0, 3.5] + [2.0] * 58
    same(run("v_frexp_mant_f32", [values], "f"), [math.frexp(value)[0] for value in values])
    found = execute(wave(registers(values, 0, "f")), "v_frexp_exp_i32_f32_e32 v9, v0")
    assert vector(found, 9) == [math.frexp(value)[1] & 0xFFFFFFFF for value in values]


PLACES = {"n": 0, "d": 2, "ds": 4, "ns": 6, "r": 8, "e": 10, "q": 12, "t": 14, "out": 20}


@pytest.mark.parametrize("kind", ["f", "d"])
def test_a_quotient_by_amds_recipe(kind: str) -> None:
    """v_div_scale_f32, v_rcp_f32, v_fma_f32, v_div_fmas_f32 and v_div_fixup_f32: rounded once, of extreme numbers too.

    And v_div_scale_f64, v_div_fmas_f64, v_div_fixup_f64. What quotients that are too large become AMD's text leaves
    open.

    The order is LLVM's (AMDGPULegalizerInfo, legalizeFDIV32 and legalizeFDIV64).
    """
    top = 127 if kind == "f" else 1023
    size = "32" if kind == "f" else "64"
    extreme = [1.0, 3.0, -7.0, 2.0**top, 1.5 * 2.0 ** (1 - top), 2.0 ** (-top - 10), 0.1, 5e3]
    numbers = [number(bits(value, kind), kind) for value in extreme]
    pairs = [(a, b) for a, b in product(numbers, numbers) if abs(rounded(Fraction(a) / Fraction(b), kind)) < INF]
    pairs += [(1.0, 1.0)] * (64 - len(pairs))
    n, d = [a for a, _ in pairs], [b for _, b in pairs]
    names = {key: name_of(at, kind) for key, at in PLACES.items()}
    lines = [
        "v_div_scale_f{s} {ds}, s[4:5], {d}, {d}, {n}", "v_div_scale_f{s} {ns}, vcc, {n}, {d}, {n}",
        "v_rcp_f{s} {r}, {ds}",
        "v_fma_f{s} {e}, -{ds}, {r}, 1.0", "v_fma_f{s} {r}, {e}, {r}, {r}", "v_fma_f{s} {e}, -{ds}, {r}, 1.0",
        "v_fma_f{s} {r}, {e}, {r}, {r}", "v_mul_f{s} {q}, {ns}, {r}", "v_fma_f{s} {t}, -{ds}, {q}, {ns}",
        "v_fma_f{s} {q}, {t}, {r}, {q}", "v_fma_f{s} {t}, -{ds}, {q}, {ns}", "v_div_fmas_f{s} {q}, {t}, {r}, {q}",
        "v_div_fixup_f{s} {out}, {q}, {d}, {n}",
    ]  # fmt: skip
    held = registers(n, 0, kind) | registers(d, 2, kind)
    found = execute(wave(held), *(line.format(s=size, **names) for line in lines))
    got = [number(value, kind) for value in (pair(found, 20) if kind == "d" else vector(found, 20))]
    wanted = [rounded(Fraction(a) / Fraction(b), kind) for a, b in pairs]
    assert all(
        abs(g - w) <= math.ulp(w) * (kind == "d") if abs(w) < INF else g == w for g, w in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize(("d", "n", "wanted"), [
    (0.0, 0.0, NAN), (INF, INF, NAN), (0.0, -3.0, -INF), (-2.0, INF, -INF), (INF, 5.0, 0.0), (NAN, 1.0, NAN),
    (1.0, NAN, NAN),
])  # fmt: skip
def test_quotients_without_a_number(d: float, n: float, wanted: float) -> None:
    for kind in ("f", "d"):
        got = run(f"v_div_fixup_{KINDS[kind]}", [[7.0] * 64, [d] * 64, [n] * 64], kind)
        same(got, [wanted] * 64)


FLOAT_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b, "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b, "nge": lambda a, b: not a >= b, "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b, "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relation", FLOAT_RELATIONS)
def test_float_comparisons(relation: str, kind: str) -> None:
    """v_cmp_lt_f32 to v_cmp_nlt_f64, of numbers and of what is none."""
    some = [1.0, -1.0, 0.0, -0.0, INF, -INF, NAN, 2.5]
    pairs = list(product(some, some))
    held = registers([a for a, _ in pairs], 0, kind) | registers([b for _, b in pairs], 2, kind)
    line = f"v_cmp_{relation}_{KINDS[kind]}_e64 s[4:5], {name_of(0, kind)}, {name_of(2, kind)}"
    found = execute(wave(held), line)
    wanted = sum(FLOAT_RELATIONS[relation](a, b) << lane for lane, (a, b) in enumerate(pairs))
    assert scalar(found, 4) | scalar(found, 5) << 32 == wanted


@pytest.mark.parametrize("kind", ["f", "d"])
def test_classes(kind: str) -> None:
    """v_cmp_class_f32, v_cmp_class_f64: bit 0 a signalling NaN, 1 a quiet one, 2 -inf, … 9 +inf."""
    small = 2.0**-140 if kind == "f" else 2.0**-1060
    values = [NAN, -INF, -1.0, -small, -0.0, 0.0, small, 1.0, INF]
    coded = [bits(value, kind) for value in values]
    coded.insert(0, coded[0] ^ (3 << 21 if kind == "f" else 3 << 50))  # the quiet bit off, another on
    coded += [coded[0]] * 54
    held = (split(coded, 0) if kind == "d" else {0: coded}) | {2: [0] * 64}
    for bit in range(10):
        held[2] = [1 << bit] * 64
        found = execute(wave(held), f"v_cmp_class_{KINDS[kind]}_e64 s[4:5], {name_of(0, kind)}, v2")
        assert scalar(found, 4) & 0x3FF == 1 << bit


def test_modifiers() -> None:
    """The sign and size of operands, and what becomes of the result."""
    a, b = floats(4), floats(5)
    held = registers(a, 0, "f") | registers(b, 1, "f")
    cases = {
        "v_add_f32_e64 v9, -v0, |v1|": lambda x, y: -x + abs(y),
        "v_mul_f32_e64 v9, -|v0|, v1": lambda x, y: -abs(x) * y,
        "v_add_f32_e64 v9, v0, v1 mul:2": lambda x, y: 2 * (x + y),
        "v_add_f32_e64 v9, v0, v1 div:2": lambda x, y: (x + y) / 2,
        "v_add_f32_e64 v9, v0, v1 clamp": lambda x, y: min(max(x + y, Fraction(0)), Fraction(1)),
    }  # fmt: skip
    for line, function in cases.items():
        wanted = [rounded(function(Fraction(x), Fraction(y))) for x, y in zip(a, b, strict=True)]
        got = [number(value) for value in vector(execute(wave(held), line), 9)]
        assert all(
            abs(g - w) <= math.ulp(w) * 2.0**29 * ("mul" in line or "div" in line)
            for g, w in zip(got, wanted, strict=True)
        )


def test_constants_of_each_width() -> None:
    """0.5 is a float of the instruction's width; a literal of float64 is its upper half."""
    got = execute(
        wave({0: [0] * 64, 1: [0] * 64}), "v_add_f64 v[2:3], v[0:1], 0.5", "v_add_f64 v[4:5], v[0:1], 0x40240000"
    )
    assert number(pair(got, 2)[0], "d") == 0.5
    assert number(pair(got, 4)[0], "d") == 10.0
    assert vector(execute(wave({0: [0] * 64}), "v_add_f16 v2, v0, 1.0"), 2)[0] == 0x3C00
