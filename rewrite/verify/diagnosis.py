"""What a difference looks like: hypotheses about one tensor that hold exactly, in the words of who wrote the edit.

Each is tried on what a module gives, or on what it gives to one of its own modules, and said only where it explains
the whole difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from .judging.tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh")


def likely(expected: Tensor, found: Tensor, given: Sequence[Tensor], inner: Mapping[str, Tensor], text: str) -> str:
    """Return what explains the difference of two tensors; empty where nothing does.

    Args:
        expected: of the original.
        found: of the rewritten model.
        given: to the module in which they are computed.
        inner: what the original's own modules of it give, by their names.
        text: the scenario, which says whether rows are padded.
    """
    if expected.shape != found.shape or not expected.numel():
        return ""
    wanted, got = expected.double().cpu(), found.double().cpu()
    known = {name: one.double().cpu() for name, one in inner.items() if one.shape == expected.shape}
    alike = [one.double().cpu() for one in given if one.shape == expected.shape]
    parts = dict(zip(["the module was given"], alike, strict=False))
    return (
        _rounded(wanted, got)
        or _another(wanted, got, known)
        or _scaled(wanted, got)
        or _summand(wanted, got, {**parts, **{f"{name} gives": one for name, one in known.items()}})
        or _places_changed(wanted, got, known)
        or _factor_of_each_row(wanted, got)
        or _tokens(wanted, got, "padding" in text)
    )


def _near(one: Tensor, other: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two tensors differ by no more than norms and softmax round."""
    size = float((one if scale is None else scale).abs().max())
    return bool(float((one - other).abs().max()) <= 10 * bound("fp64 max") * max(size, 1e-30))


def _rounded(expected: Tensor, found: Tensor) -> str:
    """A cast at the end."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(expected.to(dtype).double(), found) or torch.equal(expected.float().to(dtype).double(), found):
            return f"every value is what is expected, rounded to {dtype}: a cast"
    return ""


def _share(part: Tensor, whole: Tensor) -> float:
    """How much of `part` there is in `whole`, as a factor."""
    return float((part * whole).sum() / (part * part).sum().clamp(min=1e-60))


def _scaled(expected: Tensor, found: Tensor) -> str:
    factor = _share(expected, found)
    if abs(factor) > 1e-6 and _near(expected * factor, found):
        return f"every value is {factor:.6g} times what is expected: a factor is left out, or is another"
    return ""


def _another(expected: Tensor, found: Tensor, inner: Mapping[str, Tensor]) -> str:
    """One module's output in place of another's."""
    names = [[name for name, one in inner.items() if _near(side, one)] for side in (expected, found)]
    return f"it is what {names[1][0]} gives in place of what {names[0][0]} gives" if all(names) else ""


def _summand(expected: Tensor, found: Tensor, parts: Mapping[str, Tensor]) -> str:
    """A residual."""
    for name, one in parts.items():
        factor = _share(one, found - expected)
        if not _near(one * factor, found - expected, expected):
            continue
        if abs(factor + 1) < 1e-4:
            return f"what {name} is missing from the sum, as where a residual is left out"
        if abs(factor - 1) < 1e-4:
            return f"what {name} is in the sum once more, as where a residual is added twice"
        if abs(factor) > 1e-4:
            return f"what {name} has another factor in the sum: {factor:+.4g} of it is too much"
    return ""


def _places_changed(expected: Tensor, found: Tensor, inner: Mapping[str, Tensor]) -> str:
    """The gate of a gated activation, and what it lets pass."""
    from torch.nn import functional

    for name in ACTIVATIONS:
        function = getattr(functional, name)
        for gate, up in permutations(inner, 2):
            if _near(expected, function(inner[gate]) * inner[up]):
                if _near(found, function(inner[up]) * inner[gate]):
                    return f"{gate} and {up} have changed places: {name} is taken of {up}"
                if _near(found, inner[up] * inner[gate]):
                    return f"{name} of {gate} is left out"
    return ""


def _factor_of_each_row(expected: Tensor, found: Tensor) -> str:
    """A norm."""
    if expected.dim() < 2 or expected.shape[-1] < 2:
        return ""
    factors = (expected * found).sum(-1, keepdim=True) / (expected * expected).sum(-1, keepdim=True).clamp(min=1e-60)
    if not _near(expected * factors, found):
        return ""
    low, high = float(factors.min()), float(factors.max())
    return f"each row is {low:.4g} to {high:.4g} times what is expected: the eps of a norm, or what it divides by"


def _tokens(expected: Tensor, found: Tensor, padded: bool) -> str:
    """Which of the tokens `[B, S, …]` agree, which tells a mask from what every token takes part in."""
    if expected.dim() < 3 or expected.shape[1] < 2:
        return ""
    error = (found - expected).abs().flatten(2).amax(-1)
    agree = error <= 10 * bound("fp64 max") * float(expected.abs().max())
    if padded and bool(agree.all(1).any()):
        return "only rows with padding differ: the attention mask does not arrive, or hides other keys"
    if padded or bool(agree[:, 1:-1].any()):
        return ""
    if bool(agree[:, -1].all()) and not bool(agree[:, 0].any()):
        return "the last token alone agrees: the others see keys behind them, as without a causal mask"
    if bool(agree[:, 0].all()) and not bool(agree[:, -1].any()):
        return "the first token alone agrees, which sees itself alone: the scaling of scores, positions, or a window"
    return ""
