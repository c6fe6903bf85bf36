"""Which scale keys and values in 8 bits should have: what attention loses by each, on data that is like real ones.

    python bench/cache_scales.py

A CPU will do. Keys have a few channels that are far from zero for every token, as those of real models have; values
are of one size, which differs from layer to layer. Attention of 16 queries to 4,096 tokens, 8 heads of 128, in fp64:

    none                no scale: numbers beyond the range become its end
    head, of a prompt   a power of two for each head, from the first 256 tokens
    head and token      a power of two for each row, as `runtime/cache/fp8_layer.py` has it
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HEADS, TOKENS, SIZE, QUERIES, PROMPT = 8, 4096, 128, 16, 256
VALUES = {"of size 1": 1.0, "small values": 0.02, "tiny values": 0.002, "a sink": 0.05, "larger later": 0.3}
"""The size of values, by the kind of text: with a first token whose key is eight times as large, and with tokens
behind the prompt that are 12 (keys) and 6 (values) times as large."""


def near(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return numbers rounded to 8 bits."""
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).float().to(dtype).double()


def scaled(x: Tensor, largest: Tensor) -> Tensor:
    """Return numbers rounded with the least power of two that brings `largest` into the range."""
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return near(x / scale) * scale


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": near,
    "none, e5m2": lambda x: near(x, torch.float8_e5m2),
    "head, of a prompt": lambda x: scaled(x, x[:, :PROMPT].abs().amax((1, 2), keepdim=True)),
    "head and token": lambda x: scaled(x, x.abs().amax(-1, keepdim=True)),
}


def text(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a kind, rounded to bf16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = 1.5 * normal(HEADS, QUERIES, SIZE), normal(HEADS, TOKENS, SIZE), normal(HEADS, TOKENS, SIZE)
    far = torch.randperm(SIZE, generator=generator)[:3]
    key[:, :, far] += torch.tensor([20.0, -12.0, 35.0], dtype=torch.float64)
    query[:, :, far] *= 0.1
    if kind == "a sink":
        key[:, 0] *= 8
        value[:, 0] *= 0.01
    if kind == "larger later":
        query /= 6
        key[:, TOKENS // 2 :] *= 12
        value[:, TOKENS // 2 :] *= 6
    return query, key.bfloat16().double(), (value * VALUES[kind]).bfloat16().double()


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention without a mask."""
    return torch.softmax(query @ key.transpose(1, 2) * SIZE**-0.5, -1) @ value


def main() -> None:
    """Print a row for each kind of text: the relative error of attention by each form."""
    print("| text |", " | ".join(FORMS), "|")
    print("|---" * (len(FORMS) + 1) + "|")
    for kind in VALUES:
        query, key, value = text(kind)
        exact = attended(query, key, value)
        errors = [
            float((attended(query, form(key), form(value)) - exact).norm() / exact.norm()) for form in FORMS.values()
        ]
        print(f"| {kind} |", " | ".join(f"{error:.3f}" for error in errors), "|")


if __name__ == "__main__":
    main()
