"""LayerNorm classes written out in PyTorch call one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rewrite.analysis.patterns.mean_squares import Place, norm_places
from rewrite.analysis.patterns.norm_patterns import NotProven, computed, layer_norm_call, said
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.replacement import call_statement, returning
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseLayerNorm(Transform):
    """Compute a hand-written LayerNorm in one kernel.

    What it does:
        Replaces the body of a LayerNorm class of the file by one call of `layer_norm`. Its parameters and the names of
        its attributes stay. `nn.LayerNorm` modules are one kernel already.

    Why:
        Written out, a LayerNorm runs as nine kernels, each of which reads and writes the hidden states.

    What it needs:
        A `forward` that computes `(x - mean) * rsqrt(mean((x - mean)²) + eps)` in fp32 over the last dimension, times
        the weight in fp32, with or without a bias in fp32, then one rounding (the Cohere models). Or a class made from
        `nn.LayerNorm` that casts its input to fp32, calls torch's and casts back (Whisper's own code).

    Numerics:
        The order of roundings is kept; the sums are taken in the kernel's order.

    Known limits:
        Norms over channels (`channels_first`) and norms in the input's dtype stay.
    """

    name = "fuse_layer_norm"
    summary = "LayerNorm classes that are written out in fp32 call one kernel."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "no_module": "the norm is no `forward` of a class, so that nothing says what its weight and eps are",
        "control_flow": "the body has a statement that a fused norm has no place for",
        "not_proven": "what the body computes, or besides computing it does, is not certain",
        "other_computation": "the body is a LayerNorm, but not the computation that `layer_norm` offers",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every function that divides differences from a mean by the root of the mean of their squares."""
        return [Candidate(place.function, place.where) for place in _places(module)]

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Compare the body with the operator's."""
        place = next(place for place in _places(module) if place.function is candidate.node)
        if place.owner is None or not place.is_forward:
            return Skip("no_module")
        term = computed(place.owner, module)
        if isinstance(term, NotComputable):
            return Skip("control_flow", term.what)
        call = layer_norm_call(term, place.owner, module)
        if call is None:
            return Skip("other_computation", said(term))
        if isinstance(call, NotProven):
            return Skip("not_proven", call.what)
        new = returning(place.function, call_statement("return ", call.function, call.given, module))
        return Found((Edit(place.function, (new,)),), ("layer_norm",))


_TORCHS = ("forward", "nn.functional.layer_norm")
"""What a class made from `nn.LayerNorm` calls to normalise."""


def _places(module: Module) -> list[Place]:
    """Return the written norms, and the classes made from torch's that cast around it."""
    written = [place for place in norm_places(module) if place.centered]
    seen = {id(place.function) for place in written}
    for info in module.classes.values():
        forward = info.methods.get("forward")
        if info.bases == ("torch.nn.LayerNorm",) and forward is not None and id(forward) not in seen:
            term = computed(info, module)
            called = (t for t in subterms(term) if t.op in _TORCHS) if isinstance(term, Term) else ()
            if any(inner.op == "cast" for call in called for inner in subterms(call)):
                written.append(Place(f"{info.name}.forward", forward, info, centered=True))
    return written
