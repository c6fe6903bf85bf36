"""Arithmetic in Z/p², in which reordered sums are the same sum: computations are equal bit by bit, or differ.

A float stands for the fraction that it is, so that `x / 64`, `x * 2**-14` and `-(-x)` mean there what they mean in
numbers. What numbers have and the ring has not is chosen so that the identities hold by which kernels and models are
rewritten:

| operation | here | what holds |
|---|---|---|
| exp | `(1 + p)^x = 1 + p x` | `exp(a + b) = exp(a) exp(b)`: softmax in parts, sigmoid, tanh |
| order, max | of the residues, the upper half negative | whatever an order has |
| rsqrt, sqrt, log, erf, sin, cos, … | a random function each (random oracle) | equal arguments, equal results |
| -1e30 and below | a symbol, `HIDDEN`: absorbs, and `exp` of it is 0 | masks |

Two different polynomials agree at a random point with a probability of at most their degree over p (Schwartz, Zippel).
Triton's FpSan does the same on a card, in Z/2^32; there a division by 64 has no meaning.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

PRIMES = (46337, 46327)
"""The largest whose squares leave room for a product and a sum of two in 64 bits, and for a residue in 31."""
HIDDEN = -1
"""What is taken out of a softmax: minus infinity, and what is written for it."""
GREATEST = -2
"""Plus infinity."""
HIDES = -1e30

_prime = PRIMES[0]


class Meaningless(TypeError):
    """An operation has no meaning in the ring."""


def use(prime: int) -> None:
    """Compute modulo the square of another prime from now on."""
    global _prime
    _prime = prime


def modulus() -> int:
    """Return p²."""
    return _prime * _prime


def element(number: float) -> int:
    """Return what a number is in the ring."""
    if number != number:
        return 3**19  # any element: where it gets into a result, it was read
    if number <= HIDES:
        return HIDDEN
    if number >= -HIDES:
        return GREATEST
    numerator, denominator = float(number).as_integer_ratio()
    return numerator * pow(denominator, -1, modulus()) % modulus()


def elements(numbers: Tensor) -> Tensor:
    """Return what numbers of any dtype are in the ring, int64."""
    if not numbers.dtype.is_floating_point:
        return numbers.to(torch.int64) % modulus()
    fraction, exponent = torch.frexp(numbers.double())
    finite = numbers.double().abs() < -HIDES
    digits = torch.where(finite, fraction * 2.0**53, 0.0).to(torch.int64) % modulus()
    found = digits * _powers(_prime)[torch.where(finite, exponent, 0).long() + _LEAST] % modulus()
    if bool(finite.all()):
        return found
    odd = [element(number) for number in numbers[~finite].double().tolist()]
    return found.masked_scatter(~finite, torch.tensor(odd))


_LEAST = 1200


@functools.cache
def _powers(prime: int) -> Tensor:
    """Return what the last of 53 binary digits stands for, by the exponent from -`_LEAST` on."""
    return torch.tensor([pow(2, exponent - 53, prime * prime) for exponent in range(-_LEAST, _LEAST)])


def random(shape: tuple[int, ...], seed: str) -> Tensor:
    """Return elements that depend on the shape and the seed alone."""
    generator = torch.Generator().manual_seed(_number(seed))
    return torch.randint(0, modulus(), shape, generator=generator)


def _number(name: str) -> int:
    return sum(ord(char) * pow(131, place, 2**31) for place, char in enumerate(name)) % 2**31


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b."""
    return _marked((a + b) % modulus(), a, b)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b; nothing is left of what is hidden on both sides, as of -1e30."""
    found = (a - b) % modulus()
    if not _any_marked(a, b):
        return found
    found = torch.where((a < 0) | (b < 0), torch.where(a < 0, a, torch.where(b == HIDDEN, GREATEST, HIDDEN)), found)
    return torch.where((a < 0) & (a == b), 0, found)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """Return a b; 0 times what is hidden is 0, as of -1e30."""
    found = a * b % modulus()
    if not _any_marked(a, b):
        return found
    zero = (a == 0) | (b == 0)
    return torch.where(zero, 0, _marked(found, a, b))


def neg(a: Tensor) -> Tensor:
    """Return -a."""
    return sub(torch.zeros_like(a), a)


def div(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b."""
    return mul(a, inverse(b))


def inverse(a: Tensor) -> Tensor:
    """Return 1 / a; 0 of a multiple of p, and of infinity."""
    return torch.where(a < 0, 0, power(a, _prime * (_prime - 1) - 1))


def power(a: Tensor, exponent: int) -> Tensor:
    """Return a whole power, not negative."""
    found, square = torch.ones_like(a), a % modulus()
    while exponent:
        if exponent & 1:
            found = found * square % modulus()
        exponent >>= 1
        if exponent:
            square = square * square % modulus()
    return found


def exp(a: Tensor) -> Tensor:
    """Return (1 + p)^a, 0 of what is hidden."""
    return torch.where(a == HIDDEN, 0, (1 + _prime * (a % _prime)) % modulus())


def exp2(a: Tensor) -> Tensor:
    """Return exp(a log 2), where log 2 is the number that fp32 has of it."""
    return exp(mul(a, torch.tensor(element(math.log(2)))))


def sigmoid(a: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-a))."""
    return inverse(add(torch.ones_like(a), exp(neg(a))))


def tanh(a: Tensor) -> Tensor:
    """Return 1 - 2 / (exp(2 a) + 1)."""
    return (1 - 2 * inverse((exp(2 * a % modulus()) + 1) % modulus())) % modulus()


def oracle(name: str, a: Tensor) -> Tensor:
    """Return a function of which nothing is known but that equal arguments give equal results."""
    mixed = (a + _number(name)) & 0x7FFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3, 0x2C1B3C6D):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 13)) % modulus()


def key(a: Tensor) -> Tensor:
    """Return numbers in whose order elements are."""
    signed = torch.where(a > modulus() // 2, a - modulus(), a)
    return torch.where(a == HIDDEN, -(2**40), torch.where(a == GREATEST, 2**40, signed))


def of_key(key: Tensor) -> Tensor:
    """Return the elements that `key` made numbers of."""
    marked = torch.where(key < 0, HIDDEN, GREATEST)
    return torch.where(key.abs() >= 2**40, marked, key % modulus())


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger one."""
    return torch.where(key(a) >= key(b), a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller one."""
    return torch.where(key(a) <= key(b), a, b)


def total(a: Tensor, dim: int | list[int], keepdim: bool = False) -> Tensor:
    """Return a sum over some dimensions."""
    if _any_marked(a, a):
        raise Meaningless("a sum of infinities")
    return a.sum(dim, keepdim=keepdim) % modulus()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of matrices: doubles hold sums of 2^21 products of 16 bits."""
    if _any_marked(a, b):
        raise Meaningless("a product of matrices with infinities")
    low_a, high_a = (a & 0xFFFF).double(), (a >> 16).double()
    low_b, high_b = (b & 0xFFFF).double(), (b >> 16).double()
    high = torch.matmul(high_a, high_b).to(torch.int64) % modulus()
    middle = (torch.matmul(high_a, low_b) + torch.matmul(low_a, high_b)).to(torch.int64) % modulus()
    low = torch.matmul(low_a, low_b).to(torch.int64) % modulus()
    return ((high * 65536 + middle) % modulus() * 65536 + low) % modulus()


def _any_marked(a: Tensor, b: Tensor) -> bool:
    return bool((a < 0).any()) or bool((b < 0).any())


def _marked(found: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Put the symbols where one side has them: what is hidden first."""
    if not _any_marked(a, b):
        return found
    found = torch.where((a == GREATEST) | (b == GREATEST), GREATEST, found)
    return torch.where((a == HIDDEN) | (b == HIDDEN), HIDDEN, found)
