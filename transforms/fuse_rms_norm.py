"""RMSNorm classes call one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rewrite.analysis.patterns.mean_squares import Place, norm_places
from rewrite.analysis.patterns.norm_patterns import (
    NotProven,
    computed,
    rms_norm_call,
    rms_norm_obstacle,
    runtime_norm,
    said,
)
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.replacement import call_statement, returning
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseRmsNorm(Transform):
    """Compute an RMSNorm in one kernel.

    What it does:
        Replaces the body of an RMSNorm's `forward` by one call of `rms_norm`. The class, its parameters, its other
        methods and the names of its attributes stay.

    Why:
        PyTorch runs a hand-written RMSNorm as six kernels, each of which reads and writes the hidden states; one
        kernel reads them once and writes them once.

    What it needs:
        A `forward` that computes `x * rsqrt(mean(x²) + eps)` in fp32 over the last dimension, in whatever spelling and
        through whatever helpers, of the class, its bases or the file, then one of: rounding and a product with the
        weight (Llama), a product with the weight and rounding (OLMo 2), a product with `1 + weight` in fp32 and
        rounding (Gemma), rounding alone, rounding as the weight is rounded and a product with it (T5).

    Numerics:
        The order of roundings of each family is kept; the mean is summed in the kernel's order.

    Known limits:
        Gated norms (`fuse_gated_norm`), norms over groups and sharded norms stay.
    """

    name = "fuse_rms_norm"
    summary = "RMSNorm classes call one kernel, with the rounding order of their family."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "no_module": "the norm is no `forward` of a class, so that nothing says what its weight and eps are",
        "control_flow": "the body has a statement that a fused norm has no place for",
        "not_proven": "what the body computes, or besides computing it does, is not certain",
        "second_tensor": "another tensor takes part, as in a gated norm",
        "product_in_input_dtype": "the input is multiplied before it is brought to fp32, in another way than T5's",
        "other_computation": "the body is a norm, but none of the computations that `rms_norm` offers",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every function that divides by the root of a mean of squares, in whatever spelling; a helper of a norm that
        is one call by now, which nothing reads any more, is part of that norm.
        """
        places = [place for place in norm_places(module) if not place.centered]
        return [Candidate(place.function, place.where) for place in places if not _is_left_over(place, module)]

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Find the family of the norm."""
        place = next(place for place in norm_places(module) if place.function is candidate.node)
        if place.owner is None or not place.is_forward:
            return Skip("no_module")
        term = computed(place.owner, module)
        if isinstance(term, NotComputable):
            return Skip("control_flow", term.what)
        call = rms_norm_call(term, place.owner, module)
        if call is None:
            return Skip(rms_norm_obstacle(term), said(term))
        if isinstance(call, NotProven):
            return Skip("not_proven", call.what)
        new = returning(place.function, call_statement("return ", call.function, call.given, module))
        return Found((Edit(place.function, (new,)),), ("rms_norm",))


def _is_left_over(place: Place, module: Module) -> bool:
    """Whether a method computed what the class's `forward` has one call for now, and nothing reads it any more."""
    unread = module.references.get(place.function.name.value, 0) == 0
    return (
        unread and not place.is_forward and place.owner is not None and runtime_norm(place.owner, module) is not None
    )
