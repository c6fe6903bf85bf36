"""LayerNorm classes written out in PyTorch call one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rewrite.analysis.sites.norms import computed, divides_by_root_mean_square, layer_norm_call, looks_like_norm, subtracts_mean
from rewrite.analysis.syntax.module import Module
from rewrite.analysis.syntax.replacement import call_statement, name_is_free, returning
from rewrite.analysis.terms.computation import NotComputable
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
        the weight in fp32, with or without a bias in fp32, then one rounding (the Cohere models).

    Numerics:
        The order of roundings is kept; the sums are taken in the kernel's order.

    Known limits:
        Norms over channels (`channels_first`) and norms in the input's dtype stay.
    """

    name = "fuse_layer_norm"
    summary = "LayerNorm classes that are written out in fp32 call one kernel."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "other_computation": "the body is a LayerNorm, but not the computation that `layer_norm` offers",
        "name_taken": "the file has a name `layer_norm` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class whose `forward` subtracts a mean and multiplies by the inverse root of the variance."""
        for info in module.classes.values():
            if not looks_like_norm(info):
                continue
            term = computed(info, module)
            if not isinstance(term, NotComputable) and divides_by_root_mean_square(term) and subtracts_mean(term):
                yield Candidate(info.methods["forward"], f"{info.name}.forward")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Compare the body with the operator's."""
        info = module.classes[candidate.where.split(".")[0]]
        forward = info.methods["forward"]
        term = computed(info, module)
        call = None if isinstance(term, NotComputable) else layer_norm_call(term, info, module)
        if call is None:
            return Skip("other_computation")
        if not name_is_free(call.function, module, forward):
            return Skip("name_taken")
        new = returning(forward, call_statement("return ", call.function, call.given, module))
        return Found((Edit(forward, (new,)),), ("norms.layer_norm",))
