"""Tells whether two runs of a case differ, and in what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rewrite.codemod.passes import rewrite_text
from rewrite.errors import RewriteError
from rewrite.transform import Rewritten, Transform
from rewrite.transforms import select
from soundness.case import Case
from soundness.observe import CALLS, FEW_CALLS, Calls, Leaf, Observation, observations

RELATIVE, ABSOLUTE = 1e-9, 1e-11
"""Sums of a few dozen fp64 products in another order differ by some 1e-15."""
SINGLE_RELATIVE, SINGLE_ABSOLUTE = 1e-5, 1e-6
"""Where a file computes in fp32 in between, whatever it was given."""


@dataclass(frozen=True)
class Verdict:
    """How the rewritten module differs from the original, if it does."""

    difference: str
    rewritten: Rewritten | None
    original: tuple[Observation, ...] = ()

    @property
    def sites(self) -> dict[str, int]:
        """Number of rewritten places by transform."""
        reports = self.rewritten.transforms if self.rewritten is not None else ()
        return {report.name: len(report.rewritten) for report in reports if report.rewritten}


IN_TRAINING = ("fuse_loss", "spare_activation")
"""Transforms on request that find nothing where route_gemm, another one, took the products."""


def all_transforms(of: Sequence[str] = ()) -> list[Transform]:
    """Return every transform that promises equal results, as those of a case need them; fp8 is approximate."""
    return select(also=IN_TRAINING if {*of} & {*IN_TRAINING} else ("route_gemm",))


def examine(case: Case, transforms: list[Transform]) -> Verdict:
    """Rewrite a case, run both texts and compare."""
    original = observations(case, case.text)
    try:
        rewritten = rewrite_text(case.text, transforms)
    except (RewriteError, SyntaxError) as error:
        return Verdict(f"the rewriting fails: {type(error).__name__}: {error}", None, tuple(original))
    if rewritten.sites == 0:
        return Verdict("", rewritten, tuple(original))
    return Verdict(difference_of(case, original, rewritten.text), rewritten, tuple(original))


def examine_quickly(case: Case, transforms: list[Transform], name: str) -> Verdict:
    """Rewrite a case, and run it only where the transform `name` did something, in few calls."""
    try:
        rewritten = rewrite_text(case.text, transforms)
    except (RewriteError, SyntaxError) as error:
        return Verdict(f"the rewriting fails: {type(error).__name__}: {error}", None)
    if not any(report.rewritten for report in rewritten.transforms if report.name == name):
        return Verdict("", rewritten)
    original = observations(case, case.text, calls=FEW_CALLS)
    return Verdict(difference_of(case, original, rewritten.text, FEW_CALLS), rewritten, tuple(original))


def difference_of(case: Case, original: list[Observation], text: str, calls: Calls = CALLS) -> str:
    """Return the first difference between what was observed and what `text` does; empty for none."""
    found = observations(case, text, rewritten=True, calls=calls)
    if len(found) != len(original):
        return f"{found[0].what} raises {found[0].raised}"
    single = "float()" in case.text or "float32" in case.text
    for wanted, got in zip(original, found, strict=True):
        if wanted.raised and case.fails_as and got.raised == case.fails_as:
            continue
        if difference := _difference(wanted, got, case.layout, single):
            return f"{wanted.what}: {difference}"
    return ""


def _difference(wanted: Observation, got: Observation, layout: bool, single: bool) -> str:
    if wanted.raised != got.raised:
        return f"raises {got.raised or 'nothing'} instead of {wanted.raised or 'nothing'}"
    for (name, ours), (_, theirs) in zip(wanted.parts(), got.parts(), strict=True):
        if name == "state":
            known = {leaf.path for leaf in ours}
            theirs = [leaf for leaf in theirs if leaf.path in known or "global" not in leaf.path]
        paths, other = [leaf.path for leaf in ours], [leaf.path for leaf in theirs]
        if paths != other:
            return f"{name}: {sorted({*paths} ^ {*other})[:3] or 'another order'}"
        for one, two in zip(ours, theirs, strict=True):
            if not _same(one, two, layout and name == "result", single):
                return f"{name} {one.path or 'itself'}: {_short(two)} instead of {_short(one)}"
    return "" if wanted.sharing == got.sharing else f"memory is shared: {got.sharing} instead of {wanted.sharing}"


def _same(one: Leaf, two: Leaf, layout: bool, single: bool) -> bool:
    first, second = one.value, two.value
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        if type(first) is not type(second):
            return False
        if isinstance(first, float):
            return _close(torch.tensor(first), torch.tensor(second), single)
        return bool(first == second)
    if (first.shape, first.dtype, one.requires_grad) != (second.shape, second.dtype, two.requires_grad):
        return False
    return _close(first, second, single) and (not layout or one.layout == two.layout)


def _close(first: torch.Tensor, second: torch.Tensor, single: bool) -> bool:
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    rtol, atol = (SINGLE_RELATIVE, SINGLE_ABSOLUTE) if single else (RELATIVE, ABSOLUTE)
    largest = max(1.0, float(first.detach().abs().nan_to_num(0, 0, 0).max())) if first.numel() else 1.0
    return torch.allclose(first, second, rtol=rtol, atol=atol * largest, equal_nan=True)


def _short(leaf: Leaf) -> Any:
    value = leaf.value
    if not isinstance(value, torch.Tensor):
        return value
    head = ", ".join(f"{x:.6g}" for x in value.detach().reshape(-1)[:3].tolist())
    return f"{tuple(value.shape)} strides {leaf.stride} [{head}, …]"
